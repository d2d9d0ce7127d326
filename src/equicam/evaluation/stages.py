"""Where on the way from features to map the turn is lost: Eq at every named tensor of the chain.

Compared in the turned frame on each tensor's own grid. Channel weights have no grid and are compared as vectors; where
the gradient does not vary over the grid they depend on the class alone, so their 1.0 is an identity, not a finding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.chain import Chain, Stage, constant
from equicam.core.combine import Combine, Features, grad_cam, grad_cam_rectified
from equicam.core.views import Degrees, Fill, rotate
from equicam.evaluation.similarity import FLAT, Region, inside, own_and_others, pearson, size_of

SAME_EVERYWHERE = "the gradient is the same at every position: there is nothing to correlate"


@dataclass(frozen=True)
class Traced:
    """What one view of a batch of pictures left at the target layer and after."""

    acts: Features
    grads: Features
    scores: Float[Tensor, "b y"]


@dataclass(frozen=True)
class StageEq:
    """Likeness at one stage by angle and picture, the same with other pictures, and where it is undefined."""

    value: Float[Tensor, "a b"]
    floor: Float[Tensor, "a b"]
    reason: str | None = None
    alone: str = "no other picture to compare with"  # why a floor is missing


def stages(
    presented: Traced,
    turned: Sequence[Traced],
    angles: Sequence[Degrees],
    combine: Combine,
    *,
    target: Int[Tensor, " b"],
    size: tuple[int, int],
    region: Region = "disc",
    fill: Fill = "reflect",
    as_published: bool = False,
) -> dict[str, StageEq]:
    """By name: activations, gradients, weights (and their cosine), combined, rectified, upsampled, map, pooled, logits."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    chain = Chain(combine, size)
    another = torch.where(
        target[:, None] == target, torch.nan, 0.0
    )  # a class has the same weights in any picture
    another.fill_diagonal_(0.0)
    before = chain.trace("features", (presented.acts, presented.grads))
    for one, angle in zip(turned, angles, strict=True):
        after = chain.trace("features", (one.acts, one.grads))
        rows = {
            "activations": _channels(one.acts, rotate(presented.acts, angle, fill=fill), region),
            "gradients": _channels(one.grads, rotate(presented.grads, angle, fill=fill), region),
            "pooled-cosine": _cosines(one.acts.mean((-2, -1)), presented.acts.mean((-2, -1))),
            "logits-cosine": _cosines(one.scores, presented.scores),
        }
        if combine in (grad_cam, grad_cam_rectified):
            alphas = [g.mean((-2, -1)) for g in (one.grads, presented.grads)]
            alphas = [a.relu() for a in alphas] if combine is grad_cam_rectified else alphas
            rows["weights"] = _cosines(*(a - a.mean(1, keepdim=True) for a in alphas)) + another
            rows["weights-cosine"] = _cosines(*alphas) + another
        stage: Stage
        for stage in ("combined", "rectified", "upsampled", "map"):
            reference = rotate(before[stage], angle, fill=fill)
            if as_published and stage == "rectified":  # their reference is rectified after the turn
                reference = rotate(before["combined"], angle, fill=fill).relu()
            rows[stage] = pearson(after[stage], reference, region)
        for name, matrix in rows.items():
            found.setdefault(name, []).append(own_and_others(matrix))
    same = bool(constant(presented.grads).all())
    made = {
        name: StageEq(
            torch.stack([v for v, _ in pairs]),
            torch.stack([f for _, f in pairs]),
            alone=_ALONE.get(name, StageEq.alone),
        )
        for name, pairs in found.items()
    }
    if same:
        nothing = torch.full_like(made["gradients"].value, torch.nan)
        made["gradients"] = StageEq(nothing, nothing, SAME_EVERYWHERE)
    return made


_ALONE = dict.fromkeys(("weights", "weights-cosine"), "no picture of another class to compare with")


def _channels(a: Features, b: Features, region: Region) -> Float[Tensor, "i j"]:
    """Mean over channels of their correlation over the grid, of channels that vary in both; NaN without any."""
    mask = inside(region, size_of(a), a.device)
    (za, live_a), (zb, live_b) = (_standardised(v[..., mask].double()) for v in (a, b))
    total = torch.einsum("ikp,jkp->ij", za, zb)
    return total / torch.einsum("ik,jk->ij", live_a.double(), live_b.double())


def _standardised(values: Float[Tensor, "b k p"]) -> tuple[Float[Tensor, "b k p"], Bool[Tensor, "b k"]]:
    apart = values - values.mean(-1, keepdim=True)
    norm = apart.norm(dim=-1, keepdim=True)
    # relative to its values too: what rounding leaves of a constant channel is not variation
    live = (norm > FLAT) & (norm > 1e-6 * values.norm(dim=-1, keepdim=True))
    return torch.where(live, apart / torch.where(live, norm, 1), 0), live[..., 0]


def _cosines(a: Float[Tensor, "b k"], b: Float[Tensor, "b k"]) -> Float[Tensor, "i j"]:
    a, b = (torch.nn.functional.normalize(v.double(), dim=1) for v in (a, b))
    return a @ b.T
