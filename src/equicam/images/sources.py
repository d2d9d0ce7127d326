"""Sources of images: a folder, a saved data set, an image list, a glob pattern or one file."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path

import pyarrow.compute as pc

from equicam.errors import EquicamError, NotNamedError
from equicam.images import limited
from equicam.images.arrow_datasets import arrow_dataset, refuse_in_memory
from equicam.images.dicom import frames as count_frames
from equicam.images.dicom import is_dicom_file
from equicam.images.folders import (
    SUFFIXES,
    PathParts,
    has_image_suffix,
    is_hidden,
    list_images,
    list_items,
    make_item,
    quote_names,
    report_skipped,
    subfolders,
)
from equicam.images.item_table import Items
from equicam.images.items import Item
from equicam.images.lists import find_manifest, read_manifest
from equicam.images.remote import AnyPath, RemotePath, as_path, may_open

Tick = Callable[[int], None]
SPLITS = ("train", "training", "val", "valid", "validation", "test", "testing")


def find_items(
    source: str | Path,
    *,
    split: str | None = None,
    group_by: str | None = None,
    from_user: bool = True,
    frames: bool = True,
) -> list[Item]:
    """`list_source`, as a list of objects."""
    return list(list_source(source, split=split, group_by=group_by, from_user=from_user, frames=frames))


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

    `group_by` names the column of an image list that holds the group of each image (its patient, slide or scene), if it is
    not `group`. Every frame of a DICOM file is an item, unless files are wanted as they are (`frames` False). `tick` counts what was listed. A URL that does not come from the user (`from_user`) but from a file is refused, unless its protocol is allowed.
    """
    refuse_in_memory(source, "source")
    if not isinstance(source, str | Path | RemotePath):
        raise EquicamError(
            "source", needs="a folder, a file, a glob pattern or a URL", got=f"an object of type {type(source).__name__}", fix='"folder/"'
        )  # fmt: skip
    found = _find(as_path(source), source, split, group_by, from_user, tick)
    if group_by is not None and "group" not in found.table.column_names:
        raise EquicamError(
            f"group_by {group_by!r}", needs="an image list (items.csv) with groups in that column", got="no group",
            fix="no group_by, or that column",
        )  # fmt: skip
    return _by_frame(found, tick) if frames else found


def _find(
    path: AnyPath, source: str | Path, split: str | None, group_by: str | None, from_user: bool, tick: Tick
) -> Items:
    if not from_user and isinstance(path, RemotePath) and not may_open(str(path), Path()):
        raise NotNamedError(
            f"source {str(source)!r}", needs="to be named by you, because anybody may have written this URL",
            got="none", fix=f"--source {source}",
        )  # fmt: skip
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise EquicamError(
            f"source {str(source)[:80]!r}",
            needs="a readable path",
            got=error.strerror or error,
            fix="another",
        ) from error
    if is_folder:
        return _in_folder(path, split, group_by, tick)
    if is_file:
        return _in_file(path, split, group_by, tick)
    if has_magic(str(source)):
        return _matching(path, split)
    raise EquicamError(
        f"source {str(source)!r}", needs="an existing file or folder", got="No such file", fix="its full path"
    )


def _in_folder(root: AnyPath, split: str | None, group_by: str | None, tick: Tick) -> Items:
    """Items by the folder's image list, else as a saved data set, else every image with its subfolder as label."""
    if manifest := find_manifest(root):
        return read_manifest(manifest, split=split, group_by=group_by, tick=tick)
    if isinstance(root, Path) and (found := limited.call(_saved, root, split)) is not None:
        return found
    folders = subfolders(root)
    if split is not None:
        if split not in folders:
            raise EquicamError(
                f"split {split!r}", needs=f"a folder of that name in {str(root)!r}",
                got=f"folders {quote_names(folders)}", fix="one of these" if folders else "no split",
            )  # fmt: skip
        return _in_folder(root / split, None, group_by, tick)
    found = list_items(root)
    if not found:
        raise EquicamError(
            f"source {str(root)!r}", needs=f"images ({' '.join(SUFFIXES)}) or a list (items.csv)",
            got="none", fix="a folder of images, or one folder per class",
        )  # fmt: skip
    labels = set(found.labels())
    if len(labels) > 1 and labels.issubset(SPLITS):  # else every image would be labelled by its split
        raise EquicamError(
            f"source {str(root)!r}", needs="a split", got=f"folders {quote_names(folders)}",
            fix=f"split={min(map(str, labels))!r}",
        )  # fmt: skip
    return found


def _saved(root: Path, split: str | None) -> Items | None:
    """Items of a saved data set; None if it is none."""
    found = arrow_dataset(root, split)
    return None if found is None else Items.of(found)


def _in_file(path: AnyPath, split: str | None, group_by: str | None, tick: Tick) -> Items:
    suffix = path.suffix.lower()
    if suffix in (".csv", ".parquet"):
        return read_manifest(path, split=split, group_by=group_by, tick=tick)
    if not has_image_suffix(path.name) and not (isinstance(path, Path) and is_dicom_file(path)):
        raise EquicamError(
            f"source {str(path)!r}", needs=f"an image ({' '.join(SUFFIXES)}) or a list (.csv .parquet)",
            got=f"a file {suffix or 'without suffix'}", fix="a folder, or a list of the images",
        )  # fmt: skip
    _refuse_split(path, split)
    return Items.of([make_item((path.name,), path)])


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
        raise EquicamError(
            "the frames of DICOM files", needs="ids of their own", got="an item with the id of a frame",
            fix="another id in the list",
        )  # fmt: skip
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
    images = list_images(root, skipped, depth=depth) if root.is_dir() else []
    found = Items.of(make_item(names, path) for names, path in images if _matches(names, wanted))
    if not found:
        raise EquicamError(
            f"pattern {str(pattern)!r}", needs=f"images ({' '.join(SUFFIXES)}) that match it",
            got=f"none of {len(images)} in {str(root)!r}", fix="a folder, or ** for folders at any depth",
        )  # fmt: skip
    report_skipped(pattern, [p for p in skipped if not is_hidden(p) and _matches(p, wanted)])
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
        raise EquicamError(
            f"split {split!r}", needs="a list or a folder", got=repr(str(source)), fix="no split"
        )
