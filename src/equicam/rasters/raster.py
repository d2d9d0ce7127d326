"""The interface of rasters: what they are, and boxes of them read at any resolution, exactly; opened once in each process.

Coordinates are pixels of level 0, the finest, as floats: (0, 0) is the outer corner of the first pixel. A box is read from
the next finer level and resampled once by the exact ratio, so that a window is where its coordinates say it is.
"""

import math
import mmap
import os
import re
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from equicam.errors import EquicamError, needing, refusing
from equicam.images.files import AnyPath, RemotePath, open_regular
from equicam.images.tiff import Page, is_tiff, read_pages

MAX_READ_PIXELS = 64_000_000
"""Of one level, for one window: a raster without coarser levels is not read whole to shrink it. Of one tile, which is decoded whole."""
MAX_ROWS_PIXELS = 4_000_000_000  # decoded for a thumbnail where there is no coarse level
MAX_CRS = 100_000
_CRS = re.compile(r"[A-Za-z]{2,12}:[0-9]{1,9}$|\s*[A-Za-z_]{4,20}\s*[\[(]")
_CRS_FILES = re.compile(r"(?i)PARAMETERFILE|EXTENSION|grids|grid(shift)?_?file|\.gsb|\.gtx|\+init|://|/vsi")
THUMBNAIL_PX = 1024
BLOCK_PX = 256

Number = int | float
Bands = tuple[int, ...]
"""Positions of bands, from 0."""
Area = tuple[Number, Number, Number, Number]
"""Left, top, right and bottom, in pixels of level 0."""


@dataclass(frozen=True)
class RasterInfo:
    """What a raster says of itself."""

    kind: str  # slide or map
    width: int  # of level 0
    height: int
    bands: tuple[str, ...]  # names, or numbers from 1 where they have none
    dtype: str
    reader: str  # the library that reads it, and its version
    downsamples: tuple[Number, ...] = (1.0,)  # of its levels
    mpp: Number | None = None  # micrometres a pixel of slides, units of the coordinates a pixel of maps
    alpha: tuple[int, ...] = ()  # numbers, from 1, of the bands that are transparency
    crs: str | None = None  # of maps, as WKT or an authority's code
    transform: tuple[Number, ...] | None = None  # a … f: x = a·column + b·row + c, y = d·column + e·row + f
    origin: tuple[Number, Number] = (0.0, 0.0)  # where QuPath's coordinates begin, in ours
    series: str | None = None  # of a slide in several DICOM files, the same for each of them
    notes: tuple[str, ...] = ()  # what of the file is not applied, for people


@dataclass(frozen=True)
class Pixels:
    """Values of a box, band by band, and where they are data."""

    values: NDArray[Any]  # [bands, height, width]
    valid: NDArray[np.bool_]  # [height, width]


