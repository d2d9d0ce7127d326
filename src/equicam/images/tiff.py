"""The tags of a TIFF, read before it is decoded: files whose values 8-bit RGB cannot hold are refused.

A decoder would give the first band of many, the first page of several, or 16 bits scaled to near black, and say nothing.
"""

import mmap
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod

from equicam.errors import EquicamError

MAX_PAGES = 10_000
MAX_VALUES = 4096
"""Values read of one tag; more than any file has bands."""
MAX_BANDS = 4
GEO_FIX = "equicam audit … --tile 224 --bands {}, with pip install 'equicam[geo]'"
SLIDE_FIX = "equicam audit … --tile 224, with pip install 'equicam[wsi]'"
COPY_FIX = "a copy as 8-bit RGB"

_READ = {
    254: "subfile", 255: "old subfile", 256: "width", 257: "height", 258: "bits", 270: "description", 277: "bands",
    284: "planes", 322: "tile width", 330: "sub-pages", 338: "extra", 339: "format", 34735: "geo keys", 34737: "geo text",
    42113: "nodata", 65420: "hamamatsu",
}  # fmt: skip
"""The tags that are read; "extra" says which bands are transparency, for a hint alone."""
_TYPES = {1: "B", 2: "s", 3: "H", 4: "I", 6: "b", 7: "s", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
"""The types of values in which these tags are written, as `struct` names them."""
_FORMATS = {2: "signed integers", 3: "floating-point numbers", 5: "complex integers", 6: "complex numbers"}


@dataclass(frozen=True)
class Page:
    """What one directory of a TIFF says about its pixels."""

    width: int
    height: int
    bands: int
    bits: int  # of the widest band
    sample_format: int  # 1: unsigned integers
    alpha: Collection[int]  # numbers, from 1, of the bands that are transparency
    is_copy: bool  # at reduced resolution, or a mask
    is_tiled: bool
    has_sub_pages: bool
    georeferenced: bool
    has_nodata: bool  # a value that GDAL takes for no data
    bands_apart: bool  # each band lies in a plane of its own
    description: str
    crs_text: str  # what it says of its coordinates in words

    @property
    def is_ome(self) -> bool:
        """Whether OME's XML describes it."""
        return "<OME" in self.description

    @property
    def is_rgb8(self) -> bool:
        """Whether 8-bit RGB holds everything in it."""
        plain = not (self.has_nodata or self.bands_apart)
        return plain and (self.bands, self.bits, self.sample_format) == (3, 8, 1)


def is_tiff(data: bytes) -> bool:
    """Whether these are the bytes of a TIFF or BigTIFF."""
    return data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def pick_bands(count: int, alpha: Collection[int]) -> str:
    """Three bands of a file to try, by number: 4,3,2 are red, green and blue of many satellites; none is transparency."""
    # a file says how many bands it has: of billions the first few do
    colours = list(islice((band for band in range(1, min(count, MAX_VALUES) + 1) if band not in alpha), 8))
    first = colours[:3] if len(colours) > 2 else (colours or [1])[:1] * 3
    return ",".join(map(str, [4, 3, 2] if {2, 3, 4} <= {*colours} else first))


def refuse_unfaithful(data: bytes, what: str) -> None:
    """Raise an EquicamError for a TIFF that is damaged, or that is more than one image of 8 bits and at most 4 bands."""
    try:
        pages = read_pages(data)
        first = pages[0]
        if first.width < 1 or first.height < 1:
            raise ValueError(f"{first.width:,} × {first.height:,} pixels")
    except (ValueError, struct.error) as error:
        got = "a tag beyond its end" if isinstance(error, struct.error) else error
        raise EquicamError(what, "a whole TIFF", got, "a fresh copy of it") from error
    full = [page for page in pages if not page.is_copy]
    slide = sum(page.is_tiled for page in full) > 1 or "Aperio" in first.description
    found = f"{first.bands} {'bands' if first.bands > 1 else 'band'} of {first.bits} bits"
    if first.sample_format in _FORMATS:
        found += f" ({_FORMATS[first.sample_format]})"
    fix = COPY_FIX
    if first.georeferenced and first.sample_format < 5:  # numbers that are not complex
        scale = 1 if first.sample_format == 3 else 10000 if first.bits > 8 else None
        in_file = f" and scale = {scale} in the recipe file" if scale else ""
        fix = GEO_FIX.format(pick_bands(first.bands, first.alpha) + in_file)
    if first.is_ome or slide:
        fix = SLIDE_FIX
    if first.bands > MAX_BANDS or first.bits > 8 or first.sample_format in _FORMATS:
        got = found
    elif slide and len(pages) > 1:
        got = f"a slide of {len(pages)} pages"
    elif not all(page.is_copy for page in pages[1:]):
        got = f"{len(full)} pages, each an image"
    elif first.is_copy and first.has_sub_pages:
        got, fix = "a reduced copy of an image on a sub-page", COPY_FIX
    elif first.is_ome and (planes := _ome_planes(first.description)) > first.bands:
        got = f"one of {planes} planes"
    else:
        return
    raise EquicamError(what, f"one image of 8 bits and at most {MAX_BANDS} bands", got, fix)


def read_pages(data: bytes | mmap.mmap) -> list[Page]:
    """Every directory of the main chain; a ValueError or struct.error says what is damaged."""
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"+\0", b"\0+")
    if big and struct.unpack_from(f"{order}HH", data, 4) != (8, 0):
        raise ValueError("a header of another kind")
    (offset,) = struct.unpack_from(f"{order}{'Q' if big else 'I'}", data, 8 if big else 4)
    pages: list[Page] = []
    read: set[int] = set()
    while offset:
        if offset in read:
            raise ValueError("pages in a loop")
        if len(pages) == MAX_PAGES:
            raise ValueError(f"more than {MAX_PAGES:,} pages")
        read.add(offset)
        page, offset = _page(data, offset, order, big)
        pages.append(page)
    if not pages:
        raise ValueError("no page")
    return pages


