"""Maps of windows put together to one map of their raster.

The raster is covered by cells of so many pixels of the model's. A cell's value is the weighted mean, over the windows
its centre lies in, of their maps sampled there: Σ w·map / Σ w. Places are floats in pixels of level 0 from end to end:
no window is moved to a cell, so that nothing drifts towards the far corner. Maps are the raw ones of one class, never
scaled to 0 … 1 by window, which would show the borders of windows.
"""

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.runs.export.windows import RasterWindows, WindowMaps

BANDS = ("map", "PEUM", "stability", "coverage")
"""Coverage is the number of windows that a cell's values are a mean of; the others are NaN where it is 0."""
MIN_WEIGHT = 1e-3
"""Of a window's border along one side; at its centre it is 1."""
MAX_CELLS = 4_000_000_000
MAX_MEMORY_BYTES = 1 << 30
"""Of arrays in memory; larger ones are temporary files."""
ROWS_AT_ONCE = 256
TOLERANCE = 1e-6
"""Of a cell: a centre this close to a window's border lies on it."""


@dataclass(frozen=True)
class Grid:
    """Square cells that cover a raster from its first corner on."""

    cell: float  # in pixels of level 0
    columns: int
    rows: int


def make_grid(raster: RasterWindows, tile: int, every: int) -> Grid:
    """Cells of `every` pixels of the model's."""
    if not 1 <= every <= tile:
        raise EquicamError("every", needs=f"1 to {tile} pixels, the tile", got=every, fix="--every 8")
    cell = raster.side / tile * every
    columns, rows = (max(1, math.ceil(n / cell - TOLERANCE)) for n in (raster.width, raster.height))
    if columns * rows > MAX_CELLS:
        raise EquicamError(
            f"raster {raster.id!r}", needs=f"at most {MAX_CELLS:,} cells", got=f"{columns:,} × {rows:,}", fix="a larger --every"
        )  # fmt: skip
    return Grid(cell, columns, rows)


def stitch(
    windows: Iterable[WindowMaps], grid: Grid, *, disc: bool, folder: Path | None = None
) -> NDArray[np.float32]:
    """map, PEUM, stability and coverage of every cell: [4, rows, columns].

    With `disc`, a window counts in its inscribed disc only, which every rotated view shows whole. Arrays that are too large
    for memory lie in temporary files in `folder`.
    """
    shape = (grid.rows, grid.columns)
    sums = _allocate(
        (5, *shape), np.float64, folder
    )  # of w·map, w·PEUM, w·stability, w, w where stable is known
    bands = _allocate((len(BANDS), *shape), np.float32, folder)
    for window in windows:
        columns, across = _centres(window.x, window.side, grid.cell, grid.columns)
        rows, down = _centres(window.y, window.side, grid.cell, grid.rows)
        weight = np.outer(_raised_cosine(down), _raised_cosine(across))
        if disc:
            weight *= np.add.outer((down - 0.5) ** 2, (across - 0.5) ** 2) <= 0.25 + 1e-9
        height, width = window.map.shape
        rows_of, columns_of = interpolation(down, height), interpolation(across, width)
        total = sums[:, rows, columns]
        total[0] += weight * (rows_of @ window.map @ columns_of.T)
        total[1] += weight * (rows_of @ window.peum @ columns_of.T)
        total[3] += weight
        if math.isfinite(window.stability):
            total[2] += weight * window.stability
            total[4] += weight
        bands[3, rows, columns] += weight > 0
    with np.errstate(invalid="ignore"):
        for first in range(0, grid.rows, ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            for band, weight_at in ((0, 3), (1, 3), (2, 4)):
                bands[band, some] = sums[band, some] / sums[weight_at, some]  # 0 / 0 is NaN: no window
    return bands


def _centres(start: float, side: float, cell: float, count: int) -> tuple[slice, NDArray[np.float64]]:
    """The cells whose centre lies in a window along one side, and where: 0 … 1 from its border to the other."""
    first = max(0, math.ceil(start / cell - 0.5 - TOLERANCE))
    last = min(count, math.floor((start + side) / cell - 0.5 + TOLERANCE) + 1)
    places = (np.arange(first, max(first, last)) + 0.5) * cell
    return slice(first, max(first, last)), np.clip((places - start) / side, 0.0, 1.0)


def _raised_cosine(places: NDArray[np.float64]) -> NDArray[np.float64]:
    """1 in the middle of a window, almost 0 at its borders."""
    return np.asarray(MIN_WEIGHT + (1 - MIN_WEIGHT) * (0.5 - 0.5 * np.cos(2 * np.pi * places)))


def interpolation(places: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Bilinear weights of `size` values at places in 0 … 1, whose centres are (i + ½) / size; constant beyond the last."""
    at = np.clip(places * size - 0.5, 0, size - 1)
    low = np.minimum(at.astype(int), max(size - 2, 0))
    share = at - low
    matrix = np.zeros((len(places), size))
    here = np.arange(len(places))
    matrix[here, low] = 1 - share
    matrix[here, np.minimum(low + 1, size - 1)] += share
    return matrix


def _allocate(shape: tuple[int, ...], kind: type[np.generic], folder: Path | None) -> NDArray[Any]:
    """Zeros, in a file without a name where they are too large for memory."""
    if math.prod(shape) * np.dtype(kind).itemsize <= MAX_MEMORY_BYTES:
        return np.zeros(shape, kind)
    with tempfile.TemporaryFile(dir=folder) as file:  # the mapping keeps it until the array is gone
        return np.memmap(file, dtype=kind, mode="w+", shape=shape)
