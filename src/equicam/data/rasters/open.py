"""Open a raster by its content, once in each process."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from equicam.data.files import open_regular
from equicam.data.rasters.raster import Raster
from equicam.data.remote import AnyPath, RemotePath
from equicam.errors import EquicamError

MAX_OPEN = 4

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
    if not (_is_tiff(head) or _is_jpeg2000(head)):
        raise EquicamError(
            what, needs="a GeoTIFF or JPEG 2000, where it is at a URL", got="bytes of another format", fix="a copy on a disk"
        )  # fmt: skip
    missing: list[str] = []
    raster: Raster | None = _try(lambda: _geo(path, jpeg2000=_is_jpeg2000(head)), "geo", missing, what)
    if raster is None:
        raise EquicamError(what, needs="rasterio", got="not installed", fix="pip install 'equicam[geo]'")
    _keep(key, raster)
    return raster


def _keep(key: tuple[object, ...], raster: Raster) -> None:
    with _lock:
        _opened[key] = raster
        while len(_opened) > MAX_OPEN:
            _opened.popitem(last=False)  # closed when nobody reads it any more


def _is_tiff(head: bytes) -> bool:
    return head[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def _is_jpeg2000(head: bytes) -> bool:
    return head[4:8] == b"jP  " or head[:4] == b"\xff\x4f\xff\x51"


def _key(path: Path, stat: os.stat_result) -> tuple[object, ...]:
    """What is open: this file as it is now, in this process, because a forked one must open its own."""
    return os.getpid(), str(path), stat.st_mtime_ns, stat.st_size


def _open(path: Path, head: bytes, what: str) -> Raster:
    tiff, jp2 = _is_tiff(head), _is_jpeg2000(head)
    missing: list[str] = []
    vendor = _try(lambda: _vendor(path), "wsi", missing)
    if vendor and vendor != "generic-tiff":
        return _opening(lambda: _slide(path), what)
    if tiff and _try(lambda: _is_ome(path), "wsi", missing):
        return _opening(lambda: _ome(path), what)
    if tiff or jp2:
        geo: Raster | None = _try(lambda: _geo(path, jpeg2000=jp2), "geo", missing, what)
        if geo is not None and (geo.info.crs is not None or not vendor):
            return geo
        if vendor:
            if geo is not None:
                geo.close()
            return _opening(lambda: _slide(path), what)
    known = "a slide (svs, ndpi, mrxs, scn, bif, DICOM, OME-TIFF), a GeoTIFF or a JPEG 2000"
    if missing:
        extras = ",".join(dict.fromkeys(missing))
        raise EquicamError(
            what, needs="the readers of rasters", got="not installed", fix=f"pip install 'equicam[{extras}]'"
        )
    raise EquicamError(
        what, needs=known, got="bytes of no format we know", fix="no --tile, if it is an image"
    )


def _try(call: Callable[[], Any], extra: str, missing: list[str], what: str | None = None) -> Any:
    """The result of a reader; None where it is not installed."""
    try:
        return call() if what is None else _opening(call, what)
    except ImportError:
        missing.append(extra)
        return None


def _opening(call: Callable[[], Raster], what: str) -> Raster:
    try:
        return call()
    except (EquicamError, ImportError):
        raise
    except Exception as error:  # libraries raise exceptions of every kind on damaged files
        raise EquicamError(
            what, needs="a file that can be read", got=str(error)[:200] or type(error).__name__, fix="a fresh copy of it"
        ) from error  # fmt: skip


def _vendor(path: Path) -> str | None:
    import openslide

    found: str | None = openslide.OpenSlide.detect_format(str(path))
    return found


def _is_ome(path: Path) -> bool:
    import tifffile

    try:
        with tifffile.TiffFile(path) as file:
            return bool(file.is_ome)
    except Exception:  # noqa: BLE001  # damaged in any way: no reader of ours will take it for one
        return False


def _slide(path: Path) -> Raster:
    from equicam.data.rasters.slides import OpenSlideRaster

    return OpenSlideRaster(path)


def _ome(path: Path) -> Raster:
    from equicam.data.rasters.slides import OmeTiffRaster

    return OmeTiffRaster(path)


def _geo(path: AnyPath, *, jpeg2000: bool) -> Raster:
    from equicam.data.rasters.maps import JPEG2000, TIFF, GeoRaster

    return GeoRaster(path, JPEG2000 if jpeg2000 else TIFF)
