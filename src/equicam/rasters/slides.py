"""Slides: OpenSlide for the scanners' formats, tifffile for OME-TIFF."""

import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images.files import read_file
from equicam.images.tiff import Page, is_tiff
from equicam.rasters.raster import Bands, Pixels, Raster, RasterInfo, bad_raster, square_side

CACHE_BYTES = 64 << 20
"""Of decoded tiles, in each process."""
MAX_OME_XML, MAX_INDEX_BYTES = 10_000_000, 2**20
RGB = ("red", "green", "blue")


class OpenSlideRaster(Raster):
    """A slide that OpenSlide reads. Where the scanner has looked nowhere it is not valid, and white."""

    def __init__(self, path: Path) -> None:
        import openslide

        self._slide = openslide.OpenSlide(str(path))
        self._slide.set_cache(openslide.OpenSlideCache(CACHE_BYTES))
        properties = self._slide.properties

        def number(name: str) -> float | None:
            return _float(properties.get(f"openslide.{name}"))

        for level in range(self._slide.level_count):
            wide, high = (number(f"level[{level}].tile-{side}") for side in ("width", "height"))
            self._refuse_large_tile(path, int(wide or 0), int(high or 0))
        is_dicom = properties.get("openslide.vendor") == "dicom"
        width, height = self._slide.dimensions
        self.info = RasterInfo(
            "slide", width, height, RGB, "uint8",
            f"openslide {openslide.__library_version__}, openslide-python {openslide.__version__}",
            downsamples=tuple(self._slide.level_downsamples),
            mpp=_mpp(number("mpp-x"), number("mpp-y"), path),
            origin=(number("bounds-x") or 0.0, number("bounds-y") or 0.0),
            series=properties.get("openslide.quickhash-1") if is_dicom else None,
        )  # fmt: skip

    def level_size(self, level: int) -> tuple[int, int]:
        """Width and height of a level."""
        width, height = self._slide.level_dimensions[level]
        return width, height

    def read_level(self, level: int, x: int, y: int, width: int, height: int, bands: Bands) -> Pixels:
        """Whole pixels of a level: OpenSlide takes places in level 0."""
        wide, high = self.level_size(level)
        place = (round(x * self.info.width / wide), round(y * self.info.height / high)) if level else (x, y)
        rgba = self._slide.read_region(place, level, (width, height))
        rgb, valid = np.asarray(rgba.convert("RGB")), np.ones((height, width), bool)
        if rgba.getchannel("A").getextrema() != (255, 255):
            valid = np.asarray(rgba.getchannel("A")) > 127
            rgb = np.where(valid[..., None], rgb, 255).astype(np.uint8)  # over white, as the glass is
        values = rgb.transpose(2, 0, 1)
        return Pixels(values if bands == (0, 1, 2) else values[list(bands)], valid)

    def close(self) -> None:
        """Let go of the file."""
        self._slide.close()


