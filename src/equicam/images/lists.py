"""Image lists: CSV or Parquet files with a column path, and folders that Hugging Face `datasets` saves."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equicam.errors import EquicamError, refusing
from equicam.images import files, limited
from equicam.images.arrow_streams import invalid, read_labels
from equicam.images.files import AnyPath, RemotePath
from equicam.images.item_table import BATCH_ROWS, Items, as_json, encode_path, join_tables, table_of
from equicam.images.items import Item, parse_box, quote_names, valid_utf8

NAMES = ("items.csv", "items.parquet")
COLUMNS = ("path", "id", "label", "boxes", "region", "split", "group")
MAX_LINE = 2**20
"""Characters of a CSV line."""
PARQUET_ROWS = 1024
"""Decoded at a time."""
MAX_ROWS_PER_BYTE, FREE_ROWS = 4, 100_000
"""Of a Parquet file, which can repeat or count up rows in no bytes at all; a list of real paths has a few bytes a row."""
TEXT = (pa.string(), pa.large_string())
Tick = Callable[[int], None]
File = io.BytesIO | io.BufferedReader

_EMPTY_PART = re.compile(r"(?:^|/)\.(?:/|$)|//|/$")  # a path is written without them
Row = tuple[int, Mapping[str, Any]]
"""Line number (from 1; in CSV the header is line 1) and cells by column."""


def find_manifest(folder: AnyPath) -> AnyPath | None:
    """The image list in a folder, if it has one."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def read_manifest(
    path: AnyPath, *, split: str | None, group_by: str | None = None, tick: Tick = lambda _count: None
) -> Items:
    """The items of an image list in its order, all or those of one split; the image files need not exist.

    `group_by` names the column that holds each image's group, if it is not `group`; `tick` counts rows.
    """
    with refusing(_name(path), "a file that can be read"):
        data = path.read_bytes() if isinstance(path, RemotePath) else None
    tables = []
    for table in limited.stream(_tables, path, data, split, group_by):
        tables.append(table)
        tick(table.num_rows)
    items = Items(join_tables(tables).drop_columns("line"), path.parent)
    if not items:
        raise _wrong(path, "at least one row", "none", "one row per image")
    _refuse_strangers(items, path)
    return items


def _tables(path: AnyPath, data: bytes | None, split: str | None, group_by: str | None) -> Iterator[pa.Table]:
    """The rows of a list in batches; of a list at a URL, `data` is the file."""
    column = group_by or "group"
    tables: list[pa.Table] = []
    batch: list[dict[str, Any]] = []
    known: set[int] = set()
    splits: set[str] = set()
    with refusing(_name(path), "a file that can be read"):
        file = io.BytesIO(data) if data is not None else files.open_regular(Path(str(path)), _name(path))
        read = _parquet if path.suffix.lower() == ".parquet" else _csv
        for line, cells in read(path, file, column):
            if split is not None:
                if "split" not in cells:
                    raise _wrong(path, "a column 'split'", quote_names(cells), "no split, or that column")
                splits.add(str(cells["split"] or ""))
                if cells["split"] != split:
                    continue
            if group_by is not None and group_by not in cells:
                raise _wrong(path, f"a column {group_by!r}", quote_names(cells), "one of these")
            what = f"{_name(path)}, line {line},"
            row = _row(cells, path, what, column)
            mark = hash(row["id"])  # a number takes less memory than the id
            # at once, because a small Parquet file may repeat one row a billion times
            if mark in known and (first := _line_of(row["id"], [*tables, _table(batch)])):
                got, fix = f"{row['id']!r} as in line {first}", "a column id without repetitions"
                raise EquicamError(what, "a unique id", got, fix)
            known.add(mark)
            batch.append(row | {"line": line})
            if len(batch) == BATCH_ROWS:
                tables.append(_table(batch))
                yield tables[-1]
                batch = []
    if splits and not known:
        raise _wrong(path, f"rows of split {split!r}", f"splits {quote_names(splits - {''})}", "one of these")
    yield _table(batch)


def _table(batch: list[dict[str, Any]]) -> pa.Table:
    """Rows of a list as columns, with their lines."""
    return table_of(batch).append_column("line", pa.array([row["line"] for row in batch], pa.int64()))


def _line_of(name: str, tables: list[pa.Table]) -> int | None:
    """The line with this id; None if only the hash is the same."""
    places = ((table, pc.index(table["id"], name).as_py()) for table in tables)
    return next((table["line"][place].as_py() for table, place in places if place >= 0), None)


