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
    """The steps for one combine and one image size."""

    combine: Combine
    size: tuple[int, int]

    def trace(self, start: Stage, value: Sequence[Tensor], until: Stage = "map") -> dict[Stage, Tensor]:
        """Every named plane from `start` on. Features are two tensors (acts, grads), every other stage is one."""
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
        """Bilinear to the image's size, pixel areas aligned (`align_corners=False`)."""
        flat = plane.reshape(-1, 1, *plane.shape[-2:])
        large = interpolate(flat, self.size, mode="bilinear", align_corners=False)
        return large.view(*plane.shape[:-2], *self.size)


def unit(plane: Plane) -> Plane:
    """Min–max to [0, 1]; a constant plane becomes 0."""
    return scale_to_unit(plane, *value_range(plane))


def is_constant(plane: Plane) -> Bool[Tensor, "*n"]:
    """Whether a plane is constant up to rounding, so that stretching it would show rounding errors."""
    return value_range(plane)[1] == torch.inf


def value_range(plane: Plane) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """A plane's minimum and max − min, the latter infinite where the plane is constant up to rounding."""
    low, high = plane.amin((-2, -1)), plane.amax((-2, -1))
    width = high - low
    constant = width <= 16 * torch.finfo(low.dtype).eps * torch.maximum(high, -low)
    return low, torch.where(constant, torch.inf, width)


def scale_to_unit(plane: Plane, low: Float[Tensor, "*n"], width: Float[Tensor, "*n"]) -> Plane:
    """(plane − low) / width. An infinite width gives 0 without a second copy of the plane."""
    return (plane - low[..., None, None]).div_(width[..., None, None])
