"""Health flags: what an auditor should know about a map before trusting it."""

from functools import cache

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.fusion import FusedMap

FLAGS = ("blank", "constant", "flipped", "none-kept", "low-coverage", "odd-size")


def health(
    fused: FusedMap,
    low: Float[Tensor, " b"],
    constant: Bool[Tensor, " b"],
    flips: Bool[Tensor, "t b"],
) -> Bool[Tensor, "b f"]:
    """One column for each of `FLAGS`; `low` is the raw map's minimum, `constant` whether it has no other value."""
    zero = low == 0
    alignment, (height, width) = fused.alignment, fused.readings.size
    h, w = fused.layer_map.shape[-2:]
    uncovered = torch.zeros_like(zero)
    if alignment.enabled and alignment.fill != "reflect":
        uncovered = (alignment.covered((h, w)) == 0).flatten(1).any(1).expand_as(zero)
    odd = torch.full_like(zero, height != width or bool(height % h) or bool(width % w))
    none_kept = ~(fused.gate > 0).any(0)
    return torch.stack((constant & zero, constant & ~zero, flips.any(0), none_kept, uncovered, odd), 1)


def flag_names(table: Bool[Tensor, "b f"]) -> tuple[frozenset[str], ...]:
    """The flags of every image by name."""
    return tuple(_names(tuple(row)) for row in table.tolist())


@cache
def _names(row: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(name for name, hit in zip(FLAGS, row, strict=True) if hit)
