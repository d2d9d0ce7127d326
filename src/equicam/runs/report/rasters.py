"""An overview of every raster of a run: its thumbnail, map strength, signal and PEUM window by window, and the queue's windows.

A raster is shown only if it is still the one that was explained: the same size, and windows with the recorded digests.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from PIL import Image

from equicam.images import limited
from equicam.images.files import as_path
from equicam.overlay import RgbImage, heat
from equicam.rasters.options import raster_id
from equicam.runs.manifest import Manifest
from equicam.runs.report import render
from equicam.runs.signals import FLAT, flagged, signal_values
from equicam.runs.store import RunStore

MAX_RASTERS = 12
THUMB_PX = 640  # the longer side of a raster's thumbnail
MAX_PAGE_WIDTH_PX, MAX_PAGE_HEIGHT_PX = 414, 480  # of a thumbnail in the page
MAX_OUTLINES = 400  # in one thumbnail
LABEL_PX = 12  # letters in the page
CHECKED_WINDOWS = 3  # digests compared before a raster is shown
HEAT_STRENGTH = 0.72
PLACED = ["id", "path", "index", "x", "y", "side", "sha256", "bytes", "input_box", "status"]
"""The columns that windows are drawn and checked by."""
MAX_SIDE_PX = 2**40  # of a raster: a damaged table may hold anything

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class _Outline:
    """A window of the queue in the thumbnail, and where its rank is written: nowhere if it would hide another."""

    box: tuple[float, ...]
    rank: int
    card: int | None  # its number, where the page has a card of it
    label: tuple[float, ...] | None = None


@dataclass(frozen=True)
class _RasterCard:
    """One raster as the page shows it; images are data URLs, None where there is none."""

    facts: dict[str, Any]  # also in the JSON
    missing: str | None  # why the raster itself cannot be shown
    thumbnail: str | None = None  # None: the raster could not be read
    plain: str | None = None  # pale, below the outlines
    # strength, signal and peum as colours over it
    values: Mapping[str, str | None] = field(default_factory=dict)
    size: tuple[int, int] = (0, 0)  # of the thumbnail: width and height
    width: int | float = 0  # in the page
    outlines: tuple[_Outline, ...] = ()


@dataclass(frozen=True)
class Overview:
    """The rasters of a run; the first of them as cards."""

    facts: dict[str, Any]
    cards: tuple[_RasterCard, ...]
    scale: str  # the colours of both scales, as a data URL


def raster_overview(
    store: RunStore, items: pa.Table, queue: Sequence[Mapping[str, Any]], *, by: str, cards: int
) -> Overview | None:
    """The overview of a run of rasters, None for a run of images; the first `cards` of the queue have a card to link to."""
    rows = store.rasters().to_pylist()
    if not rows:
        return None
    members: dict[str, list[int]] = {row["id"]: [] for row in rows}
    for place, name in enumerate(items["id"].to_pylist()):
        members.setdefault(raster_id(name), []).append(place)
    queued: dict[str, list[tuple[str, int, int | None]]] = {row["id"]: [] for row in rows}
    for number, ranked in enumerate(queue, start=1):
        window = (ranked["id"], int(ranked["rank"]), number if number <= cards else None)
        queued.setdefault(raster_id(ranked["id"]), []).append(window)
    rows.sort(key=lambda row: (-len(queued[row["id"]]), row["error"] is None, row["id"]))
    shown, flat = rows[:MAX_RASTERS], flagged(items, FLAT)
    values = {
        "strength": _strengths(store, items, [i for row in shown for i in members[row["id"]]]),
        "signal": np.where(flat, np.nan, signal_values(items, by)),
    }
    if by != "peum":
        values["peum"] = np.where(flat, np.nan, signal_values(items, "peum"))
    scales = {name: _scale(column) for name, column in values.items()}
    facts = [_facts(row, members[row["id"]], items, values["signal"], len(queued[row["id"]])) for row in rows]
    shades = dict(scales)
    if by == "stability" and scales["signal"]:  # bright is what to review
        shades["signal"] = (scales["signal"][1], scales["signal"][0])
    placed, made = items.select(PLACED), []
    for row, about in zip(shown, facts, strict=False):
        of, some = members[row["id"]], queued[row["id"]]
        columns = {name: column[of] for name, column in values.items()}
        made.append(_card(row, about, placed.take(of), columns, some, shades, store.manifest))
    ramp = np.broadcast_to(np.linspace(0, 1, 256), (16, 256)).copy()
    colours = HEAT_STRENGTH * heat(ramp) + (1 - HEAT_STRENGTH) * 220.0  # as they look over a grey thumbnail
    scale = render.data_url(colours.round().astype(np.uint8))
    return Overview({"by": by, "scales": scales, "rasters": facts}, tuple(made), scale)


def _facts(
    row: Mapping[str, Any], members: Sequence[int], items: pa.Table, signal: Floats, queued: int
) -> dict[str, Any]:
    """The numbers of a raster; none of them is of the control arm alone."""
    copied = (
        "id", "kind", "width", "height", "bands", "dtype", "mpp", "crs", "reader", "windows", "background", "nodata",
        "outside", "error",
    )  # fmt: skip
    known = signal[list(members)]
    known = known[np.isfinite(known)]
    ok = pc.sum(pc.equal(items["status"].take(pa.array(members, pa.int64())), "ok")).as_py() or 0
    return {name: row[name] for name in copied} | {
        "explained": ok,
        "queue": queued,
        "median_signal": float(np.median(known)) if known.size else None,
    }


def _strengths(store: RunStore, items: pa.Table, wanted: Sequence[int]) -> Floats:
    """The mean of each wanted window's map, NaN for all other rows and where the run holds none."""
    found = np.full(items.num_rows, np.nan)
    ids = items["id"].take(pa.array(wanted, pa.int64())).to_pylist()
    place = dict(zip(ids, wanted, strict=True))
    sample = store.sample()
    needed = pc.unique(sample["shard"].filter(pc.is_in(sample["id"], pa.array(ids, pa.string())))).to_pylist()
    for number in needed:
        if not store.path("maps", number).is_file():
            continue
        maps = store.read_shard("maps", number, ["id", "map", "map_scale"])
        lists = maps["map"].combine_chunks()
        rows = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
        values = pc.list_flatten(lists).to_numpy(zero_copy_only=False).astype(np.float64)
        total, count = (np.bincount(rows, weights, len(lists)) for weights in (values, None))
        scale = np.asarray(maps["map_scale"].cast(pa.float64()).fill_null(np.nan).to_numpy())
        means = np.divide(total, count, out=np.full(len(lists), np.nan), where=count > 0) * scale
        for name, mean in zip(maps["id"].to_pylist(), means, strict=True):
            if name in place:
                found[place[name]] = mean
    return np.where(np.isfinite(found), found, np.nan)


