"""How far the views of an image disagree once they are aligned: variances, and Pearson correlations inside a region."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.alignment import Alignment
from equicam.core.views import disc_pixels
from equicam.errors import not_one_of

Region = Literal["disc", "full"]
REGIONS: tuple[Region, ...] = get_args(Region)
CONSTANT_BELOW = 1e-8
"""The standard deviation below which a map counts as constant (the paper's)."""
ROUNDING = 1e-12
"""Relative to the mean of pixels in float64: a smaller standard deviation is none."""


def pearson(
    a: Float[Tensor, "*n i h w"], b: Float[Tensor, "*n j h w"], region: Region, radius: float = 1.0
) -> Float[Tensor, "*n i j"]:
    """Pearson's r over the region's pixels; 0 where either plane is constant."""
    return standardise(pixels_in(a, region, radius))[0] @ standardise(pixels_in(b, region, radius))[0].mT


def pixels_in(planes: Float[Tensor, "*n h w"], region: Region, radius: float = 1.0) -> Float[Tensor, "*n p"]:
    """The region's pixels of every plane; of the disc, those within a share of its radius."""
    if region not in REGIONS:
        raise not_one_of("region", REGIONS, region, '"disc"')
    pixels = planes.flatten(-2)
    if region == "full":
        return pixels
    # by index: a mask must be counted first, which synchronises with the device
    return pixels.index_select(-1, disc_pixels((planes.shape[-2], planes.shape[-1]), planes.device, radius))


def standardise(pixels: Float[Tensor, "*n p"]) -> tuple[Float[Tensor, "*n p"], Bool[Tensor, "*n"]]:
    """Rows with mean 0 and norm 1 in float64, and which ones are constant, so that a correlation is undefined: they become 0."""
    pixels = pixels.double()  # sums over fifty thousand pixels are not exact in float32
    mean = pixels.mean(-1, keepdim=True)
    centred = pixels - mean
    norm = centred.norm(dim=-1, keepdim=True)
    # norm / √p is the standard deviation; the mean of large values has a rounding error of its own
    least = (ROUNDING * mean.abs()).clamp(min=CONSTANT_BELOW)
    constant = norm < least * math.sqrt(pixels.shape[-1])
    return torch.where(constant, 0, centred / torch.where(constant, 1, norm)), constant[..., 0]


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
    pixels = pixels_in(aligned_maps, region, radius)
    centred = pixels - pixels.mean(-1, keepdim=True, dtype=torch.float64).to(pixels.dtype)
    norm = torch.linalg.vector_norm(centred, dim=-1, dtype=torch.float64)
    constant = norm < CONSTANT_BELOW * pixels.shape[-1] ** 0.5
    z = centred * torch.where(constant, 0, 1 / norm).to(pixels.dtype)[..., None]
    with_presented = (z * z[0]).sum(-1, dtype=torch.float64)
    total = torch.linalg.vector_norm(z.sum(0), dim=-1, dtype=torch.float64)
    pairs: Tensor = total.square() - (~constant).sum(0)
    return ViewCorrelations(with_presented, pairs / (views * (views - 1)) if views > 1 else pairs * torch.nan)
