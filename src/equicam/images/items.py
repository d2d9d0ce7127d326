"""Items: the images of a source as plain data, samples balanced over classes, and digests."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from equicam.errors import EquicamError
from equicam.images import arrow_streams, dicom, files, limited
from equicam.images.files import AnyPath, FileStat, RemotePath, file_stat
from equicam.images.formats import UprightImage, decode, warn_if_as_stored
from equicam.rasters.options import RasterWindow, raster_id

if TYPE_CHECKING:
    from equicam.rasters.windows import WindowPixels

Label = int | str | None
Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels of the image as stored."""


@dataclass(frozen=True)
class Item:
    """One image of a source: its id, its file, and its annotations."""

    id: str
    path: AnyPath
    label: Label = None
    boxes: tuple[Box, ...] = ()
    region: Box | None = None  # the area of the image that decides the label, where a data set defines one
    index: int | None = None  # the position in a file that contains many images
    read: Callable[[Path, int], NDArray[np.uint8]] | None = None  # from a file of a format of one's own
    window: RasterWindow | None = None  # the part of a raster
    voi: tuple[float, float] | None = None  # the window (centre, width) of a DICOM image, instead of its own
    group: str | None = None  # patient, slide or scene: images of one group are not independent


def _scan_order(item: Item) -> tuple[str, float, float]:
    """A key that sorts items by id, and windows of a raster row by row."""
    if item.window is None:
        return item.id, 0.0, 0.0
    return raster_id(item.id), item.window.y, item.window.x


@dataclass(frozen=True)
class ItemContent:
    """What an item's file holds, as a process that opens files has it: digest and image come from the same bytes.

    The digest is that of the encoded image; if a file contains many images as pixels, that of the pixels.
    """

    item: Item
    data: bytes = field(repr=False)  # the file; of one with many images, one image, encoded or as pixels
    stat: FileStat
    size: tuple[int, int] | None = None  # width and height of the pixels
    pixels: "WindowPixels | None" = field(default=None, repr=False)  # of a window of a raster

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the data; of a window, of its decoded pixels."""
        return hashlib.sha256(self.data).hexdigest() if self.pixels is None else self.pixels.digest()

    def decode(self) -> UprightImage:
        """The image as upright 8-bit RGB; raises an EquicamError if it cannot be decoded."""
        if self.item.window is not None:
            from equicam.rasters.windows import show_window

            return UprightImage(show_window(self.item.path, self.item.window), 1)
        if self.size is None:
            return decode(self.data, f"image {str(self.item.path)!r}", self.item.voi)
        return UprightImage(Image.frombytes("RGB", self.size, self.data), 1)

    @property
    def content(self) -> "UprightImage | WindowPixels":
        """The image, or the pixels of a window."""
        return self.pixels or self.decode()

    def load(self) -> "LoadedItem":
        """The same, decoded."""
        return LoadedItem(self.sha256, self.content, self.stat)


@dataclass(frozen=True)
class LoadedItem:
    """An item's image and the digest of the very bytes it comes from, read in a process that opens files."""

    sha256: str
    content: "UprightImage | WindowPixels"
    stat: FileStat

    @property
    def upright(self) -> UprightImage:
        """The image, which a window of a raster is not."""
        if isinstance(self.content, UprightImage):
            return self.content
        raise EquicamError("an image", "to be a file", "a window of a raster", "equicam audit")


def load_item(item: Item) -> LoadedItem:
    """An item's image; raises an EquicamError if it cannot be read or decoded."""
    if not isinstance(item.path, RemotePath):
        return limited.call(_load, item)
    if item.window is not None:
        return limited.call_connected(_load, item)
    # the bytes are fetched here, so that the process that decodes them cannot connect
    return limited.call(read_item(item).load)


def open_item(item: Item) -> Image.Image:
    """The item's image as upright 8-bit RGB; raises an EquicamError if it cannot be read."""
    return warn_if_as_stored(load_item(item).upright, f"image {str(item.path)!r}")


def open_image(path: str | Path | RemotePath, voi: tuple[float, float] | None = None) -> Image.Image:
    """The first frame of an image file as upright 8-bit RGB; an EquicamError says why it cannot be had.

    `voi` is the window (centre and width) of a DICOM image, instead of its own.
    """
    return open_item(Item(str(path), Path(path) if isinstance(path, str) else path, voi=voi))


def item_digest(item: Item) -> str:
    """SHA-256 of an item's data; raises an EquicamError if it cannot be read."""
    if isinstance(item.path, RemotePath) and item.window is None:
        return read_item(item).sha256
    return (limited.call_connected if isinstance(item.path, RemotePath) else limited.call)(_digest, item)


def content_digest(item: Item) -> str | None:
    """`item_digest`; None if it cannot be read."""
    with suppress(OSError, ValueError):
        return item_digest(item)
    return None


def _load(item: Item) -> LoadedItem:
    return read_item(item).load()


def _digest(item: Item) -> str:
    return read_item(item).sha256