def _scale(values: Floats) -> tuple[float, float] | None:
    """What is black and what is pale yellow: the 1st and 99th percentile of all windows; None without a value."""
    known = values[np.isfinite(values)]
    if not known.size:
        return None
    low, high = np.percentile(known, [1, 99]).tolist()
    return low, high if high > low else low + max(abs(low), 1.0) * 1e-6


def _card(
    row: Mapping[str, Any],
    facts: dict[str, Any],
    items: pa.Table,
    values: Mapping[str, Floats],
    queued: Sequence[tuple[str, int, int | None]],
    scales: Mapping[str, tuple[float, float] | None],
    manifest: Manifest,
) -> _RasterCard:
    width, height = row["width"], row["height"]
    if row["error"] is not None or not all(v is not None and 1 <= v <= MAX_SIDE_PX for v in (width, height)):
        return _RasterCard(facts, row["error"] or "The run did not record its size.")
    size = render.fit((height, width), THUMB_PX)
    found = _read_raster(items, manifest, size)
    thumbnail = render.background(found, size)
    pale = (0.45 * (thumbnail @ np.array([0.299, 0.587, 0.114])) + 0.55 * 255)[..., None]
    plain = np.repeat(pale, 3, axis=-1).round().astype(np.uint8)
    boxes = _boxes(items, size[1] / width, size[0] / height)
    places = dict(zip(items["id"].to_pylist(), boxes, strict=True))
    windows = [
        _Outline(tuple(places[name].tolist()), rank, number)
        for name, rank, number in queued[:MAX_OUTLINES]
        if name in places and np.isfinite(places[name]).all()
    ]
    wide = min(MAX_PAGE_WIDTH_PX, MAX_PAGE_HEIGHT_PX * size[1] / size[0])
    return _RasterCard(
        facts, found if isinstance(found, str) else None, thumbnail=render.data_url(thumbnail), plain=render.data_url(plain),
        values={name: _painted(plain, boxes, column, scales[name]) for name, column in values.items()},
        size=size[::-1], width=wide, outlines=_label_outlines(windows, size, size[1] / wide),
    )  # fmt: skip


def _read_raster(items: pa.Table, manifest: Manifest, size: render.Size) -> RgbImage | str:
    """A thumbnail of the raster, or why it is not shown; a few windows tell whether it is the one explained."""
    windows = items.filter(pc.equal(items["status"], "ok"))
    last = windows.num_rows - 1
    for place in sorted({round(last * i / max(1, CHECKED_WINDOWS - 1)) for i in range(CHECKED_WINDOWS)}):
        if place < 0:
            return "None of its windows was explained, so it is not known to be the same file."
        found = render.read_input(windows.slice(place, 1).to_pylist()[0], (8, 8), manifest)
        if isinstance(found, str):
            return found
    if manifest.tiling is None:
        return "The run does not say how it was read."
    try:
        from equicam.rasters.windows import show_raster

        path = windows["path"][0].as_py()
        thumbnail = limited.call(show_raster, as_path(path), manifest.tiling.input, THUMB_PX)
    except Exception:  # noqa: BLE001  # libraries raise exceptions of every kind on damaged files
        return "The file can no longer be read."
    return np.asarray(thumbnail.resize((size[1], size[0]), Image.Resampling.BILINEAR))


