"""The ILSVRC-2012 validation set: in synset folders, or flat with its devkit; boxes where annotations exist."""

import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from xml.parsers import expat

import numpy as np

from equicam.errors import EquicamError
from equicam.images.files import MAX_LIST_BYTES, read_file
from equicam.images.items import Box, Item, parse_box, valid_utf8
from equicam.images.sources import (
    SUFFIXES,
    PathParts,
    item_at,
    list_files,
    read_lines,
    report_skipped,
    subfolders,
)

IMAGES = ("", "val", "ILSVRC2012_img_val")
DEVKIT = ("", "data", "ILSVRC2012_devkit_t12/data")
ANNOTATIONS = ("bbox", "Annotations", "val_annotations")
NOT_IMAGES = {*ANNOTATIONS, "data", "ILSVRC2012_devkit_t12"}
TRUTH, META = "ILSVRC2012_validation_ground_truth.txt", "meta.mat"
SYNSET, NUMBERED = re.compile("n[0-9]{8}"), re.compile(r"ILSVRC2012_val_([0-9]{8})\.[A-Za-z]+")
MAX_ANNOTATION_BYTES = 2**20  # the published ones have about a thousand

Annotations = Mapping[tuple[str, str], Path]
"""XML files by synset folder ("" for none) and stem."""


def imagenet(root: Path, split: str | None) -> list[Item] | None:
    """Validation images, labelled 0 … 999; by synset name if there are not exactly a thousand synset folders."""
    if split not in (None, "val"):
        return None
    for base in (root / name for name in IMAGES if (root / name).is_dir()):
        if synsets := _synsets(base):
            return _in_synsets(base, synsets, _annotations(root))
    truth = _in_devkit(root, TRUTH)
    return None if truth is None else _by_number(root, truth)


def _synsets(folder: Path) -> list[str]:
    """Synset folders, if the folder contains nothing else but devkit and annotations."""
    names = [name for name in subfolders(folder) if name not in NOT_IMAGES]
    return names if all(SYNSET.fullmatch(name) for name in names) else []


def _in_synsets(base: Path, synsets: list[str], annotations: Annotations) -> list[Item] | None:
    numbers = {name: i for i, name in enumerate(synsets)} if len(synsets) == 1000 else {}
    skipped: list[PathParts] = []
    items = [
        _with_boxes(item_at(base, (name, *parts), label=numbers.get(name, name)), annotations, synset=name)
        for name in synsets
        for parts in list_files(base / name, SUFFIXES, skipped)
    ]
    report_skipped(base, skipped)
    return sorted(items, key=lambda item: item.id) or None


def _by_number(root: Path, truth: Path) -> list[Item]:
    """Line i of the ground truth is the class of image i."""
    meta = _in_devkit(root, META)
    if meta is None:
        fix = "unpacking ILSVRC2012_devkit_t12.tar.gz there"
        raise EquicamError(f"ImageNet in {str(root)!r}", f"{META} next to {TRUTH}", "none", fix)
    synsets, classes, annotations = _synsets_by_class(meta), read_lines(truth), _annotations(root)
    labels = {synset: i for i, synset in enumerate(sorted(synsets.values()))}
    items = []
    for base, name, number in _numbered(root):
        class_id = classes[number - 1] if 1 <= number <= len(classes) else "no such line"
        if (synset := synsets.get(class_id)) is None:
            needs = f"a class of {META} in line {number} of {TRUTH}"
            raise EquicamError(f"image {name!r}", needs, repr(class_id)[:80], "both from the same devkit")
        items.append(_with_boxes(item_at(base, (name,), label=labels[synset]), annotations, synset=synset))
    return items


def _numbered(root: Path) -> list[tuple[Path, str, int]]:
    """Validation images and their numbers, from the first folder that contains some."""
    for base in (root / name for name in IMAGES if (root / name).is_dir()):
        skipped: list[PathParts] = []
        names = [name for (name,) in list_files(base, SUFFIXES, skipped, depth=1)]
        if found := [(base, name, int(match[1])) for name in names if (match := NUMBERED.fullmatch(name))]:
            report_skipped(base, [*skipped, *((name,) for name in names if not NUMBERED.fullmatch(name))])
            return found
    fix = "unpacking ILSVRC2012_img_val.tar into val/"
    raise EquicamError(f"ImageNet in {str(root)!r}", "images ILSVRC2012_val_00000001.JPEG …", "none", fix)


def _synsets_by_class(meta: Path) -> dict[str, str]:
    """WNID by ILSVRC2012_ID as text, as in the ground truth; ids above 1000 are groups of classes."""
    data, _ = read_file(meta, what=f"file {str(meta)!r}", limit=MAX_LIST_BYTES)
    try:
        import scipy.io

        rows = np.atleast_1d(scipy.io.loadmat(io.BytesIO(data), squeeze_me=True)["synsets"])
        pairs = [(int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in rows]
        return {str(number): valid_utf8(synset) for number, synset in pairs if 1 <= number <= 1000}
    except Exception as error:  # whatever is wrong with it; SciPy may also end this process
        what, needs = f"file {str(meta)!r}", "synsets with ILSVRC2012_ID and WNID"
        got = valid_utf8(repr(error)[:200])
        raise EquicamError(what, needs, got, "a fresh copy of the devkit") from error


def _in_devkit(root: Path, name: str) -> Path | None:
    return next((root / folder / name for folder in DEVKIT if (root / folder / name).is_file()), None)


def _annotations(root: Path) -> Annotations:
    found: dict[tuple[str, str], Path] = {}
    for folder in (root / name for name in ANNOTATIONS if (root / name).is_dir()):
        for parts in list_files(folder, (".xml",)):
            synset = next((part for part in parts[-2:-1] if SYNSET.fullmatch(part)), "")
            found.setdefault((synset, Path(parts[-1]).stem), folder.joinpath(*parts))
    return found


def _with_boxes(item: Item, annotations: Annotations, *, synset: str) -> Item:
    file = annotations.get((synset, item.path.stem)) or annotations.get(("", item.path.stem))
    return item if file is None else replace(item, boxes=read_boxes(file))


def read_boxes(file: Path) -> tuple[Box, ...]:
    """The boxes of the objects in a PASCAL-style XML file; a file that declares a DTD or entities is refused."""
    what = f"annotation {str(file)!r}"
    path: list[str] = []
    found: list[dict[str, str]] = []

    def start(name: str, _: object) -> None:
        path.append(name)
        if len(path) == 3 and path[1:] == ["object", "bndbox"]:
            found.append({})

    def text(data: str) -> None:
        if len(path) == 4 and path[1:3] == ["object", "bndbox"]:
            found[-1][path[3]] = found[-1].get(path[3], "") + data

    def refuse(*_: object) -> None:
        raise EquicamError(what, "XML without a DTD", "a declaration of one", "removing it")

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = refuse
    parser.StartElementHandler, parser.EndElementHandler = start, lambda _: path.pop()
    parser.CharacterDataHandler, parser.buffer_text = text, True
    try:
        parser.Parse(read_file(file, what=what, limit=MAX_ANNOTATION_BYTES)[0], True)
    except EquicamError:
        raise
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise EquicamError(what, "well-formed XML", error, "a fresh copy of it") from error
    corners = ("xmin", "ymin", "xmax", "ymax")
    return tuple(parse_box((box.get(one, "") for one in corners), what=what) for box in found)
