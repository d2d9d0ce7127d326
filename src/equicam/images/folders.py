"""Images below a folder. File names are untrusted: they are matched and escaped."""

import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from equicam.errors import EquicamError
from equicam.images import dicom
from equicam.images.files import MAX_LIST_BYTES, read_file
from equicam.images.item_table import BATCH_ROWS, Items, as_json, encode_path, join_tables
from equicam.images.items import Item, valid_utf8
from equicam.images.remote import AnyPath, RemotePath

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".jp2", ".ppm", ".pgm")
RASTER_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide")
"""Of slides, which are read in windows."""
SUFFIXES = (*IMAGE_SUFFIXES, *dicom.SUFFIXES, *RASTER_SUFFIXES)

PathParts = tuple[str, ...]
"""A path relative to a folder, split at the separators."""
_log = logging.getLogger(__name__)


def has_image_suffix(name: str) -> bool:
    """Whether a file name has the suffix of an image; the content is checked when the file is opened."""
    return _suffix(name) in SUFFIXES


def list_items(root: AnyPath) -> Items:
    """Every image below a folder, sorted by id; its first subfolder is its label."""
    skipped: list[PathParts] = []
    if isinstance(root, RemotePath):
        found = Items.of(
            make_item(parts, path, label=_escape(parts[0]) if len(parts) > 1 else None)
            for parts, path in list_images(root, skipped)
        )
    else:
        tables = [_table(root, parts, names) for parts, names in _walk(root, SUFFIXES, skipped)]
        tables.sort(key=lambda table: table["id"][0].as_py())  # then there is mostly nothing left to sort
        found = Items(join_tables(tables), root)
    report_skipped(root, skipped)
    return found.in_scan_order()


def _table(root: Path, folder: PathParts, names: Sequence[str]) -> pa.Table:
    """The columns of the images in a folder."""
    prefix = "".join(f"{part}/" for part in folder)
    names = sorted(names)
    ids = [_escape(prefix + name) for name in names]
    columns = {"id": pa.array(ids, pa.string())}
    if folder:
        columns["label"] = pa.repeat(pa.scalar(as_json(_escape(folder[0])), pa.string()), len(ids))
    odd = {i for i, name in enumerate(names) if ids[i] != prefix + name}
    if odd:
        paths = [
            encode_path(root / (prefix + name))["path"] if i in odd else None for i, name in enumerate(names)
        ]
        columns["path"] = pa.array(paths, pa.binary())
    return pa.table(columns)


def list_images(
    root: AnyPath, skipped: list[PathParts], *, depth: int | None = None
) -> list[tuple[PathParts, AnyPath]]:
    """Image files below a folder, by relative path; entries that are hidden or no images are added to `skipped`."""
    if isinstance(root, Path):
        return [(parts, root.joinpath(*parts)) for parts in list_files(root, SUFFIXES, skipped, depth=depth)]
    found: list[tuple[PathParts, AnyPath]] = []
    for parts, path in root.list_files():
        if depth is None or len(parts) <= depth:
            if has_image_suffix(parts[-1]) and not is_hidden(parts):
                found.append((parts, path))
            else:
                skipped.append(parts)
    return found


def is_hidden(parts: PathParts) -> bool:
    """Whether a file or one of its folders has a name that starts with a dot."""
    return any(part.startswith(".") for part in parts)


def report_skipped(source: AnyPath, skipped: Sequence[PathParts]) -> None:
    """Tell the user which entries of a source are no images of it, in one line."""
    if skipped:
        names = quote_names(_escape("/".join(parts)) for parts in skipped)
        _log.warning(
            "source %r: %d left out, hidden or not an image by the name: %s", str(source), len(skipped), names
        )


def item_at(root: Path, parts: PathParts, *, label: int | str | None = None) -> Item:
    """The item of an image at a path below a folder."""
    return make_item(parts, root.joinpath(*parts), label=label)


def make_item(parts: PathParts, path: AnyPath, *, label: int | str | None = None) -> Item:
    """The item of an image file; different relative paths give different ids."""
    return Item(_escape("/".join(parts)), path, label)


def list_files(
    root: Path, suffixes: Collection[str], skipped: list[PathParts] | None = None, *, depth: int | None = None
) -> list[PathParts]:
    """Files with these suffixes, sorted; hidden ones are excluded, and no folder is entered twice.

    Real folders come before symbolic links to folders, and a link to a parent of `root` is not followed. All other
    entries are added to `skipped`. A pipe or device counts as a file: opening it fails with a reason.
    """
    skipped = [] if skipped is None else skipped
    found = _walk(root, suffixes, skipped, depth=depth)
    return sorted((*parts, name) for parts, names in found for name in names)


def _walk(
    root: Path, suffixes: Collection[str], skipped: list[PathParts], *, depth: int | None = None
) -> Iterator[tuple[PathParts, list[str]]]:
    """The folders that hold such files, and the names of the files, at most `BATCH_ROWS` at a time."""
    endings = tuple(suffixes)
    entered = {_identity(folder) for folder in root.resolve().parents}
    todo: deque[PathParts] = deque([()])
    while todo:
        parts = todo.popleft()
        folder = root.joinpath(*parts)
        if (identity := _identity(folder)) in entered:
            skipped.append(parts)
            continue
        entered.add(identity)
        names: list[str] = []
        folders: list[os.DirEntry[str]] = []
        for entry in _entries(folder):
            if entry.name.startswith("."):
                skipped.append((*parts, entry.name))
            elif _is_folder(entry):
                folders.append(entry)
            elif entry.name.lower().endswith(endings):
                names.append(entry.name)
                if len(names) == BATCH_ROWS:
                    yield parts, names
                    names = []
            else:
                skipped.append((*parts, entry.name))
        if names:
            yield parts, names
        if depth is None or len(parts) + 1 < depth:
            for entry in sorted(folders, key=lambda one: one.name):
                (todo.append if entry.is_symlink() else todo.appendleft)((*parts, entry.name))


def subfolders(root: AnyPath) -> list[str]:
    """The sorted names of the folders directly inside, hidden ones excluded."""
    if isinstance(root, RemotePath):
        return root.subfolders()
    return sorted(entry.name for entry in _entries(root) if entry.name[0] != "." and _is_folder(entry))


def quote_names(names: Iterable[str], *, limit: int = 8) -> str:
    """The first few names, quoted, for an error message."""
    given = sorted(set(names))
    more = f" and {len(given) - limit} more" if len(given) > limit else ""
    return (", ".join(repr(name) for name in given[:limit]) or "none") + more


def read_lines(file: Path) -> list[str]:
    """The stripped lines of a text file; invalid UTF-8 is kept, because lines contain file names."""
    data, _ = read_file(file, what=f"file {str(file)!r}", limit=MAX_LIST_BYTES)
    text = data.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    return [line.strip() for line in text.rstrip().split("\n")]


def _escape(name: str) -> str:
    return valid_utf8(name.replace("\\", "\\\\"))  # escape backslashes too, so that ids stay unique


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  # a Path per file is slow for a million files


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise _unreadable(folder, error) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; a link to nothing counts as a file, which is then reported missing."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _identity(folder: Path) -> tuple[int, int]:
    try:
        stat = folder.stat()
    except OSError as error:
        raise _unreadable(folder, error) from error
    return stat.st_dev, stat.st_ino


def _unreadable(folder: Path, error: OSError) -> EquicamError:
    return EquicamError(
        f"folder {str(folder)!r}", needs="to be readable", got=error.strerror, fix="its permissions"
    )