class Raster(ABC):
    """An open raster."""

    info: RasterInfo

    @abstractmethod
    def read_level(self, level: int, x: int, y: int, width: int, height: int, bands: Bands) -> Pixels:
        """Whole pixels of a level, which lie inside it."""

    @abstractmethod
    def level_size(self, level: int) -> tuple[int, int]:
        """Width and height of a level."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    def _rows_decoded(self, _level: int) -> int:
        """Rows that are decoded where one is read."""
        return 512

    @staticmethod
    def _refuse_large_tile(path: AnyPath, width: int, height: int) -> None:
        """Raise an EquicamError for a tile or strip that would take gigabytes to decode, whatever part of it is wanted."""
        if width * height > MAX_READ_PIXELS:
            needs, got = f"tiles of at most {MAX_READ_PIXELS:,} pixels", f"{width:,} × {height:,}"
            raise bad_raster(path, needs, got, "a tiled copy (gdal_translate -co TILED=YES)")

    def band_indices(self, names: tuple[str, ...]) -> Bands:
        """Positions of bands given by name or by number from 1."""
        return _band_indices(self.info.bands, names)

    def read(self, box: Area, size: tuple[int, int], bands: Bands) -> Pixels:
        """A box inside the raster as an image of this size (width, height).

        The next finer level is resampled by the exact ratio, antialiased where it shrinks. A box on whole pixels that keeps
        its size comes back as stored.
        """
        x0, y0, x1, y1 = box
        ratio = min((x1 - x0) / size[0], (y1 - y0) / size[1])
        level = bisect_right(self.info.downsamples, ratio * (1 + 1e-9)) - 1 if ratio >= 1 else 0
        wide, high = self.level_size(level) if level else (self.info.width, self.info.height)
        across, down = self.info.width / wide, self.info.height / high
        left, top, right, bottom = edges = x0 / across, y0 / down, x1 / across, y1 / down
        first_x, first_y, last_x, last_y = map(round, edges)
        on_pixels = max(abs(edge - round(edge)) for edge in edges) < 1e-6
        if on_pixels and (last_x - first_x, last_y - first_y) == size:
            return self._checked(level, first_x, first_y, *size, bands)
        reach = 2 * max(1.0, (right - left) / size[0], (bottom - top) / size[1])  # of the filter
        first_x, first_y = max(0, math.floor(left - reach)), max(0, math.floor(top - reach))
        width = min(wide, math.ceil(right + reach)) - first_x
        height = min(high, math.ceil(bottom + reach)) - first_y
        found = self._checked(level, first_x, first_y, width, height, bands)
        start = max(0.0, left - first_x), max(0.0, top - first_y)
        return resample(found, (*start, min(width, right - first_x), min(height, bottom - first_y)), size)

    def _checked(self, level: int, x: int, y: int, width: int, height: int, bands: Bands) -> Pixels:
        if width * height > MAX_READ_PIXELS:
            needs, got = f"at most {MAX_READ_PIXELS:,} pixels of the file", f"{width:,} × {height:,}"
            fix = "a raster with coarser levels (a pyramid), or a smaller --mpp"
            raise EquicamError("a window", needs, got, fix)
        with refusing("a window", "a part of the file that can be read"):
            return self.read_level(level, x, y, width, height, bands)

    def thumbnail(self, bands: Bands, side: int = THUMBNAIL_PX) -> "_Thumbnail":
        """The whole raster in a small image; cheap, not exact, and with holes where the file cannot be read."""
        info = self.info
        shrink = max(1.0, max(info.width, info.height) / side)
        size = (max(1, round(info.width / shrink)), max(1, round(info.height / shrink)))
        level = max((i for i, down in enumerate(info.downsamples) if down <= shrink), default=0)
        wide, high = self.level_size(level)
        if wide * high > MAX_READ_PIXELS // 2:  # there is no coarse level: some pixels of some rows
            fewer = max(4, -(-size[1] * wide * self._rows_decoded(level) // MAX_ROWS_PIXELS))
            size = (max(1, size[0] // fewer), max(1, size[1] // fewer))
            places = [(0, int((i + 0.5) * high / size[1]), wide, 1, i) for i in range(size[1])]
            whole = self._read_parts(level, places, (wide, size[1]), bands)
            columns = [int((i + 0.5) * wide / size[0]) for i in range(size[0])]
            pixels = Pixels(whole.pixels.values[..., columns], whole.pixels.valid[:, columns])
            return _Thumbnail(pixels, info.width / size[0], whole.unread[:, columns])
        try:
            found = self.read_level(level, 0, 0, wide, high, bands)
            unread = np.zeros((high, wide), bool)
        except Exception:  # noqa: BLE001  # some of it is damaged: the rest is read block by block
            places = [
                (x, y, min(BLOCK_PX, wide - x), min(BLOCK_PX, high - y), y)
                for y in range(0, high, BLOCK_PX)
                for x in range(0, wide, BLOCK_PX)
            ]
            parts = self._read_parts(level, places, (wide, high), bands)
            found, unread = parts.pixels, parts.unread
        small = resample(found, (0, 0, wide, high), size)
        hole = _resize(unread.astype(np.float32), (0, 0, wide, high), size) > 0
        return _Thumbnail(small, info.width / size[0], hole)

    def value_range(self, bands: Bands) -> tuple[tuple[float, float], ...]:
        """What is black and white in images of it: 0 and 255 of 8 bits, else the 2nd and 98th percentile of all of it."""
        if self.info.dtype == "uint8":
            return ((0.0, 255.0),) * len(bands)
        if bands not in self._ranges:
            self._ranges[bands] = tuple(self._percentiles(bands))
        return self._ranges[bands]

    @cached_property
    def _ranges(self) -> dict[Bands, tuple[tuple[float, float], ...]]:
        """Ranges by bands; they end with the raster, so that nothing keeps its file open."""
        return {}

    def _percentiles(self, bands: Bands) -> Iterator[tuple[float, float]]:
        found = self.thumbnail(bands, 512).pixels
        for band in found.values:
            known = band[found.valid]
            low, high = np.percentile(known, [2, 98]) if known.size else (0.0, 1.0)
            yield float(low), float(high if high > low else low + 1)

    def _read_parts(
        self, level: int, places: Sequence[tuple[int, ...]], size: tuple[int, int], bands: Bands
    ) -> "_Thumbnail":
        """Parts of a level (x, y, width, height, and the row where it goes) put together; what cannot be read is marked."""
        values = np.zeros((len(bands), *size[::-1]), self.info.dtype)
        valid, unread = np.zeros(size[::-1], bool), np.ones(size[::-1], bool)
        for x, y, width, height, row in places:
            with suppress(Exception):
                part = self.read_level(level, x, y, width, height, bands)
                here = (slice(row, row + height), slice(x, x + width))
                values[:, *here], valid[here], unread[here] = part.values, part.valid, False
        return _Thumbnail(Pixels(values, valid), 1.0, unread)


@dataclass(frozen=True)
class _Thumbnail:
    """A small image of a whole raster."""

    pixels: Pixels
    shrink: Number  # pixels of level 0 for one of it
    unread: NDArray[np.bool_]  # where the file cannot be read


def bad_raster(path: object, needs: str, got: object, fix: str) -> EquicamError:
    """Why the raster in a file cannot be read."""
    return EquicamError(f"raster {str(path)!r}", needs, got, fix)


def square_side(across: float, down: float) -> float | None:
    """The side of pixels that are square to 2 %, else None."""
    return (across + down) / 2 if abs(across - down) <= 0.02 * max(across, down) else None


def plain_crs(crs: str, what: str) -> str:
    """A coordinate system as a code or as WKT; one that names files or addresses is refused, because GDAL would open them."""
    _refuse_crs_files(crs, what, odd=len(crs) > MAX_CRS or not _CRS.match(crs))
    return crs


def _refuse_crs_files(text: str, what: str, *, odd: bool = False) -> None:
    """Refuse what a file says of its coordinates if that names files: PROJ opens grids even where nothing is transformed."""
    if odd or _CRS_FILES.search(text):
        needs = "a coordinate system by its code, or as WKT without grid files"
        fix = "assigning one by its EPSG code (gdal_translate -a_srs EPSG:32618)"
        raise EquicamError(what, needs, repr(text[:80]), fix)


@lru_cache(maxsize=64)
def _band_indices(bands: tuple[str, ...], names: tuple[str, ...]) -> Bands:
    known = {name.casefold(): i for i, name in enumerate(bands)}
    found: list[int] = []
    for name in names:
        by_number = int(name) - 1 if name.isdecimal() and len(name) < 6 else -1
        place = known.get(name.casefold(), by_number)
        if not 0 <= place < len(bands):
            needs = f"one of {', '.join(bands[:20])}, or a number from 1"
            fix = "--bands with names or numbers of the file"
            raise EquicamError(f"band {name!r}", needs, "no such band", fix)
        found.append(place)
    return tuple(found)


def resample(pixels: Pixels, box: Area, size: tuple[int, int]) -> Pixels:
    """A box of pixels at another size: triangle filter, widened where it shrinks. Invalid pixels have no weight."""
    values, valid = pixels.values, pixels.valid
    if valid.all():
        return Pixels(np.stack([_resize(band, box, size) for band in values]), np.ones(size[::-1], bool))
    share = _resize(valid.astype(np.float32), box, size)
    weight = np.maximum(share, 1e-6)
    bands = [_resize(np.where(valid, band, 0).astype(np.float32), box, size) / weight for band in values]
    found = np.stack(bands)
    if values.dtype == np.uint8:
        found = np.clip(np.rint(found), 0, 255).astype(np.uint8)
    return Pixels(found, share > 0.5)


def _resize(band: NDArray[Any], box: Area, size: tuple[int, int]) -> NDArray[Any]:
    """One band: 8-bit values stay 8-bit, all others become float32."""
    image = Image.fromarray(band if band.dtype == np.uint8 else band.astype(np.float32))
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR, box=box))


MAX_OPEN = 4
GEO_BOX, MAX_GEO_BOX_BYTES = bytes.fromhex("b14bf8bd083d4b43a5ae8cd7d5a6ce03"), 2**16
"""The UUID of GeoJP2."""

_opened: OrderedDict[tuple[object, ...], Raster] = OrderedDict()
_lock = threading.Lock()


def open_raster(path: AnyPath) -> Raster:
    """The raster in a file; the last few stay open. An EquicamError says why there is none.

    A map at a URL is read by ranges of bytes; a slide must be on a disk.
    """
    what = f"raster {str(path)!r}"
    with suppress(OSError), _lock:
        if (key := _key(path, None if isinstance(path, RemotePath) else path.stat())) in _opened:
            _opened.move_to_end(key)
            return _opened[key]
    if isinstance(path, RemotePath):
        head = path.read_bytes(4096)
    else:
        with open_regular(path, what) as file:
            head, key = file.read(4096), _key(path, os.fstat(file.fileno()))
    with refusing(what, "a file that can be read"):
        raster = _open(path, head, what)
    with _lock:
        _opened[key] = raster
        while len(_opened) > MAX_OPEN:
            _opened.popitem(last=False)  # closed when nobody reads it any more
    return raster


def _key(path: AnyPath, stat: os.stat_result | None) -> tuple[object, ...]:
    """What is open: this file as it is now, in this process, because a forked one must open its own."""
    return os.getpid(), str(path), stat and stat.st_mtime_ns, stat and stat.st_size


def _open(path: AnyPath, head: bytes, what: str) -> Raster:
    """One reader for each content; a file is never given to another because the right one is not installed."""
    jpeg2000 = head[4:8] == b"jP  " or head[:4] == b"\xff\x4f\xff\x51"
    if isinstance(path, RemotePath):
        if not (is_tiff(head) or jpeg2000):
            needs = "a GeoTIFF or JPEG 2000, where it is at a URL"
            raise EquicamError(what, needs, "bytes of another format", "a copy on a disk")
        return _open_map(path, what, jpeg2000=jpeg2000)
    if jpeg2000:
        _refuse_crs_files(_geo_boxes(path), what)
        return _open_map(path, what, jpeg2000=True)
    is_dicom = head[128:132] == b"DICM"
    if not is_tiff(head) or is_dicom:
        if _vendor(path, head, what) is None:
            needs = "a slide (svs, ndpi, mrxs, scn, bif, DICOM, OME-TIFF), a GeoTIFF or a JPEG 2000"
            got = "a DICOM file that is no slide" if is_dicom else "bytes of no format we know"
            raise EquicamError(what, needs, got, "no --tile, if it is an image")
        return _open_slide(path, what)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pages = read_pages(data)
    for page in pages:
        _refuse_crs_files(page.crs_text, what)
    first = pages[0]
    if first.is_ome:
        return _open_slide(path, what, pages)
    images = [page for page in pages if page.is_tiled and not page.is_copy]
    # slides have several images of their own, and OpenSlide knows which vendor's; without it, rasterio reads a plain tiled TIFF
    many = len(images) > 1 or "Aperio" in first.description
    plain = first.is_tiled and first.is_rgb8 and find_spec("openslide") is not None
    others = (None, "generic-tiff") if many else (None,)
    if not first.georeferenced and (many or plain) and _vendor(path, head, what) not in others:
        return _open_slide(path, what)
    return _open_map(path, what, jpeg2000=False)


def _geo_boxes(path: Path) -> str:
    """What the boxes of a JPEG 2000 say of coordinates: each holds the tags of a GeoTIFF."""
    found, at = b"", 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (at := data.find(GEO_BOX, at)) >= 0:
            # before it, the box's length and type
            length = int.from_bytes(data[max(0, at - 8) : max(0, at - 4)])
            found += data[at : at + min(length, MAX_GEO_BOX_BYTES)]
            at += len(GEO_BOX)
    return found.decode("latin-1")


def _vendor(path: Path, head: bytes, what: str) -> str | None:
    """OpenSlide's name of the format."""
    with needing("wsi", what):
        import openslide

        from equicam.rasters.slides import refuse_companions

    refuse_companions(path, head)
    found: str | None = openslide.OpenSlide.detect_format(str(path))
    return found


def _open_slide(path: Path, what: str, ome_pages: list[Page] | None = None) -> Raster:
    with needing("wsi", what):
        from equicam.rasters.slides import OmeTiffRaster, OpenSlideRaster

        return OpenSlideRaster(path) if ome_pages is None else OmeTiffRaster(path, ome_pages)


def _open_map(path: AnyPath, what: str, *, jpeg2000: bool) -> Raster:
    with needing("geo", what):
        from equicam.rasters.maps import JPEG2000, TIFF, GeoRaster

        return GeoRaster(path, JPEG2000 if jpeg2000 else TIFF)
