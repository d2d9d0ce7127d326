"""What a reader returns, and how it is told the class."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.chain import Stage
from equicam.core.combine import Features, Plane

Pin = Callable[[Float[Tensor, "n y"] | None], tuple[Int[Tensor, " n"], Float[Tensor, "n y"] | None]]
"""Given the scores of a batch of views: each view's target class and the scores of its picture as presented."""

Aim = Callable[[Float[Tensor, "n y"], Int[Tensor, " n"]], Float[Tensor, "n y"]]
"""(scores as presented, target) → the direction in score space whose gradient is read."""


@dataclass(frozen=True)
class Reading:
    """One batch of views, read: where they enter the chain, and what the model said of them."""

    stage: Stage
    value: tuple[Features | Plane, ...]  # (acts, grads) at features, one plane elsewhere
    scores: Float[Tensor, "n y"] | None = None
    probs: Float[Tensor, "n y"] | None = None
    rectify_weights: bool = False


def join(readings: list[Reading]) -> Reading:
    """Batches of one picture's views, as if read at once."""
    first = readings[0]
    if len(readings) == 1:
        return first
    value = tuple(map(torch.cat, zip(*(r.value for r in readings), strict=True)))
    scores = [r.scores for r in readings if r.scores is not None]
    probs = [r.probs for r in readings if r.probs is not None]
    return replace(
        first,
        value=value,
        scores=torch.cat(scores) if scores else None,
        probs=torch.cat(probs) if probs else None,
    )


def wide(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Float32 or wider: half-precision networks are explained in full precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
