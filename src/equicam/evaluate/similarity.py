"""Similarity of planes inside a region: each plane of one set with each plane of another.

The diagonal of such a matrix compares each image with itself; the rest of a row is its unrelated-image floor.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import avg_pool2d

from equicam.core.uncertainty import Region, pixels_in, standardise
from equicam.core.views import disc

PlanesA = Float[Tensor, "*a i h w"]
PlanesB = Float[Tensor, "*a j h w"]
Matrix = Float[Tensor, "*a i j"]
Rows = tuple[Float[Tensor, "*n p"], Bool[Tensor, "*n"]]
"""What a measure makes of the pixels of planes, and which planes are constant: they become 0."""


def region_mask(
    region: Region, size: tuple[int, int], device: torch.device, radius: float = 1.0
) -> Bool[Tensor, "h w"]:
    """The pixels inside the region; of the disc, those within a share of its radius."""
    return (
        disc(size, device, radius) if region == "disc" else torch.ones(size, dtype=torch.bool, device=device)
    )


def constant_in_region(
    planes: Float[Tensor, "*n h w"], region: Region, radius: float = 1.0
) -> Bool[Tensor, "*n"]:
    """Which planes have no standard deviation inside the region, so that a correlation is undefined.

    `core.chain.is_constant` compares the range of a whole plane with its largest value: whether min–max can scale it.
    """
    return standardise(pixels_in(planes, region, radius))[1]


def ssim(a: PlanesA, b: PlanesB, region: Region, radius: float = 1.0) -> Matrix:
    """Mean structural similarity over the 7×7 windows inside the region, data range 1; 0 for constant planes."""
    if a.ndim > 3:
        return torch.stack([ssim(one, other, region, radius) for one, other in zip(a, b, strict=True)])
    inside = region_mask(region, size_of(a), a.device, radius)
    rows = [torch.stack([_ssim(one, other, inside) for other in b]) for one in a]
    constant = constant_in_region(a, region, radius)[:, None] | constant_in_region(b, region, radius)
    return torch.where(constant, 0, torch.stack(rows).double())


def _ssim(a: Float[Tensor, "h w"], b: Float[Tensor, "h w"], region: Bool[Tensor, "h w"]) -> Float[Tensor, ""]:
    side, c1, c2 = 7, 0.01**2, 0.03**2
    pair = torch.stack((a, b, a * a, b * b, a * b))[:, None].double()
    mean_a, mean_b, aa, bb, ab = avg_pool2d(pair, side, stride=1)[:, 0]
    unbiased = side**2 / (side**2 - 1)
    var_a, var_b = unbiased * (aa - mean_a**2), unbiased * (bb - mean_b**2)
    cov = unbiased * (ab - mean_a * mean_b)
    similarity = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    similarity = similarity / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    inside = avg_pool2d(region[None].double(), side, stride=1)[0] == 1
    mean: Tensor = similarity[inside].mean()
    return mean


def _ranks(values: Float[Tensor, "*n p"]) -> Float[Tensor, "*n p"]:
    """Ranks from 1 in every row, equal values at their mean rank."""
    values = values.contiguous()
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values, right=False)
    up_to = torch.searchsorted(ordered, values, right=True)
    return (below + up_to + 1).to(values.dtype) / 2


def _standardised_ranks(pixels: Float[Tensor, "*n p"]) -> Rows:
    constant = standardise(pixels)[1]  # its rounding errors have no order
    return standardise(torch.where(constant[..., None], 0, _ranks(pixels.double())))[0], constant


def _normalise(pixels: Float[Tensor, "*n p"]) -> Rows:
    pixels, constant = pixels.double(), standardise(pixels)[1]
    blank = constant[..., None]
    return torch.where(blank, 0, pixels / torch.where(blank, 1, pixels.norm(dim=-1, keepdim=True))), constant


_ROWS: dict[str, Callable[[Float[Tensor, "*n p"]], Rows]] = {
    "pearson": standardise,
    "spearman": _standardised_ranks,
    "cosine": _normalise,
}
"""Measures that are products of rows; SSIM is the only other one."""
MEASURES = (*_ROWS, "ssim")


def compare_planes(
    a: PlanesA, b: PlanesB, measure: str, region: Region, radius: float = 1.0
) -> tuple[Matrix, Bool[Tensor, "*a i"], Bool[Tensor, "*a j"]]:
    """The similarity of each plane of a set with each of another, 0 with a constant one, and which are constant."""
    if measure == "ssim":
        constant_a, constant_b = (constant_in_region(planes, region, radius) for planes in (a, b))
        return ssim(a, b, region, radius), constant_a, constant_b
    (rows_a, constant_a), (rows_b, constant_b) = (
        _ROWS[measure](pixels_in(planes, region, radius)) for planes in (a, b)
    )
    return rows_a @ rows_b.mT, constant_a, constant_b


def own_and_others(
    matrix: Float[Tensor, "*a b b"], unrelated: Bool[Tensor, "b b"] | None = None
) -> tuple[Float[Tensor, "*a b"], Float[Tensor, "*a b"]]:
    """The diagonal, and the mean of the defined values of unrelated images in each row (NaN if none is).

    Without `unrelated`, all other images are.
    """
    own = matrix.diagonal(dim1=-2, dim2=-1)
    itself = torch.eye(own.shape[-1], dtype=torch.bool, device=matrix.device)
    left_out = itself if unrelated is None else itself | ~unrelated
    return own, matrix.masked_fill(left_out, torch.nan).nanmean(-1)


def size_of(planes: Tensor) -> tuple[int, int]:
    """Height and width of planes."""
    return planes.shape[-2], planes.shape[-1]
