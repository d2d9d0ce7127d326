"""Checks for NaN and infinity in a batch."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.errors import EquicamError


def finite(x: Float[Tensor, "..."]) -> Bool[Tensor, ""]:
    """Whether every value is finite; one reduction over magnitudes is faster than `isfinite().all()`."""
    return x.abs().amax() < torch.inf


def finite_images(x: Float[Tensor, "b c H W"]) -> Bool[Tensor, " b"]:
    """Which images are finite."""
    return x.abs().flatten(1).amax(1) < torch.inf


def not_finite(x: Float[Tensor, "b c H W"]) -> EquicamError:
    """The error for a batch that has NaN or infinity in it."""
    return not_finite_images(finite_images(x))


def not_finite_images(passed: Bool[Tensor, " b"]) -> EquicamError:
    """The same, by which images are finite."""
    bad = (~passed).nonzero().flatten().tolist()
    return EquicamError(
        "images", needs="finite pixels", got=f"NaN or infinity in image {bad}", fix="leaving it out"
    )
