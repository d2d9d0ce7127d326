"""Sources of images: a folder, a saved data set, an image list, a glob pattern or one file.

File names are untrusted: they are matched and escaped.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from equicam.errors import EquicamError, NotNamedError
from equicam.images import dicom, limited
from equicam.images.arrow_streams import refuse_in_memory
from equicam.images.dicom import frames as count_frames
from equicam.images.dicom import is_dicom_file
from equicam.images.files import MAX_LIST_BYTES, AnyPath, RemotePath, as_path, may_open, read_file
from equicam.images.item_table import BATCH_ROWS, Items, as_json, encode_path, join_tables
from equicam.images.items import Item, quote_names, valid_utf8
from equicam.images.lists import arrow_dataset, find_manifest, read_manifest

Tick = Callable[[int], None]
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")


def find_items(source: str | Path, *, split: str | None = None, group_by: str | None = None) -> list[Item]:
    """`list_source`, as a list of objects."""
    return list(list_source(source, split=split, group_by=group_by))


def list_source(
    source: str | Path,
    *,
    split: str | None = None,
    group_by: str | None = None,
    from_user: bool = True,
    frames: bool = True,
    tick: Tick = lambda _count: None,
) -> Items:
    """The items of a source, with unique ids in valid UTF-8; no image is opened but the headers of DICOM files.

    `group_by` names the column of an image list that holds each image's group, if it is not `group`. Every frame of a DICOM
    file is an item, unless files are wanted as they are (`frames` False). `tick` counts what was listed. A URL that does not
    come from the user (`from_user`) but from a file is refused, unless its protocol is allowed.
    """
    refuse_in_memory(source, "source")
    if not isinstance(source, str | Path | RemotePath):
        raise EquicamError(
            "source", "a folder, a file, a glob pattern or a URL", f"an object of type {type(source).__name__}",
            '"folder/"',
        )  # fmt: skip
    found = _find(as_path(source), source, split, group_by, from_user, tick)
    if group_by is not None and "group" not in found.table.column_names:
        what, needs = f"group_by {group_by!r}", "an image list (items.csv) with groups in that column"
        raise EquicamError(what, needs, "no group", "no group_by, or that column")
    return _by_frame(found, tick) if frames else found


def _find(
    path: AnyPath, source: str | Path, split: str | None, group_by: str | None, from_user: bool, tick: Tick
) -> Items:
    what = f"source {str(source)!r}"
    if not from_user and isinstance(path, RemotePath) and not may_open(str(path), Path()):
        needs = "to be named by you, because anybody may have written this URL"
        raise NotNamedError(what, needs, "none", f"--source {source}")
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        got = error.strerror or error
        raise EquicamError(f"source {str(source)[:80]!r}", "a readable path", got, "another") from error
    if is_folder:
        return _in_folder(path, split, group_by, tick)
    if is_file:
        return _in_file(path, split, group_by, tick)
    if has_magic(str(source)):
        return _matching(path, split)
    raise EquicamError(what, "an existing file or folder", "No such file", "its full path")


def _in_folder(root: AnyPath, split: str | None, group_by: str | None, tick: Tick) -> Items:
    """Items by the folder's image list, else as a saved data set, else every image with its subfolder as label."""
    if manifest := find_manifest(root):
        return read_manifest(manifest, split=split, group_by=group_by, tick=tick)
    if isinstance(root, Path) and (found := limited.call(_saved, root, split)) is not None:
        return found
    folders, what = subfolders(root), f"source {str(root)!r}"
    got = f"folders {quote_names(folders)}"
    if split is not None:
        if split not in folders:
            needs, fix = f"a folder of that name in {str(root)!r}", "one of these" if folders else "no split"
            raise EquicamError(f"split {split!r}", needs, got, fix)
        return _in_folder(root / split, None, group_by, tick)
    found = list_items(root)
    if not found:
        needs, fix = f"{_IMAGES} or a list (items.csv)", "a folder of images, or one folder per class"
        raise EquicamError(what, needs, "none", fix)
    labels = set(found.labels())
    if len(labels) > 1 and labels.issubset(SPLITS):  # else every image would be labelled by its split
        raise EquicamError(what, "a split", got, f'split="{min(map(str, labels))}"')
    return found