def _page(data: bytes | mmap.mmap, offset: int, order: str, big: bool) -> tuple[Page, int]:
    """One directory, and the offset of the next; 0 after the last."""
    count_type, entry_bytes, offset_type = ("Q", 20, "Q") if big else ("H", 12, "I")
    _refuse_beyond(data, offset, struct.calcsize(count_type))
    (count,) = struct.unpack_from(f"{order}{count_type}", data, offset)
    start = offset + struct.calcsize(count_type)
    end = start + count * entry_bytes
    _refuse_beyond(data, end, struct.calcsize(offset_type))
    values: dict[str, tuple[int, ...] | bytes] = {}
    for at in range(start, end, entry_bytes):
        tag, kind, number = struct.unpack_from(f"{order}HH{offset_type}", data, at)
        if (name := _READ.get(tag)) and number:
            try:
                values[name] = _values(data, at + entry_bytes, kind, number, order, offset_type)
            except (ValueError, struct.error):
                if name != "extra":
                    raise
    (following,) = struct.unpack_from(f"{order}{offset_type}", data, end)

    def numbers(name: str, default: int) -> Sequence[int]:
        found = values.get(name, (default,))
        if isinstance(found, bytes):
            raise ValueError(f"text in its {name}")
        return found

    def text(name: str) -> str:
        found = values.get(name, b"")
        return found.decode("latin-1") if isinstance(found, bytes) else ""

    bands, extra = numbers("bands", 1)[0], values.get("extra", ())
    first_extra = bands - len(extra) + 1
    page = Page(
        width=numbers("width", 0)[0],
        height=numbers("height", 0)[0],
        bands=bands,
        bits=max(numbers("bits", 1)),
        sample_format=max(numbers("format", 1), key=lambda one: one in _FORMATS),
        alpha={band for band, kind in enumerate(extra[:8], first_extra) if kind in (1, 2)},
        is_copy=bool(numbers("subfile", 0)[0] & 0b101) or numbers("old subfile", 1)[0] == 2,
        is_tiled="tile width" in values or "hamamatsu" in values,
        has_sub_pages="sub-pages" in values,
        georeferenced="geo keys" in values,
        has_nodata="nodata" in values,
        bands_apart=numbers("planes", 1)[0] == 2,
        description=text("description"),
        crs_text=text("geo text"),
    )
    return page, int(following)


def _values(
    data: bytes | mmap.mmap, entry_end: int, kind: int, number: int, order: str, offset_type: str
) -> tuple[int, ...] | bytes:
    """The values of a tag: in its entry if they fit, else where the entry points."""
    if kind not in _TYPES:
        raise ValueError(f"a tag of type {kind}")
    letter, room = _TYPES[kind], struct.calcsize(offset_type)
    size = number * struct.calcsize(letter)
    at = entry_end - room
    if size > room:
        (at,) = struct.unpack_from(f"{order}{offset_type}", data, at)
        _refuse_beyond(data, at, size)
    if letter == "s":
        return data[at : at + size]
    return struct.unpack_from(f"{order}{min(number, MAX_VALUES)}{letter}", data, at)


def _ome_planes(description: str) -> int:
    """Channels × depths × times of the first image that OME-XML describes; 1 where it has none."""
    found = re.search(r"<(?:\w+:)?Pixels\b[^>]{0,4000}", description)
    sizes = re.findall(r'\bSize[CZT]="(\d{1,9})"', found[0]) if found else ()
    return prod(max(1, int(size)) for size in sizes)


def _refuse_beyond(data: bytes | mmap.mmap, offset: int, size: int) -> None:
    if offset + size > len(data):
        raise ValueError(f"an offset of {offset:,} in {len(data):,} bytes")
