"""Does a map move with its image? Eq, and Eq under conditions on the prediction.

Eq_T(i) = r( h(T x_i), T h(x_i) ) for every presentation T, a rotation unless another group is chosen; the floor is the
same with T h(x_j) of the other images of the batch, of other groups if images have groups; skill = (Eq − floor) / (1 − floor). The disc holds the pixels that
every presentation shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.correlation import Region
from equicam.core.transforms import Degrees, Element, Transform
from equicam.core.views import Fill, Views, transform_all
from equicam.evaluate.batch import target_probability
from equicam.evaluate.similarity import compare_planes, own_and_others
from equicam.readers.logits import LABEL_PREDICTED_FROM

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
    matrix, constant = compare_planes(moved, reference, measure, region, views.radius)
    own, others = own_and_others(matrix, unrelated)
    return Eq(own, others, constant)


def consistent(
    probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"], *, multilabel: bool = False
) -> Bool[Tensor, "a b"]:
    """Where the top-1 of the transformed image is still the presented one's; the first of `probs` is presented.

    Of a label it is whether the transformed image has it where the presented one has.
    """
    if multilabel:
        predicted = target_probability(probs, target) >= LABEL_PREDICTED_FROM
        return predicted[1:] == predicted[0]
    return target_probability(probs, target)[1:] == probs[1:].amax(-1)


def confidence_kept(
    probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"], *, of_any_class: bool = False
) -> Float[Tensor, "a b"]:
    """min(1, p_c(T x) / p_c(x)); `of_any_class`: the largest probability of T x, whatever its class."""
    if of_any_class:
        return probs[1:].amax(-1)
    of_target = target_probability(probs, target)
    return (of_target[1:] / of_target[0]).clamp(max=1)


def mean_where(value: Float[Tensor, "a b"], where: Bool[Tensor, "a b"]) -> Float[Tensor, " b"]:
    """Each image's mean over the presentations where the condition holds; NaN where it never does."""
    return torch.where(where, value, 0).sum(0) / where.sum(0)


def weighted_mean(value: Float[Tensor, "a b"], weight: Float[Tensor, "a b"]) -> Float[Tensor, " b"]:
    """Σ_T w_T Eq_T / Σ_T w_T of each image."""
    return (weight * value).sum(0) / weight.sum(0)
