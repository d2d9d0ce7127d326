"""An overview of every raster of a run: its thumbnail, map strength, signal and PEUM window by window, and the queue's windows.

A raster is shown only if it is still the one that was explained: the same size, and windows with the recorded digests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float
from markupsafe import Markup
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
INK, PAPER = "#5b2a86", "#fff"
PLACED = ["id", "path", "index", "x", "y", "side", "sha256", "bytes", "input_box", "status"]
"""The columns that windows are drawn and checked by."""
MAX_SIDE_PX = 2**40  # of a raster: a damaged table may hold anything

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RasterCard:
    """One raster as the page shows it."""

    facts: dict[str, Any]  # also in the JSON
    missing: str | None  # why the raster itself cannot be shown
    thumbnail: str | None = None  # data URLs; None: the raster could not be read
    strength: str | None = None  # None: the run holds no map of it
    signal: str | None = None
    peum: str | None = None  # None: it is the signal, or undefined
    plain: str | None = None  # pale, below the outlines
    outlines: Markup | None = None
    labelled: int = 0  # outlined windows whose rank is written next to them
    outlined: int = 0
    style: str = ""  # the size of its thumbnails in the page


@dataclass(frozen=True)
class Overview:
    """The rasters of a run; the first of them as cards."""

    facts: dict[str, Any]
    cards: tuple[RasterCard, ...]
    scale: str  # the colours of both scales, as a data URL


def raster_overview(
    store: RunStore,
    manifest: Manifest,
    items: pa.Table,
    queue: Sequence[Mapping[str, Any]],
    *,
    by: str,
    cards: int,
) -> Overview | None:
    """The overview of a run of rasters, None for a run of images; the first `cards` of the queue have a card to link to."""
    rows = store.rasters().to_pylist()
    if manifest.tiling is None or not rows:
        return None
    ids = [raster_id(name) for name in items["id"].to_pylist()]
    members: dict[str, list[int]] = {row["id"]: [] for row in rows}
    for place, name in enumerate(ids):
        members.setdefault(name, []).append(place)
    queued: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, ranked in enumerate(queue, start=1):
        queued.setdefault(raster_id(ranked["id"]), []).append((number, ranked))
    rows.sort(key=lambda row: (-len(queued.get(row["id"], ())), row["error"] is None, row["id"]))
    signal = np.where(flagged(items, FLAT), np.nan, signal_values(items, by))
    shown = rows[:MAX_RASTERS]
    strength = _strengths(store, items, [i for row in shown for i in members[row["id"]]])
    values = {"strength": strength, "signal": signal}
    if by != "peum":
        values["peum"] = np.where(flagged(items, FLAT), np.nan, signal_values(items, "peum"))
    scales = {name: _scale(column) for name, column in values.items()}
    facts = [_facts(row, members[row["id"]], items, signal, len(queued.get(row["id"], ()))) for row in rows]
    shades = dict(scales)
    if by == "stability" and scales["signal"]:  # bright is what to review
        shades["signal"] = (scales["signal"][1], scales["signal"][0])
    placed = items.select(PLACED)
    shown_cards = tuple(
        _card(
            row, one, placed.take(members[row["id"]]), {name: column[members[row["id"]]] for name, column in values.items()},
            queued.get(row["id"], ()), shades, manifest, cards,
        )
        for row, one in zip(shown, facts, strict=False)
    )  # fmt: skip
    return Overview({"by": by, "scales": scales, "rasters": facts}, shown_cards, render.data_url(_colours()))


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
    low, high = np.percentile(known, [1, 99])
    return float(low), float(high if high > low else low + max(abs(low), 1.0) * 1e-6)


def _card(
    row: Mapping[str, Any],
    facts: dict[str, Any],
    items: pa.Table,
    values: Mapping[str, Floats],
    queued: Sequence[tuple[int, Mapping[str, Any]]],
    scales: Mapping[str, tuple[float, float] | None],
    manifest: Manifest,
    cards: int,
) -> RasterCard:
    width, height = row["width"], row["height"]
    if row["error"] is not None or not all(v is not None and 1 <= v <= MAX_SIDE_PX for v in (width, height)):
        return RasterCard(facts, row["error"] or "The run did not record its size.")
    size = render.fit((height, width), THUMB_PX)
    found = _read_raster(items, manifest, size)
    missing = found if isinstance(found, str) else None
    thumbnail = render.background(found, size)
    scale_x, scale_y = thumbnail.shape[1] / width, thumbnail.shape[0] / height
    boxes = _boxes(items, scale_x, scale_y)
    places = dict(zip(items["id"].to_pylist(), boxes, strict=True))
    outlined = [
        (tuple(places[one["id"]]), int(one["rank"]), number if number <= cards else None)
        for number, one in queued[:MAX_OUTLINES]
        if one["id"] in places and np.isfinite(places[one["id"]]).all()
    ]
    wide = min(MAX_PAGE_WIDTH_PX, MAX_PAGE_HEIGHT_PX * thumbnail.shape[1] / thumbnail.shape[0])
    outlines, labelled = _outlines(
        outlined, thumbnail.shape[1], thumbnail.shape[0], thumbnail.shape[1] / wide
    )
    pale = _pale(thumbnail)
    return RasterCard(
        facts, missing, thumbnail=render.data_url(thumbnail), plain=render.data_url(pale),
        **{name: _painted(thumbnail, boxes, column, scales[name]) for name, column in values.items()},
        outlines=outlines, labelled=labelled, outlined=len(outlined),
        style=f"width: {max(24, round(wide))}px",
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
    thumbnail: RgbImage, boxes: Float[np.ndarray, "n 4"], values: Floats, scale: tuple[float, float] | None
) -> str | None:
    """The windows' values as colours over the thumbnail, their mean where windows overlap; pale where there is none."""
    if scale is None or not np.isfinite(values).any():
        return None
    mean, covered = mean_over_windows(boxes, values, (thumbnail.shape[0], thumbnail.shape[1]))
    low, high = scale
    colours = heat(np.clip((mean - low) / (high - low), 0, 1))
    pale = _pale(thumbnail)  # a dark thumbnail would darken the colours
    blended = HEAT_STRENGTH * colours + (1 - HEAT_STRENGTH) * pale
    return render.data_url(np.where(covered[..., None], blended, pale).round().astype(np.uint8))


