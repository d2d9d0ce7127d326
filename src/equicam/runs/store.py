"""A run on disk: a folder that pandas, polars and DuckDB read without us.

    manifest.json           the recipe and everything else that makes the run reproducible
    sample.parquet          every image of the run in order, and its shard
    rasters.parquet         if images are windows: their rasters, readers, and how many windows were left out
    items/shard-*.parquet   one row per image
    maps/shard-*.parquet    its map, PEUM and view maps at layer resolution, float16
    digests.json            SHA-256 of manifest, sample and shards, once all shards are there
    events.sqlite           the log: each event is chained to the one before

A shard is there whole or not at all, in any order. Its maps are written before its items.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images.item_table import Items
from equicam.images.items import Item, valid_utf8
from equicam.rasters.options import raster_id
from equicam.rasters.tiling import RasterRow
from equicam.runs.manifest import Manifest, parse_manifest, refuse_difference
from equicam.shards import (
    TEMPORARY_SUFFIX,
    encode_table,
    map_concurrently,
    read_table,
    refuse_other_columns,
    write_atomic,
    write_table,
)

KINDS = ("items", "maps")
_ID = pa.field("id", pa.string(), nullable=False)
MAPS = pa.schema(
    [
        _ID,
        ("height", pa.int32()),  # of the grid
        ("width", pa.int32()),
        ("map", pa.list_(pa.float16())),  # × map_scale
        ("map_scale", pa.float32()),
        ("peum", pa.list_(pa.float16())),
        ("peum_scale", pa.float32()),
        ("view_maps", pa.list_(pa.float16())),  # every view's plane, not aligned
        ("view_maps_scale", pa.float32()),
    ]
)
PLANES = ("map", "peum", "view_maps")


@dataclass(frozen=True)
class StoredMaps:
    """One image's map, PEUM and view maps at layer resolution; view maps are not aligned."""

    map: NDArray[np.float32]  # [h, w]
    peum: NDArray[np.float32]  # [h, w]
    view_maps: NDArray[np.float32]  # [t, h, w]

    @staticmethod
    def from_row(row: dict[str, Any]) -> "StoredMaps":
        """From a row of the maps table, whose lists may be arrays."""
        try:
            flat = [np.asarray(row[name], dtype=np.float32) * float(row[f"{name}_scale"]) for name in PLANES]
            shapes = 2 * [(row["height"], row["width"])] + [(-1, row["height"], row["width"])]
            return StoredMaps(*(values.reshape(shape) for values, shape in zip(flat, shapes, strict=True)))
        except (TypeError, ValueError) as error:
            raise EquicamError(
                f"the maps of {row['id']!r}", "to be as they were written", error, "restoring their shard"
            ) from error

    @staticmethod
    def from_table(table: pa.Table) -> dict[str, "StoredMaps"]:
        """Those of a maps table, by id; their lists are views of one array, not Python numbers."""
        arrays = {name: _arrays(table[name].combine_chunks()) for name in PLANES}
        rows = enumerate(table.drop_columns(list(PLANES)).to_pylist())
        return {
            row["id"]: StoredMaps.from_row(row | {name: some[i] for name, some in arrays.items()})
            for i, row in rows
        }

    def to_row(self, name: str) -> dict[str, Any]:
        """As a row of the maps table: float16 of values divided by their largest, so that none vanishes or overflows."""
        row: dict[str, Any] = {"id": name, "height": self.map.shape[0], "width": self.map.shape[1]}
        for key in PLANES:
            values = getattr(self, key)
            scale = float(np.abs(values).max(initial=0.0)) or 1.0
            row[key], row[f"{key}_scale"] = (values / scale).astype(np.float16).ravel(), scale
        return row


def _arrays(lists: pa.ListArray) -> list[NDArray[np.float16] | None]:
    values, ends = lists.values.to_numpy(zero_copy_only=False), lists.offsets.to_numpy().tolist()
    null = lists.is_null().to_pylist()
    return [None if none else values[a:b] for none, a, b in zip(null, ends, ends[1:], strict=False)]


