"""The maps of one image as a run stores them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equicam.errors import EquicamError

MAPS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("height", pa.int32()),  # of the grid
        pa.field("width", pa.int32()),
        pa.field("map", pa.list_(pa.float16())),  # × map_scale
        pa.field("map_scale", pa.float32()),
        pa.field("peum", pa.list_(pa.float16())),
        pa.field("peum_scale", pa.float32()),
        pa.field("view_maps", pa.list_(pa.float16())),  # every view's plane, not aligned
        pa.field("view_maps_scale", pa.float32()),
    ]
)


def _read(row: dict[str, Any], name: str) -> NDArray[np.float32]:
    """A map of a row of the maps table, or its view maps."""
    grid = (row["height"], row["width"])
    try:
        values: NDArray[np.float32] = np.asarray(row[name], dtype=np.float32) * float(row[f"{name}_scale"])
        return values.reshape(-1, *grid) if name == "view_maps" else values.reshape(grid)
    except (TypeError, ValueError) as error:
        raise EquicamError(
            f"the maps of {row['id']!r}", needs="to be as they were written", got=error, fix="restoring their shard"
        ) from error  # fmt: skip


def _rows(table: pa.Table, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a maps table, with these lists as views of one array, not as Python numbers."""
    arrays = {name: _arrays(table[name].combine_chunks()) for name in names}
    for i, row in enumerate(table.drop_columns(list(names)).to_pylist()):
        yield row | {name: some[i] for name, some in arrays.items()}


def _arrays(lists: pa.ListArray) -> list[NDArray[np.float16] | None]:
    values, ends = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_numpy().tolist()
    null = lists.is_null().to_pylist()
    return [None if none else values[a:b] for none, a, b in zip(null, ends, ends[1:], strict=False)]


@dataclass(frozen=True)
class StoredMaps:
    """One image's map, PEUM and view maps at layer resolution; view maps are not aligned."""

    map: NDArray[np.float32]  # [h, w]
    peum: NDArray[np.float32]  # [h, w]
    view_maps: NDArray[np.float32]  # [t, h, w]

    @staticmethod
    def from_row(row: dict[str, Any]) -> "StoredMaps":
        """From a row of the maps table."""
        return StoredMaps(*(_read(row, name) for name in ("map", "peum", "view_maps")))

    @staticmethod
    def from_table(table: pa.Table) -> dict[str, "StoredMaps"]:
        """Those of a maps table, by id."""
        return {row["id"]: StoredMaps.from_row(row) for row in _rows(table, ("map", "peum", "view_maps"))}

    def to_row(self, name: str) -> dict[str, Any]:
        """As a row of the maps table: float16 of values divided by their largest, so that none vanishes or overflows."""
        row: dict[str, Any] = {"id": name, "height": self.map.shape[0], "width": self.map.shape[1]}
        for key in ("map", "peum", "view_maps"):
            values = getattr(self, key)
            scale = float(np.abs(values).max(initial=0.0)) or 1.0
            row[key], row[f"{key}_scale"] = (values / scale).astype(np.float16).ravel(), scale
        return row
