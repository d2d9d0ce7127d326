"""Alignment: views rotated back to the presented frame and averaged there with their weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.combine import weighted
from equicam.core.views import Fill, Views, column_means


@dataclass(frozen=True)
class Alignment:
    """How planes of the views reach the presented frame: M_t, and the weights w_t (sum 1)."""

    views: Views
    enabled: bool  # False: planes are averaged as they are
    fill: Fill
    weights: Float[Tensor, "t b"]

    def align(self, planes: Float[Tensor, "t b *k h w"]) -> Float[Tensor, "t b *k H W"]:
        """M_t y_t, or y_t itself where views are not aligned."""
        return self.views.align(planes, self.fill) if self.enabled else planes

    def covered(self, grid: Sequence[int]) -> Float[Tensor, "b H W"]:
        """Σ_t w_t M_t 1: how much of each cell the weighted views cover, planes having this grid before alignment."""
        cover = self.views.coverage((grid[-2], grid[-1]), like=self.weights, fill=self.fill)
        return torch.einsum("tb,thw->bhw", self.weights, cover)

    @property
    def divides_by_coverage(self) -> bool:
        """Whether means are divided by what the views cover."""
        return self.enabled and self.fill in ("coverage", "canvas")

    @property
    def at_pixels(self) -> "Alignment":
        """The same for planes of pixel size, which need no canvas: each pixel is a matter of its own."""
        return replace(self, fill="coverage") if self.fill == "canvas" else self

    def mean(self, planes: Float[Tensor, "t b *k H W"], grid: Sequence[int]) -> Float[Tensor, "b *k H W"]:
        """Σ_t w_t y_t of planes that had this grid before alignment, divided by coverage if the fill says so.

        0 where no view covers a cell.
        """
        total = torch.einsum("tb,tb...->b...", self.weights, planes)
        if not self.divides_by_coverage:
            return total
        scale = inverse(self.covered(grid))
        return total * scale.view(len(scale), *[1] * (total.ndim - 3), *scale.shape[1:])

    def variance(self, maps: Float[Tensor, "t b H W"]) -> Float[Tensor, "b H W"]:
        """Σ_t w_t (h_t − h̄)² of maps of pixel size. Under `coverage`, a view counts where, and as much as, it covers."""
        mean = self.mean(maps, maps.shape)
        if not self.divides_by_coverage:
            return torch.einsum("tb,tbhw->bhw", self.weights, (maps - mean).square_())
        cover = self.views.coverage((maps.shape[-2], maps.shape[-1]), like=maps)[:, None]
        deviation = cover * (maps * inverse(cover) - mean) ** 2
        return torch.einsum("tb,tbhw->bhw", self.weights, deviation) * inverse(self.covered(maps.shape))


def contract_then_warp(
    alignment: Alignment,
    acts: Float[Tensor, "t b k h w"],
    grads: Float[Tensor, "t b k h w"],
    *,
    rectify: bool,
) -> Float[Tensor, "b H W"]:
    """Feature-space Grad-CAM without aligning a channel: exact, because alignment and mean are linear.

    ᾱ_k = Σ_t w_t Σ_q c_t(q) g_t^k(q) with c_t(q) = mean_p M_t[p,q]; then Σ_k ᾱ_k Ā^k = Σ_t w_t M_t Σ_k ᾱ_k A_t^k.
    """
    grid = (acts.shape[-2], acts.shape[-1])
    if alignment.fill == "canvas":  # which holds every cell of every rotated view: each counts the same
        counts = torch.full(
            (len(acts), 1, *grid), 1 / (grid[0] * grid[1]), dtype=acts.dtype, device=acts.device
        )
    elif alignment.fill == "coverage":
        share = inverse(alignment.covered(grid)) / (grid[0] * grid[1])
        counts = alignment.views.align_transposed(share.expand(len(acts), -1, -1, -1), "coverage")
    else:
        counts = column_means(alignment.views, grid, alignment.fill, acts.dtype, acts.device)
    counts = alignment.weights[..., None, None] * counts
    alpha = torch.einsum("tbhw,tbkhw->tbk", counts, grads).sum(0)
    if rectify:
        alpha = alpha.relu()
    return alignment.mean(alignment.align(weighted(acts, alpha.expand(len(acts), -1, -1))), grid)


def inverse(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """1 / x, and 0 where x is 0."""
    return torch.where(x > 0, 1 / x, 0)
