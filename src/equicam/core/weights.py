"""How much each view counts: gates from a view's confidence in the target and whether it is still the top-1 class.

A weigher returns numbers ≥ 0. `normalise` scales them to sum 1 and, where all are 0, falls back to the presented view.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.views import select
from equicam.errors import EquicamError

Weigher = Callable[[Float[Tensor, "t b"], Bool[Tensor, "t b"]], Float[Tensor, "t b"]]
"""(confidence in the target, whether the target is the view's top-1) → gate ≥ 0."""


def uniform(confidence: Float[Tensor, "t b"], is_top1: Bool[Tensor, "t b"]) -> Float[Tensor, "t b"]:  # noqa: ARG001
    """Every view counts the same."""
    return torch.ones_like(confidence)


@dataclass(frozen=True)
class KeepConfident:
    """PCF, Predictive Confidence Filtering: views with top-1 = c and p_c ≥ τ, weighted by p_c."""

    tau: int | float = 0.10

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise EquicamError("tau", "a probability from 0 to 1", self.tau, "tau=0.10")

    def __call__(
        self, confidence: Float[Tensor, "t b"], is_top1: Bool[Tensor, "t b"]
    ) -> Float[Tensor, "t b"]:
        """p_c where the view is kept, 0 elsewhere."""
        return torch.where(is_top1 & (confidence >= self.tau), confidence, 0)


@dataclass(frozen=True)
class SoftGate:
    """p_c^γ, whatever the top-1 class is; γ = 0 is uniform."""

    gamma: int | float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < float("inf"):
            raise EquicamError("gamma", "a finite number ≥ 0", self.gamma, "gamma=1.0")

    def __call__(
        self,
        confidence: Float[Tensor, "t b"],
        is_top1: Bool[Tensor, "t b"],  # noqa: ARG002
    ) -> Float[Tensor, "t b"]:
        """(p_c / max_t p_c)^γ: the same weights once scaled to sum 1, safe from underflow."""
        best = confidence.amax(0, keepdim=True)
        return torch.where(best > 0, confidence / best, 1) ** self.gamma


def normalise(gate: Float[Tensor, "t b"], order: list[int], count: int) -> Float[Tensor, "s b"]:
    """Gates scaled to sum 1, each at its place (`order`) among `count` views, the presented view first.

    All weight goes to the presented view where every gate is 0. A presented view that is not among the gates has none.
    """
    if len(order) < count:
        gate = torch.cat((torch.zeros_like(gate[:1]), gate))
        order = [0, *order]
    total = gate.sum(0)
    presented_only = torch.eye(count, 1, dtype=gate.dtype, device=gate.device)
    ordered = select(gate, [order.index(s) for s in range(count)])
    return torch.where(total > 0, ordered / total, presented_only)
