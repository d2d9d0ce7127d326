"""Alignment: views rotated back to the presented frame and averaged there with their weights."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.chain import weighted
from equicam.core.views import Fill, Views, column_means, constant


@dataclass(frozen=True)
class Alignment:
    """How planes of the views reach the presented frame: M_t, and the weights w_t (sum 1)."""

    views: Views
    enabled: bool  # False: planes are averaged as they are
    fill: Fill
    weights: Float[Tensor, "t b"]
    same_weights: tuple[float, ...] | None = None  # those of every image, where they do not depend on it

    def align(self, planes: Float[Tensor, "t b *k h w"]) -> Float[Tensor, "t b *k h w"]:
        """M_t y_t, or y_t itself where views are not aligned."""
        return self.views.align(planes, self.fill) if self.enabled else planes

    def covered(self, size: tuple[int, int]) -> Float[Tensor, "#b h w"]:
        """Σ_t w_t M_t 1: how much of each cell the weighted views cover, of one image where all are the same."""
        weights = self.weights if self.same_weights is None else self.weights[:, :1]
        return torch.einsum("tb,thw->bhw", weights, self.views.coverage(size, like=weights))

    def mean(self, planes: Float[Tensor, "t b *k h w"]) -> Float[Tensor, "b *k h w"]:
        """Σ_t w_t y_t of aligned planes, divided by coverage if the fill says so; 0 where no view covers a cell."""
        total = torch.einsum("tb,tb...->b...", self.weights, planes)
        if not self._divides_by_coverage:
            return total
        scale = inverse(self.covered((planes.shape[-2], planes.shape[-1])))
        return total * scale.view(len(scale), *[1] * (total.ndim - 3), *scale.shape[1:])

    def variance(self, maps: Float[Tensor, "t b H W"]) -> Float[Tensor, "b H W"]:
        """Σ_t w_t (h_t − h̄)² of aligned maps. Under `coverage`, a view counts where, and as much as, it covers."""
        total = torch.einsum("tb,tb...->b...", self.weights, maps)
        if not self._divides_by_coverage:
            return torch.einsum("tb,tbhw->bhw", self.weights, (maps - total).square_())
        size = (maps.shape[-2], maps.shape[-1])
        cover, scale = self.views.coverage(size, like=maps)[:, None], inverse(self.covered(size))
        deviation = cover * (maps * inverse(cover) - total * scale) ** 2
        return torch.einsum("tb,tbhw->bhw", self.weights, deviation) * scale

    def cell_counts(self, acts: Float[Tensor, "t b k h w"]) -> Float[Tensor, "t #b h w"]:
        """c_t(q) = mean_p M_t[p,q], over coverage if the fill says so: how much cell q of view t counts in the mean."""
        size = (acts.shape[-2], acts.shape[-1])
        if self.fill != "coverage":
            return column_means(self.views, size, self.fill, acts.dtype, acts.device)
        if self.same_weights is not None:
            return _counts_of_same_weights(self.views, size, self.same_weights, acts.dtype, acts.device)
        return self._counts_by_coverage(size)

    def _counts_by_coverage(self, size: tuple[int, int]) -> Float[Tensor, "t #b h w"]:
        share = inverse(self.covered(size)) / (size[0] * size[1])
        return self.views.align_transposed(share.expand(len(self.views), *share.shape), "coverage")

    @property
    def _divides_by_coverage(self) -> bool:
        return self.enabled and self.fill == "coverage"


def contract_then_warp(
    alignment: Alignment,
    acts: Float[Tensor, "t b k h w"],
    grads: Float[Tensor, "t b k h w"],
    *,
    rectify: bool,
) -> Float[Tensor, "b h w"]:
    """Feature-space Grad-CAM without aligning a channel: exact, because alignment and mean are linear.

    ᾱ_k = Σ_t w_t Σ_q c_t(q) g_t^k(q) with c_t(q) = mean_p M_t[p,q]; then Σ_k ᾱ_k Ā^k = Σ_t w_t M_t Σ_k ᾱ_k A_t^k.
    """
    counts = alignment.weights[..., None, None] * alignment.cell_counts(acts)
    alpha = torch.einsum("tbhw,tbkhw->tbk", counts, grads).sum(0)
    if rectify:
        alpha = alpha.relu()
    return alignment.mean(alignment.align(weighted(acts, alpha.expand(len(acts), -1, -1))))


def inverse(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """1 / x, and 0 where x is 0."""
    return torch.where(x > 0, 1 / x, 0)


@constant
def _counts_of_same_weights(
    views: Views, size: tuple[int, int], weights: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t 1 h w"]:
    of_views = torch.tensor(weights, dtype=dtype, device=device)[:, None]
    return Alignment(views, True, "coverage", of_views)._counts_by_coverage(size)
