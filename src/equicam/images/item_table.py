"""Items as columns: a fraction of the memory of objects, so that one process can list many millions of images."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.images.dicom import SUFFIXES
from equicam.images.files import UNKNOWN, AnyPath, FileStat, RemotePath, file_stat, file_stats, is_url
from equicam.images.items import Item, sample_places, valid_utf8
from equicam.rasters.options import RasterWindow, Tiling, raster_id

BATCH_ROWS = 8192
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("path", pa.binary()),
        ("label", pa.string()),  # this and the next two as JSON
        ("boxes", pa.string()),
        ("region", pa.string()),
        ("group", pa.string()),
        ("index", pa.int64()),
        ("x", pa.float64()),  # of a window
        ("y", pa.float64()),
        ("side", pa.float64()),
        ("bytes", pa.int64()),  # of a remote file, from its listing
        ("mtime_ns", pa.int64()),
        ("refused", pa.bool_()),  # a URL that may not be opened
    ]
)
"""Columns of which all values are null are left out. The path is null where it is the id, below the root unless absolute."""
_DICOM = rf"(?i)\.({'|'.join(suffix.lstrip('.') for suffix in SUFFIXES)})$"


@dataclass(frozen=True, eq=False)
class Items(Sequence[Item]):
    """The items of a source in order; an item is made when it is taken out."""

    table: pa.Table
    root: AnyPath | None = None
    voi: tuple[float, float] | None = None
    tiling: Tiling | None = None  # of windows
    margin: int = 0

    @staticmethod
    def of(items: Iterable[Item]) -> "Items":
        """Any items, of which windows have one tiling."""
        if isinstance(items, Items):
            return items
        tables, left, shared = [], iter(items), Items(table_of([]))
        while batch := list(islice(left, BATCH_ROWS)):
            tables.append(table_of(map(_row, batch)))
            shared = replace(shared, voi=batch[0].voi)
            for window in (item.window for item in batch if item.window):
                shared = replace(shared, tiling=window.tiling, margin=max(shared.margin, window.margin))
        return replace(shared, table=join_tables(tables))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> "Items": ...

    def __getitem__(self, place: int | slice) -> "Item | Items":
        if isinstance(place, int):
            return next(self._make(self.table.slice(range(len(self))[place], 1)))
        start, stop, step = place.indices(len(self))
        if step != 1:
            return self.take(range(start, stop, step))
        return replace(self, table=self.table.slice(start, max(0, stop - start)))

    def __iter__(self) -> Iterator[Item]:
        for start in range(0, len(self), BATCH_ROWS):
            yield from self._make(self.table.slice(start, BATCH_ROWS))

    def __reduce__(self) -> tuple[Any, ...]:
        # copied, because a slice is pickled with all that it is a slice of
        return Items, (self.take(range(len(self))).table, self.root, self.voi, self.tiling, self.margin)

    def take(self, places: Any) -> "Items":
        """Those at these places."""
        return replace(self, table=self.table.take(pa.array(places, pa.int64())))

    def column(self, name: str) -> pa.ChunkedArray:
        """A column, null where it was left out."""
        if name in self.table.column_names:
            return self.table[name]
        return pa.chunked_array([pa.nulls(len(self), COLUMNS.field(name).type)])

    @property
    def ids(self) -> pa.ChunkedArray:
        """The ids."""
        return self.table["id"]

    def iter_ids(self) -> Iterator[str]:
        """The ids one by one."""
        for start in range(0, len(self), BATCH_ROWS):
            yield from self.ids.slice(start, BATCH_ROWS).to_pylist()

    def labels(self) -> list[int | str | None]:
        """The labels."""
        codes, values = self._coded_labels()
        return [values[code] for code in codes.tolist()]

    def label_texts(self) -> pa.Array:
        """The labels as text."""
        codes, values = self._coded_labels()
        texts = [None if value is None else str(value) for value in values]
        return pa.array(texts, pa.string()).take(pa.array(codes))

    def _coded_labels(self) -> tuple[NDArray[np.int64], list[int | str | None]]:
        """The place of every label in the list of all different ones, and that list, which ends with None."""
        coded = self.column("label").combine_chunks().dictionary_encode()
        values = [*map(json.loads, coded.dictionary.to_pylist()), None]
        codes = coded.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
        return codes.astype(np.int64), values

    def path_texts(self) -> pa.ChunkedArray:
        """The paths as valid UTF-8."""
        below = pc.binary_join_element_wise(pa.scalar(valid_utf8(self._prefix)), self.ids, "")
        below = pc.if_else(pc.starts_with(self.ids, "/"), self.ids, below)
        if "path" not in self.table.column_names:
            return below
        paths = [None if one is None else valid_utf8(_decode(one)) for one in self.table["path"].to_pylist()]
        return pc.coalesce(pa.array(paths, pa.string()), below)

    def stats(self) -> list[FileStat]:
        """Size and modification time of every file."""
        if "path" in self.table.column_names or isinstance(self.root, RemotePath):
            return file_stats([item.path for item in self])
        return [file_stat(name) for name in map(self._below, self.ids.to_pylist())]

    @property
    def has_urls(self) -> bool:
        """Whether some of the files are at URLs."""
        if isinstance(self.root, RemotePath):
            return True
        found = pc.any(pc.match_substring_regex(self.column("path"), "^[A-Za-z][A-Za-z0-9+.-]*://"))
        return bool(found.as_py())

    def dicom_places(self) -> list[int]:
        """Where files are DICOM by their suffix."""
        found = pc.or_(
            pc.match_substring_regex(self.ids, _DICOM),
            pc.match_substring_regex(self.column("path"), _DICOM).fill_null(False),
        )
        places = np.flatnonzero(found.to_numpy()).tolist()
        return [place for place in places if self[place].path.suffix.lower() in SUFFIXES]

    def in_scan_order(self) -> "Items":
        """Sorted by id, and windows of a raster row by row."""
        if "side" in self.table.column_names:
            rasters = (pa.array(map(raster_id, part.to_pylist()), pa.string()) for part in self.ids.chunks)
            places = {name: self.table[name].fill_null(0.0) for name in ("y", "x")}
            keys = pa.table({"raster": pa.chunked_array(rasters, pa.string()), **places})
        elif pc.all(pc.less_equal(self.ids[:-1], self.ids[1:])).as_py() is not False:
            return self
        else:
            keys = pa.table({"id": self.ids})
        return self.take(pc.sort_indices(keys, [(name, "ascending") for name in keys.column_names]))

    def sample(self, n: int | None) -> "Items":
        """The items of `sample_by_class`, in scan order."""
        items = self.in_scan_order()
        if n is None:
            return items
        return items.take(np.sort(sample_places(items.labels(), items.column("group").to_pylist(), n)))

    def digest(self) -> str:
        """As `digest_items`."""
        total = hashlib.sha256()
        for start in range(0, len(self), BATCH_ROWS):
            batch = self[start : start + BATCH_ROWS]
            columns = (batch.column(name).to_pylist() for name in ("id", "label", "boxes", "region"))
            lines = (
                f"[{quote(name)}, {label or 'null'}, {boxes or '[]'}, {region or 'null'}]\n"
                for name, label, boxes, region in zip(*columns, strict=True)
            )
            total.update("".join(lines).encode())
        return total.hexdigest()

    def _make(self, table: pa.Table) -> Iterator[Item]:
        for row in table.to_pylist():
            texts = map(row.get, ("label", "boxes", "region"))
            label, boxes, region = (text and json.loads(text) for text in texts)
            yield Item(
                row["id"], self._path(row), label, tuple(map(tuple, boxes or ())), region and tuple(region),
                index=row.get("index"), window=self._window(row), voi=self.voi, group=row.get("group"),
            )  # fmt: skip

    def _path(self, row: Mapping[str, Any]) -> AnyPath:
        encoded = row.get("path")
        text = self._below(row["id"]) if encoded is None else _decode(encoded)
        if not is_url(text):
            return Path(text)
        stat = FileStat(row.get("bytes"), row.get("mtime_ns"))
        return RemotePath(text, None if stat == UNKNOWN else stat, allowed=not row.get("refused"))

    def _below(self, name: str) -> str:
        """The path of a file by its id."""
        return name if name[:1] == "/" else self._prefix + name

    @cached_property
    def _prefix(self) -> str:
        """What precedes ids in the paths of files below the root."""
        text = str(self.root or ".")
        return "" if text == "." else f"{text.rstrip('/')}/"

    def _window(self, row: Mapping[str, Any]) -> RasterWindow | None:
        if self.tiling is None or row.get("side") is None:
            return None
        # a raster that could not be opened has a window of no size
        return RasterWindow(row["x"], row["y"], row["side"], self.tiling, self.margin if row["side"] else 0)


def table_of(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table without the columns that none of them has."""
    given = list(rows)
    arrays = {field.name: pa.array([row.get(field.name) for row in given], field.type) for field in COLUMNS}
    return pa.table({k: some for k, some in arrays.items() if k == "id" or some.null_count < len(some)})


def join_tables(tables: Sequence[pa.Table]) -> pa.Table:
    """One table, in one piece unless it is very large."""
    return pa.concat_tables([table_of([]), *tables], promote_options="default").combine_chunks()


def encode_path(path: AnyPath) -> dict[str, Any]:
    """The columns of a path."""
    text = {"path": str(path).encode("utf-8", "surrogateescape")}
    if isinstance(path, Path):
        return text
    return text | asdict(path.stat or UNKNOWN) | {"refused": None if path.allowed else True}


def as_json(value: Any) -> str | None:
    """A label, boxes or a region as the digest of items has them; None for none."""
    return json.dumps(value) if value not in (None, (), []) else None


def _row(item: Item) -> dict[str, Any]:
    window = item.window
    return {
        "id": item.id,
        **encode_path(item.path),
        "label": as_json(item.label),
        "boxes": as_json([[*map(float, box)] for box in item.boxes]),
        "region": as_json(item.region and [*map(float, item.region)]),
        "group": item.group,
        "index": item.index,
        **({} if window is None else {"x": window.x, "y": window.y, "side": window.side}),
    }


def _decode(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
