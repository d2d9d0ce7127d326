"""Rasters cut into windows: a grid, what of it is tissue or data, and regions that people have drawn."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError, refusing
from equicam.images import limited
from equicam.images.dicom import SUFFIXES as DICOM_SUFFIXES
from equicam.images.files import AnyPath, RemotePath, file_stat, read_file
from equicam.images.item_table import Items, join_tables
from equicam.images.items import Item
from equicam.rasters.geojson import MAX_BYTES, find_in_regions, read_features, read_regions
from equicam.rasters.options import RasterWindow, Tiling, window_id
from equicam.rasters.raster import THUMBNAIL_PX, Raster, bad_raster, open_raster, square_side
from equicam.rasters.windows import display_bands, resolve_input

MAX_WINDOWS = 10_000_000
"""Of one raster, which lists at some 9 µs each; more are a mistake in the options or in a hostile file."""
MIN_SATURATION = 0.05
"""Of tissue, whatever Otsu's threshold is: a slide of glass alone has none."""
THUMBNAIL_PX_A_WINDOW, MAX_THUMBNAIL_PX = 4, 4096

Tick = Callable[[int], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RasterRow:
    """A raster of a run, and what became of its grid."""

    id: str
    path: str
    kind: str | None = None
    width: int | None = None
    height: int | None = None
    bands: tuple[str, ...] = ()
    dtype: str | None = None
    mpp: int | float | None = None
    crs: str | None = None
    transform: tuple[int | float, ...] | None = None
    origin: tuple[int | float, int | float] = (0.0, 0.0)
    reader: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None
    windows: int = 0
    background: int = 0  # windows with too little tissue
    nodata: int = 0  # windows with too little data
    outside: int = 0  # windows outside the regions
    error: str | None = None


def cut_windows(
    items: Sequence[Item], tiling: Tiling, margin: int, tick: Tick = lambda _count: None
) -> tuple[Items, list[RasterRow]]:
    """The windows of rasters in scan order, and a row for every raster; one that cannot be opened is a bad item."""
    # refused before any raster is opened
    if tiling.regions is not None and not Path(tiling.regions).is_dir():
        limited.call(_check_regions, Path(tiling.regions))
    cuts: list[_Cut] = []
    known: set[str] = set()  # slides in several DICOM files, of which one stands for all
    for item in items:
        cuts += _cut_in_child(item, tiling, margin, known)
        tick(1)
    rows, errors = [one.row for one in cuts], [one.error for one in cuts if one.error]
    windows = Items.of([])
    for one in cuts:
        windows = replace(one.windows, margin=max(windows.margin, one.windows.margin))
    windows = replace(windows, table=join_tables([one.windows.table for one in cuts]))
    for note, count in Counter(note for one in cuts for note in one.notes).items():
        path = next(one.row.path for one in cuts if note in one.notes)
        _log.warning("raster %r%s: %s", path, f" and {count - 1:,} more" if count > 1 else "", note)
    if not (pc.max(windows.column("side")).as_py() or 0):
        if errors and len(errors) == len(rows):
            more = f"; {len(errors) - 1:,} more rasters could not be cut either" if len(errors) > 1 else ""
            first = errors[0]
            raise EquicamError(first.what, first.needs, f"{first.got}{more}", first.fix) from first
        dropped = {"background": "background", "nodata": "without data", "outside": "outside the regions"}
        counts = (f"{sum(getattr(row, name) for row in rows):,} {text}" for name, text in dropped.items())
        got, fix = f"none: {', '.join(counts)}", "another tile, mpp, tissue or regions"
        raise EquicamError("rasters", "at least one window to explain", got, fix)
    return windows, rows


@dataclass(frozen=True)
class _Cut:
    """A raster as it was listed."""

    windows: Items
    row: RasterRow
    error: EquicamError | None = None
    notes: tuple[str, ...] = ()


def _check_regions(path: Path) -> None:
    what = f"regions {str(path)!r}"
    read_features(read_file(path, what=what, limit=MAX_BYTES)[0], what)


def _cut_in_child(item: Item, tiling: Tiling, margin: int, known: set[str]) -> list[_Cut]:
    """A raster listed in a process that opens files; nothing for a further file of a slide in several."""
    call = limited.call_connected if isinstance(item.path, RemotePath) else limited.call
    try:
        if isinstance(item.path, Path) and item.path.suffix.lower() in DICOM_SUFFIXES:
            series = call(_series, item.path)
            if series in known:
                return []
            known.update([series] if series else [])
        return [call(_cut, item, tiling, margin)]
    except EquicamError as error:  # too much time or memory, or the end of that process
        return [_bad(item, tiling, error)]


def _series(path: Path) -> str | None:
    """What the files of one DICOM slide have in common."""
    with suppress(EquicamError):
        return open_raster(path).info.series
    return None


def _bad(item: Item, tiling: Tiling, error: EquicamError, row: RasterRow | None = None) -> _Cut:
    """A raster without windows: one bad item, which says why when it is read."""
    row = row or RasterRow(item.id, str(item.path), **asdict(file_stat(item.path)))
    window = replace(item, window=RasterWindow(0.0, 0.0, 0.0, tiling))
    return _Cut(Items.of([window]), replace(row, error=str(error)), error)


def _cut(item: Item, tiling: Tiling, margin: int) -> _Cut:
    stat = file_stat(item.path)
    if isinstance(item.path, RemotePath):  # not requested again for every window
        item = replace(item, path=replace(item.path, stat=stat))
    known = RasterRow(item.id, str(item.path), **asdict(stat))
    try:
        with refusing(f"raster {str(item.path)!r}", "a file that can be read"):
            raster = open_raster(item.path)
            info = raster.info
            stated: dict[str, Any] = {k: value for k, value in vars(info).items() if hasattr(known, k)}
            known = replace(known, **stated | {"mpp": tiling.mpp_is or info.mpp})
            resolve_input(info, tiling.input, str(item.path))
            places, side, left_out = _places(raster, item.path, tiling)
    except EquicamError as error:
        if limited.is_memory_error(error):
            raise  # in a process that has read nothing else there may be enough
        return _bad(item, tiling, error, known)

    def windows() -> Iterator[Item]:
        for x, y, label in places:
            window = RasterWindow(x, y, side, tiling, margin)
            name = window_id(item.id, window)
            yield replace(item, id=name, window=window, label=item.label if label is None else label)

    return _Cut(Items.of(windows()), replace(known, windows=len(places), **left_out), notes=info.notes)


def _places(
    raster: Raster, path: AnyPath, tiling: Tiling
) -> tuple[list[tuple[float, float, str | None]], float, dict[str, Any]]:
    """Left and top of every window that is kept, with the label of its region; the side; and how many were left out."""
    info = raster.info
    scale = _pixels_per_pixel(raster, tiling, str(path))
    side, step = tiling.tile * scale, tiling.step * scale
    columns, rows = (_starts(length, side, step) for length in (info.width, info.height))
    if not columns or not rows:
        needs = f"sides of {side:g} pixels or more, for a tile of {tiling.tile}"
        raise bad_raster(path, needs, f"{info.width} × {info.height}", "a smaller --tile")
    if (count := len(columns) * len(rows)) > MAX_WINDOWS:
        fix = "a larger --stride or --mpp"
        raise bad_raster(path, f"at most {MAX_WINDOWS:,} windows", f"{count:,}", fix)
    x, y = (grid.ravel() for grid in np.meshgrid(columns, rows))
    bands = display_bands(raster, tiling.input, str(path))
    if tiling.tissue > 0 and (info.kind != "slide" or len(bands) != 3):
        got = "a map" if info.kind != "slide" else f"{len(bands)} band"
        raise bad_raster(path, "a slide in three colours, for tissue", got, "tissue=0, or regions")
    wanted = THUMBNAIL_PX_A_WINDOW * max(info.width, info.height) / side
    small = raster.thumbnail(bands, int(min(MAX_THUMBNAIL_PX, max(THUMBNAIL_PX, wanted))))
    pixels, shrink = small.pixels, small.shrink
    # what cannot be read is kept: its windows are rows with the reason
    has_data = _share(pixels.valid | small.unread, x, y, side, shrink) >= max(tiling.valid, 1e-9)
    is_tissue = np.ones(len(x), bool)
    if tiling.tissue > 0:
        stained = _tissue(pixels.values, pixels.valid) | small.unread
        is_tissue = _share(stained, x, y, side, shrink) >= tiling.tissue
    labels: NDArray[Any] = np.full(len(x), None, object)
    inside = np.ones(len(x), bool)
    if tiling.regions is not None:
        labels, inside = find_in_regions(read_regions(info, path, tiling.regions), x + side / 2, y + side / 2)
    shown = has_data & is_tissue
    left_out = {"background": has_data & ~is_tissue, "nodata": ~has_data, "outside": shown & ~inside}
    places = [(float(x[i]), float(y[i]), labels[i]) for i in np.flatnonzero(shown & inside)]
    return places, side, {name: int(some.sum()) for name, some in left_out.items()}


def _pixels_per_pixel(raster: Raster, tiling: Tiling, name: str) -> float:
    """Pixels of level 0 for one of the model's."""
    wanted, stored = tiling.input.mpp, tiling.mpp_is or raster.info.mpp
    if wanted is None:
        return 1.0
    info = raster.info
    unit = "µm" if info.kind == "slide" else f"units of {info.crs}" if info.crs else "units of the map"
    a, b, _, d, e, _ = info.transform or (1, 0, 0, 0, 1, 0)
    if square_side(math.hypot(a, d), math.hypot(b, e)) is None:
        fix = "no --mpp, or a resampled copy"
        raise bad_raster(name, "square pixels, for --mpp", "pixels that are not", fix)
    if stored is None:
        fix = "--mpp-is 0.25, if you know it"
        raise bad_raster(name, "its resolution, for --mpp", "none in the file", fix)
    ratio = wanted / stored
    if ratio < 0.5 or ratio > 1000:
        needs = f"to be as fine as --mpp, or at most twice as coarse, in {unit}"
        raise bad_raster(name, needs, f"{stored:g} a pixel for --mpp {wanted:g}", "another --mpp")
    return 1.0 if abs(ratio - 1) < 1e-9 else ratio


def _starts(length: int, side: int | float, step: int | float) -> list[float]:
    """Where windows begin along one side; the last one ends at the border."""
    if side > length * (1 + 1e-9):
        return []
    count = math.floor((length - side) / step + 1e-9) + 1
    starts = [i * step for i in range(count)]
    if length - side - starts[-1] > 1e-6 * length:
        starts.append(length - side)
    return starts


def _share(
    mask: NDArray[np.bool_], x: NDArray[Any], y: NDArray[Any], side: int | float, shrink: int | float
) -> NDArray[np.float64]:
    """The share of each window that a mask of the whole raster covers."""
    total = np.pad(mask.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    high, wide = mask.shape
    x0, y0 = (np.clip((v / shrink).astype(int), 0, limit - 1) for v, limit in ((x, wide), (y, high)))
    x1 = np.clip(np.ceil((x + side) / shrink).astype(int), x0 + 1, wide)
    y1 = np.clip(np.ceil((y + side) / shrink).astype(int), y0 + 1, high)
    inside = total[y1, x1] - total[y0, x1] - total[y1, x0] + total[y0, x0]
    return np.asarray(inside / ((x1 - x0) * (y1 - y0)))


def _tissue(rgb: NDArray[Any], valid: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Where a slide is more saturated than Otsu's threshold: stain, not glass."""
    values = rgb.astype(np.float32)
    high, low = values.max(0), values.min(0)
    saturation = np.where(high > 0, (high - low) / np.maximum(high, 1), 0)
    known = saturation[valid]
    if not known.size:
        return np.zeros(valid.shape, bool)
    return np.asarray(valid & (saturation > max(MIN_SATURATION, _otsu(known))))


def _otsu(values: NDArray[np.float32], bins: int = 256) -> float:
    """The threshold between two groups of values in [0, 1] that are farthest apart for their spread."""
    counts, edges = np.histogram(values, bins=bins, range=(0, 1))
    centres, weight = (edges[:-1] + edges[1:]) / 2, counts.cumsum()
    total, mass = counts.sum(), (counts * centres).cumsum()
    with np.errstate(divide="ignore", invalid="ignore"):
        between = (mass[-1] * weight / total - mass) ** 2 / (weight * (total - weight))
    between[~np.isfinite(between)] = -1
    return float(edges[int(between.argmax()) + 1])
