"""Fusion: the views of an image become one map.

With M_t aligning view t and weights w_t (sum 1), feature-space EquiGrad-CAM is

    ᾱ_k = mean_p Σ_t w_t (M_t g_t^k)(p),   map = unit ∘ upsample ∘ ReLU ( Σ_k ᾱ_k Σ_t w_t M_t A_t^k ).

Every other method stops the same chain elsewhere: `Fusion` says where views are aligned and where they are averaged.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from equicam.core.alignment import Alignment, contract_then_warp
from equicam.core.chain import STAGES, Chain, Combine, Stage, grad_cam, grad_cam_rectified, unit
from equicam.core.views import Fill, Views, select
from equicam.core.weights import Weigher, normalise, uniform
from equicam.errors import EquicamError, not_one_of

T = TypeVar("T")


@dataclass(frozen=True)
class Fusion:
    """Which views, where they are aligned, where they are averaged, how they are weighted."""

    views: Views
    align_at: Stage | None  # None: never aligned
    mean_at: Stage
    weigh: Weigher = uniform

    def __post_init__(self) -> None:
        for name, stage in (
            ("align_at", "map" if self.align_at is None else self.align_at),
            ("mean_at", self.mean_at),
        ):
            if stage not in STAGES:
                raise not_one_of(f"Fusion.{name}", STAGES, stage, '"map"')
        if not self.views.radius:
            raise EquicamError(
                "views", "a part of the image that all of them show", ", ".join(self.views.labels[:3]),
                "Views.shifts((0.05, 0))",
            )  # fmt: skip
        if self.align_at is not None and STAGES.index(self.align_at) > STAGES.index(self.mean_at):
            raise EquicamError(
                "Fusion", "align_at no later than mean_at", f"align_at={self.align_at!r}, mean_at={self.mean_at!r}",
                f"mean_at={self.align_at!r}",
            )  # fmt: skip


@dataclass(frozen=True)
class ViewReadings:
    """What a reader returned for every view of some images, the presented view first."""

    views: Views
    stage: Stage  # where the values enter the chain
    values: tuple[Float[Tensor, "s b ..."], ...]  # (acts, grads) at features, one plane elsewhere
    confidence: Float[Tensor, "s b"]  # p_c of the target
    top1: Int[Tensor, "s b"]
    target: Int[Tensor, " b"]
    logits: Float[Tensor, "b y"] | None  # of the presented view; None without a model
    probabilities: Float[Tensor, "b y"] | None
    size: tuple[int, int]  # of the images, in pixels
    # Grad-CAM's channel weights, as the paper's authors do behind a class token
    rectify_weights: bool = False
    _computed: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def of_views(self, views: Views) -> "ViewReadings":
        """The same images read in these views alone, the presented view first."""
        ordered, _ = views.presented_first()
        rows = ordered.indices_in(self.views)
        if rows == list(range(len(self.views))):
            return self
        return self._once(
            ("of_views", *rows),
            lambda: replace(
                self,
                views=ordered,
                values=tuple(select(v, rows) for v in self.values),
                confidence=select(self.confidence, rows),
                top1=select(self.top1, rows),
                _computed={},
            ),
        )

    def chain_of_each_view(self, combine: Combine) -> dict[Stage, Tensor]:
        """Every named plane of each view's own chain."""
        chain = Chain(combine, self.size)
        return self._once(("chain", combine), lambda: chain.trace(self.stage, self.values))

    def aligned_maps(self, combine: Combine, alignment: Alignment) -> Float[Tensor, "s b H W"]:
        """h_t: each view's own map, aligned if the alignment is enabled."""
        return self._once(
            ("maps", combine, alignment.enabled, alignment.fill),
            lambda: alignment.align(self.chain_of_each_view(combine)["map"]),
        )

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        """Several fusions of the same views share what they have in common."""
        if key not in self._computed:
            self._computed[key] = make()
        return cast(T, self._computed[key])


@dataclass(frozen=True)
class FusedMap:
    """One fusion of the readings, finished up to the last min–max."""

    readings: ViewReadings
    fusion: Fusion
    alignment: Alignment
    combine: Combine
    gate: Float[Tensor, "t b"]  # what the weigher returned, before scaling
    order: list[int]  # the index of each of the fusion's views in `readings`
    raw: Float[Tensor, "b H W"]
    layer_map: Float[Tensor, "b h w"]  # the same at the layer's resolution

    @property
    def map(self) -> Float[Tensor, "b H W"]:
        """The map in [0, 1]."""
        return unit(self.raw)

    @property
    def aligned_maps(self) -> Float[Tensor, "s b H W"]:
        """h_t: each view's own map, the presented view first; aligned if the fusion aligns."""
        return self.readings.aligned_maps(self.combine, self.alignment)

    @property
    def maps_in_presented_frame(self) -> Float[Tensor, "s b H W"]:
        """Each view's own map aligned, whether the fusion aligns or not."""
        return self.readings.aligned_maps(self.combine, replace(self.alignment, enabled=True))


