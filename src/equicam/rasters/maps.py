"""Georeferenced rasters: GeoTIFF and JPEG 2000 through rasterio, any bands and types, nodata and masks."""

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.files import AnyPath, RemotePath, read_file
from equicam.rasters.raster import Bands, Pixels, Raster, RasterInfo, bad_raster, plain_crs, square_side

TIFF, JPEG2000 = "GTiff", "JP2OpenJPEG"
"""The only drivers: others, such as VRT, name further files or addresses, and a file is not obeyed."""
CACHE_BYTES = 64 << 20
MAX_BANDS = 4096
MAX_KNOWN_BLOCKS = 100_000
MAX_SIDECAR_BYTES = 2**24
ALONE = {
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",  # no .ovr, .msk, world file or other companion is looked for
    "GDAL_PAM_ENABLED": "NO",  # nor .aux.xml
    "CPL_VSIL_CURL_ALLOWED_FILENAME": "none",  # GDAL's own network file systems open nothing
    "GDAL_DRIVER_PATH": "disable",  # no plug-ins
    "PROJ_NETWORK": "OFF",
}
"""What GDAL must not do. A GeoTIFF may name overviews at any path or address, and GDAL would open them as it reads."""
_CHANGING = ("NoDataValue", "NoDataValueAsInt64", "ColorInterp", "ColorTable", "MaskBand", "Scale", "Offset", "SRS", "GeoTransform", "GCPList")  # fmt: skip
"""Elements of .aux.xml that change which pixels are data, what they mean or where they lie; statistics do not."""


