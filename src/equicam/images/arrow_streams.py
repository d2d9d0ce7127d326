"""Arrow streams with encoded images, as Hugging Face `datasets` saves them: read one at a time, without that library.

Batches are mapped, so that an image is read from the disk when it is used. Columns are validated before they are used, because
anybody may have written them.
"""

import mmap
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from equicam.errors import EquicamError, refusing
from equicam.images.files import MAX_IMAGE_BYTES, open_regular, refuse_large

MAX_ROWS = 10_000_000
"""In one file."""
MAX_OPEN_FILES = 4
SAVED = "save_to_disk again"
KINDS = ("Dataset", "DatasetDict")
"""How the types of the data sets of that library end, streamed ones too."""


@dataclass(frozen=True)
class _Stream:
    """A file, mapped."""

    batches: tuple[pa.RecordBatch, ...]
    ends: tuple[int, ...]  # rows up to the end of each batch
    image_columns: tuple[str, ...]
    label_columns: tuple[str, ...]


def read_image_bytes(path: Path, index: int) -> bytes:
    """The encoded image in a row; a path in the file is never followed."""
    stream, image = _open(path)
    number = bisect_right(stream.ends, index)
    if number == len(stream.batches):
        raise invalid(path, f"a row {index}", "fewer")
    batch, what = stream.batches[number], f"row {index} of {str(path)!r}"
    cell = _column(path, batch, image)[index - stream.ends[number] + batch.num_rows].as_py() or {}
    if not isinstance(data := cell.get("bytes"), bytes):
        fix = "save_to_disk, which copies images into its files"
        raise EquicamError(what, "the bytes of an image", "a path" if cell.get("path") else "none", fix)
    refuse_large(len(data), what, MAX_IMAGE_BYTES)
    return data


def read_labels(path: Path, name: str) -> list[int | str | None]:
    """The numbers or texts of a column, one for each image; None for all where the column is missing or another kind."""
    (stream, image), found = _open(path), list[int | str | None]()
    for batch in stream.batches:
        rows = len(_column(path, batch, image))  # as many as there are, whatever the header claims
        found += _column(path, batch, name).to_pylist() if name in stream.label_columns else [None] * rows
    return found


def _holds_images(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind) or {field.name for field in kind} != {"bytes", "path"}:
        return False
    return kind.field("bytes").type in (pa.binary(), pa.large_binary())


def _column(path: Path, batch: pa.RecordBatch, name: str) -> pa.Array:
    """A column of a batch, checked whole: offsets that point outside would read other memory."""
    with refusing(f"file {str(path)!r}", f"a whole Arrow stream with a column {name!r}", fix=SAVED):
        found = batch.column(name)
        found.validate(full=True)
    return found


def _open(path: Path) -> tuple[_Stream, str]:
    """A file, and its column with bytes and path of images; of several, the one named "image"."""
    what = f"file {str(path)!r}"
    with refusing(what, "an existing file", fix=SAVED):
        found = path.stat()
    stream = _map(str(path), (found.st_size, found.st_mtime_ns))
    names = stream.image_columns
    if len(names) != 1 and "image" not in names:
        got, fix = ", ".join(map(repr, names[:8])) or "none", "dataset.select_columns before save_to_disk"
        raise EquicamError(what, "one column of images, or one named 'image'", got, fix)
    return stream, names[0] if len(names) == 1 else "image"


@lru_cache(maxsize=MAX_OPEN_FILES)
def _map(path: str, _version: tuple[int, int]) -> _Stream:
    """A file that is mapped again when it changes."""
    with refusing(f"file {path!r}", "a whole Arrow stream", fix=SAVED):
        with open_regular(Path(path), f"file {path!r}") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with pa.ipc.open_stream(pa.py_buffer(mapped)) as reader:
            schema, batches = reader.schema, tuple(reader)
        times = Counter(schema.names)
    ends = tuple(accumulate(batch.num_rows for batch in batches))
    if ends and ends[-1] > MAX_ROWS:
        raise invalid(Path(path), f"at most {MAX_ROWS:,} rows", f"{ends[-1]:,}")
    once = [field for field in schema if times[field.name] == 1]
    images = tuple(field.name for field in once if _holds_images(field.type))
    text = (pa.string(), pa.large_string())
    labels = tuple(f.name for f in once if pa.types.is_integer(f.type) or f.type in text)
    return _Stream(batches, ends, images, labels)


def invalid(path: Path, needs: str, got: object) -> EquicamError:
    """A file that is not as `datasets` saves it."""
    return EquicamError(f"file {str(path)!r}", needs, got, SAVED)


def refuse_in_memory(given: object, what: str) -> None:
    """Refuse an object of that library, by its type: a run records a folder, from which it can be computed again."""
    if type(given).__module__.partition(".")[0] == "datasets" and type(given).__name__.endswith(KINDS):
        fix = 'data.save_to_disk("folder") and then "folder", or for explain its images, as in data[:8]["image"]'
        got = f"a {type(given).__name__} of Hugging Face"
        raise EquicamError(what, "files, or images in memory", got, fix)
