"""The presented frame: views turned back into it, averaged there, and what they disagree on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.combine import weighted
from equicam.core.views import Fill, Views, mean_weights


@dataclass(frozen=True)
class Frame:
    """The presented frame: views turned back into it and averaged there with their weights (sum 1)."""

    views: Views
    align: bool
    fill: Fill
    weights: Float[Tensor, "t b"]

    def undo(self, planes: Float[Tensor, "t b *k h w"]) -> Float[Tensor, "t b *k h w"]:
        """M_t y_t, or y_t itself where views are never turned back."""
        return self.views.undo(planes, self.fill) if self.align else planes

    def seen(self, grid: Sequence[int]) -> Float[Tensor, "b h w"]:
        """Σ_t w_t M_t 1: how much of each cell the weighed views have looked at."""
        cover = self.views.coverage((grid[-2], grid[-1]), like=self.weights)
        return torch.einsum("tb,thw->bhw", self.weights, cover)

    def mean(self, planes: Float[Tensor, "t b *k h w"]) -> Float[Tensor, "b *k h w"]:
        """Σ_t w_t y_t, divided by what was seen if the fill asks for it; 0 where nothing was."""
        total = torch.einsum("tb,tb...->b...", self.weights, planes)
        if self.fill != "coverage" or not self.align:
            return total
        share = inverse(self.seen(planes.shape))
        return total * share.view(len(share), *[1] * (total.ndim - 3), *share.shape[1:])

    def variance(self, maps: Float[Tensor, "t b H W"]) -> Float[Tensor, "b H W"]:
        """σ² = Σ_t w_t (h_t − h̄)²; under coverage each view counts where, and as much as, it has looked."""
        mean = self.mean(maps)
        if self.fill != "coverage" or not self.align:
            return torch.einsum("tb,tbhw->bhw", self.weights, (maps - mean).square_())
        cover = self.views.coverage((maps.shape[-2], maps.shape[-1]), like=maps)[:, None]
        apart = cover * (maps * inverse(cover) - mean) ** 2
        return torch.einsum("tb,tbhw->bhw", self.weights, apart) * inverse(self.seen(maps.shape))


def channels_first(
    frame: Frame, acts: Float[Tensor, "t b k h w"], grads: Float[Tensor, "t b k h w"], *, rectify: bool
) -> Float[Tensor, "b h w"]:
    """Feature space without warping a channel: exact, because turning back and averaging are linear.

    ᾱ_k = Σ_t w_t Σ_q c_t(q) g_t^k(q) with c_t(q) = mean_p M_t[p,q]; then Σ_k ᾱ_k Ā^k = Σ_t w_t M_t Σ_k ᾱ_k A_t^k.
    """
    grid = (acts.shape[-2], acts.shape[-1])
    if frame.fill == "coverage":
        share = inverse(frame.seen(grid)) / (grid[0] * grid[1])
        counts = frame.views.undo_transposed(share.expand(len(acts), -1, -1, -1), "coverage")
    else:
        counts = mean_weights(frame.views, grid, frame.fill, acts.dtype, acts.device)
    counts = frame.weights[..., None, None] * counts
    alpha = torch.einsum("tbhw,tbkhw->tbk", counts, grads).sum(0)
    if rectify:
        alpha = alpha.relu()
    return frame.mean(frame.undo(weighted(acts, alpha.expand(len(acts), -1, -1))))


def inverse(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """1 / x, and 0 where x is 0."""
    return torch.where(x > 0, 1 / x, 0)
