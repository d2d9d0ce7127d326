"""Georeferenced rasters: GeoTIFF and JPEG 2000 through rasterio, any bands and types, nodata and masks."""

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.data.rasters.raster import Pixels, Raster, RasterInfo
from equicam.data.remote import AnyPath, RemotePath
from equicam.errors import EquicamError

TIFF, JPEG2000 = "GTiff", "JP2OpenJPEG"
"""The only drivers: others, such as VRT, name further files or addresses, and a file is not obeyed."""
CACHE_BYTES = 64 << 20
MAX_BANDS = 4096
MAX_KNOWN_BLOCKS = 100_000


class GeoRaster(Raster):
    """A raster that rasterio reads."""

    def __init__(self, path: AnyPath, driver: str) -> None:
        import rasterio
        from rasterio.errors import NotGeoreferencedWarning

        self._is_tiff, self._lock = driver == TIFF, threading.Lock()
        self._written: dict[tuple[int, int, int, int], bool] = {}  # blocks by level, row, column and band
        with rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES, GDAL_NUM_THREADS=1), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotGeoreferencedWarning)  # such files are rasters too
            where: tuple[Any, dict[str, Any]] = (path, {})
            if isinstance(path, RemotePath):
                system, inner = path.file_system()
                where = (inner, {"opener": system})
            open_ = partial(rasterio.open, where[0], driver=driver, **where[1])
            self._levels: list[Any] = [open_()]
            try:
                self.info = self._describe(path)
                masks = self._levels[0].mask_flag_enums
                self._always_valid = [[flag.name for flag in one] == ["all_valid"] for one in masks]
                self._all_valid = all(self._always_valid)
                self._overviews = self._open_overviews(open_)
                self._bands_apart = self._levels[0].profile.get("interleave") == "band"
                self._block_sizes = [one.block_shapes[0] for one in self._levels]
            except BaseException:
                self.close()
                raise

    def _describe(self, path: AnyPath) -> RasterInfo:
        import rasterio

        data = self._levels[0]
        types = set(data.dtypes)
        if len(types) != 1 or not 1 <= data.count <= MAX_BANDS or "complex" in min(types):
            raise EquicamError(
                f"raster {str(path)!r}", needs="bands of one real type", got=f"{data.count} bands, {sorted(types)}",
                fix="a copy with one type",
            )  # fmt: skip
        (kind,) = types
        names = [text or "" for text in data.descriptions]
        unique = all(names) and len({n.casefold() for n in names}) == len(names)
        colours = tuple(one.name for one in data.colorinterp)
        bands = tuple(names) if unique else colours if set(colours[:3]) == {"red", "green", "blue"} else ()
        if len(set(bands)) != data.count:
            bands = tuple(str(i + 1) for i in range(data.count))
        a, b, _, d, e, _ = tuple(data.transform)[:6]
        across, down = float(np.hypot(a, d)), float(np.hypot(b, e))
        placed = data.crs is not None and across > 0 and abs(across - down) <= 0.02 * max(across, down)
        return RasterInfo(
            "map", data.width, data.height, bands, kind, f"rasterio {rasterio.__version__}, GDAL {rasterio.__gdal_version__}",
            downsamples=(1.0,),
            mpp=(across + down) / 2 if placed else None,
            crs=None if data.crs is None else data.crs.to_string(),
            transform=tuple(float(v) for v in tuple(data.transform)[:6]),
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

    def read_level(
        self, level: int, x: int, y: int, width: int, height: int, bands: tuple[int, ...]
    ) -> Pixels:
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

    def close(self) -> None:
        """Let go of the file."""
        for one in self._levels:
            one.close()
