"""OME-TIFF: the stitched map as a pyramid with named channels and the size of its pixels, for slide viewers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.runs.export.libraries import needing
from equicam.runs.export.stitched import StitchedMap
from equicam.runs.export.stitching import BANDS, ROWS_AT_ONCE

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