def _boxes(items: pa.Table, scale_x: float, scale_y: float) -> Float[np.ndarray, "n 4"]:
    """Left, top, right and bottom of the windows in pixels of the thumbnail; NaN where a row has none."""
    x, y, side = (
        np.asarray(items[name].cast(pa.float64()).fill_null(np.nan).to_numpy()) for name in ("x", "y", "side")
    )
    side = np.where(side > 0, side, np.nan)
    return np.stack([x * scale_x, y * scale_y, (x + side) * scale_x, (y + side) * scale_y], axis=1)


def _painted(
    plain: RgbImage, boxes: Float[np.ndarray, "n 4"], values: Floats, scale: tuple[float, float] | None
) -> str | None:
    """The windows' values as colours over the pale thumbnail, their mean where windows overlap."""
    if scale is None or not np.isfinite(values).any():
        return None
    mean, covered = _mean_over_windows(boxes, values, (plain.shape[0], plain.shape[1]))
    low, high = scale
    colours = heat(np.clip((mean - low) / (high - low), 0, 1))
    blended = HEAT_STRENGTH * colours + (1 - HEAT_STRENGTH) * plain
    return render.data_url(np.where(covered[..., None], blended, plain).round().astype(np.uint8))


def _mean_over_windows(
    boxes: Float[np.ndarray, "n 4"], values: Floats, size: render.Size
) -> tuple[Float[np.ndarray, "h w"], Bool[np.ndarray, "h w"]]:
    """The mean value of the windows over each pixel, and where there is any; a window has a pixel at least."""
    known = np.isfinite(boxes).all(1) & np.isfinite(values)
    height, width = size
    x0, y0, x1, y1 = np.clip(boxes[known], -1e9, 1e9).T
    left, right = _pixels(x0, x1, width)
    top, bottom = _pixels(y0, y1, height)
    total, count = np.zeros((2, height + 1, width + 1))
    for rows, columns, sign in ((top, left, 1), (bottom, right, 1), (top, right, -1), (bottom, left, -1)):
        np.add.at(total, (rows, columns), sign * values[known])
        np.add.at(count, (rows, columns), sign)
    total, count = (one.cumsum(0).cumsum(1)[:height, :width] for one in (total, count))
    covered = count > 0.5
    return np.where(covered, total / np.maximum(count, 1), 0.0), covered


def _pixels(low: Floats, high: Floats, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first pixel of spans and the one after the last."""
    first = np.clip(np.rint(low), 0, length - 1).astype(np.int64)
    return first, np.clip(np.rint(high), first + 1, length).astype(np.int64)


def _label_outlines(outlines: Sequence[_Outline], size: render.Size, unit: float) -> tuple[_Outline, ...]:
    """The outlines with a place for each rank that hides no other; `unit`: pixels of the thumbnail in one of the page."""
    placed: dict[int, tuple[float, ...]] = {}
    high = (LABEL_PX + 3) * unit
    for number in sorted(range(len(outlines)), key=lambda n: outlines[n].rank):
        wide = (0.62 * LABEL_PX * len(str(outlines[number].rank)) + 7) * unit
        at = _label_place(outlines[number].box, wide, high, size, placed.values())
        if at is not None:
            placed[number] = (*at, wide, high)
    return tuple(replace(one, label=placed.get(n)) for n, one in enumerate(outlines))


def _label_place(
    box: tuple[float, ...], wide: float, high: float, size: render.Size, taken: Iterable[tuple[float, ...]]
) -> tuple[float, float] | None:
    """The left and top of a label: in the window's corner, its middle or just outside it; None if none is free."""
    x0, y0, x1, y1 = box
    middle = (x0 + x1 - wide) / 2
    inside = [(x0, y0), (middle, (y0 + y1 - high) / 2)]
    outside = [(middle, y0 - high), (middle, y1), (x1, y0), (x0 - wide, y0)]
    fits = x1 - x0 >= wide and y1 - y0 >= high
    for x, y in (inside + outside) if fits else outside:
        left, top = min(max(0.0, x), size[1] - wide), min(max(0.0, y), size[0] - high)
        free = all(
            left >= x + w or left + wide <= x or top >= y + h or top + high <= y for x, y, w, h in taken
        )
        if free and left >= 0 and top >= 0 and math.hypot(left - x, top - y) <= high:
            return left, top
    return None
