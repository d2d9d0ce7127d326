"""Pearson correlation of planes inside a region, every plane of one set with every plane of another."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.views import disc_pixels
from equicam.errors import EquicamError

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
    return standardise(pixels_in(a, region, radius)) @ standardise(pixels_in(b, region, radius)).mT


def pixels_in(planes: Float[Tensor, "*n h w"], region: Region, radius: float = 1.0) -> Float[Tensor, "*n p"]:
    """The region's pixels in float64, because sums over fifty thousand pixels are not exact in float32."""
    return select_pixels(planes, region, radius).double()


def select_pixels(
    planes: Float[Tensor, "*n h w"], region: Region, radius: float = 1.0
) -> Float[Tensor, "*n p"]:
    """The region's pixels of every plane; of the disc, those within a share of its radius."""
    if region not in REGIONS:
        raise EquicamError("region", needs=f"one of {', '.join(REGIONS)}", got=repr(region), fix='"disc"')
    pixels = planes.flatten(-2)
    if region == "full":
        return pixels
    # by index: a mask must be counted first, which synchronises with the device
    return pixels.index_select(-1, disc_pixels((planes.shape[-2], planes.shape[-1]), planes.device, radius))


def standardise(pixels: Float[Tensor, "*n p"]) -> Float[Tensor, "*n p"]:
    """Rows with mean 0 and norm 1; constant rows become 0."""
    return standardise_and_flag_constant(pixels)[0]


def standardise_and_flag_constant(
    pixels: Float[Tensor, "*n p"],
) -> tuple[Float[Tensor, "*n p"], Bool[Tensor, "*n"]]:
    """Rows with mean 0 and norm 1, and which ones are constant: they become 0."""
    centred, norm, constant = _centre(pixels)
    return torch.where(constant, 0, centred / torch.where(constant, 1, norm)), constant[..., 0]


def is_constant_row(pixels: Float[Tensor, "*n p"]) -> Bool[Tensor, "*n"]:
    """Which rows have no standard deviation, so that a correlation is undefined."""
    return _centre(pixels)[2][..., 0]


def _centre(
    pixels: Float[Tensor, "*n p"],
) -> tuple[Float[Tensor, "*n p"], Float[Tensor, "*n 1"], Bool[Tensor, "*n 1"]]:
    mean = pixels.mean(-1, keepdim=True)
    centred = pixels - mean
    norm = centred.norm(dim=-1, keepdim=True)
    # norm / √p is the standard deviation; the mean of large values has a rounding error of its own
    least = (ROUNDING * mean.abs()).clamp(min=CONSTANT_BELOW)
    return centred, norm, norm < least * math.sqrt(pixels.shape[-1])
