"""Arrow streams with encoded images, as Hugging Face `datasets` saves them: read one at a time, without that library.

A stream is a row of messages: a schema, then record batches. The length and the rows of a batch are in its header, so
that one batch is mapped at a time. Columns are validated before they are used, because anybody may have written them.
"""

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from equicam.errors import EquicamError
from equicam.images.files import MAX_IMAGE_BYTES, open_regular, refuse_large

MAX_ROWS = 10_000_000
"""In one file."""
MAX_HEADER_BYTES = 2**24
MAX_MAPPED_BATCHES = 4
MARKER = 0xFFFFFFFF
"""Before every message."""
SCHEMA, RECORD_BATCH = 1, 3
"""Kinds of messages; the others hold dictionaries and tensors, which `datasets` does not save."""


@dataclass(frozen=True)
class Batch:
    """A record batch of a stream: where it is in the file, and its rows."""

    start: int
    length: int  # bytes, header and body
    first_row: int
    rows: int


@dataclass(frozen=True)
class Stream:
    """A file as its headers describe it."""

    schema: pa.Schema
    batches: tuple[Batch, ...]
    image_columns: tuple[str, ...]
    label_columns: tuple[str, ...]


def read_image_bytes(path: Path, index: int) -> bytes:
    """The encoded image in a row; a path in the file is never followed."""
    what, image = f"row {index} of {str(path)!r}", image_column(path)
    for batch in _open(path).batches:
        if batch.first_row <= index < batch.first_row + batch.rows:
            cell = _column(path, batch, image)[index - batch.first_row].as_py() or {}
            if not isinstance(cell.get("bytes"), bytes):
                raise EquicamError(
                    what, needs="the bytes of an image", got="a path" if cell.get("path") else "none",
                    fix="save_to_disk, which copies images into its files",
                )  # fmt: skip
            refuse_large(len(cell["bytes"]), what, MAX_IMAGE_BYTES)
            data: bytes = cell["bytes"]
            return data
    raise invalid(path, f"a row {index}", "fewer")


def image_column(path: Path) -> str:
    """The column with bytes and path of images; of several, the one named "image"."""
    found = _open(path).image_columns
    if len(found) != 1 and "image" not in found:
        raise EquicamError(
            f"file {str(path)!r}", needs="one column of images, or one named 'image'",
            got=", ".join(map(repr, found[:8])) or "none", fix="dataset.select_columns before save_to_disk",
        )  # fmt: skip
    return found[0] if len(found) == 1 else "image"


def read_labels(path: Path, name: str) -> list[int | str | None]:
    """The numbers or texts of a column, one for each image; None for all where the column is missing or another kind."""
    stream, image, found = _open(path), image_column(path), list[int | str | None]()
    for batch in stream.batches:
        rows = len(_column(path, batch, image))  # as many as there are, whatever the header claims
        found += _column(path, batch, name).to_pylist() if name in stream.label_columns else [None] * rows
    return found