def _csv(path: AnyPath, data: File, _group: str) -> Iterator[Row]:
    """Rows of text; invalid UTF-8 is kept, because a path may contain it."""
    with io.TextIOWrapper(data, "utf-8-sig", "surrogateescape", newline="") as file:
        reader = csv.reader(iter(partial(_line, file, path), ""), strict=True)

        def where() -> str:
            return f"{_name(path)}, line {reader.line_num},"

        try:
            columns = [name.strip() for name in next(reader, [])]
            _check(columns, path)
            for cells in reader:
                if len(cells) > len(columns):
                    fix = "quotes around cells that hold a comma"
                    raise EquicamError(where(), f"{len(columns)} cells", len(cells), fix)
                if cells:
                    yield reader.line_num, dict(zip_longest(columns, cells, fillvalue=""))
        except csv.Error as error:
            fix = "quotes that are closed and doubled"
            raise EquicamError(where(), "well-formed CSV", error, fix) from error


def _line(file: io.TextIOWrapper, path: AnyPath) -> str:
    """The next line of a text file; one without end, as in a sparse file, is refused."""
    line = file.readline(MAX_LINE)
    if len(line) == MAX_LINE:
        raise _wrong(path, f"lines of less than {MAX_LINE:,} characters", "a longer one", "CSV as text")
    return line


def _parquet(path: AnyPath, file: File, group: str) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with refusing(_name(path), "a whole Parquet file"), file:
        bytes_ = file.seek(0, io.SEEK_END)
        schema = pq.read_schema(file)
        _check(schema.names, path)
        wanted = [name for name in dict.fromkeys((*COLUMNS, group)) if name in schema.names]
        # a cell that is repeated stays one cell until its length is known
        source = pq.ParquetFile(file, read_dictionary=[n for n in wanted if schema.field(n).type in TEXT])
        if (rows := source.metadata.num_rows) > FREE_ROWS + MAX_ROWS_PER_BYTE * bytes_:
            got = f"{rows:,} in {bytes_:,} bytes"
            raise _wrong(path, f"at most {MAX_ROWS_PER_BYTE} rows a byte", got, "CSV")
        batches = source.iter_batches(PARQUET_ROWS, columns=wanted)
        yield from enumerate((cells for batch in batches for cells in _checked(batch, path).to_pylist()), 1)


