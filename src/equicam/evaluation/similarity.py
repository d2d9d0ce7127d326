"""How alike planes are, every one of a set with every one of another, inside a region.

The diagonal of such a matrix compares each picture with itself, the rest of a row is its unrelated-picture floor.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import avg_pool2d

from equicam.core.views import disc, disc_places
from equicam.errors import EquicamError

Region = Literal["disc", "full"]
REGIONS: tuple[Region, ...] = get_args(Region)
FLAT = 1e-8
"""The standard deviation below which a map counts as constant (the paper's)."""

Planes = Float[Tensor, "*n h w"]
Some = Float[Tensor, "*a i h w"]
Others = Float[Tensor, "*a j h w"]
Matrix = Float[Tensor, "*a i j"]


def inside(region: Region, size: tuple[int, int], device: torch.device) -> Bool[Tensor, "h w"]:
    """The pixels that count."""
    if region not in REGIONS:
        raise EquicamError("region", needs=f"one of {', '.join(REGIONS)}", got=repr(region), fix='"disc"')
    return disc(size, device) if region == "disc" else torch.ones(size, dtype=torch.bool, device=device)


def flat(planes: Float[Tensor, "*n h w"], region: Region) -> Bool[Tensor, "*n"]:
    """Which planes are constant inside the region."""
    return _picked(planes, region).std(-1, correction=0) < FLAT


def pearson(a: Some, b: Others, region: Region) -> Matrix:
    """Pearson's r over the region's pixels; 0 where either plane is constant."""
    return _centred(_picked(a, region)) @ _centred(_picked(b, region)).mT


def spearman(a: Some, b: Others, region: Region) -> Matrix:
    """Pearson's r of the ranks, ties at their mean rank."""
    return _centred(_ranked(a, region)) @ _centred(_ranked(b, region)).mT


def cosine(a: Some, b: Others, region: Region) -> Matrix:
    """Cosine over the region's pixels; 0 where either plane is constant."""
    return _unit(_picked(a, region), a, region) @ _unit(_picked(b, region), b, region).mT


def ssim(a: Some, b: Others, region: Region) -> Matrix:
    """Mean structural similarity, 7×7 windows that lie inside the region, range of the values 1; 0 for constants."""
    if a.ndim > 3:
        return torch.stack([ssim(one, other, region) for one, other in zip(a, b, strict=True)])
    rows = [torch.stack([_ssim(one, other, region) for other in b]) for one in a]
    still = flat(a, region)[:, None] | flat(b, region)
    return torch.where(still, 0, torch.stack(rows).double())


Measure = Callable[[Some, Others, Region], Matrix]
MEASURES: dict[str, Measure] = {"pearson": pearson, "spearman": spearman, "cosine": cosine, "ssim": ssim}


def ranks(values: Float[Tensor, "*n p"]) -> Float[Tensor, "*n p"]:
    """Ranks from 1 in every row, equal values at the mean of theirs."""
    ordered = values.sort(-1).values
    below = torch.searchsorted(ordered, values, right=False)
    upto = torch.searchsorted(ordered, values, right=True)
    return (below + upto + 1).to(values.dtype) / 2


def own_and_others(matrix: Float[Tensor, "*a b b"]) -> tuple[Float[Tensor, "*a b"], Float[Tensor, "*a b"]]:
    """The diagonal, and the mean of what is defined in the rest of each row (NaN where there is nothing)."""
    own = matrix.diagonal(dim1=-2, dim2=-1)
    rest = matrix.masked_fill(torch.eye(own.shape[-1], dtype=torch.bool, device=matrix.device), torch.nan)
    return own, rest.nanmean(-1)


def _picked(planes: Planes, region: Region) -> Float[Tensor, "*n p"]:
    # in double: a thousand maps are cheap, and sums over fifty thousand pixels are not exact in single
    values = planes.flatten(-2)
    if region == "disc":  # by place, not by mask: a mask must be counted first, which waits for the device
        values = values.index_select(-1, disc_places(size_of(planes), planes.device))
    else:
        inside(region, size_of(planes), planes.device)  # refuses what is no region
    return values.double()


def _ranked(planes: Planes, region: Region) -> Float[Tensor, "*n p"]:
    """Ranks; of a constant plane none, whatever rounding left of it."""
    return torch.where(flat(planes, region)[..., None], 0, ranks(_picked(planes, region)))


def _centred(values: Float[Tensor, "*n p"]) -> Float[Tensor, "*n p"]:
    apart = values - values.mean(-1, keepdim=True)
    still = values.std(-1, correction=0, keepdim=True) < FLAT
    return torch.where(still, 0, apart / torch.where(still, 1, apart.norm(dim=-1, keepdim=True)))


def _unit(values: Float[Tensor, "*n p"], planes: Planes, region: Region) -> Float[Tensor, "*n p"]:
    still = flat(planes, region)[..., None]
    return torch.where(still, 0, values / torch.where(still, 1, values.norm(dim=-1, keepdim=True)))


def _ssim(a: Float[Tensor, "h w"], b: Float[Tensor, "h w"], region: Region) -> Float[Tensor, ""]:
    side, c1, c2 = 7, 0.01**2, 0.03**2
    pair = torch.stack((a, b, a * a, b * b, a * b))[:, None].double()
    mean_a, mean_b, aa, bb, ab = avg_pool2d(pair, side, stride=1)[:, 0]
    unbiased = side**2 / (side**2 - 1)
    var_a, var_b, cov = (
        unbiased * (aa - mean_a**2),
        unbiased * (bb - mean_b**2),
        unbiased * (ab - mean_a * mean_b),
    )
    found = ((2 * mean_a * mean_b + c1) * (2 * cov + c2)) / (
        (mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)
    )
    whole = avg_pool2d(inside(region, size_of(a), a.device)[None].double(), side, stride=1)[0] == 1
    mean: Tensor = found[whole].mean()
    return mean


def size_of(planes: Tensor) -> tuple[int, int]:
    """Height and width of planes."""
    return planes.shape[-2], planes.shape[-1]
