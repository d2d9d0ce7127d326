"""The maps of one image as a run stores them."""

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


@dataclass(frozen=True)
class StoredMaps:
    """One image's map, PEUM and view maps at layer resolution; view maps are not aligned."""

    map: NDArray[np.float32]  # [h, w]
    peum: NDArray[np.float32]  # [h, w]
    view_maps: NDArray[np.float32]  # [t, h, w]

    @staticmethod
    def from_row(row: dict[str, Any]) -> "StoredMaps":
        """From a row of the maps table."""
        grid = (row["height"], row["width"])

        def read(name: str) -> NDArray[np.float32]:
            values: NDArray[np.float32] = np.asarray(row[name], dtype=np.float32) * float(
                row[f"{name}_scale"]
            )
            return values

        try:
            return StoredMaps(
                read("map").reshape(grid), read("peum").reshape(grid), read("view_maps").reshape(-1, *grid)
            )
        except (TypeError, ValueError) as error:
            raise EquicamError(
                f"the maps of {row['id']!r}", needs="to be as they were written", got=error, fix="restoring their shard"
            ) from error  # fmt: skip

    def to_row(self, name: str) -> dict[str, Any]:
        """As a row of the maps table: float16 of values divided by their largest, so that none vanishes or overflows."""
        row: dict[str, Any] = {"id": name, "height": self.map.shape[0], "width": self.map.shape[1]}
        for key in ("map", "peum", "view_maps"):
            values = getattr(self, key)
            scale = float(np.abs(values).max(initial=0.0)) or 1.0
            row[key], row[f"{key}_scale"] = (values / scale).astype(np.float16).ravel(), scale
        return row