def fuse(readings: ViewReadings, combine: Combine, fusion: Fusion, fill: Fill) -> FusedMap:
    """Carry views to `align_at`, align them, carry them to `mean_at`, average, and finish the chain once."""
    readings = readings.of_views(fusion.views)
    _, order = fusion.views.presented_first()
    is_top1 = readings.top1 == readings.target
    gate = fusion.weigh(select(readings.confidence, order), select(is_top1, order))
    count = len(readings.views)
    weights = normalise(gate, order, count)
    same = tuple((s in order) / len(order) for s in range(count)) if fusion.weigh is uniform else None
    alignment = Alignment(readings.views, fusion.align_at is not None, fill, weights, same)
    if readings.rectify_weights and combine is grad_cam:
        combine = grad_cam_rectified
    if STAGES.index(fusion.align_at or fusion.mean_at) < STAGES.index(readings.stage):
        raise EquicamError(
            f"a reader that starts at {readings.stage!r}", "a fusion from there on",
            f"align_at={fusion.align_at!r}, mean_at={fusion.mean_at!r}", 'align_at="map", mean_at="map"',
        )  # fmt: skip
    fused = average(readings, combine, fusion, alignment)
    raw = fused["map"] if fusion.mean_at == "map" else fused["upsampled"]
    # a mean taken at pixel size is pooled to the grid its views were read on
    grid = readings.values[0].shape[-2:]
    layer_map = fused["rectified"] if "rectified" in fused else adaptive_avg_pool2d(raw, (grid[0], grid[1]))
    return FusedMap(readings, fusion, alignment, combine, gate, order, raw, layer_map)


def average(
    readings: ViewReadings, combine: Combine, fusion: Fusion, alignment: Alignment
) -> dict[Stage, Tensor]:
    """The planes of a fusion's chain from `mean_at` on, which has one for all views."""
    chain = Chain(combine, readings.size)
    if fusion.align_at == fusion.mean_at == "features" and combine in (grad_cam, grad_cam_rectified):
        plane = contract_then_warp(alignment, *readings.values, rectify=combine is grad_cam_rectified)
        return chain.trace("combined", [plane], until="upsampled")
    aligned = _aligned_values(readings, combine, fusion, alignment)
    start, at = fusion.align_at or fusion.mean_at, fusion.mean_at
    carried = aligned if start == at else [chain.trace(start, aligned, until=at)[at]]
    return chain.trace(at, [alignment.mean(v) for v in carried], until="upsampled")


def _aligned_values(
    readings: ViewReadings, combine: Combine, fusion: Fusion, alignment: Alignment
) -> list[Tensor]:
    start = fusion.align_at or fusion.mean_at
    if start == "map":
        return [readings.aligned_maps(combine, alignment)]
    values = readings.values if start == "features" else (readings.chain_of_each_view(combine)[start],)
    return [alignment.align(v) for v in values]


FLAGS = ("blank", "constant", "flipped", "none-kept", "low-coverage", "odd-size")


def health(
    fused: FusedMap, low: Float[Tensor, " b"], constant: Bool[Tensor, " b"], flips: Bool[Tensor, "t b"]
) -> Bool[Tensor, "b f"]:
    """One column for each of `FLAGS`; `low` is the raw map's minimum, `constant` whether it has no other value."""
    zero = low == 0
    alignment, (height, width) = fused.alignment, fused.readings.size
    h, w = fused.layer_map.shape[-2:]
    uncovered = torch.zeros_like(zero)
    if alignment.enabled and alignment.fill != "reflect":
        uncovered = (alignment.covered((h, w)) == 0).flatten(1).any(1).expand_as(zero)
    odd = torch.full_like(zero, height != width or bool(height % h) or bool(width % w))
    none_kept = ~(fused.gate > 0).any(0)
    return torch.stack((constant & zero, constant & ~zero, flips.any(0), none_kept, uncovered, odd), 1)


def flag_names(table: Bool[Tensor, "b f"]) -> tuple[frozenset[str], ...]:
    """The flags of every image by name."""
    return tuple(_names(tuple(row)) for row in table.tolist())


@cache
def _names(row: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(name for name, hit in zip(FLAGS, row, strict=True) if hit)
