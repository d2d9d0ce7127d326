"""Windows of a run, raster by raster, and their maps put together to one map of the raster.

The raster is covered by cells of so many pixels of the model's. A cell's value is the weighted mean, over the windows
its centre lies in, of their maps sampled there: Σ w·map / Σ w. Places are floats in pixels of level 0 from end to end:
no window is moved to a cell, so that nothing drifts towards the far corner. Maps are the raw ones of one class, never
scaled to 0 … 1 by window, which would show the borders of windows.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from equicam import __version__
from equicam.errors import EquicamError
from equicam.images.files import file_digest
from equicam.rasters.options import raster_id
from equicam.runs.manifest import Manifest
from equicam.runs.store import RunStore

COLUMNS = (
    "id", "x", "y", "side", "target", "confidence", "top5", "top5_confidence", "peum_score", "stability", "flip_rate", "flags", "steadiness", "status",
)  # fmt: skip
MAP_COLUMNS = ("id", "height", "width", "map", "map_scale", "peum", "peum_scale")
MAX_RASTER_SIDE = 2**40
MAX_CLASSES_NAMED = 10

Row = dict[str, Any]


@dataclass(frozen=True)
class RasterWindows:
    """A raster of a run, and the windows of it that were explained."""

    id: str
    kind: str  # slide or map
    width: int  # in pixels of level 0, as all coordinates
    height: int
    mpp: float | None  # micrometres a pixel of slides
    crs: str | None
    transform: tuple[float, ...] | None
    origin: tuple[float, float]  # where QuPath's coordinates begin
    rows: tuple[Row, ...]

    @property
    def side(self) -> float:
        """The side of its windows, which all have the same."""
        sides = [row["side"] for row in self.rows]
        if max(sides) - min(sides) > 1e-6 * max(sides):
            raise EquicamError(
                f"raster {self.id!r}", "windows of one size", f"sides from {min(sides):g} to {max(sides):g}",
                "restoring the items of the run",
            )  # fmt: skip
        return float(sides[0])


@dataclass(frozen=True)
class WindowMaps:
    """One window's place and raw maps at layer resolution."""

    x: float
    y: float
    side: float
    map: NDArray[np.float32]  # [h, w]
    peum: NDArray[np.float32]  # [h, w]
    stability: float  # NaN where it is undefined


def read_windows(store: RunStore) -> list[RasterWindows]:
    """Every raster with a window that was explained."""
    tiling = store.manifest.tiling
    if tiling is None:
        raise EquicamError(
            "this export", "a run of windows of slides or maps", "a run of images", "equicam audit --tile 224"
        )
    by_raster: dict[str, list[Row]] = {}
    for row in store.read_items(list(COLUMNS)).to_pylist():
        if row["status"] == "ok" and row["side"]:
            by_raster.setdefault(raster_id(row["id"]), []).append(row)
    found = [
        _raster(raster, by_raster[raster["id"]], tiling.mpp_is)
        for raster in store.rasters().to_pylist()
        if raster["id"] in by_raster
    ]
    if not found:
        raise EquicamError(
            "this export", "windows that were explained", "none", "equicam audit again, which resumes"
        )
    return found


def _raster(raster: Row, rows: list[Row], mpp_is: float | None) -> RasterWindows:
    """A raster and its windows; anybody may have written the run, so every number is checked."""
    transform, origin = raster["transform"], raster["origin"] or (0.0, 0.0)
    numbers = [*(transform or ()), *origin, *(v for row in rows for v in (row["x"], row["y"], row["side"]))]
    lengths = (raster["width"], raster["height"])
    valid = (
        all(isinstance(n, int) and 0 < n < MAX_RASTER_SIDE for n in lengths)
        and all(isinstance(v, float) and math.isfinite(v) for v in numbers)
        and all(row["side"] > 0 and row["target"] is not None for row in rows)
        and len(origin) == 2
        and (transform is None or len(transform) == 6)
    )
    if not valid:
        raise EquicamError(
            f"raster {raster['id']!r}", "sizes, places and classes that are numbers", "others in rasters.parquet or items",
            "restoring them",
        )  # fmt: skip
    mpp = mpp_is or raster["mpp"]
    return RasterWindows(
        raster["id"], raster["kind"] or "slide", *lengths, mpp if mpp and 0 < mpp < math.inf else None, raster["crs"],
        None if transform is None else tuple(transform), (origin[0], origin[1]), tuple(rows),
    )  # fmt: skip


