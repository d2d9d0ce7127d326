"""How far the views of an image disagree once they are aligned."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.alignment import Alignment
from equicam.core.correlation import CONSTANT_BELOW, Region, select_pixels


def peum(aligned_maps: Float[Tensor, "t b H W"], alignment: Alignment) -> Float[Tensor, "b H W"]:
    """PEUM: σ² = Σ_t w_t (h_t − h̄)², h_t the aligned map of view t and h̄ = Σ_t w_t h_t."""
    return alignment.variance(aligned_maps)


@dataclass(frozen=True)
class ViewCorrelations:
    """Pearson correlations between the aligned maps of an image's views; 0 with a constant map."""

    with_presented: Float[Tensor, "t b"]  # of each view with the presented one, which is the first
    of_pairs: Float[Tensor, " b"]  # mean over all pairs of views; NaN for one view

    @property
    def stability(self) -> Float[Tensor, " b"]:
        """The rotation test of the presented view's own map: its mean correlation with the others; NaN for one view."""
        return self.with_presented[1:].mean(0)

    @property
    def disagreement(self) -> Float[Tensor, " b"]:
        """1 − the mean over all pairs."""
        return 1 - self.of_pairs


def correlate_views(
    aligned_maps: Float[Tensor, "t b H W"], region: Region = "disc", radius: float = 1.0
) -> ViewCorrelations:
    """The correlations of views, the presented one first, inside the disc or a part of its radius.

    With z_t the map of view t at mean 0 and norm 1, Σ_{s≠t} r_st = |Σ_t z_t|² − Σ_t |z_t|²: no matrix of pairs is
    needed. A constant map has z = 0.
    """
    views = len(aligned_maps)
    pixels = select_pixels(aligned_maps, region, radius)
    centred = pixels - pixels.mean(-1, keepdim=True, dtype=torch.float64).to(pixels.dtype)
    norm = torch.linalg.vector_norm(centred, dim=-1, dtype=torch.float64)
    constant = norm < CONSTANT_BELOW * pixels.shape[-1] ** 0.5
    z = centred * torch.where(constant, 0, 1 / norm).to(pixels.dtype)[..., None]
    with_presented = (z * z[0]).sum(-1, dtype=torch.float64)
    total = torch.linalg.vector_norm(z.sum(0), dim=-1, dtype=torch.float64)
    pairs: Tensor = total.square() - (~constant).sum(0)
    return ViewCorrelations(with_presented, pairs / (views * (views - 1)) if views > 1 else pairs * torch.nan)
