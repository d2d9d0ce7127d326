"""Does a map rotate with its image? Eq, and Eq under conditions on the prediction.

Eq_θ(i) = r( h(R_θ x_i), R_θ h(x_i) ); the floor is the same with R_θ h(x_j) of the other images of the batch;
skill = (Eq − floor) / (1 − floor).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.correlation import Region
from equicam.core.transforms import Degrees
from equicam.core.views import Fill, rotate_all
from equicam.evaluation.batch import target_probability
from equicam.evaluation.similarity import MEASURES, constant_in_region, own_and_others

ANGLES: tuple[Degrees, ...] = (15, 30, 45, 60, 90, 135, 180)


@dataclass(frozen=True)
class Eq:
    """One value for each angle and image, its floor, and where a map was constant (there the value is 0)."""

    value: Float[Tensor, "a b"]
    floor: Float[Tensor, "a b"]
    constant: Bool[Tensor, "a b"]


def equivariance(
    rotated: Float[Tensor, "a b H W"],
    presented: Float[Tensor, "b H W"],
    angles: Sequence[Degrees],
    *,
    measure: str = "pearson",
    region: Region = "disc",
    fill: Fill = "reflect",
) -> Eq:
    """Compare maps of rotated images with the rotated maps of the presented images."""
    reference = rotate_all(presented, angles, fill=fill)
    own, others = own_and_others(MEASURES[measure](rotated, reference, region))
    return Eq(own, others, constant_in_region(rotated, region) | constant_in_region(reference, region))


def consistent(probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"]) -> Bool[Tensor, "a b"]:
    """Where the top-1 of the rotated image is still the presented one's; the first of `probs` is presented."""
    return probs[1:].argmax(-1) == target


def confidence_kept(
    probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"], *, as_published: bool = False
) -> Float[Tensor, "a b"]:
    """min(1, p_c(R_θ x) / p_c(x)); `as_published`: the largest probability of R_θ x, whatever its class."""
    if as_published:
        return probs[1:].amax(-1)
    of_target = target_probability(probs, target)
    return (of_target[1:] / of_target[0]).clamp(max=1)


def mean_where(value: Float[Tensor, "a b"], where: Bool[Tensor, "a b"]) -> Float[Tensor, " b"]:
    """Each image's mean over the angles where the condition holds; NaN where it never does."""
    return torch.where(where, value, 0).sum(0) / where.sum(0)


def weighted_mean(value: Float[Tensor, "a b"], weight: Float[Tensor, "a b"]) -> Float[Tensor, " b"]:
    """Σ_θ w_θ Eq_θ / Σ_θ w_θ of each image."""
    return (weight * value).sum(0) / weight.sum(0)
