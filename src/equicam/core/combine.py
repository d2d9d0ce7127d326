"""From activations A and gradients g of the target layer to one plane: (acts, grads) → plane."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

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
