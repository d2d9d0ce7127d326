"""How far the views of an image disagree once they are aligned."""

from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.alignment import Alignment
from equicam.core.correlation import Region, pearson
from equicam.core.views import disc_pixels


def peum(aligned_maps: Float[Tensor, "t b H W"], alignment: Alignment) -> Float[Tensor, "b H W"]:
    """PEUM: σ² = Σ_t w_t (h_t − h̄)², h_t the aligned map of view t and h̄ = Σ_t w_t h_t."""
    return alignment.variance(aligned_maps)


def disagreement(aligned_maps: Float[Tensor, "t b H W"], region: Region = "disc") -> Float[Tensor, " b"]:
    """1 − mean Pearson correlation over all pairs of views; NaN for one view, which has nothing to disagree with."""
    by_image = aligned_maps.transpose(0, 1)
    r = pearson(by_image, by_image, region)
    views = r.shape[-1]
    pairs = r.sum((-2, -1)) - r.diagonal(dim1=-2, dim2=-1).sum(-1)
    return 1 - pairs / (views * (views - 1))


def mean_converged(
    aligned_maps: Float[Tensor, "t b H W"], alignment: Alignment, tolerance: int | float
) -> Bool[Tensor, " b"]:
    """Where more views would change the mean by less than the tolerance: √(mean σ²) / n ≤ ε · sd(h̄), in the disc.

    Evenly spaced rotations cover the circle, so their mean errs as 1/n and not as 1/√n. Weighted views count as
    n = 1 / Σ w². An image with fewer than two views to compare has not converged.
    """
    inside = disc_pixels((aligned_maps.shape[-2], aligned_maps.shape[-1]), aligned_maps.device)
    variance, mean = (
        plane.flatten(1)[:, inside].double()
        for plane in (peum(aligned_maps, alignment), alignment.mean(aligned_maps))
    )
    count = 1 / (alignment.weights.double() ** 2).sum(0)
    return (count >= 2) & (variance.mean(1).sqrt() / count <= tolerance * mean.std(1, correction=0))
