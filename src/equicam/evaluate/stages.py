"""At which stage from features to map is equivariance lost? Eq at every named tensor of the chain.

Compared in the frame of each presentation on each tensor's own grid. Channel weights have no grid and are compared as vectors; where
the gradient does not vary over the grid they depend on the class alone, so their 1.0 is an identity, not a finding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.chain import Chain, Stage, is_constant
from equicam.core.combine import Combine, Features, grad_cam, grad_cam_rectified
from equicam.core.correlation import CONSTANT_BELOW, Region, pearson
from equicam.core.transforms import Element, Transform
from equicam.core.views import Fill, Views, transform_all
from equicam.evaluate.reasons import ReasonCode
from equicam.evaluate.similarity import own_and_others, region_mask, size_of

WITHOUT_GRID = {"weights", "weights-cosine", "pooled-cosine", "logits-cosine"}
"""Stages that are vectors."""
NEEDS_ANOTHER_CLASS = {"weights", "weights-cosine"}
"""Stages that are the same for any image of a class, so that their floor needs another class."""


@dataclass(frozen=True)
class LayerTrace:
    """Activations and gradients of one view of a batch at the target layer, and its logits."""

    activations: Features
    gradients: Features
    logits: Float[Tensor, "b y"]


@dataclass(frozen=True)
class StageEq:
    """Similarity at one stage by presentation and image, its floor with other images, and why either may be undefined."""

    value: Float[Tensor, "a b"]
    floor: Float[Tensor, "a b"]
    reason: ReasonCode | None = None
    no_floor: ReasonCode = ReasonCode.NO_OTHER_IMAGE


def stages(
    presented: LayerTrace,
    moved: Sequence[LayerTrace],
    presentations: Sequence[Element],
    combine: Combine,
    *,
    target: Int[Tensor, " b"],
    size: tuple[int, int],
    region: Region = "disc",
    fill: Fill = "reflect",
    rectify_last: bool = False,
    unrelated: Bool[Tensor, "b b"] | None = None,
) -> dict[str, StageEq]:
    """By name: activations, gradients, weights (and their cosine), combined, rectified, upsampled, map, pooled, logits."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    views = Views(presentations)
    chain = Chain(combine, size)
    # a class has the same weights in any image: only images of another class are unrelated
    same_class = torch.where(target[:, None] == target, torch.nan, 0.0)
    same_class.fill_diagonal_(0.0)
    before = chain.trace("features", (presented.activations, presented.gradients))
    for one, transform in zip(moved, views.transforms, strict=True):
        after = chain.trace("features", (one.activations, one.gradients))
        rows = _compare_features(one, presented, transform, region, views.radius, fill)
        if combine in (grad_cam, grad_cam_rectified):
            alphas = [g.mean((-2, -1)) for g in (one.gradients, presented.gradients)]
            alphas = [a.relu() for a in alphas] if combine is grad_cam_rectified else alphas
            rows["weights"] = _cosines(*(a - a.mean(1, keepdim=True) for a in alphas)) + same_class
            rows["weights-cosine"] = _cosines(*alphas) + same_class
        stage: Stage
        for stage in ("combined", "rectified", "upsampled", "map"):
            reference = transform_all(before[stage], [transform], fill=fill)[0]
            if rectify_last and stage == "rectified":
                reference = transform_all(before["combined"], [transform], fill=fill)[0].relu()
            rows[stage] = pearson(after[stage], reference, region, views.radius)
        for name, matrix in rows.items():
            found.setdefault(name, []).append(own_and_others(matrix, unrelated))
    made = {name: _stage_eq(name, pairs) for name, pairs in found.items()}
    if bool(is_constant(presented.gradients).all()):
        undefined = torch.full_like(made["gradients"].value, torch.nan)
        made["gradients"] = StageEq(undefined, undefined, ReasonCode.CONSTANT_GRADIENT)
    return made


def _compare_features(
    one: LayerTrace, presented: LayerTrace, transform: Transform, region: Region, radius: float, fill: Fill
) -> dict[str, Float[Tensor, "i j"]]:
    inside = region_mask(region, size_of(one.activations), one.activations.device, radius)
    activations, gradients = (
        transform_all(values, [transform], fill=fill)[0]
        for values in (presented.activations, presented.gradients)
    )
    return {
        "activations": _channels(one.activations, activations, inside),
        "gradients": _channels(one.gradients, gradients, inside),
        "pooled-cosine": _cosines(*(trace.activations.mean((-2, -1)) for trace in (one, presented))),
        "logits-cosine": _cosines(one.logits, presented.logits),
    }


def _stage_eq(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> StageEq:
    value, floor = (torch.stack(column) for column in zip(*pairs, strict=True))
    no_floor = ReasonCode.NO_OTHER_CLASS if name in NEEDS_ANOTHER_CLASS else ReasonCode.NO_OTHER_IMAGE
    return StageEq(value, floor, no_floor=no_floor)


def _channels(a: Features, b: Features, inside: Bool[Tensor, "h w"]) -> Float[Tensor, "i j"]:
    """Mean correlation over the grid of the channels that vary in both; NaN if none does."""
    (za, varies_a), (zb, varies_b) = (_standardise(v[..., inside].double()) for v in (a, b))
    total = torch.einsum("ikp,jkp->ij", za, zb)
    return total / torch.einsum("ik,jk->ij", varies_a.double(), varies_b.double())


def _standardise(values: Float[Tensor, "b k p"]) -> tuple[Float[Tensor, "b k p"], Bool[Tensor, "b k"]]:
    """Channels centred and of norm 1, and which of them vary."""
    centred = values - values.mean(-1, keepdim=True)
    norm = centred.norm(dim=-1, keepdim=True)
    # relative to the values too: the rounding error of a constant channel is not variation
    varies = (norm > CONSTANT_BELOW) & (norm > 1e-6 * values.norm(dim=-1, keepdim=True))
    return torch.where(varies, centred / torch.where(varies, norm, 1), 0), varies[..., 0]


def _cosines(a: Float[Tensor, "b k"], b: Float[Tensor, "b k"]) -> Float[Tensor, "i j"]:
    a, b = (torch.nn.functional.normalize(v.double(), dim=1) for v in (a, b))
    return a @ b.T
