"""As many views as a picture needs: nested grids, and a rule on how far their mean may still be off.

Views of the next grid are added to those already read, never read again. The rule: with σ² the variance of the n views'
aligned maps (PEUM) and h̄ their mean, both inside the disc, stop once

    √(mean σ²) / n  ≤  ε · sd(h̄).

Even turns cover the circle, so their mean errs as 1/n and not as 1/√n, as n draws would. Weighed views count as
n = 1 / Σ w²; a picture with fewer than two views to compare goes on to the last grid.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.combine import Combine
from equicam.core.fusion import Fused, fuse, see, see_more
from equicam.core.views import Fill, Views, disc_places
from equicam.methods import Fusion
from equicam.runtime.batching import Read


def settled(
    read: Read,
    x: Float[Tensor, "b c H W"],
    combine: Combine,
    fusion: Fusion,
    target: Int[Tensor, " b"] | None,
    fill: Fill,
    chunk: int,
    *,
    originals: int | None = None,
) -> Iterator[tuple[Int[Tensor, " r"], Fused]]:
    """Pictures, by their place in x, with the fusion of the views they took; every picture once."""
    assert fusion.auto is not None  # noqa: S101  # the caller asked
    rows = torch.arange(len(x), device=x.device)
    counts = fusion.auto.counts
    seen = see(read, x, Views.evenly(counts[0]), target, chunk, originals=originals)
    for count, more in pairwise((*counts, 0)):
        fused = fuse(seen, combine, replace(fusion, auto=None, views=Views.evenly(count)), fill)
        done = converged(fused, fusion.auto.tolerance) if more else torch.ones_like(rows, dtype=torch.bool)
        where = done.nonzero().flatten()
        if len(where):
            yield rows[where], fused.at(where)
        left = (~done).nonzero().flatten()
        if not len(left):
            return
        rows = rows[left]
        seen = see_more(read, x[rows], seen.at(left), Views.evenly(more), chunk)


def converged(fused: Fused, tolerance: int | float) -> Bool[Tensor, " b"]:
    """Where the mean of the views is within the tolerance, by the rule above."""
    maps, weights = fused.maps, fused.frame.weights
    inside = disc_places((maps.shape[-2], maps.shape[-1]), maps.device)
    apart, mean = (v.flatten(1)[:, inside].double() for v in (fused.peum(), fused.frame.mean(maps)))
    count = 1 / (weights.double() ** 2).sum(0)
    return (count >= 2) & (apart.mean(1).sqrt() / count <= tolerance * mean.std(1, correction=0))
