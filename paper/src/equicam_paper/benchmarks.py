"""Published data sets, recognised by their files: (root, split) → items, or None for any other folder."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from equicam.errors import EquicamError
from equicam.images import limited, sources
from equicam.images.files import as_path
from equicam.images.items import Box, Item, parse_box, quote_names, valid_utf8
from equicam.images.lists import find_manifest
from equicam.images.sources import list_files, list_items, read_lines, subfolders
from equicam_paper import hdf5
from equicam_paper.imagenet import imagenet

CUB = ("images.txt", "image_class_labels.txt", "bounding_boxes.txt", "train_test_split.txt")
PATCHES = re.compile(r"camelyonpatch_level_2_split_(train|valid|test)_x\.h5")
CENTRE: Box = (32.0, 32.0, 64.0, 64.0)
"""The centre third of a 96×96 patch decides its label: a negative patch may contain tumour outside it."""
FIX = "a fresh copy of it"


def cub(root: Path, split: str | None) -> list[Item] | None:
    """CUB-200-2011 with its boxes; the split is "test" by default, or "train" or "all"; classes start at 0."""
    base = _cub_folder(root)
    if base is None:
        return None
    if split not in (None, "train", "test", "all"):
        raise _no_split("CUB-200-2011", split, ["train", "test", "all"])
    wanted = {"train": ("1",), "all": ("0", "1")}.get(split or "test", ("0",))
    files = [base / name for name in CUB]
    paths, labels, boxes, trained = map(_table, files)
    items = []
    for number, path in paths.items():
        if _cell(trained, number, files[3]) in wanted:
            label = _class(_cell(labels, number, files[1]), number, files[1])
            box = _corners(_cell(boxes, number, files[2]), what=f"image {number} in {str(files[2])!r}")
            items.append(Item(id=valid_utf8(path), path=base / "images" / path, label=label, boxes=(box,)))
    if not items or (count := len({item.id for item in items})) < len(items):
        got = f"{len(items)} lines of {count if items else 0} images in this split"
        raise EquicamError(f"file {str(files[0])!r}", "one image per line, each once", got, FIX)
    return items


def is_cub(root: Path) -> bool:
    """Whether a folder holds CUB-200-2011."""
    return _cub_folder(root) is not None


def _cub_folder(root: Path) -> Path | None:
    folders = (root, root / "CUB_200_2011")
    return next((p for p in folders if all((p / name).is_file() for name in CUB[:2])), None)


def _table(file: Path) -> dict[str, str]:
    """The rest of each line by the image number it starts with."""
    found = {}
    for line, text in enumerate(read_lines(file), 1):
        number, _, rest = text.partition(" ")
        if not rest or number in found or not re.fullmatch("[0-9]{1,9}", number):
            what = f"file {str(file)!r}, line {line},"
            raise EquicamError(what, "a new image number and a value", repr(text)[:80], FIX)
        found[number] = rest
    return found


def _cell(table: dict[str, str], number: str, file: Path) -> str:
    if number not in table:
        raise EquicamError(f"file {str(file)!r}", f"a line for image {number}", "none", FIX)
    return table[number]


def _class(text: str, number: str, file: Path) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) < 1:
        raise EquicamError(f"image {number} in {str(file)!r}", "a class from 1 on", repr(text)[:80], FIX)
    return int(text) - 1


def _corners(text: str, *, what: str) -> Box:
    """A box from x, y, width and height."""
    try:
        x, y, width, height = (float(v) for v in text.split())
    except ValueError as error:
        raise EquicamError(what, "x y width height", repr(text)[:80], FIX) from error
    return parse_box((x, y, x + width, y + height), what=what)


def patch_camelyon(root: Path, split: str | None) -> list[Item] | None:
    """PatchCamelyon's HDF5 files; the split is "test" by default, or "train" or "valid"."""
    for base in (folder for folder in (root, root / "pcam") if folder.is_dir()):
        names = [name for (name,) in list_files(base, (".h5",), depth=1)]
        files = {match[1]: base / name for name in names if (match := PATCHES.fullmatch(name))}
        if files:
            wanted = split or "test"
            if wanted not in files:
                raise _no_split("PatchCamelyon", wanted, list(files))
            return _patches(files[wanted], wanted)
    return None


def patch_camelyon_file(path: Path, split: str | None) -> list[Item] | None:
    """The items of one PatchCamelyon file of images, whose name contains the split."""
    match = PATCHES.fullmatch(path.name)
    if match is None:
        return None
    if split not in (None, match[1]):
        raise _no_split(repr(path.name), split, [match[1]])
    return _patches(path, match[1])


def _patches(images: Path, split: str) -> list[Item]:
    count = hdf5.count_images(images)
    labels = hdf5.read_labels(images.with_name(f"{images.stem[:-1]}y.h5"), count=count)
    regions = [CENTRE if label == 1 else None for label in labels]
    return [
        Item(f"{split}-{i:06}", images, label, region=region, index=i, read=hdf5.read_image)
        for i, (label, region) in enumerate(zip(labels, regions, strict=True))
    ]


def resisc45(root: Path, split: str | None) -> list[Item] | None:
    """NWPU-RESISC45 as unpacked: one folder with one subfolder per class, without splits."""
    if split is not None or subfolders(root) != ["NWPU-RESISC45"]:
        return None
    return list(list_items(root / "NWPU-RESISC45")) or None


def _no_split(what: str, split: str | None, splits: list[str]) -> EquicamError:
    return EquicamError(what, "an existing split", repr(split), quote_names(splits))


Layout = Callable[[Path, str | None], list[Item] | None]
LAYOUTS: tuple[Layout, ...] = (patch_camelyon, cub, imagenet, resisc45)
"""In the order they are tried; the first that returns items wins."""


def find_items(source: str | Path, *, split: str | None = None, group_by: str | None = None) -> list[Item]:
    """The items of a published data set, and of any other source those that equicam finds, by its options."""
    path = as_path(source)
    known = limited.call(_published, path, split) if group_by is None and isinstance(path, Path) else None
    return sources.find_items(source, split=split, group_by=group_by) if known is None else known


def _published(path: Path, split: str | None) -> list[Item] | None:
    """By the layout of a folder without an image list, else of its subfolder for the split."""
    if path.suffix == ".h5":
        return patch_camelyon_file(path, split)
    if not os.path.isdir(path) or find_manifest(path):  # noqa: PTH112  # Path.is_dir raises for names that are too long
        return None
    for layout in LAYOUTS:
        if (items := layout(path, split)) is not None:
            return items
    return None if split is None else _published(path / split, None)