SHARDS_AT_A_TIME = 64  # whose rows are reduced together
ITEMS = pa.schema(
    [
        _ID,
        ("path", pa.string()),
        ("index", pa.int64()),  # which image of a file that holds several
        # left, top and side of a window, in pixels of its raster's finest level
        ("x", pa.float64()),
        ("y", pa.float64()),
        ("side", pa.float64()),
        ("sha256", pa.string()),
        ("bytes", pa.int64()),
        ("mtime_ns", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("input_box", pa.list_(pa.float32())),  # x0 y0 x1 y1 of the image: what the model's input shows
        ("label", pa.string()),
        ("target", pa.int32()),  # the class explained: the top-1 of the presented image
        ("confidence", pa.float32()),  # its probability; null where a value is explained
        ("output", pa.float32()),  # its logit, or the value that is explained
        ("top5", pa.list_(pa.int32())),
        ("top5_confidence", pa.list_(pa.float32())),
        ("peum_score", pa.float64()),
        # mean Pearson of the presented view's own map with every other view's, aligned; null for one view
        ("stability", pa.float64()),
        ("stability_by_view", pa.list_(pa.float32())),
        ("flip_rate", pa.float32()),
        ("views_kept", pa.int32()),  # views with a weight above 0
        ("view_confidence", pa.list_(pa.float32())),
        ("view_top1", pa.list_(pa.int32())),
        ("view_agreement", pa.list_(pa.float32())),  # Pearson of each view with the mean of the others
        ("flags", pa.list_(pa.string())),
        ("steadiness", pa.string()),  # steady, unsteady or cannot say
        ("steadiness_reason", pa.string()),  # the code of its reason
        ("eq", pa.float64()),  # disc Eq of grad-cam, on the calibration subset
        pa.field("status", pa.string(), nullable=False),  # ok or bad
        ("reason", pa.string()),  # the code of the reason why it is bad
        ("reason_values", pa.string()),  # its values, as JSON
        ("seconds", pa.float32()),
    ]
)
SHARD_COLUMNS = {"items": ITEMS, "maps": MAPS}
SAMPLE = pa.schema(
    [_ID, ("path", pa.string()), ("label", pa.string()), ("shard", pa.int32()), ("calibration", pa.bool_())]
)


def _column(hint: Any) -> pa.DataType:
    """Of text, counts, numbers, or tuples of them, any of which may be None."""
    kinds = {*get_args(hint)} - {NoneType} if get_origin(hint) is UnionType else {hint}
    for kind, column in ((float, pa.float64()), (int, pa.int64()), (str, pa.string())):
        if kind in kinds:
            return column
    return pa.list_(_column(get_args(*kinds)[0]))


RASTERS = pa.schema(
    [_ID if name == "id" else (name, _column(hint)) for name, hint in get_type_hints(RasterRow).items()]
)
"""One row for every raster of a run."""
Rasters = Sequence[RasterRow]


class RunStore:
    """The files of a run: anyone may read them, the holder of the lock writes them."""

    def __init__(self, folder: Path, moved: Mapping[str, str] | None = None) -> None:
        self.folder = Path(folder)
        self.moved = dict(moved or {})  # present paths of moved images, by id
        self.shown = valid_utf8(str(self.folder))  # in messages

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, read once."""
        path = self.folder / "manifest.json"
        if not path.is_file():
            got = "no manifest.json in it" if self.folder.is_dir() else "no such folder"
            raise EquicamError(repr(self.shown), "to be a run", got, "equicam audit first")
        manifest = parse_manifest(path.read_bytes(), where=self.shown)
        try:
            rows = pq.read_metadata(self.folder / "sample.parquet").num_rows
        except (OSError, ValueError, pa.ArrowException):  # missing or damaged
            return manifest
        if rows != manifest.images:
            raise EquicamError(
                f"the run {self.shown}", "as many images in manifest.json as in sample.parquet",
                f"{manifest.images} and {rows}", "restoring both files",
            )  # fmt: skip
        return manifest

    @property
    def shard_count(self) -> int:
        """Shards of the whole run."""
        return -(-self.manifest.images // self.manifest.shard_size)

    def path(self, kind: str, number: int) -> Path:
        """The file of a shard of items or maps, written or not."""
        return self.folder / self.name(kind, number)

    def name(self, kind: str, number: int) -> str:
        """The name of a shard's file within the run."""
        return f"{kind}/shard-{number:06d}.parquet"

    def names(self) -> list[str]:
        """The names of all files whose digests a finished run lists."""
        return [*self.heads(), *(self.name(kind, n) for kind in KINDS for n in range(self.shard_count))]

    def heads(self) -> list[str]:
        """The names of the files that say what a run is."""
        rasters = ["rasters.parquet"] if self.manifest.tiling else []
        return ["manifest.json", "sample.parquet", *rasters]

    def pending(self) -> list[int]:
        """The shards that are not there yet, or only in half."""
        return [number for number in range(self.shard_count) if not self.has_shard(number)]

    def has_shard(self, number: int) -> bool:
        """Whether a shard is there, items and maps."""
        return all(self.path(kind, number).is_file() for kind in KINDS)

    def write_shard(
        self,
        number: int,
        items: pa.Table,
        maps: pa.Table,
        announce: Callable[[int, dict[str, str]], None] = lambda _number, _digests: None,
    ) -> dict[str, str]:
        """Write a shard, its maps first; returns the SHA-256 of both, which `announce` gets before they are written."""
        encoded = {"maps": encode_table(maps), "items": encode_table(items)}
        digests = {kind: hashlib.sha256(data).hexdigest() for kind, data in encoded.items()}
        announce(number, digests)
        for kind, data in encoded.items():
            write_atomic(self.path(kind, number), data)
        return digests

    def read_shard(self, kind: str, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a shard of items or maps; all columns or these."""
        return read_table(self.path(kind, number), columns, schema=SHARD_COLUMNS[kind])

    def refuse_other_columns(self, kind: str, number: int) -> None:
        """Refuse a shard without the columns it was written with, without reading it."""
        path, schema = self.path(kind, number), SHARD_COLUMNS[kind]
        refuse_other_columns(path, pq.read_schema(path).empty_table(), schema, schema.names)

    def sample(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Every image of the run, in order; all columns or these."""
        return read_table(self.folder / "sample.parquet", columns, schema=SAMPLE)

    def rasters(self) -> pa.Table:
        """Every raster of the run; none in a run of images."""
        if self.manifest.tiling is None:
            return RASTERS.empty_table()
        return self._with_present_paths(read_table(self.folder / "rasters.parquet", schema=RASTERS))

    def read_items(
        self,
        columns: Sequence[str] | None = None,
        shards: Sequence[int] | None = None,
        reduce: Callable[[pa.Table], pa.Table] = lambda table: table,
    ) -> pa.Table:
        """The rows written so far, in the sample's order; all columns or these, of all shards or these.

        `reduce` is called with the rows of some shards, so that what it leaves out takes no memory.
        """
        tables = self._read_shards("items", range(self.shard_count) if shards is None else shards, columns)
        reduced = []
        while some := list(islice(tables, SHARDS_AT_A_TIME)):
            reduced.append(reduce(pa.concat_tables(some)))
        if not reduced:
            return reduce(ITEMS.empty_table().select(list(columns or ITEMS.names)))
        return self._with_present_paths(pa.concat_tables(reduced))

    def _read_shards(
        self, kind: str, numbers: Iterable[int], columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """The rows of those of these shards that are written."""
        written = [n for n in numbers if self.path(kind, n).is_file()]
        return map_concurrently(lambda n: self.read_shard(kind, n, columns), written)

    def _with_present_paths(self, table: pa.Table) -> pa.Table:
        """Rows of images or rasters, with the present paths of those that were moved."""
        if not self.moved or "path" not in table.column_names:
            return table
        pairs = zip(table["id"].to_pylist(), table["path"].to_pylist(), strict=True)
        # an id may look like that of a window
        now = [self.moved.get(name, self.moved.get(raster_id(name), path)) for name, path in pairs]
        return table.set_column(table.column_names.index("path"), "path", pa.array(now, pa.string()))

    def explained(self) -> list[str]:
        """The ids of the images that have a map."""
        items = self.read_items(["id", "status"])
        return items["id"].filter(pc.equal(items["status"], "ok")).to_pylist()  # type: ignore[no-any-return]

    def rows(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """The rows of these images by id."""
        return {row["id"]: row for row in self.select(list(ids)).to_pylist()}

    def select(self, ids: Sequence[str] | pa.Array, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these images, in the sample's order; all columns or these, of which id is one."""
        wanted = pa.array(ids, pa.string())
        return _with_ids(self.read_items(columns, self._shards(wanted)), wanted)

    def maps(self, ids: Iterable[str]) -> dict[str, StoredMaps]:
        """The maps of these images by id."""
        wanted = pa.array(list(ids), pa.string())
        tables = self._read_shards("maps", self._shards(wanted))
        return {k: v for table in tables for k, v in StoredMaps.from_table(_with_ids(table, wanted)).items()}

    def _shards(self, ids: pa.Array) -> list[int]:
        """The shards that hold these images."""
        return sorted(pc.unique(_with_ids(self._shard_by_id, ids)["shard"]).to_pylist())

    @cached_property
    def _shard_by_id(self) -> pa.Table:
        return self.sample(["id", "shard"])

    def refuse_foreign(self) -> None:
        """Refuse a folder with files of others; leftovers of a run killed while it started are not foreign."""
        if not self.folder.is_dir() or (self.folder / "manifest.json").is_file():
            return
        if [*self.folder.glob("items/*"), *self.folder.glob("maps/*")]:
            raise EquicamError(
                f"resuming {self.shown}", "its manifest.json", "no such file", "restoring it, or another --out",
            )  # fmt: skip
        names = {path.name for path in self.folder.iterdir() if not path.name.endswith(TEMPORARY_SUFFIX)}
        if names - {".lock", "items", "maps", "sample.parquet", "rasters.parquet"}:
            raise EquicamError(
                repr(self.shown), "an empty or new folder, or a run", "other files in it", "another --out"
            )

    def begin(
        self, manifest: Manifest, items: Sequence[Item], calibration: Iterable[str], rasters: Rasters = ()
    ) -> None:
        """Lay out the folder, or check that it holds the same run; a run without any shard may be replaced.

        What a killed writer left is removed.
        """
        for folder in ("", "items/", "maps/"):
            for path in self.folder.glob(f"{folder}.*{TEMPORARY_SUFFIX}"):
                path.unlink(missing_ok=True)
        if self.started():
            before = self.manifest
            if (before.data, before.images) != (manifest.data, manifest.images):
                self._refuse_other_images(items)
            refuse_difference(before, manifest, where=self.shown)
            return
        self.refuse_foreign()
        for kind in KINDS:
            (self.folder / kind).mkdir(parents=True, exist_ok=True)
        self.write_head(manifest, items, calibration, rasters)

    def write_head(
        self, manifest: Manifest, items: Sequence[Item], calibration: Iterable[str], rasters: Rasters = ()
    ) -> None:
        """Write the rasters, the sample and the manifest."""
        listed = Items.of(items)
        columns = {
            "id": listed.ids,
            "path": listed.path_texts(),
            "label": listed.label_texts(),
            "shard": pa.array(np.arange(len(listed)) // manifest.shard_size, pa.int32()),
            "calibration": pc.is_in(listed.ids, pa.array(calibration, pa.string())),
        }
        if manifest.tiling is not None:
            rows = [asdict(row) | {"path": valid_utf8(row.path)} for row in rasters]
            write_table(self.folder / "rasters.parquet", pa.Table.from_pylist(rows, schema=RASTERS))
        write_table(self.folder / "sample.parquet", pa.table(columns, schema=SAMPLE).combine_chunks())
        # last: with it the run exists
        write_atomic(self.folder / "manifest.json", manifest.dumps().encode())
        for read_once in ("manifest", "_shard_by_id"):
            self.__dict__.pop(read_once, None)

    def started(self) -> bool:
        """Whether a shard was written."""
        return (self.folder / "manifest.json").is_file() and any(self.folder.glob("*/*-*.parquet"))

    def _refuse_other_images(self, items: Sequence[Item]) -> None:
        before, now = set(self.sample()["id"].to_pylist()), {item.id for item in items}
        changes = [
            f"{len(some)} {word} ({', '.join(map(repr, sorted(some)[:3]))})"
            for word, some in (("gone", before - now), ("new", now - before))
            if some
        ]
        if changes:
            raise EquicamError(
                f"resuming {self.shown}", "the images it was started with", " and ".join(changes),
                "another --out, or those images",
            )  # fmt: skip

    @contextmanager
    def writing(self) -> Iterator[int]:
        """Hold the writer's lock; the system releases it when the process ends, however it ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
                raise EquicamError(
                    repr(self.shown), "one writer at a time", f"process {holder} writing it", "waiting for it"
                ) from error
            os.truncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
            yield handle
        finally:
            os.close(handle)


def _with_ids(table: pa.Table, ids: pa.Array) -> pa.Table:
    return table.filter(pc.is_in(table["id"], value_set=ids))
