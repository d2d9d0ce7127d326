"""Open a raster by its content, once in each process."""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from equicam.errors import EquicamError
from equicam.images.files import open_regular
from equicam.images.remote import AnyPath, RemotePath
from equicam.images.tiff import Page, is_tiff, read_pages
from equicam.rasters.raster import Raster, refuse_crs_files

MAX_OPEN = 4
GEO_BOX, MAX_GEO_BOX_BYTES = bytes.fromhex("b14bf8bd083d4b43a5ae8cd7d5a6ce03"), 2**16
"""The UUID of GeoJP2."""
EXTRAS = {"wsi": "OpenSlide or tifffile", "geo": "rasterio"}
T = TypeVar("T")

_opened: OrderedDict[tuple[object, ...], Raster] = OrderedDict()
_lock = threading.Lock()


def open_raster(path: AnyPath) -> Raster:
    """The raster in a file; the last few stay open. An EquicamError says why there is none.

    A map at a URL is read by ranges of bytes; a slide must be on a disk.
    """
    what = f"raster {str(path)!r}"
    if isinstance(path, RemotePath):
        return _open_remote(path, what)
    with suppress(OSError), _lock:
        if (key := _key(path, path.stat())) in _opened:
            _opened.move_to_end(key)
            return _opened[key]
    with open_regular(path, what) as file:
        head, key = file.read(4096), _key(path, os.fstat(file.fileno()))
    raster = _open(path, head, what)
    _keep(key, raster)
    return raster


def _open_remote(path: RemotePath, what: str) -> Raster:
    key = (os.getpid(), path.url)
    with _lock:
        if key in _opened:
            return _opened[key]
    head = path.read_start(4096)
    if not (is_tiff(head) or _is_jpeg2000(head)):
        raise EquicamError(
            what, needs="a GeoTIFF or JPEG 2000, where it is at a URL", got="bytes of another format", fix="a copy on a disk"
        )  # fmt: skip
    raster = _with("geo", lambda: _geo(path, jpeg2000=_is_jpeg2000(head)), what)
    _keep(key, raster)
    return raster


def _keep(key: tuple[object, ...], raster: Raster) -> None:
    with _lock:
        _opened[key] = raster
        while len(_opened) > MAX_OPEN:
            _opened.popitem(last=False)  # closed when nobody reads it any more


def _is_jpeg2000(head: bytes) -> bool:
    return head[4:8] == b"jP  " or head[:4] == b"\xff\x4f\xff\x51"


def _key(path: Path, stat: os.stat_result) -> tuple[object, ...]:
    """What is open: this file as it is now, in this process, because a forked one must open its own."""
    return os.getpid(), str(path), stat.st_mtime_ns, stat.st_size


def _open(path: Path, head: bytes, what: str) -> Raster:
    """One reader for each content; a file is never given to another because the right one is not installed."""
    if _is_jpeg2000(head):
        refuse_crs_files(_geo_boxes(path), what)
        return _with("geo", lambda: _geo(path, jpeg2000=True), what)
    if not is_tiff(head) or head[128:132] == b"DICM":
        vendor = _with("wsi", lambda: _vendor(path, head), what)
        if vendor is None:
            raise EquicamError(
                what, needs="a slide (svs, ndpi, mrxs, scn, bif, DICOM, OME-TIFF), a GeoTIFF or a JPEG 2000",
                got="a DICOM file that is no slide" if head[128:132] == b"DICM" else "bytes of no format we know",
                fix="no --tile, if it is an image",
            )  # fmt: skip
        return _with("wsi", lambda: _slide(path), what)
    pages = _opening(lambda: _pages(path), what)
    for page in pages:
        refuse_crs_files(page.crs_text, what)
    first = pages[0]
    if first.is_ome:
        return _with("wsi", lambda: _ome(path, pages), what)
    images = [page for page in pages if page.is_tiled and not page.is_copy]
    if not first.georeferenced and (len(images) > 1 or "Aperio" in first.description):
        # slides have several images of their own; OpenSlide knows which vendor's
        if _with("wsi", lambda: _vendor(path, head), what) not in (None, "generic-tiff"):
            return _with("wsi", lambda: _slide(path), what)
    elif not first.georeferenced and first.is_tiled and first.is_rgb8 and _slide_vendor(path, head):
        return _with("wsi", lambda: _slide(path), what)
    return _with("geo", lambda: _geo(path, jpeg2000=False), what)


def _pages(path: Path) -> list[Page]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return read_pages(data)


def _geo_boxes(path: Path) -> str:
    """What the boxes of a JPEG 2000 say of coordinates: each holds the tags of a GeoTIFF."""
    found, at = b"", 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        while (at := data.find(GEO_BOX, at)) >= 0:
            length = int.from_bytes(
                data[max(0, at - 8) : max(0, at - 4)]
            )  # before it, the box's length and type
            found += data[at : at + min(length, MAX_GEO_BOX_BYTES)]
            at += len(GEO_BOX)
    return found.decode("latin-1")


def _slide_vendor(path: Path, head: bytes) -> str | None:
    """OpenSlide's name of the format of a plain tiled RGB TIFF; None without OpenSlide, where rasterio reads it as well."""
    try:
        return _vendor(path, head)
    except ImportError:
        return None


def _with(extra: str, call: Callable[[], T], what: str) -> T:
    """The result of a reader; an EquicamError that names its extra where it is not installed."""
    try:
        return _opening(call, what)
    except ImportError as error:
        raise EquicamError(
            what, needs=f"its reader, {EXTRAS[extra]}", got="not installed", fix=f"pip install 'equicam[{extra}]'"
        ) from error  # fmt: skip


def _opening(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except (EquicamError, ImportError):
        raise
    except Exception as error:  # libraries raise exceptions of every kind on damaged files
        raise EquicamError(
            what, needs="a file that can be read", got=str(error)[:200] or type(error).__name__, fix="a fresh copy of it"
        ) from error  # fmt: skip


def _vendor(path: Path, head: bytes) -> str | None:
    import openslide

    from equicam.rasters.slides import refuse_companions

    refuse_companions(path, head)
    found: str | None = openslide.OpenSlide.detect_format(str(path))
    return found


def _slide(path: Path) -> Raster:
    from equicam.rasters.slides import OpenSlideRaster

    return OpenSlideRaster(path)


def _ome(path: Path, pages: list[Page]) -> Raster:
    from equicam.rasters.slides import OmeTiffRaster

    return OmeTiffRaster(path, pages)


def _geo(path: AnyPath, *, jpeg2000: bool) -> Raster:
    from equicam.rasters.maps import JPEG2000, TIFF, GeoRaster

    return GeoRaster(path, JPEG2000 if jpeg2000 else TIFF)
