"""Files of an export: safe names, written whole, over another file only by force; the stitched map as GeoTIFF and OME-TIFF."""

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError, needing
from equicam.images.files import file_digest
from equicam.images.items import valid_utf8
from equicam.rasters.raster import plain_crs
from equicam.runs.export.stitching import BANDS, ROWS_AT_ONCE, StitchedMap
from equicam.shards import TEMPORARY_SUFFIX

MAX_NAME_CHARS = 80
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # on Windows


def safe_names(ids: Sequence[str]) -> dict[str, str]:
    """A file name for each id: letters, digits, dots, - and _; a digest is added where it would not be the id's alone."""
    plain = {one: _safe(one) for one in ids}
    count = Counter(name.casefold() for name in plain.values())
    return {
        one: name
        if name == one and count[name.casefold()] == 1
        else f"{name}-{hashlib.sha256(one.encode()).hexdigest()[:8]}"
        for one, name in plain.items()
    }


def _safe(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", text.replace("\\", "/").rpartition("/")[2]).strip("._-")
    name = name[-MAX_NAME_CHARS:].lstrip("._-")
    return f"_{name}" if not name or RESERVED.fullmatch(name) else name


class ExportFolder:
    """A folder that exports write into, which may hold files of others and verdicts that were drawn into exports."""

    def __init__(self, folder: Path, *, force: bool = False) -> None:
        self.path, self._force = folder, force
        self.written: dict[str, str] = {}  # SHA-256 by name
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise EquicamError(valid_utf8(str(folder)), "to be a folder", "a link or a file", "another --out")
        folder.mkdir(parents=True, exist_ok=True)

    def refuse_existing(self, names: Sequence[str]) -> None:
        """Refuse names that are taken, unless files are to be replaced by force."""
        for path in (self.path / name for name in names):
            if path.is_dir() or (not self._force and (path.is_symlink() or path.exists())):
                raise EquicamError(
                    valid_utf8(str(path)), "to be absent, because verdicts may have been drawn into it",
                    "a folder" if path.is_dir() else "an existing file",
                    "another --out" if path.is_dir() else "--force to replace it, or another --out",
                )  # fmt: skip

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path to write to; the file appears under its name when it is whole."""
        self.refuse_existing([name])
        with tempfile.TemporaryDirectory(dir=self.path, prefix=".export-", suffix=TEMPORARY_SUFFIX) as folder:
            temporary = Path(folder) / name
            yield temporary
            digest = file_digest(temporary)
            self.refuse_existing([name])  # it may have come while ours was written
            temporary.replace(self.path / name)
        self.written[name] = digest

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that this export wrote."""
        return tuple(self.path / name for name in self.written)


BLOCK_PX = 512


def write_geotiff(path: Path, stitched: StitchedMap) -> None:
    """Bands by name, NaN where no window is, overviews, and in the tags the run it comes from.

    A raster without coordinates keeps those of its pixels: x to the right and y down, in pixels of level 0.
    """
    with needing("geo", "--to geotiff"):
        import rasterio
        from rasterio import Affine
        from rasterio.errors import RasterioError
        from rasterio.shutil import copy
        from rasterio.windows import Window

    raster = stitched.raster
    a, b, c, d, e, f = raster.transform or (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    cell = stitched.cell
    transform = Affine(a * cell, b * cell, c, d * cell, e * cell, f)  # of cells instead of pixels
    count, rows, columns = stitched.bands.shape
    plain = path.with_name("plain.tif")  # the driver COG only copies
    profile = {
        "driver": "GTiff", "dtype": "float32", "count": count, "width": columns, "height": rows, "nodata": np.nan,
        "crs": raster.crs and plain_crs(raster.crs, f"the GeoTIFF of {raster.id!r}"), "transform": transform, "tiled": True, "blockxsize": BLOCK_PX, "blockysize": BLOCK_PX,
        "BIGTIFF": "IF_SAFER", "interleave": "band",
    }  # fmt: skip
    try:
        with rasterio.open(plain, "w", **profile) as file:
            for first in range(0, rows, 2 * ROWS_AT_ONCE):
                some = stitched.bands[:, first : first + 2 * ROWS_AT_ONCE]
                file.write(some, window=Window(0, first, columns, some.shape[1]))
            for number, name in enumerate(BANDS, 1):
                file.set_band_description(number, name)
            file.update_tags(
                **{f"equicam_{name.replace(' ', '_')}": text for name, text in stitched.facts.items()}
            )
        copy(
            plain, path, driver="COG", COMPRESS="DEFLATE", PREDICTOR="YES", BLOCKSIZE=BLOCK_PX,
            OVERVIEW_RESAMPLING="AVERAGE", BIGTIFF="IF_SAFER",
        )  # fmt: skip
    except (RasterioError, ValueError) as error:  # GDAL refuses what is no CRS
        raise EquicamError(
            f"the GeoTIFF of {raster.id!r}", "a CRS and transform that GDAL takes", str(error)[:200],
            "restoring rasters.parquet",
        ) from error  # fmt: skip
    plain.unlink()


TILE_PX = 256
MIN_LEVEL_PX = 256
"""The last level of a pyramid is not larger than this."""


def write_ome_tiff(path: Path, stitched: StitchedMap) -> None:
    """Axes CYX, float32, NaN where no window is; coarser levels are SubIFDs."""
    with needing("wsi", "--to ome-tiff"):
        import tifffile

    levels = [stitched.bands, *_coarser(stitched.bands)]
    facts = stitched.facts
    metadata: dict[str, Any] = {
        "axes": "CYX",
        "Channel": {"Name": list(BANDS)},
        "Description": "; ".join(f"{name}: {text}" for name, text in facts.items()),
    }
    if stitched.raster.kind == "slide" and stitched.raster.mpp is not None:
        size = stitched.raster.mpp * stitched.cell
        metadata |= {
            "PhysicalSizeX": size, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": size, "PhysicalSizeYUnit": "µm",
        }  # fmt: skip
    options = {
        "photometric": "minisblack", "tile": (TILE_PX, TILE_PX), "compression": "zlib", "maxworkers": 1,
    }  # fmt: skip
    with tifffile.TiffWriter(path, ome=True, bigtiff=True) as file:
        file.write(levels[0], subifds=len(levels) - 1, metadata=metadata, **options)
        for level in levels[1:]:
            file.write(level, subfiletype=1, metadata=None, **options)


def _coarser(bands: NDArray[np.float32]) -> Iterator[NDArray[np.float32]]:
    """Levels of half the size until one is small."""
    while max(bands.shape[1:]) > MIN_LEVEL_PX:
        bands = _halve(bands)
        yield bands


def _halve(bands: NDArray[np.float32]) -> NDArray[np.float32]:
    """The mean of the values there are of two by two cells; an odd last row or column is repeated."""
    count, rows, columns = bands.shape
    found = np.empty((count, -(-rows // 2), -(-columns // 2)), np.float32)
    for first in range(0, rows, ROWS_AT_ONCE):
        some = bands[:, first : first + ROWS_AT_ONCE]
        some = np.pad(some, ((0, 0), (0, some.shape[1] % 2), (0, columns % 2)), mode="edge")
        cells = some.reshape(count, some.shape[1] // 2, 2, -1, 2)
        known = np.isfinite(cells)
        with np.errstate(invalid="ignore"):
            mean = np.where(known, cells, 0).sum((2, 4)) / known.sum((2, 4))
        found[:, first // 2 : first // 2 + mean.shape[1]] = mean
    return found
