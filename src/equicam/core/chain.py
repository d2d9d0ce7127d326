"""From a reading to its map: how features become one plane, and the named steps from one to the next.

features ─combine▶ combined ─rectify▶ rectified ─upsample▶ upsampled ─unit▶ map
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import interpolate

Features = Float[Tensor, "*n k h w"]
Plane = Float[Tensor, "*n h w"]
Combine = Callable[[Features, Features], Plane]

_SPACE = (-2, -1)


def weighted(acts: Features, weights: Float[Tensor, "*n k"]) -> Plane:
    """Σ_k w_k A_k."""
    return torch.einsum("...k,...khw->...hw", weights, acts)


def grad_cam(acts: Features, grads: Features) -> Plane:
    """Σ_k α_k A_k, α_k = mean_ij g_k."""
    return weighted(acts, grads.mean(_SPACE))


def grad_cam_rectified(acts: Features, grads: Features) -> Plane:
    """Grad-CAM with α_k⁺: what the paper's authors do on tokens behind a class token."""
    return weighted(acts, grads.mean(_SPACE).relu())


def grad_cam_pp(acts: Features, grads: Features) -> Plane:
    """Grad-CAM++ eq. 19: w_k = Σ a·g⁺, a = g² / (2g² + (Σ_ab A_ab)·g³ + 1e-6)."""
    curvature = acts.sum(_SPACE, keepdim=True) * grads**3
    return weighted(acts, (grads**2 / (2 * grads**2 + curvature + 1e-6) * grads.relu()).sum(_SPACE))


def grad_cam_pp_of_products(acts: Features, grads: Features) -> Plane:
    """The authors' Grad-CAM++: Σ_ab (A·g³)_ab inside the sum, a⁺, ε = 1e-8."""
    curvature = (acts * grads**3).sum(_SPACE, keepdim=True)
    alpha = (grads**2 / (2 * grads**2 + curvature + 1e-8)).relu()
    return weighted(acts, (alpha * grads.relu()).sum(_SPACE))


def xgrad_cam(acts: Features, grads: Features) -> Plane:
    """w_k = Σ g·A / (Σ A + 1e-8)."""
    return weighted(acts, (grads * acts).sum(_SPACE) / (acts.sum(_SPACE) + 1e-8))


def eigen_cam(acts: Features, grads: Features) -> Plane:  # noqa: ARG001
    """Activations along their first principal direction over positions.

    A principal direction has no sign; it gets the one that puts the plane's longer tail above zero.
    """
    flat: Tensor = acts.flatten(-2).transpose(-2, -1)
    flat = flat - flat.mean(-2, keepdim=True)
    first = torch.linalg.svd(flat, full_matrices=False).Vh[..., :1, :]
    plane: Tensor = (flat @ first.transpose(-2, -1))[..., 0]
    sign = torch.where((plane**3).sum(-1, keepdim=True) < 0, -1, 1)
    return (sign * plane).view(*plane.shape[:-1], *acts.shape[-2:])


def layer_cam(acts: Features, grads: Features) -> Plane:
    """Σ_k g_k⁺ ⊙ A_k."""
    return (grads.relu() * acts).sum(-3)


Stage = Literal["features", "combined", "rectified", "upsampled", "map"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Chain:
    """The steps for one combine and one image size."""

    combine: Combine
    size: tuple[int, int]

    def trace(self, start: Stage, value: Sequence[Tensor], until: Stage = "map") -> dict[Stage, Tensor]:
        """Every named plane from `start` on. Features are two tensors (acts, grads), every other stage is one."""
        plane = value[0]
        if start == "features":
            start, plane = "combined", self.combine(*value)
        named: dict[Stage, Tensor] = {start: plane}
        steps: dict[Stage, Any] = {"rectified": torch.relu, "upsampled": self.upsample, "map": unit}
        for stage in STAGES[STAGES.index(start) + 1 : STAGES.index(until) + 1]:
            named[stage] = plane = steps[stage](plane)
        return named

    def upsample(self, plane: Plane) -> Float[Tensor, "*n H W"]:
        """Bilinear to the image's size, pixel areas aligned (`align_corners=False`)."""
        flat = plane.reshape(-1, 1, *plane.shape[-2:])
        large = interpolate(flat, self.size, mode="bilinear", align_corners=False)
        return large.view(*plane.shape[:-2], *self.size)


def unit(plane: Plane) -> Plane:
    """Min–max to [0, 1]; a constant plane becomes 0."""
    return scale_to_unit(plane, *value_range(plane))


def is_constant(plane: Plane) -> Bool[Tensor, "*n"]:
    """Whether a plane is constant up to rounding, so that stretching it would show rounding errors."""
    return value_range(plane)[1] == torch.inf


def value_range(plane: Plane) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """A plane's minimum and max − min, the latter infinite where the plane is constant up to rounding."""
    low, high = plane.amin((-2, -1)), plane.amax((-2, -1))
    width = high - low
    constant = width <= 16 * torch.finfo(low.dtype).eps * torch.maximum(high, -low)
    return low, torch.where(constant, torch.inf, width)


def scale_to_unit(plane: Plane, low: Float[Tensor, "*n"], width: Float[Tensor, "*n"]) -> Plane:
    """(plane − low) / width. An infinite width gives 0 without a second copy of the plane."""
    return (plane - low[..., None, None]).div_(width[..., None, None])