def read_item(item: Item) -> ItemContent:
    """Read an item's file here, once; raises an EquicamError if it cannot be read. Only a process that opens files calls it."""
    what = f"image {str(item.path)!r}"
    if item.window is not None:
        from equicam.rasters.windows import read_window

        return ItemContent(item, b"", file_stat(item.path), pixels=read_window(item.path, item.window))
    if item.index is None:
        return ItemContent(item, *files.read_file(item.path, what=what, limit=files.MAX_IMAGE_BYTES))
    if isinstance(item.path, RemotePath):
        raise EquicamError("a file of images", "to be on a disk", str(item.path), "a copy of it")
    if item.read is not None:
        pixels = item.read(item.path, item.index)
    elif dicom.is_dicom_file(item.path):
        pixels = dicom.read_frame(item.path, item.index, item.voi)
    else:
        data = arrow_streams.read_image_bytes(item.path, item.index)
        return ItemContent(item, data, file_stat(item.path))
    return ItemContent(item, pixels.tobytes(), file_stat(item.path), (pixels.shape[1], pixels.shape[0]))


def upright_box(orientation: int | None, size: tuple[int, int], box: Box) -> Box:
    """A box of the image as stored, in the upright image (of this size), to which the orientation was applied."""
    if orientation is None:
        return box
    width, height = size if orientation < 5 else size[::-1]  # as stored
    x0, y0, x1, y1 = box
    if orientation in (2, 3, 7, 8):
        x0, x1 = width - x1, width - x0
    if orientation in (3, 4, 6, 7):
        y0, y1 = height - y1, height - y0
    return (x0, y0, x1, y1) if orientation < 5 else (y0, x0, y1, x1)


def sample_by_class(items: Sequence[Item], n: int | None) -> list[Item]:
    """A sample spread over classes: the first image of every class, then the second of every class, … up to n.

    For n below the number C of classes: the first image of class round(k·C/n), k = 0 … n−1.
    Without labels every image counts as a class. Where images have groups, the images of a class come from one group after
    the other, so that a small sample has many of them. The order of `items` does not matter.
    """
    ordered = sorted(items, key=lambda i: (*_scan_order(i), str(i.path), -1 if i.index is None else i.index))
    labels, groups = [item.label for item in ordered], [item.group for item in ordered]
    return [ordered[place] for place in sample_places(labels, groups, n)]


def sample_places(labels: Sequence[Label], groups: Sequence[str | None], n: int | None) -> list[int]:
    """The places of a sample spread over classes, of items in order of id with these labels and groups."""
    if n is not None and n < 1:
        raise EquicamError("a sample", "at least 1 image", n, "n=None for all of them")
    places: Sequence[int] = range(len(labels))
    if any(group is not None for group in groups):
        # the first of every group, then the second of every group, …; within a class too
        counters = defaultdict[tuple[Label, str | None], "count[int]"](count)
        rounds = [next(counters[key]) for key in zip(labels, groups, strict=True)]
        places = sorted(places, key=rounds.__getitem__)
    by_class: dict[Label, list[int]] = {}
    for place in places:
        by_class.setdefault(labels[place], []).append(place)
    # numbered classes first, then named ones, then items without a label; of these alone, each is a class
    ordered = sorted(by_class, key=lambda label: (label is None, isinstance(label, str), label))
    classes = [by_class[label] for label in ordered] if {*by_class} != {None} else [[one] for one in places]
    if n is not None and n < len(classes):
        return [classes[round(k * len(classes) / n)][0] for k in range(n)]
    return [place for slot in zip_longest(*classes) for place in slot if place is not None][:n]


def digest_items(items: Sequence[Item]) -> str:
    """SHA-256 of ids, labels, boxes and regions in order, one JSON line per item; paths are not included."""
    total = hashlib.sha256()
    for item in items:
        boxes = [[*map(float, box)] for box in item.boxes]
        region = None if item.region is None else [*map(float, item.region)]
        total.update(json.dumps([item.id, item.label, boxes, region]).encode() + b"\n")
    return total.hexdigest()


def digest_files(items: Sequence[Item]) -> str:
    """SHA-256 of ids, their files' sizes and times, and windows: it changes when a file of the same name is replaced."""
    total = hashlib.sha256()
    for item, stat in zip(items, files.file_stats([item.path for item in items]), strict=True):
        version = "absent" if stat.bytes is None else f"{stat.bytes}\0{stat.mtime_ns}"
        version += "" if item.voi is None else f"\0{item.voi}"
        total.update(f"{item.id}\0{version}\0".encode())
    return total.hexdigest()


def digest_groups(items: Sequence[Item]) -> str:
    """SHA-256 of each item's group in order."""
    return hashlib.sha256(json.dumps([item.group for item in items]).encode()).hexdigest()


def parse_box(numbers: Iterable[str | float], *, what: str) -> Box:
    """A box from four numbers; `what` names their source in the error message."""
    given = list(numbers)
    with suppress(ValueError):
        x0, y0, x1, y1 = map(float, given)
        if x0 <= x1 and y0 <= y1 and all(map(math.isfinite, (x0, y0, x1, y1))):
            return x0, y0, x1, y1
    got = repr(" ".join(map(str, given)))[:80]
    raise EquicamError(what, "boxes of four numbers, x0 ≤ x1 and y0 ≤ y1", got, "'x0 y0 x1 y1' in pixels")


def valid_utf8(text: str) -> str:
    """The text as valid UTF-8: undecodable bytes of a file name become backslash escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def quote_names(names: Iterable[str], *, limit: int = 8) -> str:
    """The first few names, quoted, for an error message."""
    given = sorted(set(names))
    more = f" and {len(given) - limit} more" if len(given) > limit else ""
    return (", ".join(repr(name) for name in given[:limit]) or "none") + more
