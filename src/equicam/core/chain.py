"""The named tensors between a reading and its map, and the steps from one to the next.

features ─combine▶ combined ─rectify▶ rectified ─upsample▶ upsampled ─unit▶ map
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import interpolate

from equicam.core.combine import Combine, Plane

Stage = Literal["features", "combined", "rectified", "upsampled", "map"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Chain:
    """The steps for one combine and one picture size."""

    combine: Combine
    size: tuple[int, int]

    def trace(self, start: Stage, value: Sequence[Tensor], until: Stage = "map") -> dict[Stage, Tensor]:
        """Every named plane from `start` on; features are the two tensors (acts, grads), all else is one."""
        plane = self.combine(*value) if start == "features" else value[0]
        start = "combined" if start == "features" else start
        named: dict[Stage, Tensor] = {start: plane}
        steps: dict[Stage, Callable[[Tensor], Tensor]] = {
            "rectified": torch.relu,
            "upsampled": self.upsample,
            "map": unit,
        }
        for stage in STAGES[STAGES.index(start) + 1 : STAGES.index(until) + 1]:
            plane = steps[stage](plane)
            named[stage] = plane
        return named

    def upsample(self, plane: Plane) -> Float[Tensor, "*n H W"]:
        """Bilinear to the picture's size, pixel areas aligned (`align_corners=False`)."""
        flat = plane.reshape(-1, 1, *plane.shape[-2:])
        return interpolate(flat, self.size, mode="bilinear", align_corners=False).view(
            *plane.shape[:-2], *self.size
        )


def constant(plane: Plane) -> Bool[Tensor, "*n"]:
    """Whether a plane is constant up to rounding: stretching it would draw rounding errors."""
    return span(plane)[1] == torch.inf


def unit(plane: Plane) -> Plane:
    """Min–max to [0, 1]; a constant plane becomes 0."""
    return stretched(plane, *span(plane))


def span(plane: Plane) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """A plane's least value, and how far it reaches above: infinitely, where it is constant up to rounding."""
    low, high = plane.amin((-2, -1)), plane.amax((-2, -1))
    width = high - low
    still = width <= 16 * torch.finfo(low.dtype).eps * torch.maximum(high, -low)
    return low, torch.where(still, torch.inf, width)


def stretched(plane: Plane, low: Float[Tensor, "*n"], width: Float[Tensor, "*n"]) -> Plane:
    """(plane − low) / width: by an infinite width 0, without a choice that would copy the plane once more."""
    return (plane - low[..., None, None]).div_(width[..., None, None])