def mean_over_windows(
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


def _pale(thumbnail: RgbImage) -> RgbImage:
    """The thumbnail in pale grey, for marks to lie on."""
    grey = thumbnail @ np.array([0.299, 0.587, 0.114])
    return np.repeat((0.45 * grey + 0.55 * 255)[..., None], 3, axis=-1).round().astype(np.uint8)


def _colours() -> RgbImage:
    """The colours from low to high as they look over a grey thumbnail."""
    ramp = np.broadcast_to(np.linspace(0, 1, 256), (16, 256)).copy()
    over: RgbImage = (HEAT_STRENGTH * heat(ramp) + (1 - HEAT_STRENGTH) * 220.0).round().astype(np.uint8)
    return over


def _outlines(
    outlined: Sequence[tuple[tuple[float, ...], int, int | None]], width: int, height: int, unit: float
) -> tuple[Markup, int]:
    """Squares with their ranks as SVG, and how many have a rank; one that would hide another is left out.

    `unit` is how many pixels of the thumbnail one pixel of the page has.
    """
    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Windows of the queue, outlined, with their rank.">'
    ]
    for (x0, y0, x1, y1), _, _ in outlined:
        square = f'x="{x0:.1f}" y="{y0:.1f}" width="{max(1.0, x1 - x0):.1f}" height="{max(1.0, y1 - y0):.1f}"'
        parts.append(
            f'<rect {square} fill="none" stroke="{PAPER}" stroke-width="{3.5 * unit:.2f}"/>'
            f'<rect {square} fill="none" stroke="{INK}" stroke-width="{1.6 * unit:.2f}"/>'
        )
    taken: list[tuple[float, float, float, float]] = []
    high = (LABEL_PX + 3) * unit
    for box, rank, link in sorted(outlined, key=lambda one: one[1]):
        wide = (0.62 * LABEL_PX * len(str(rank)) + 7) * unit
        at = _label_place(box, wide, high, width, height, taken)
        if at is None:
            continue
        taken.append((at[0], at[1], at[0] + wide, at[1] + high))
        label = (
            f'<rect x="{at[0]:.1f}" y="{at[1]:.1f}" width="{wide:.1f}" height="{high:.1f}" rx="{3 * unit:.1f}" fill="{INK}"/>'
            f'<text x="{at[0] + wide / 2:.1f}" y="{at[1] + high - 3.6 * unit:.1f}" text-anchor="middle" '
            f'font-size="{LABEL_PX * unit:.1f}" font-weight="600" fill="{PAPER}">{rank}</text>'
        )
        parts.append(label if link is None else f'<a href="#image-{link}">{label}</a>')
    return Markup("".join([*parts, "</svg>"])), len(taken)  # noqa: S704  # numbers alone


def _label_place(
    box: tuple[float, ...],
    wide: float,
    high: float,
    width: int,
    height: int,
    taken: Sequence[tuple[float, float, float, float]],
) -> tuple[float, float] | None:
    """The left and top of a label: in the window's corner, its middle or just outside it; None if none is free."""
    x0, y0, x1, y1 = box
    middle = (x0 + x1 - wide) / 2
    inside = [(x0, y0), (middle, (y0 + y1 - high) / 2)]
    outside = [(middle, y0 - high), (middle, y1), (x1, y0), (x0 - wide, y0)]
    fits = x1 - x0 >= wide and y1 - y0 >= high
    for x, y in (inside + outside) if fits else outside:
        left, top = min(max(0.0, x), width - wide), min(max(0.0, y), height - high)
        free = all(
            left >= r or left + wide <= left_ or top >= b or top + high <= t for left_, t, r, b in taken
        )
        if free and left >= 0 and top >= 0 and math.hypot(left - x, top - y) <= high:
            return left, top
    return None