class OmeTiffRaster(Raster):
    """An OME-TIFF: planes of one time and depth, and its pyramid; tiles are decoded as they are needed, and kept."""

    def __init__(self, path: Path, pages: Sequence[Page]) -> None:
        import tifffile

        _refuse_to_print()
        self._file = tifffile.TiffFile(path, _multifile=False, is_mmstack=False, is_ndtiff=False)
        try:
            _refuse_other_files(self._file.ome_metadata or "", path, len(pages), pages[0].bands)
            self._levels, self.info = self._describe(path)
        except BaseException:
            self._file.close()
            raise
        self._lock = threading.Lock()
        self._tiles: OrderedDict[tuple[int, int, int], NDArray[Any]] = OrderedDict()
        self._bytes = 0

    def _describe(self, path: Path) -> tuple[list[list[Any]], RasterInfo]:
        series = self._file.series[0]
        axes, shape = series.axes, series.shape
        sizes = dict(zip(axes, shape, strict=True))
        others = {axis: n for axis, n in sizes.items() if axis not in "YXCS" and n > 1}
        if others or "Y" not in sizes or "X" not in sizes:
            needs, fix = "one plane, or one for each channel", "one time and depth of it"
            raise bad_raster(path, needs, f"{axes} {shape}", fix)
        channels, samples = sizes.get("C", 1), sizes.get("S", 1)
        levels = [list(level.pages) for level in series.levels]
        levels[1:] = sorted(levels[1:], key=lambda pages: -int(pages[0].keyframe.imagewidth))
        if any(len(pages) != channels for pages in levels) or (samples > 1 and channels > 1):
            raise bad_raster(path, "a page for each channel", f"{axes} {shape}", "another copy")
        self._refuse_codec(levels, path)
        for planes in levels:
            self._refuse_large_tile(path, *_tile_size(planes[0].keyframe))
        named, mpp = _read_ome(self._file.ome_metadata or "", path)
        count = channels * samples
        bands = RGB if samples == 3 else tuple(named[:count]) if len(named) >= count else ()
        wide, high = sizes["X"], sizes["Y"]
        downs = [wide / pages[0].keyframe.imagewidth for pages in levels]
        return levels, RasterInfo(
            "slide", wide, high, bands or tuple(str(i + 1) for i in range(count)), str(series.dtype),
            f"tifffile {metadata.version('tifffile')}", downsamples=tuple(downs), mpp=mpp,
        )  # fmt: skip

    @staticmethod
    def _refuse_codec(levels: list[list[Any]], path: Path) -> None:
        """Refuse a compression that tifffile cannot decode here, once and not window by window."""
        import tifffile

        for compression in {pages[0].keyframe.compression for pages in levels}:
            try:
                tifffile.TIFF.DECOMPRESSORS[compression]
            except KeyError as error:
                needs, got = "a compression that can be decoded", getattr(compression, "name", compression)
                fix = "pip install imagecodecs, or a copy with deflate"
                raise bad_raster(path, needs, got, fix) from error

    def level_size(self, level: int) -> tuple[int, int]:
        """Width and height of a level."""
        page = self._levels[level][0].keyframe
        return page.imagewidth, page.imagelength

    def read_level(self, level: int, x: int, y: int, width: int, height: int, bands: Bands) -> Pixels:
        """Whole pixels of a level, put together from its tiles; one that was never written is not valid."""
        samples = self._levels[level][0].keyframe.samplesperpixel
        values = np.zeros((len(bands), height, width), self.info.dtype)
        valid = np.ones((height, width), bool)
        page = self._levels[level][0].keyframe  # what all pages of a level share
        if page.planarconfig == 2 and samples > 1:
            raise EquicamError("an OME-TIFF", "samples that lie together", "separate planes", "another copy")
        wide, high = _tile_size(page)
        across = -(-page.imagewidth // wide)
        rows, columns = range(y // high, -(-(y + height) // high)), range(x // wide, -(-(x + width) // wide))
        for (plane, band), row, column in product(zip(values, bands, strict=True), rows, columns):
            channel, sample = divmod(band, samples)
            tile = self._tile(level, channel, row * across + column)
            top, left = row * high - y, column * wide - x
            here = slice(max(0, top), top + high), slice(max(0, left), left + wide)
            if tile is None:
                valid[here] = False
            else:
                plane[here] = tile[max(0, -top) : height - top, max(0, -left) : width - left, sample]
        return Pixels(values, valid)

    def _tile(self, level: int, channel: int, index: int) -> NDArray[Any] | None:
        """One decoded tile [height, width, samples]; None if it was never written."""
        key = (level, channel, index)
        with self._lock:
            if key in self._tiles:
                self._tiles.move_to_end(key)
                return self._tiles[key]
            page = self._levels[level][channel]
            start, count = page.dataoffsets[index], page.databytecounts[index]
            if not count:
                return None
            self._file.filehandle.seek(start)
            data = self._file.filehandle.read(count)
            if len(data) < count:
                needs = f"{count:,} bytes of a tile"
                raise EquicamError("an OME-TIFF", needs, f"{len(data):,}", "a fresh copy of it")
            decoded, _, _ = page.keyframe.decode(data, index, jpegtables=page.keyframe.jpegtables)
            if decoded is None:
                return None
            tile: NDArray[Any] = decoded[0]
            self._tiles[key] = tile
            self._bytes += tile.nbytes
            while self._bytes > CACHE_BYTES and len(self._tiles) > 1:
                _, oldest = self._tiles.popitem(last=False)
                self._bytes -= oldest.nbytes
            return tile

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _tile_size(page: Any) -> tuple[int, int]:
    """Width and height of a page's tiles or strips."""
    return (page.tilewidth, page.tilelength) if page.is_tiled else (page.imagewidth, page.rowsperstrip)


def _refuse_to_print() -> None:
    """Tifffile logs what it finds odd in a file, which names of a hostile file could fill the terminal with."""
    log = logging.getLogger("tifffile")
    if not log.handlers:
        log.addHandler(logging.NullHandler())
        log.propagate = False


def _ome_root(text: str) -> ElementTree.Element | None:
    """The description as XML; None where it is none, or may grow."""
    if len(text) > MAX_OME_XML or "<!DOCTYPE" in text or "<!ENTITY" in text:
        return None
    try:
        return ElementTree.fromstring(text)  # noqa: S314  # without entities, which could grow
    except ElementTree.ParseError:
        return None


def _refuse_other_files(text: str, path: Path, pages: int, samples: int) -> None:
    """Refuse planes that lie in other files, which tifffile would open, and more planes than there are pages."""
    what = f"raster {str(path)!r}"
    root = _ome_root(text)
    if root is None:
        raise EquicamError(what, "a description in OME-XML", "none that can be read", "writing it again")
    own = root.get("UUID")
    elsewhere = root.find("{*}BinaryOnly")
    for named in root.iterfind(".//{*}UUID"):
        name = named.get("FileName", "")
        if own is None and name.lower() == path.name.lower():
            own = named.text
        if named.text != own:
            elsewhere = named
            break
    if elsewhere is not None:
        name = elsewhere.get("FileName") or elsewhere.get("MetadataFile") or "another file"
        fix = "one file with all of them (bfconvert), or this file under its first name"
        raise EquicamError(what, "all its planes in it", f"some in {name[:120]!r}", fix)
    for pixels in root.iterfind(".//{*}Pixels"):
        planes = math.prod(_count(pixels, f"Size{axis}", what) for axis in "CZT")
        places = [_count(data, name, what) for data in pixels.iterfind("{*}TiffData") for name in data.attrib]
        if max(planes / samples, *places, 1) > pages:
            got = f"{planes:,} planes on {pages:,} pages"
            raise EquicamError(what, "a page for each plane", got, "a whole copy of it")


def _count(element: ElementTree.Element, name: str, what: str) -> int:
    text = element.get(name, "1")
    if not re.fullmatch("[0-9]{1,9}", text):
        raise EquicamError(what, f"a number in {name}", repr(text[:40]), "writing it again")
    return int(text)


def _read_ome(text: str, path: Path) -> tuple[list[str], float | None]:
    """Names of the channels of the first image, and micrometres a pixel; a file may hold anything there."""
    root = _ome_root(text)
    pixels = None if root is None else root.find(".//{*}Image/{*}Pixels")
    if pixels is None:
        return [], None
    names = [channel.get("Name") or "" for channel in pixels.iterfind("{*}Channel")]
    named = [name[:80] for name in names] if all(names) else []
    units = {pixels.get(f"PhysicalSize{axis}Unit", "µm") for axis in "XY"}
    if units - {"µm", "um", "μm"}:
        return named, None
    return named, _mpp(_float(pixels.get("PhysicalSizeX")), _float(pixels.get("PhysicalSizeY")), path)


def refuse_companions(path: Path, head: bytes) -> None:
    """Refuse a slide unless what lies next to it under its name are regular files there: OpenSlide opens what it finds.

    Of DICOM it looks at every file of the folder; an index (VMS, VMU) names its files. A pipe would be waited for, and a
    link or a path could lead anywhere.
    """
    what, dicom = f"raster {str(path)!r}", head[128:132] == b"DICM"
    for entry in path.parent.iterdir():
        if entry.name != path.name and (dicom or entry.stem == path.stem or entry.name.startswith(path.name)):
            _refuse_odd(what, path, entry)
            if not dicom and entry.name == path.stem and entry.is_dir():  # MRXS
                for inner in entry.iterdir():
                    _refuse_odd(what, path, inner)
    if path.suffix.lower() == ".mrxs" and (index := path.with_suffix("") / "Slidedat.ini").exists():
        text = read_file(index, what=what, limit=MAX_INDEX_BYTES)[0]
        _refuse_named(what, index, re.findall(rb"(?m)^\s*(?:INDEXFILE|FILE_\d+)\s*=[ \t]*(.*?)\s*$", text))
    elif not dicom and not is_tiff(head) and path.stat().st_size <= MAX_INDEX_BYTES:
        text = read_file(path, what=what, limit=MAX_INDEX_BYTES)[0]
        if b"irtual Microscope Specimen]" in text:
            _refuse_named(what, path, re.findall(rb"(?m)^[^=\n]*(?:File|Image)[^=\n]*=[ \t]*(.*?)\s*$", text))


def _refuse_named(what: str, index: Path, names: Sequence[bytes]) -> None:
    for raw in names:
        name = raw.decode("utf-8", "surrogateescape")
        if re.search(r"[/\\\0]", name) or name in (".", ".."):
            raise _bad_companion(what, name, "a path")
        if name:
            _refuse_odd(what, index, index.parent / name)


def _refuse_odd(what: str, slide: Path, file: Path) -> None:
    """A link is one to another name in the same folder, or of a slide that is itself a link, in the folder where that is."""
    homes = (slide.parent.resolve(), slide.resolve().parent)
    if file.is_symlink() and not any(file.resolve().is_relative_to(home) for home in homes):
        raise _bad_companion(what, file.name, "a link to another place")
    if not file.exists() or file.is_dir():
        return
    if not file.is_file():
        raise _bad_companion(what, file.name, "a pipe or device")
    if file.name.startswith(slide.name) and file.name.endswith(("-wal", "-journal", "-shm")):
        raise _bad_companion(what, file.name, "changes to it that were never written into it")


def _bad_companion(what: str, name: str, got: str) -> EquicamError:
    fix = "a folder with this slide alone, copied whole"
    return EquicamError(what, "regular files next to it", f"{got}: {name[:120]!r}", fix)


def _float(text: str | None) -> float | None:
    with suppress(ValueError):
        if math.isfinite(value := float(text or "")):
            return value
    return None


def _mpp(across: float | None, down: float | None, path: Path) -> float | None:
    """Micrometres a pixel, if the file says it; a slide whose pixels are not square is refused."""
    if not across or not down or across <= 0 or down <= 0:
        return None
    side = square_side(across, down)
    if side is None:
        raise bad_raster(path, "square pixels", f"{across:g} × {down:g} µm", "a resampled copy")
    return side
