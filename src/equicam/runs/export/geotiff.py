"""Cloud-optimised GeoTIFF: the stitched map in the coordinates of its raster."""

from pathlib import Path

import numpy as np

from equicam.errors import EquicamError
from equicam.rasters.raster import plain_crs
from equicam.runs.export.libraries import needing
from equicam.runs.export.stitched import StitchedMap
from equicam.runs.export.stitching import BANDS, ROWS_AT_ONCE

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
            f"the GeoTIFF of {raster.id!r}", needs="a CRS and transform that GDAL takes", got=str(error)[:200],
            fix="restoring rasters.parquet",
        ) from error  # fmt: skip
    plain.unlink()