def _holds_images(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {"bytes", "path"}:
        return False
    return bool(
        pa.types.is_binary(kind.field("bytes").type) or pa.types.is_large_binary(kind.field("bytes").type)
    )


def _holds_labels(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _column(path: Path, batch: Batch, name: str) -> pa.Array:
    """A column of a batch, checked whole: offsets that point outside would read other memory."""
    try:
        found = _record_batch(str(path), batch, _version(path)).column(name)
        found.validate(full=True)
    except EquicamError:
        raise
    except Exception as error:  # Arrow reports damage as one of a dozen exceptions
        raise invalid(path, f"a whole Arrow stream with a column {name!r}", error) from error
    return found


@lru_cache(maxsize=MAX_MAPPED_BATCHES)
def _record_batch(path: str, batch: Batch, version: tuple[int, int]) -> pa.RecordBatch:
    """A batch as it is on disk; pages of the file are read when they are used."""
    aligned = batch.start - batch.start % mmap.ALLOCATIONGRANULARITY
    with open_regular(Path(path), f"file {path!r}") as file:
        length = batch.start + batch.length - aligned
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=aligned)
    message = pa.ipc.read_message(pa.py_buffer(mapped).slice(batch.start - aligned))
    return pa.ipc.read_record_batch(message, _index(path, version).schema)


def _open(path: Path) -> Stream:
    return _index(str(path), _version(path))


def _version(path: Path) -> tuple[int, int]:
    """Changes when the file does."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise invalid(path, "an existing file", getattr(error, "strerror", None) or error) from error
    return found.st_size, found.st_mtime_ns


@lru_cache(maxsize=64)
def _index(path: str, version: tuple[int, int]) -> Stream:
    """The schema, and every batch by its place; no column is read."""
    size, schema, batches, rows = version[0], None, [], 0
    try:
        with open_regular(Path(path), f"file {path!r}") as file:
            while len(start := file.read(8)) == 8:
                marker, length = struct.unpack("<Ii", start)
                if marker == MARKER and length == 0:
                    break  # the end of the stream
                if marker != MARKER or not 0 < length <= MAX_HEADER_BYTES:
                    raise invalid(Path(path), "an Arrow stream", "another format")
                at = file.tell() - 8
                kind, body, count = _read_header(header := file.read(length))
                if body < 0 or count < 0 or at + 8 + length + body > size:
                    raise invalid(Path(path), "a whole Arrow stream", "one that is cut off")
                if kind == SCHEMA and schema is None:
                    schema = pa.ipc.read_schema(pa.ipc.read_message(pa.py_buffer(start + header)))
                elif kind == RECORD_BATCH and schema is not None:
                    batches.append(Batch(at, 8 + length + body, rows, count))
                    rows += count
                else:
                    raise invalid(Path(path), "a schema and record batches", f"a message of kind {kind}")
                if rows > MAX_ROWS:
                    raise invalid(Path(path), f"at most {MAX_ROWS:,} rows", f"{rows:,}")
                file.seek(at + 8 + length + body)
        if schema is None:
            raise invalid(Path(path), "an Arrow stream", "none")
        times = Counter(schema.names)
        once = [field for field in schema if times[field.name] == 1]
        images = tuple(field.name for field in once if _holds_images(field.type))
        labels = tuple(field.name for field in once if _holds_labels(field.type))
        return Stream(schema, tuple(batches), images, labels)
    except EquicamError:
        raise
    except Exception as error:
        raise invalid(Path(path), "a whole Arrow stream", error) from error


def _read_header(header: bytes) -> tuple[int, int, int]:
    """Kind, bytes of the body and rows of a message, from its FlatBuffers table.

    Message is {version, header_type, header, bodyLength}, RecordBatch {length, nodes, buffers, compression}. Compressed
    batches are refused: their buffers may claim any size, and `save_to_disk` writes none.
    """
    table = struct.unpack_from("<I", header, 0)[0]
    kind = _field(header, table, 1, "<B")
    body = _field(header, table, 3, "<q")
    if kind != RECORD_BATCH:
        return kind, body, 0
    at = _slot(header, table, 2)
    batch = at + struct.unpack_from("<I", header, at)[0]
    if _slot(header, batch, 3):
        raise ValueError("its columns are compressed")
    return kind, body, _field(header, batch, 0, "<q")


def _field(header: bytes, table: int, number: int, kind: str) -> int:
    at = _slot(header, table, number)
    return int(struct.unpack_from(kind, header, at)[0]) if at else 0


def _slot(header: bytes, table: int, number: int) -> int:
    """Where a field of a FlatBuffers table is; 0 if it has its default."""
    vtable = table - struct.unpack_from("<i", header, table)[0]
    if vtable < 0 or 4 + 2 * number >= struct.unpack_from("<H", header, vtable)[0]:
        return 0
    offset = struct.unpack_from("<H", header, vtable + 4 + 2 * number)[0]
    return table + int(offset) if offset else 0


def invalid(path: Path, needs: str, got: object) -> EquicamError:
    """A file that is not as `datasets` saves it."""
    return EquicamError(f"file {str(path)!r}", needs=needs, got=got, fix="save_to_disk again")
