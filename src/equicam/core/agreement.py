"""Agreement: which part of a map its views mark, each on its own; and repeatability: one half of the views against the other.

    a(p) = Σ_t w_t [p is hot in view t] / Σ_t w_t,   over the views that cover p.

Hot are the pixels of a view's own aligned map above its 80th percentile in the disc: at most a fifth of them, and none of a
constant map. The outline holds the pixels with a ≥ ¾ that are hot in the map, too. Maps are compared on a coarse grid, because they have few details: it is a sixteenth of the work at 224 pixels.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d, interpolate

from equicam.core.alignment import inverse
from equicam.core.chain import unit
from equicam.core.fusion import FusedMap, average
from equicam.core.uncertainty import pearson, pixels_in, standardise
from equicam.core.views import Views, select

OUTLINE_FROM = 0.75
"""The agreement from which a pixel is outlined."""
ROUNDING = 1e-6
"""Of a sum of weights."""
HOT_SHARE = 0.2
LEAST_AREA = 0.01
"""Of the disc: with a smaller outline, a map is split."""
LEAST_VIEWS = 6
"""Fewer views outline something by chance."""
LONGER_SIDE = 64
"""Cells of the coarse grid at most, so that an outline takes 512 bytes."""

Word = Literal["agreed", "split", "blank"]
WORDS: tuple[Word, ...] = ("agreed", "split", "blank")


@dataclass(frozen=True)
class Agreement:
    """What the views of some images agree on, on the coarse grid."""

    share: Float[Tensor, "b g j"]
    outline: Bool[Tensor, "b g j"]
    area: Float[Tensor, " b"]  # share of the disc inside the outline; NaN below six views
    too_blank: Bool[Tensor, " b"]  # so many views are constant that no pixel can be outlined


def measure_agreement(fused: FusedMap, *, in_window: bool = False) -> Agreement:
    """The agreement of a map's views; with context, a pixel is hot among those of the view's whole window."""
    alignment, views, radius = fused.alignment, fused.readings.views, fused.fusion.views.radius
    grid = coarse_grid(fused.readings.size)
    aligned = adaptive_avg_pool2d(fused.maps_in_presented_frame, grid)
    shown = adaptive_avg_pool2d(unit(fused.raw), grid)
    if in_window:
        of_views = fused.readings.chain_of_each_view(fused.combine)["map"]
        own, ranked = adaptive_avg_pool2d(of_views, grid).flatten(-2), shown.flatten(-2)
    else:
        own, ranked = (pixels_in(maps, "disc", radius) for maps in (aligned, shown))
    hot = aligned > _percentile(own)[..., None, None]
    cover = alignment.weights[..., None, None] * views.coverage(grid, like=aligned)[:, None]
    share = (cover * hot).sum(0) * inverse(cover.sum(0))
    outline = (share >= OUTLINE_FROM - ROUNDING) & (shown > _percentile(ranked)[..., None, None])
    few = (fused.gate > 0).sum(0) < LEAST_VIEWS
    area = torch.where(few, torch.nan, pixels_in(outline.to(share.dtype), "disc", radius).mean(-1))
    blank_weight = (alignment.weights * standardise(own)[1]).sum(0)
    return Agreement(share, outline, area, blank_weight > 1 - OUTLINE_FROM + ROUNDING)


def coarse_grid(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the grid on which views are compared."""
    step = math.ceil(max(size) / LONGER_SIDE)
    return math.ceil(size[0] / step), math.ceil(size[1] / step)


def _percentile(values: Float[Tensor, "*n p"]) -> Float[Tensor, "*n"]:
    """The least value that at most a fifth of the values exceed."""
    count = values.shape[-1]
    return values.kthvalue(count - int(HOT_SHARE * count), -1).values


def to_pixels(outline: Bool[Tensor, "b g j"], size: tuple[int, int]) -> Bool[Tensor, "b H W"]:
    """The outline as a mask at pixel size."""
    return interpolate(outline[:, None].float(), size, mode="bilinear")[:, 0] >= 0.5


def repeatability(fused: FusedMap) -> Float[Tensor, " b"]:
    """Pearson in the disc of the map from every other view with the map from the rest; NaN where a half keeps no view."""
    if len(fused.order) < 2:
        return torch.full_like(fused.gate[0], torch.nan)
    (first, kept), (second, also_kept) = (_map_from(fused, start) for start in (0, 1))
    r = pearson(first, second, "disc", fused.fusion.views.radius)[:, 0, 0]
    return torch.where(kept & also_kept, r.to(first.dtype), torch.nan)


def _map_from(fused: FusedMap, start: int) -> tuple[Float[Tensor, "b 1 g j"], Bool[Tensor, " b"]]:
    """The map from every other view of the set, coarse, and whether the weigher kept any of them."""
    readings, rows, gate = fused.readings, fused.order[start::2], fused.gate[start::2]
    views = Views([readings.views.transforms[t] for t in rows])
    values = tuple(select(value, rows) for value in readings.values)
    confidence, top1 = select(readings.confidence, rows), select(readings.top1, rows)
    half = replace(readings, views=views, values=values, confidence=confidence, top1=top1, _computed={})
    total = gate.sum(0)
    weights = gate * inverse(total)
    same = (1 / len(rows),) * len(rows) if fused.alignment.same_weights else None
    alignment = replace(fused.alignment, views=views, weights=weights, same_weights=same)
    planes = average(half, fused.combine, fused.fusion, alignment)
    raw = planes["map" if fused.fusion.mean_at == "map" else "upsampled"]
    return adaptive_avg_pool2d(unit(raw), coarse_grid(readings.size))[:, None], total > 0


def word_for(area: float, flags: frozenset[str]) -> Word | None:
    """Agreed, split or blank; None below six views."""
    if {"blank", "constant", "blank-views"} & flags:
        return "blank"
    return None if math.isnan(area) else "agreed" if area >= LEAST_AREA else "split"