class GeoRaster(Raster):
    """A raster that rasterio reads."""

    def __init__(self, path: AnyPath, driver: str) -> None:
        import rasterio
        from rasterio.errors import NotGeoreferencedWarning

        self._is_tiff, self._lock = driver == TIFF, threading.Lock()
        self._written: dict[tuple[int, int, int, int], bool] = {}  # blocks by level, row, column and band
        notes = _notes_of_companions(path) if isinstance(path, Path) else ()
        _leave_alone()
        with rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES, GDAL_NUM_THREADS=1, **ALONE), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)  # such files are rasters too
            if isinstance(path, RemotePath):
                system, inner = path.file_system()
                open_ = partial(rasterio.open, inner, driver=driver, opener=system)
            else:  # from the root, because GDAL reads a name that begins with GTIFF_DIR: otherwise
                open_ = partial(rasterio.open, path.absolute(), driver=driver)
            self._levels: list[Any] = [open_()]
            try:
                self.info = self._describe(path, notes)
                masks = self._levels[0].mask_flag_enums
                self._always_valid = [[flag.name for flag in one] == ["all_valid"] for one in masks]
                self._all_valid = all(self._always_valid)
                self._overviews = self._open_overviews(open_)
                self._bands_apart = self._levels[0].profile.get("interleave") == "band"
                self._block_sizes = [one.block_shapes[0] for one in self._levels]
                for high, wide in self._block_sizes:
                    self._refuse_large_tile(path, wide, high)
            except BaseException:
                self.close()
                raise

    def _describe(self, path: AnyPath, notes: tuple[str, ...]) -> RasterInfo:
        import rasterio

        data = self._levels[0]
        if data.tags(ns="OVERVIEWS"):
            fix = "a copy with its own overviews (gdal_translate -of COG)"
            raise bad_raster(path, "all its pixels in it", "one that names overviews in another file", fix)
        types = set(data.dtypes)
        if len(types) != 1 or not 1 <= data.count <= MAX_BANDS or "complex" in min(types):
            got = f"{data.count} bands, {sorted(types)}"
            raise bad_raster(path, "bands of one real type", got, "a copy with one type")
        names = [text or "" for text in data.descriptions]
        unique = all(names) and len({n.casefold() for n in names}) == len(names)
        colours = tuple(one.name for one in data.colorinterp)
        bands = tuple(names) if unique else colours if set(colours[:3]) == {"red", "green", "blue"} else ()
        if len(set(bands)) != data.count:
            bands = tuple(str(i + 1) for i in range(data.count))
        transform = tuple(map(float, tuple(data.transform)[:6]))
        a, b, _, d, e, _ = transform
        side = square_side(float(np.hypot(a, d)), float(np.hypot(b, e))) or None
        return RasterInfo(
            "map", data.width, data.height, bands, types.pop(),
            f"rasterio {rasterio.__version__}, GDAL {rasterio.__gdal_version__}",
            mpp=None if data.crs is None else side,
            alpha=tuple(i for i, colour in enumerate(colours, 1) if colour == "alpha"),
            crs=None if data.crs is None else plain_crs(data.crs.to_string(), f"raster {str(path)!r}"),
            transform=transform,
            notes=(*(notes if data.transform.is_identity else ()), *_scaled(data)),
        )  # fmt: skip

    def _open_overviews(self, open_: Callable[..., Any]) -> list[int]:
        """Open what is the whole image made smaller; other images in the file, such as a label, are no levels."""
        found: list[int] = []
        downs = [1.0]
        for i, factor in enumerate(map(float, self._levels[0].overviews(1))):
            one = open_(overview_level=i)
            sizes = ((self.info.width, one.width), (self.info.height, one.height))
            if factor > downs[-1] and all(abs(whole / factor - small) <= 1 for whole, small in sizes):
                self._levels.append(one)
                downs.append(factor)
                found.append(i)
            else:
                one.close()
        self.info = replace(self.info, downsamples=tuple(downs))
        return found

    def level_size(self, level: int) -> tuple[int, int]:
        """Width and height of a level."""
        return self._levels[level].width, self._levels[level].height

    def read_level(self, level: int, x: int, y: int, width: int, height: int, bands: Bands) -> Pixels:
        """Whole pixels of a level; nodata, masks and transparency are not valid, and neither is NaN."""
        data, window = self._levels[level], ((y, y + height), (x, x + width))
        wanted = [b + 1 for b in bands]
        with self._lock:
            values = data.read(wanted, window=window)
            if self._all_valid or all(self._always_valid[b] for b in bands):
                valid = np.ones(values.shape[1:], bool)
            else:
                valid = (data.read_masks(wanted, window=window) > 0).all(0)
            # bands that lie apart in the file have blocks of their own
            if self._is_tiff:
                for band in wanted if self._bands_apart else wanted[:1]:
                    self._refuse_unwritten(level, x, y, valid, band)
        if values.dtype.kind == "f":
            valid &= np.isfinite(values).all(0)
        return Pixels(values, valid)

    def _refuse_unwritten(self, level: int, x: int, y: int, valid: NDArray[np.bool_], band: int) -> None:
        """Blocks that were never written, or whose place the file does not say, are read as 0, and are not data."""
        high, wide = self._block_sizes[level]
        overview = self._overviews[level - 1] if level else None
        for row in range(y // high, -(-(y + valid.shape[0]) // high)):
            for column in range(x // wide, -(-(x + valid.shape[1]) // wide)):
                key = (level, row, column, band)
                if key not in self._written:
                    place = f"BLOCK_OFFSET_{column}_{row}"
                    found = self._levels[0].get_tag_item(place, "TIFF", bidx=band, ovr=overview)
                    if len(self._written) > MAX_KNOWN_BLOCKS:
                        self._written.clear()
                    self._written[key] = found is not None
                if not self._written[key]:
                    top, left = row * high - y, column * wide - x
                    valid[max(0, top) : top + high, max(0, left) : left + wide] = False

    def _rows_decoded(self, level: int) -> int:
        return int(self._block_sizes[level][0])

    def close(self) -> None:
        """Let go of the file."""
        for one in self._levels:
            one.close()


@cache
def _leave_alone() -> None:
    """In a process that opens files, take from GDAL every driver but ours, and say for good what it must not do.

    An overview, mask or mosaic that a file names is opened by whatever driver knows it; there is none left that would.
    """
    if not limited.in_child():
        return
    from rasterio import _env

    os.environ.update(ALONE)
    environment = _env.GDALEnv()
    environment.start()
    os.environ["GDAL_SKIP"] = ",".join({*environment.drivers()} - {TIFF, JPEG2000})
    _env._have_registered_drivers = False  # once more, now without them
    environment.start()
    if others := {*environment.drivers()} - {TIFF, JPEG2000}:
        needs, got = f"to be left with the drivers {TIFF} and {JPEG2000}", f"{len(others)} more"
        raise EquicamError("rasterio", needs, got, "pip install 'rasterio<1.5'")


def _notes_of_companions(path: Path) -> tuple[str, ...]:
    """Refuse a file that others next to it complete; what only places it is a note. None of them is ever used."""
    for mask in (path.with_name(f"{path.name}.msk"), path.with_name(f"{path.name}.MSK")):
        if mask.exists():
            fix = "gdal_translate --config GDAL_TIFF_INTERNAL_MASK YES, into a new file"
            raise bad_raster(path, "its mask in it", f"one in {mask.name!r}", fix)
    aux = path.with_name(f"{path.name}.aux.xml")
    if aux.exists():
        try:
            data, _ = read_file(aux, what=f"file {str(aux)!r}", limit=MAX_SIDECAR_BYTES)
            root = ElementTree.fromstring(data)  # noqa: S314  # in a limited process
        except ElementTree.ParseError:
            root = ElementTree.Element("none")  # GDAL ignores it too
        named = {one.tag for one in root.iter()} & {*_CHANGING}
        if "OVERVIEWS" in {one.get("domain", "").upper() for one in root.iter("Metadata")}:
            named.add("overviews")
        if named:
            got = f"{', '.join(sorted(named))} in {aux.name!r}"
            fix = "gdal_translate into a new file, which takes it in, or removing that file"
            raise bad_raster(path, "everything about its pixels in it", got, fix)
    letters = path.suffix[1:]
    worlds = (f".{letters[:1]}{letters[-1:]}w", f".{letters}w", ".wld")
    found = [world for world in worlds if path.with_suffix(world).exists()]
    note = "its place is in {} and is not read; gdal_translate puts it into the file"
    return tuple(map(note.format, found[:1]))


def _scaled(data: Any) -> tuple[str, ...]:
    """A note where bands have a scale or an offset of their own."""
    if {*data.scales} == {1} and {*data.offsets} == {0}:
        return ()
    stated = f"scale {data.scales[0]:g} and offset {data.offsets[0]:g}"
    return (f"its tags say {stated}, which are not applied: scale divides values as stored",)
