"""Images below a folder. File names are untrusted: they are matched and escaped."""

import os
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path

from equicam.data.items import Item, valid_utf8
from equicam.data.remote import AnyPath, RemotePath
from equicam.errors import EquicamError

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".jp2", ".ppm", ".pgm")

PathParts = tuple[str, ...]
"""A path relative to a folder, split at the separators."""


def has_image_suffix(name: str) -> bool:
    """Whether a file name has the suffix of an image; the content is checked when the file is opened."""
    return _suffix(name) in SUFFIXES


def list_items(root: AnyPath) -> list[Item]:
    """Every image below a folder, sorted by id; its first subfolder is its label."""
    items = (
        make_item(parts, path, label=_escape(parts[0]) if len(parts) > 1 else None)
        for parts, path in list_images(root)
    )
    return sorted(items, key=lambda item: item.id)


def list_images(root: AnyPath, *, depth: int | None = None) -> list[tuple[PathParts, AnyPath]]:
    """Image files below a folder: relative path and file."""
    if isinstance(root, RemotePath):
        found = root.list_files() if depth is None else [f for f in root.list_files() if len(f[0]) <= depth]
        return [(parts, path) for parts, path in found if has_image_suffix(parts[-1])]
    return [(parts, root.joinpath(*parts)) for parts in list_files(root, SUFFIXES, depth=depth)]


def item_at(root: Path, parts: PathParts, *, label: int | str | None = None) -> Item:
    """The item of an image at a path below a folder."""
    return make_item(parts, root.joinpath(*parts), label=label)


def make_item(parts: PathParts, path: AnyPath, *, label: int | str | None = None) -> Item:
    """The item of an image file; different relative paths give different ids."""
    return Item(_escape("/".join(parts)), path, label)


def list_files(root: Path, suffixes: Collection[str], *, depth: int | None = None) -> list[PathParts]:
    """Files with these suffixes, sorted; hidden ones are excluded, and no folder is entered twice.

    Real folders come before symbolic links to folders, and a link to a parent of `root` is not followed.
    """
    found: list[PathParts] = []
    real = root.resolve()
    entered = {_identity(folder) for folder in real.parents}
    todo: deque[PathParts] = deque([()])
    while todo:
        parts = todo.popleft()
        folder = root.joinpath(*parts)
        if (identity := _identity(folder)) in entered:
            continue
        entered.add(identity)
        for entry in _entries(folder):
            below = (*parts, entry.name)
            kind = _kind(entry)
            if kind == "folder" and (depth is None or len(below) < depth):
                (todo.append if entry.is_symlink() else todo.appendleft)(below)
            elif kind == "file" and _suffix(entry.name) in suffixes:
                found.append(below)
    return sorted(found)


def subfolders(root: AnyPath) -> list[str]:
    """The sorted names of the folders directly inside, hidden ones excluded."""
    if isinstance(root, RemotePath):
        return root.subfolders()
    return [entry.name for entry in _entries(root) if _kind(entry) == "folder"]


def quote_names(names: Iterable[str], *, limit: int = 8) -> str:
    """The first few names, quoted, for an error message."""
    given = sorted(set(names))
    more = f" and {len(given) - limit} more" if len(given) > limit else ""
    return (", ".join(repr(name) for name in given[:limit]) or "none") + more


def read_lines(file: Path) -> list[str]:
    """The stripped lines of a text file; invalid UTF-8 is kept, because lines contain file names."""
    try:
        text = file.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise EquicamError(
            f"file {str(file)!r}", needs="to exist and be readable", got=error.strerror, fix="a fresh copy"
        ) from error
    return [line.strip() for line in text.rstrip().split("\n")]


def _escape(name: str) -> str:
    return valid_utf8(name.replace("\\", "\\\\"))  # escape backslashes too, so that ids stay unique


def _suffix(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122  # a Path per file is slow for a million files


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise _unreadable(folder, error) from error
    return sorted(visible, key=lambda entry: entry.name)


def _kind(entry: os.DirEntry[str]) -> str:
    """Folder, file, or other (a pipe or device, never opened); links are followed."""
    try:
        if entry.is_dir():
            return "folder"
        if entry.is_file():
            return "file"
        entry.stat()
    except OSError:
        return "file"  # keep a broken link, so that the missing file is reported
    return "other"


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
