"""Image lists in CSV or Parquet files: a column path, and annotations in further columns."""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from equicam.data.folders import quote_names
from equicam.data.items import Item, parse_box, valid_utf8
from equicam.data.remote import AnyPath, RemotePath, as_path, is_url
from equicam.errors import EquicamError

NAMES = ("items.csv", "items.parquet")
COLUMNS = ("path", "id", "label", "boxes", "region", "split")

Row = tuple[int, Mapping[str, Any]]
"""Line number (from 1; in CSV the header is line 1) and cells by column."""


def find_manifest(folder: AnyPath) -> AnyPath | None:
    """The image list in a folder, if it has one."""
    return next((folder / name for name in NAMES if (folder / name).is_file()), None)


def read_manifest(path: AnyPath, *, split: str | None) -> list[Item]:
    """The items of an image list in its order, all or those of one split; the image files need not exist."""
    try:
        rows = list(_parquet(path) if path.suffix.lower() == ".parquet" else _csv(path))
    except OSError as error:
        raise _wrong(path, "a file that can be read", error, "a fresh copy of it") from error
    if split is not None:
        rows = _of_split(rows, path, split)
    if not rows:
        raise _wrong(path, "at least one row", "none", "one row per image")
    items = [_item(cells, path, f"{_name(path)}, line {line}") for line, cells in rows]
    lines: dict[str, int] = {}
    for (line, _), item in zip(rows, items, strict=True):
        if item.id in lines:
            raise EquicamError(
                f"{_name(path)}, line {line},", needs="a unique id",
                got=f"{item.id!r} as in line {lines[item.id]}", fix="a column id without repetitions",
            )  # fmt: skip
        lines[item.id] = line
    return items


def _csv(path: AnyPath) -> Iterator[Row]:
    """Rows of text; invalid UTF-8 is kept, because a path may contain it."""
    with io.TextIOWrapper(_file(path), "utf-8-sig", "surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            columns = [name.strip() for name in next(reader, [])]
            _check(columns, path)
            for cells in reader:
                if len(cells) > len(columns):
                    raise EquicamError(
                        f"{_name(path)}, line {reader.line_num},", needs=f"{len(columns)} cells",
                        got=len(cells), fix="quotes around cells that hold a comma",
                    )  # fmt: skip
                if cells:
                    yield reader.line_num, dict(zip(columns, cells, strict=False))
        except csv.Error as error:
            raise EquicamError(
                f"{_name(path)}, line {reader.line_num},", needs="well-formed CSV", got=error,
                fix="quotes that are closed and doubled",
            ) from error  # fmt: skip


def _parquet(path: AnyPath) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _file(path) as file:
            source = pq.ParquetFile(file)
            columns = list(source.schema_arrow.names)
            _check(columns, path)
            rows = source.read([name for name in COLUMNS if name in columns]).to_pylist()
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _wrong(path, "a whole Parquet file", error, "a fresh copy of it") from error
    yield from enumerate(rows, 1)


def _check(columns: list[str], path: AnyPath) -> None:
    if columns.count("path") != 1:
        raise _wrong(path, "a column 'path'", quote_names(columns), f"a heading of {', '.join(COLUMNS)}")
    if repeated := {name for name in columns if name in COLUMNS and columns.count(name) > 1}:
        raise _wrong(path, "each column once", f"{quote_names(repeated)} twice", "other names")


def _of_split(rows: list[Row], path: AnyPath, split: str) -> list[Row]:
    if rows and not any("split" in cells for _, cells in rows):
        raise _wrong(path, "a column 'split'", quote_names(rows[0][1]), "no split, or that column")
    splits = {str(cells.get("split") or "") for _, cells in rows}
    if split not in splits:
        raise _wrong(path, f"rows of split {split!r}", f"splits {quote_names(splits - {''})}", "one of these")
    return [(line, cells) for line, cells in rows if cells.get("split") == split]


def _item(cells: Mapping[str, Any], manifest: AnyPath, what: str) -> Item:
    path = _text(cells, "path", what)
    if not path:
        raise EquicamError(f"{what},", needs="a path", got="an empty cell", fix="the file name of the image")
    boxes = (one for one in _text(cells, "boxes", what).split(";") if one.strip())
    region = _text(cells, "region", what)
    return Item(
        id=valid_utf8(_text(cells, "id", what) or path),
        path=_resolve(manifest, path, what),
        label=_label(cells.get("label"), what),
        boxes=tuple(parse_box(one.split(), what=f"{what},") for one in boxes),
        region=parse_box(region.split(), what=f"{what},") if region.strip() else None,
    )


def _resolve(manifest: AnyPath, path: str, what: str) -> AnyPath:
    """An image's path, relative to the list's folder unless it is a URL."""
    if is_url(path):
        return as_path(path)
    if isinstance(manifest, RemotePath) and (path.startswith("/") or ".." in path.split("/")):
        raise EquicamError(
            f"{what},", needs="a path below the list's folder", got=repr(path)[:80], fix="a URL"
        )
    return manifest.parent / path


def _file(path: AnyPath) -> io.BytesIO | io.BufferedReader:
    return io.BytesIO(path.read_bytes()) if isinstance(path, RemotePath) else path.open("rb")


def _text(cells: Mapping[str, Any], column: str, what: str) -> str:
    value = cells.get(column)
    if value is None or isinstance(value, str):
        return value or ""
    if column == "id" and isinstance(value, int):
        return str(value)
    raise EquicamError(
        f"{what},", needs=f"text in column {column!r}", got=repr(value)[:80], fix="a column of strings"
    )


def _label(value: object, what: str) -> int | str | None:
    """An integer wherever the cell contains one, else a name; None for an empty cell."""
    if isinstance(value, float) and (
        value != value or value.is_integer()
    ):  # pandas writes nullable integers as floats
        return None if value != value else int(value)
    if isinstance(value, str):
        text = value.strip()
        return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else valid_utf8(text) or None
    if value is None or isinstance(value, int):
        return None if value is None else int(value)
    raise EquicamError(
        f"{what},", needs="an integer or a name as label", got=repr(value)[:80], fix="a column of either"
    )


def _name(path: AnyPath) -> str:
    return f"list {str(path)!r}"


def _wrong(path: AnyPath, needs: str, got: object, fix: str) -> EquicamError:
    return EquicamError(_name(path), needs=needs, got=got, fix=fix)