def _saved(root: Path, split: str | None) -> Items | None:
    """Items of a saved data set; None if it is none."""
    found = arrow_dataset(root, split)
    return None if found is None else Items.of(found)


def _in_file(path: AnyPath, split: str | None, group_by: str | None, tick: Tick) -> Items:
    suffix = path.suffix.lower()
    if suffix in (".csv", ".parquet"):
        return read_manifest(path, split=split, group_by=group_by, tick=tick)
    if not path.name.lower().endswith(SUFFIXES) and not (isinstance(path, Path) and is_dicom_file(path)):
        needs, got = f"{_IMAGES} or a list (.csv .parquet)", f"a file {suffix or 'without suffix'}"
        raise EquicamError(f"source {str(path)!r}", needs, got, "a folder, or a list of the images")
    _refuse_split(path, split)
    return Items.of([_make_item((path.name,), path)])


def _by_frame(items: Items, tick: Tick) -> Items:
    """One item for every frame of a DICOM file on a disk; a header that cannot be read is a reason when it is opened."""
    # by content only a single file, so that a million PNGs are not opened
    alone = len(items) == 1 and isinstance(path := items[0].path, Path) and is_dicom_file(path)
    dicom = {0} if alone else set(items.dicom_places())
    if not dicom:
        return items

    def frames() -> Iterator[Item]:
        for place, item in enumerate(items):
            yield from _frames(item) if place in dicom else [item]
            tick(1)

    found = Items.of(frames())
    if len(found) > len(items) and pc.count_distinct(found.ids).as_py() < len(found):
        got, fix = "an item with the id of a frame", "another id in the list"
        raise EquicamError("the frames of DICOM files", "ids of their own", got, fix)
    return found


def _frames(item: Item) -> list[Item]:
    count = 1
    if item.index is None and isinstance(item.path, Path):
        with contextlib.suppress(EquicamError):
            count = limited.call(count_frames, item.path)
    return [replace(item, id=f"{item.id}#frame={i}", index=i) for i in range(count)] if count > 1 else [item]


