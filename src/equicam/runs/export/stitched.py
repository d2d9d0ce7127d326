"""The stitched map of a raster, as its writers get it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from equicam.runs.export.windows import RasterWindows


@dataclass(frozen=True)
class StitchedMap:
    """The bands of a raster's cells, and where they come from."""

    raster: RasterWindows
    bands: NDArray[np.float32]  # map, PEUM, stability, coverage: [4, rows, columns]
    cell: float  # side of a cell in pixels of level 0
    facts: Mapping[str, str]  # run, its digest, equicam's version, class, method
