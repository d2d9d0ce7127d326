"""How much each view counts: gates from a view's probability of the target and whether it is still its top-1.

A weigher gives numbers ≥ 0; the composition scales them to sum to 1 and, where all are 0, falls back to the
presented view alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.errors import EquicamError

Weigher = Callable[[Float[Tensor, "t b"], Bool[Tensor, "t b"]], Float[Tensor, "t b"]]


def uniform(prob: Float[Tensor, "t b"], top: Bool[Tensor, "t b"]) -> Float[Tensor, "t b"]:  # noqa: ARG001
    """Every view counts the same."""
    return torch.ones_like(prob)


@dataclass(frozen=True)
class KeepConfident:
    """PCF, prediction-consistent fusion: views with top-1 = c and p_c ≥ τ, weighed by p_c."""

    tau: int | float = 0.10

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise EquicamError("tau", needs="a probability from 0 to 1", got=self.tau, fix="tau=0.10")

    def __call__(self, prob: Float[Tensor, "t b"], top: Bool[Tensor, "t b"]) -> Float[Tensor, "t b"]:
        """p_c where the view is kept, 0 elsewhere."""
        return torch.where(top & (prob >= self.tau), prob, 0)


@dataclass(frozen=True)
class SoftGate:
    """p_c^γ, whatever the top-1; γ = 0 is uniform."""

    gamma: int | float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma < float("inf"):
            raise EquicamError("gamma", needs="a finite number ≥ 0", got=self.gamma, fix="gamma=1.0")

    def __call__(self, prob: Float[Tensor, "t b"], top: Bool[Tensor, "t b"]) -> Float[Tensor, "t b"]:  # noqa: ARG002
        """(p_c / max_t p_c)^γ: the same weights once scaled to sum 1, safe from underflow."""
        best = prob.amax(0, keepdim=True)
        return torch.where(best > 0, prob / best, 1) ** self.gamma
