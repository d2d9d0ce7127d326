"""Does a map move with its image? Eq, and Eq under conditions on the prediction.

Eq_T(i) = r( h(T x_i), T h(x_i) ) for every presentation T, a rotation unless another group is chosen; the floor is the
same with T h(x_j) of the other images of the batch, of other groups if images have groups; skill = (Eq − floor) / (1 − floor). The disc holds the pixels that
every presentation shows.

`stages` asks where equivariance is lost: Eq at every named tensor of the chain, on that tensor's own grid. Channel weights have
no grid and are compared as vectors; where the gradient does not vary over the grid they depend on the class alone, so their 1.0
is an identity, not a finding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.chain import Chain, Combine, Features, Stage, grad_cam, grad_cam_rectified, is_constant
from equicam.core.transforms import Degrees, Element, Transform
from equicam.core.uncertainty import CONSTANT_BELOW, Region, pearson
from equicam.core.views import Fill, Views, transform_all
from equicam.evaluate.rows import ReasonCode
from equicam.evaluate.similarity import compare_planes, own_and_others, region_mask, size_of

ANGLES: tuple[Degrees, ...] = (15, 30, 45, 60, 90, 135, 180)
GROUPS: dict[str, tuple[Transform, ...]] = {
    "rotation": tuple(Transform(float(angle)) for angle in ANGLES),
    "dihedral": tuple(Transform(float(angle), mirrored=True) for angle in (0, *ANGLES)),
    "scale": tuple(Transform(scale=factor) for factor in (0.8, 0.9, 1.1, 1.25)),
    "shift": tuple(
        Transform(shift=(share * right, share * down))
        for share in (0.05, 0.1)
        for right, down in ((1, 0), (-1, 0), (0, 1), (0, -1))
    ),
}
"""How images are presented: rotated, mirrored and rotated, larger and smaller, moved right, left, down and up."""


@dataclass(frozen=True)
class Eq:
    """One value for each presentation and image, its floor, and where a map was constant (there the value is 0)."""

    value: Float[Tensor, "a b"]
    floor: Float[Tensor, "a b"]
    constant: Bool[Tensor, "a b"]


def equivariance(
    moved: Float[Tensor, "a b H W"],
    presented: Float[Tensor, "b H W"],
    presentations: Sequence[Element],
    *,
    measure: str = "pearson",
    region: Region = "disc",
    fill: Fill = "reflect",
    unrelated: Bool[Tensor, "b b"] | None = None,
) -> Eq:
    """Compare maps of transformed images with the transformed maps of the presented images; numbers are rotations.

    `unrelated` says which images count for the floor of which; without it, all others do.
    """
    views = Views(presentations)
    return compare(
        moved, transform_all(presented, views.transforms, fill=fill), views, measure, region, unrelated
    )


def compare(
    moved: Float[Tensor, "a b H W"],
    reference: Float[Tensor, "a b H W"],
    views: Views,
    measure: str,
    region: Region,
    unrelated: Bool[Tensor, "b b"] | None = None,
) -> Eq:
    """Eq of maps of transformed images and of transformed maps."""
    matrix, *constant = compare_planes(moved, reference, measure, region, views.radius)
    return Eq(*own_and_others(matrix, unrelated), constant[0] | constant[1])


def mean_where(value: Float[Tensor, "a b"], where: Bool[Tensor, "a b"]) -> Float[Tensor, " b"]:
    """Each image's mean over the presentations where the condition holds; NaN where it never does."""
    return torch.where(where, value, 0).sum(0) / where.sum(0)


def weighted_mean(value: Float[Tensor, "a b"], weight: Float[Tensor, "a b"]) -> Float[Tensor, " b"]:
    """Σ_T w_T Eq_T / Σ_T w_T of each image."""
    return (weight * value).sum(0) / weight.sum(0)


WITHOUT_GRID = {"weights", "weights-cosine", "pooled-cosine", "logits-cosine"}
"""Stages that are vectors."""


@dataclass(frozen=True)
class LayerTrace:
    """Activations and gradients of one view of a batch at the target layer, and its logits."""

    activations: Features
    gradients: Features
    logits: Float[Tensor, "b y"]


@dataclass(frozen=True)
class _StageEq:
    """Similarity at one stage by presentation and image, its floor with other images, and why either may be undefined."""

    value: Float[Tensor, "a b"]
    floor: Float[Tensor, "a b"]
    no_floor: ReasonCode
    reason: ReasonCode | None = None


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
) -> dict[str, _StageEq]:
    """By name: activations, gradients, weights (and their cosine), combined, rectified, upsampled, map, pooled, logits."""
    views, chain = Views(presentations), Chain(combine, size)
    inside = region_mask(region, size_of(presented.activations), presented.activations.device, views.radius)
    # a class has the same weights in any image: only images of another class are unrelated
    same_class = torch.where(target[:, None] == target, torch.nan, 0.0)
    same_class.fill_diagonal_(0.0)
    before = chain.trace("features", (presented.activations, presented.gradients))
    matrices: dict[str, list[Tensor]] = {}
    for one, transform in zip(moved, views.transforms, strict=True):
        after = chain.trace("features", (one.activations, one.gradients))
        activations, gradients, *references = (
            transform_all(values, [transform], fill=fill)[0]
            for values in (presented.activations, presented.gradients, *(before[stage] for stage in _PLANES))
        )
        if rectify_last:
            references[_PLANES.index("rectified")] = references[_PLANES.index("combined")].relu()
        found = {
            "activations": _channels(one.activations, activations, inside),
            "gradients": _channels(one.gradients, gradients, inside),
            "pooled-cosine": _cosines(*(trace.activations.mean((-2, -1)) for trace in (one, presented))),
            "logits-cosine": _cosines(one.logits, presented.logits),
        }
        if combine in (grad_cam, grad_cam_rectified):
            alphas = [g.mean((-2, -1)) for g in (one.gradients, presented.gradients)]
            alphas = [a.relu() for a in alphas] if combine is grad_cam_rectified else alphas
            found["weights"] = _cosines(*(a - a.mean(1, keepdim=True) for a in alphas)) + same_class
            found["weights-cosine"] = _cosines(*alphas) + same_class
        for stage, reference in zip(_PLANES, references, strict=True):
            found[stage] = pearson(after[stage], reference, region, views.radius)
        for name, matrix in found.items():
            matrices.setdefault(name, []).append(matrix)
    made = {}
    for name, every in matrices.items():
        no_floor = ReasonCode.NO_OTHER_CLASS if name.startswith("weights") else ReasonCode.NO_OTHER_IMAGE
        made[name] = _StageEq(*own_and_others(torch.stack(every), unrelated), no_floor)
    if bool(is_constant(presented.gradients).all()):
        undefined = torch.full_like(made["gradients"].value, torch.nan)
        made["gradients"] = _StageEq(
            undefined, undefined, ReasonCode.NO_OTHER_IMAGE, ReasonCode.CONSTANT_GRADIENT
        )
    return made


_PLANES: tuple[Stage, ...] = ("combined", "rectified", "upsampled", "map")


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