def choose_target(manifest: Manifest, rasters: Sequence[RasterWindows], wanted: int | None) -> int:
    """The class whose maps are put together: the one that all windows were explained for, or the one wanted."""
    counts = Counter(row["target"] for raster in rasters for row in raster.rows)
    if wanted is None and len(counts) == 1:
        return int(next(iter(counts)))
    if wanted is not None and wanted in counts:
        return wanted
    most = counts.most_common(MAX_CLASSES_NAMED)
    names = [f"{manifest.output_name(target)!r} ({count:,} windows)" for target, count in most]
    more = f" and {len(counts) - len(most)} more" if len(counts) > len(most) else ""
    first = manifest.output_name(most[0][0])
    raise EquicamError(
        "a map of a whole raster", "one class, of those that windows were explained for", ", ".join(names) + more,
        f"--class {first!r}, or an audit with --target",
    )  # fmt: skip


def read_maps(store: RunStore, rows: Sequence[Row]) -> Iterator[WindowMaps]:
    """The stored maps of these windows."""
    wanted: dict[str, Row] = {row["id"]: row for row in rows}
    for name, plane, peum in stored_planes(store, wanted):
        row = wanted[name]
        stability = math.nan if row["stability"] is None else row["stability"]
        yield WindowMaps(row["x"], row["y"], row["side"], plane, peum, stability)


def stored_planes(
    store: RunStore, wanted: Container[str]
) -> Iterator[tuple[str, NDArray[np.float32], NDArray[np.float32]]]:
    """Id, map and PEUM of these images, one shard in memory at a time."""
    sample = zip(*store.sample(["id", "shard"]).to_pydict().values(), strict=True)
    for number in sorted(filter(store.has_shard, {number for name, number in sample if name in wanted})):
        table = store.read_shard("maps", number, MAP_COLUMNS).combine_chunks()
        for i, name in enumerate(table["id"].to_pylist()):
            if name in wanted:
                yield name, _plane(table, "map", i), _plane(table, "peum", i)


def _plane(table: pa.Table, name: str, row: int) -> NDArray[np.float32]:
    """One plane of a shard of maps, in its own units."""
    try:
        shape = (table["height"][row].as_py(), table["width"][row].as_py())
        values = table[name][row].values.to_numpy(zero_copy_only=False).astype(np.float32)
        plane: NDArray[np.float32] = values.reshape(shape) * np.float32(table[f"{name}_scale"][row].as_py())
        if not plane.size or not np.isfinite(plane).all():
            raise ValueError("values that are not finite")
    except (AttributeError, TypeError, ValueError) as error:
        raise EquicamError(
            f"the maps of {table['id'][row].as_py()!r}", "to be as they were written", error, "restoring their shard",
        ) from error  # fmt: skip
    return plane


def predicted_class(row: Mapping[str, Any], manifest: Manifest) -> tuple[int | None, str]:
    """The model's top-1 class of a window, by number and name; not the class explained, where one was chosen for all."""
    top = row["top5"][0] if row["top5"] else row["target"]
    return top, manifest.output_name(top)


def run_facts(store: RunStore, target: int) -> dict[str, str]:
    """Where a map comes from, for the tags of its file."""
    manifest, digests = store.folder / "manifest.json", store.folder / "digests.json"
    return {
        "version": __version__,
        "run digest": file_digest(digests if digests.is_file() else manifest),
        "manifest digest": file_digest(manifest),
        "class": store.manifest.output_name(target),
        "method": store.manifest.recipe.method,
    }


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
        raise EquicamError("every", f"1 to {tile} pixels, the tile", every, "--every 8")
    cell = raster.side / tile * every
    columns, rows = (max(1, math.ceil(n / cell - TOLERANCE)) for n in (raster.width, raster.height))
    if columns * rows > MAX_CELLS:
        raise EquicamError(
            f"raster {raster.id!r}", f"at most {MAX_CELLS:,} cells", f"{columns:,} × {rows:,}", "a larger --every",
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
    # of w·map, w·PEUM, w·stability, w, w where stable is known
    sums = _allocate((5, *shape), np.float64, folder)
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


@dataclass(frozen=True)
class StitchedMap:
    """The bands of a raster's cells, and where they come from."""

    raster: RasterWindows
    bands: NDArray[np.float32]  # map, PEUM, stability, coverage: [4, rows, columns]
    cell: float  # side of a cell in pixels of level 0
    facts: Mapping[str, str]  # run, its digest, equicam's version, class, method