def _matching(pattern: AnyPath, split: str | None) -> Items:
    """Images whose path matches the pattern; ids start at its first wildcard."""
    _refuse_split(pattern, split)
    parts = tuple(str(pattern).split("/")) if isinstance(pattern, RemotePath) else pattern.parts
    fixed = next(i for i, part in enumerate(parts) if has_magic(part))
    root = RemotePath("/".join(parts[:fixed])) if isinstance(pattern, RemotePath) else Path(*parts[:fixed])
    wanted = parts[fixed:]
    depth = None if "**" in wanted else len(wanted)
    skipped: list[PathParts] = []
    images = _list_images(root, skipped, depth=depth) if root.is_dir() else []
    found = Items.of(_make_item(names, path) for names, path in images if _matches(names, wanted))
    if not found:
        got, fix = f"none of {len(images)} in {str(root)!r}", "a folder, or ** for folders at any depth"
        raise EquicamError(f"pattern {str(pattern)!r}", f"{_IMAGES} that match it", got, fix)
    report_skipped(pattern, [p for p in skipped if not _is_hidden(p) and _matches(p, wanted)])
    return found.in_scan_order()


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Component by component, as a shell matches; ** matches any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _refuse_split(source: AnyPath, split: str | None) -> None:
    if split is not None:
        raise EquicamError(f"split {split!r}", "a list or a folder", repr(str(source)), "no split")


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".gif", ".jp2", ".ppm", ".pgm")
RASTER_SUFFIXES = (".svs", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide")
"""Of slides, which are read in windows."""
SUFFIXES = (*IMAGE_SUFFIXES, *dicom.SUFFIXES, *RASTER_SUFFIXES)

_IMAGES = f"images ({' '.join(SUFFIXES)})"

PathParts = tuple[str, ...]
"""A path relative to a folder, split at the separators."""
_log = logging.getLogger(__name__)


def list_items(root: AnyPath) -> Items:
    """Every image below a folder, sorted by id; its first subfolder is its label."""
    skipped: list[PathParts] = []
    if isinstance(root, RemotePath):
        images = _list_images(root, skipped)
        found = Items.of(_make_item(p, path, _escape(p[0]) if p[1:] else None) for p, path in images)
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
        paths = (root / (prefix + name) if i in odd else None for i, name in enumerate(names))
        columns["path"] = pa.array([path and encode_path(path)["path"] for path in paths], pa.binary())
    return pa.table(columns)


def _list_images(
    root: AnyPath, skipped: list[PathParts], *, depth: int | None = None
) -> list[tuple[PathParts, AnyPath]]:
    """Image files below a folder, by relative path; entries that are hidden or no images are added to `skipped`."""
    if isinstance(root, Path):
        return [(parts, root.joinpath(*parts)) for parts in list_files(root, SUFFIXES, skipped, depth=depth)]
    found: list[tuple[PathParts, AnyPath]] = []
    for parts, path in root.list_files():
        if depth is None or len(parts) <= depth:
            if parts[-1].lower().endswith(SUFFIXES) and not _is_hidden(parts):
                found.append((parts, path))
            else:
                skipped.append(parts)
    return found


def _is_hidden(parts: PathParts) -> bool:
    """Whether a file or one of its folders has a name that starts with a dot."""
    return any(part.startswith(".") for part in parts)


def report_skipped(source: AnyPath, skipped: Sequence[PathParts]) -> None:
    """Tell the user which entries of a source are no images of it, in one line."""
    if skipped:
        names = quote_names(_escape("/".join(parts)) for parts in skipped)
        left_out = "source %r: %d left out, hidden or not an image by the name: %s"
        _log.warning(left_out, str(source), len(skipped), names)


def item_at(root: Path, parts: PathParts, *, label: int | str | None = None) -> Item:
    """The item of an image at a path below a folder."""
    return _make_item(parts, root.joinpath(*parts), label)


def _make_item(parts: PathParts, path: AnyPath, label: int | str | None = None) -> Item:
    """The item of an image file; different relative paths give different ids."""
    return Item(_escape("/".join(parts)), path, label)


def list_files(
    root: Path, suffixes: Collection[str], skipped: list[PathParts] | None = None, *, depth: int | None = None
) -> list[PathParts]:
    """Files with these suffixes, sorted; hidden ones are excluded, and no folder is entered twice.

    Real folders come before symbolic links to folders, and a link to a parent of `root` is not followed. All other
    entries are added to `skipped`. A pipe or device counts as a file: opening it fails with a reason.
    """
    found = _walk(root, tuple(suffixes), [] if skipped is None else skipped, depth)
    return sorted((*parts, name) for parts, names in found for name in names)


def _walk(
    root: Path, endings: tuple[str, ...], skipped: list[PathParts], depth: int | None = None
) -> Iterator[tuple[PathParts, list[str]]]:
    """The folders that hold such files, and the names of the files, at most `BATCH_ROWS` at a time."""
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


def read_lines(file: Path) -> list[str]:
    """The stripped lines of a text file; invalid UTF-8 is kept, because lines contain file names."""
    data, _ = read_file(file, what=f"file {str(file)!r}", limit=MAX_LIST_BYTES)
    text = data.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    return [line.strip() for line in text.rstrip().split("\n")]


def _escape(name: str) -> str:
    return valid_utf8(name.replace("\\", "\\\\"))  # escape backslashes too, so that ids stay unique


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with _readable(folder), os.scandir(folder) as entries:
        yield from entries


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; a link to nothing counts as a file, which is then reported missing."""
    with contextlib.suppress(OSError):
        return entry.is_dir()
    return False


def _identity(folder: Path) -> tuple[int, int]:
    with _readable(folder):
        stat = folder.stat()
    return stat.st_dev, stat.st_ino


@contextlib.contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what, got = f"folder {str(folder)!r}", error.strerror
        raise EquicamError(what, "to be readable", got, "its permissions") from error
