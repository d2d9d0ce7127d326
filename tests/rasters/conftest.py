"""Rasters drawn in the tests: one scene in every format that should give the same pixels."""

from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

WIDTH, HEIGHT = 1000, 760


def scene(bands: int = 3, dtype: str = "uint8", seed: int = 0, size=(HEIGHT, WIDTH)) -> np.ndarray:
    """A smooth random scene [bands, height, width] that fills the type's range up to 250, or 10,000."""
    rng = np.random.default_rng(seed)
    planes = ndimage.gaussian_filter(rng.standard_normal((bands, *size)), (0, 4, 4))
    planes = (planes - planes.min()) / np.ptp(planes)
    return (planes * (250 if dtype == "uint8" else 10_000)).astype(dtype)


def halved(image: np.ndarray) -> np.ndarray:
    """Half the size, by means of 2 × 2."""
    *bands, high, wide = image.shape
    image = image[..., : high // 2 * 2, : wide // 2 * 2].astype(np.float64)
    return image.reshape(*bands, high // 2, 2, wide // 2, 2).mean((-3, -1))


def write_pyramid(path: Path, image: np.ndarray, *, levels=3, ome=False, mpp: float | None = 0.5):
    """A tiled pyramid of [bands, height, width]: further pages, or SubIFDs of an OME-TIFF."""
    tifffile = pytest.importorskip("tifffile")
    rgb = image.shape[0] == 3 and image.dtype == np.uint8
    common = {"tile": (128, 128), "photometric": "rgb" if rgb else "minisblack"}
    metadata = {"axes": "YXS" if rgb else "CYX"}
    if mpp:
        metadata |= dict.fromkeys(("PhysicalSizeX", "PhysicalSizeY"), mpp)
        metadata |= dict.fromkeys(("PhysicalSizeXUnit", "PhysicalSizeYUnit"), "µm")
    if ome and not rgb:
        metadata["Channel"] = {"Name": [f"stain {i}" for i in range(len(image))]}
    with tifffile.TiffWriter(path, ome=ome, bigtiff=False) as file:
        for i in range(levels):
            image = np.rint(halved(image)).astype(image.dtype) if i else image
            data = np.ascontiguousarray(image.transpose(1, 2, 0)) if rgb else image
            options = {"subfiletype": 1, "metadata": None} if i else {"metadata": metadata if ome else None}
            if ome and not i:
                options["subifds"] = levels - 1
            elif mpp and not ome:
                options |= {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"}
            file.write(data, **common, **options)


def write_geotiff(path, image: np.ndarray, *, nodata=None, mask=None, overviews=(), affine=None, **options):
    """A GeoTIFF in UTM 18N at 10 m, or in another place."""
    rasterio = pytest.importorskip("rasterio")
    from rasterio.enums import Resampling

    profile = {
        "driver": "GTiff", "count": image.shape[0], "height": image.shape[1], "width": image.shape[2],
        "dtype": image.dtype, "crs": "EPSG:32618", "tiled": True, "blockxsize": 128, "blockysize": 128, "nodata": nodata,
        "transform": affine or rasterio.Affine(10, 0, 500_000, 0, -10, 4_500_000),
    } | options  # fmt: skip
    with rasterio.open(path, "w", **profile) as file:
        file.write(image)
        if mask is not None:
            file.write_mask(mask)
        if overviews:
            file.build_overviews(list(overviews), Resampling.average)
    return path