def _checked(batch: pa.RecordBatch, path: AnyPath) -> pa.RecordBatch:
    """Rows whose cells are numbers, or texts that are not too long: they become objects, each of its own."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = column.dictionary if pa.types.is_dictionary(column.type) else column
        if pa.types.is_nested(values.type):
            needs, got = f"numbers or text in column {name!r}", str(values.type)[:80]
            raise _wrong(path, needs, got, "a column of strings")
        if values.type in (*TEXT, pa.binary(), pa.large_binary()):
            _refuse_long(pc.max(pc.binary_length(values)).as_py() or 0, name, _name(path))
    return batch


def _refuse_long(length: int, column: str, what: str) -> None:
    if length > (most := csv.field_size_limit()):
        needs = f"at most {most:,} characters in column {column!r}"
        raise EquicamError(what, needs, f"{length:,}", "a shorter text")


def _check(columns: list[str], path: AnyPath) -> None:
    if columns.count("path") != 1:
        raise _wrong(path, "a column 'path'", quote_names(columns), f"a heading of {', '.join(COLUMNS)}")
    if repeated := {name for name in columns if name in COLUMNS and columns.count(name) > 1}:
        raise _wrong(path, "each column once", f"{quote_names(repeated)} twice", "other names")


def _refuse_strangers(items: Items, path: AnyPath) -> None:
    """Refuse a list of nothing but URLs that only it names; a few among other rows are rows with a reason."""
    if pc.all(items.column("refused").fill_null(False)).as_py():
        named = sorted({files.scheme(item.path) for item in items})
        needs = f"permission to open {', '.join(f'{one}://' for one in named)}, which only it names"
        raise _wrong(path, needs, "none", f"{files.ALLOW_SCHEMES}={','.join(named)} in the environment")


def _row(cells: Mapping[str, Any], manifest: AnyPath, what: str, group: str) -> dict[str, Any]:
    path = _text(cells, "path", what)
    if not path:
        raise EquicamError(what, "a path", "an empty cell", "the file name of the image")
    boxes = (one for one in _text(cells, "boxes", what).split(";") if one.strip())
    region = _text(cells, "region", what)
    name = valid_utf8(_text(cells, "id", what) or path)
    in_group = _label(cells.get(group), what)
    return {
        "id": name,
        **_path_columns(manifest, path, name, what),
        "label": as_json(_label(cells.get("label"), what)),
        "boxes": as_json([parse_box(one.split(), what=what) for one in boxes]),
        "region": as_json(parse_box(region.split(), what=what) if region.strip() else None),
        "group": None if in_group is None else str(in_group),
    }


def _path_columns(manifest: AnyPath, path: str, name: str, what: str) -> dict[str, Any]:
    """An image's path, relative to the list's folder unless it is a URL; not every URL may be opened."""
    if files.is_url(path):
        try:
            found = files.as_path(path)
        except EquicamError as error:
            raise EquicamError(what, error.needs, error.got, error.fix) from error
        return encode_path(found if files.may_open(path, manifest) else RemotePath(path, allowed=False))
    if isinstance(manifest, RemotePath) and (path.startswith("/") or ".." in path.split("/")):
        raise EquicamError(what, "a path below the list's folder", repr(path)[:80], "a URL")
    plain = path == name and not _EMPTY_PART.search(path)
    return {} if plain else encode_path(manifest.parent / path)


def _text(cells: Mapping[str, Any], column: str, what: str) -> str:
    value = "" if cells.get(column) is None else cells[column]
    if isinstance(value, str):
        _refuse_long(len(value), column, what)
        return value
    if column == "id" and isinstance(value, int):
        return str(value)
    raise EquicamError(what, f"text in column {column!r}", repr(value)[:80], "a column of strings")


def _label(value: object, what: str) -> int | str | None:
    """An integer wherever the cell contains one, else a name; None for an empty cell."""
    if isinstance(value, str):
        text = value.strip()
        return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else valid_utf8(text) or None
    if value is None or (isinstance(value, float) and value != value):
        return None
    # pandas writes nullable integers as floats
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise EquicamError(what, "an integer or a name as label", repr(value)[:80], "a column of either")


def _name(path: AnyPath) -> str:
    return f"list {str(path)!r}"


def _wrong(path: AnyPath, needs: str, got: object, fix: str) -> EquicamError:
    return EquicamError(_name(path), needs, got, fix)


STATE, SPLITS = "state.json", "dataset_dict.json"
LABELS = "label"
"""The column of labels, unless another one is the only column of classes."""


def arrow_dataset(root: Path, split: str | None) -> list[Item] | None:
    """The images of a saved data set in its order; labels are its numbers of classes, or texts."""
    if (root / SPLITS).is_file():
        return _in_split(root, split)
    if not (root / STATE).is_file() or not (root / "dataset_info.json").is_file():
        return None
    if split is not None:
        raise EquicamError(f"split {split!r}", f"a data set with splits ({SPLITS})", str(root), "no split")
    column = _label_column(root / "dataset_info.json")
    found: list[Item] = []
    for path in _data_files(root / STATE):
        first = len(found)
        labels = enumerate(read_labels(path, column), first)
        found += (Item(f"{i:08}", path, _class_label(value), index=i - first) for i, value in labels)
    if not found:
        raise invalid(root / STATE, "at least one row", "none")
    return found


def _in_split(root: Path, split: str | None) -> list[Item]:
    known = [name for name in _list(root / SPLITS, "splits") if isinstance(name, str)]
    wanted = known[0] if split is None and len(known) == 1 else split
    if wanted not in known:
        got = "none" if split is None else repr(split)
        raise EquicamError(f"source {str(root)!r}", "a split", got, quote_names(known))
    folder = root / _plain_name(wanted, root / SPLITS)
    found = None if (folder / SPLITS).is_file() else arrow_dataset(folder, None)
    if found is None:
        raise invalid(folder, f"a {STATE}", "none")
    return found


def _label_column(info: Path) -> str:
    features = _json(info).get("features")
    known = features.items() if isinstance(features, dict) else ()
    classes = [name for name, one in known if isinstance(one, dict) and one.get("_type") == "ClassLabel"]
    return classes[0] if len(classes) == 1 else LABELS


def _class_label(value: int | str | None) -> int | str | None:
    """-1 is the library's number for a missing label."""
    if isinstance(value, str):
        return valid_utf8(value.strip()) or None
    return value if value is not None and value >= 0 else None


def _data_files(state: Path) -> list[Path]:
    entries = _list(state, "_data_files")
    names = [_plain_name(one.get("filename"), state) for one in entries if isinstance(one, dict)]
    if len(set(names)) < len(names):
        raise invalid(state, "every file once", quote_names(names))
    return [state.parent / name for name in names]


def _plain_name(name: object, file: Path) -> str:
    """The name of a file or folder next to `file`; one that leads elsewhere is refused."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise invalid(file, "plain names of files", repr(name)[:80])
    return name


def _list(path: Path, key: str) -> list[Any]:
    found = _json(path).get(key)
    return found if isinstance(found, list) else []


def _json(path: Path) -> dict[str, Any]:
    data, _ = files.read_file(path, what=f"file {str(path)!r}", limit=files.MAX_LIST_BYTES)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(path, "JSON", error) from error
    if not isinstance(found, dict):
        raise invalid(path, "a JSON object", type(found).__name__)
    return found
