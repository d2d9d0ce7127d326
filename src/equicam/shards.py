"""A folder of shards: work that can be interrupted at any moment and resumed.

Each shard is one Parquet file, written under a temporary name, synced and renamed, so that it is there whole or not at
all. `fingerprint.json` identifies the work; another fingerprint is refused, naming the difference.
"""

import json
import math
import os
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import is_dataclass
from itertools import islice
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equicam.errors import EquicamError

FINGERPRINT = "fingerprint.json"
TEMPORARY_SUFFIX = ".tmp"
"""Of files that are being written."""
MAX_COUNT = 10**9
"""That a file may state."""
THREADS = 4
"""That read files at the same time."""
_SURROGATE = re.compile("[\ud800-\udfff]")
T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def temporary_file(path: Path, data: bytes) -> Iterator[Path]:
    """A file next to another, on disk and this user's alone; removed in the end unless it was renamed."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY_SUFFIX)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; it is on disk when this returns."""
    with temporary_file(path, data) as temporary:
        os.umask(mask := os.umask(0))
        temporary.chmod(0o666 & ~mask)
        temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def encode_table(table: pa.Table) -> bytes:
    """A table as Parquet."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, whole or not at all."""
    write_atomic(path, encode_table(table))


def read_table(
    path: Path,
    columns: Sequence[str] | None = None,
    *,
    schema: pa.Schema | None = None,
    data: bytes | None = None,
) -> pa.Table:
    """Read a table from Parquet; the error for a damaged file names it. `data` is the file, if it was read already.

    With a schema, other columns are refused; without, those that it does not have are left out.
    """
    try:
        # thousands of small files: a thread for each column, or a data set of one file, takes longer than reading
        with pq.ParquetFile(path if data is None else pa.BufferReader(data)) as file:
            table = file.read(None if columns is None else list(columns), use_threads=False)
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the file system; pyarrow's own have no number
        raise EquicamError(
            str(path), "to be as it was written", next(iter(str(error).splitlines()), "no Parquet"),
            "deleting it and computing it again",
        ) from error  # fmt: skip
    if schema is not None:
        refuse_other_columns(path, table, schema, columns or schema.names)
    return table if columns is None else table.select([n for n in columns if n in table.column_names])


def map_concurrently(
    function: Callable[[T], R], values: Iterable[T], *, threads: int = THREADS
) -> Iterator[R]:
    """The results in order, computed a little ahead by threads: for functions that read files."""
    left = iter(values)
    with ThreadPoolExecutor(threads) as pool:
        ahead = deque(pool.submit(function, value) for value in islice(left, 2 * threads))
        while ahead:
            yield ahead.popleft().result()
            ahead.extend(pool.submit(function, value) for value in islice(left, 1))


def refuse_other_columns(path: Path, table: pa.Table, schema: pa.Schema, needed: Sequence[str]) -> None:
    """Refuse a table that lacks a needed column, or has one of the schema's with another type."""
    missing = [name for name in needed if name not in table.column_names]
    odd = [
        f.name for f in schema if f.name in table.column_names and table.schema.field(f.name).type != f.type
    ]
    if missing or odd:
        raise EquicamError(
            str(path), "the columns it was written with",
            "; ".join([f"no {name}" for name in missing] + [f"another type of {name}" for name in odd]), "restoring it",
        )  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; the error for a damaged file names it."""
    try:
        return parse_object(path.read_bytes())
    except ValueError as error:
        raise EquicamError(str(path), "to be as it was written", error, "restoring it") from error


def parse_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object; a ValueError for anything else, however it is nested or encoded."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"JSON that is no object but {type(value).__name__}")
    return value


def from_plain(kind: Any, value: Any, name: str = "it") -> Any:
    """A value of JSON as this type: a dataclass, which may have a `from_json`, tuple, mapping, choice, text, count or number.

    Anybody may have written it: a value of another type is a ValueError. Null is NaN where a number is expected.
    """
    origin, kinds = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):  # one type, or None
        return None if value is None else from_plain(kinds[0], value, name)
    if is_dataclass(kind) and isinstance(value, dict):
        if hasattr(kind, "from_json"):
            return kind.from_json(value)
        hints = get_type_hints(kind)
        return origin(**{inner: from_plain(hint, value[inner], inner) for inner, hint in hints.items()})
    if origin is tuple and isinstance(value, list):
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        if len(kinds) == len(value):
            return tuple(from_plain(hint, inner, name) for hint, inner in zip(kinds, value, strict=True))
    if kind is float and (value is None or type(value) in (int, float)):
        return math.nan if value is None else float(value)
    if not (
        (kind is str and isinstance(value, str) and not _SURROGATE.search(value))
        or (kind is int and type(value) is int and 0 <= value <= MAX_COUNT)
        or (origin is Mapping and isinstance(value, dict))
        or (origin is Literal and value in kinds)
    ):
        raise ValueError(f"{name} = {shorten(value)}")
    return value


def json_ready(value: Any) -> Any:
    """Nested values for JSON, with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [json_ready(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def finite_table(table: pa.Table) -> pa.Table:
    """The same of a table's columns of numbers."""
    for i, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            known = pc.is_finite(table[i])
            table = table.set_column(i, field, pc.if_else(known, table[i], pa.scalar(None, field.type)))
    return table


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of two fingerprints, one phrase per difference."""
    return [
        f"{key} was {shorten(before.get(key))}, is {shorten(now.get(key))}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]


def plain(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint as it reads back from JSON: tuples become lists."""
    return json.loads(json.dumps(fingerprint))  # type: ignore[no-any-return]


def refuse_another(what: str, before: Mapping[str, Any], now: Mapping[str, Any], *, fix: str) -> None:
    """Raise an error that names the differences, if there are any."""
    if found := differences(before, plain(now)):
        raise EquicamError(what, "the same settings to resume", "; ".join(found), fix)


def shard_path(folder: Path, number: int) -> Path:
    """The file of a shard, written or not."""
    return folder / f"shard-{number:06d}.parquet"


class Shards:
    """Numbered shards in a folder, all of one fingerprint."""

    def __init__(self, folder: Path, fingerprint: Mapping[str, Any], *, fix: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / FINGERPRINT
        if known.is_file():
            refuse_another(str(folder), read_json(known), fingerprint, fix=fix)
        elif any(folder.iterdir()):
            raise EquicamError(str(folder), "to be empty, new or ours", "other files in it", fix)
        else:
            write_atomic(known, json.dumps(fingerprint, indent=1).encode())

    def pending(self, count: int) -> list[int]:
        """The shards that are not there yet."""
        return [number for number in range(count) if not shard_path(self.folder, number).is_file()]

    def write(self, number: int, table: pa.Table) -> None:
        """Write a shard, whole."""
        write_table(shard_path(self.folder, number), table)

    def read(self, count: int) -> pa.Table:
        """All shards in order."""
        return pa.concat_tables(read_table(shard_path(self.folder, number)) for number in range(count))


def shorten(value: Any) -> str:
    """A value of JSON as text for a message, at most 80 characters."""
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"
