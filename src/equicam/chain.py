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

from equicam.combine import Combine, Plane

Stage = Literal["features", "combined", "rectified", "upsampled", "map"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclass(frozen=True)
class Chain:
    """The steps for one combine and one picture size."""

    combine: Combine
    size: tuple[int, int]

    def trace(self, start: Stage, value: Sequence[Tensor]) -> dict[Stage, Tensor]:
        """Every named plane from `start` on; features are the two tensors (acts, grads), all else is one."""
        plane = self.combine(*value) if start == "features" else value[0]
        start = "combined" if start == "features" else start
        named: dict[Stage, Tensor] = {start: plane}
        steps: dict[Stage, Callable[[Tensor], Tensor]] = {
            "rectified": torch.relu,
            "upsampled": self.upsample,
            "map": unit,
        }
        for stage in STAGES[STAGES.index(start) + 1 :]:
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
    return _still(*_ends(plane))


def unit(plane: Plane) -> Plane:
    """Min–max to [0, 1]; a constant plane becomes 0."""
    low, high = _ends(plane)
    # by infinity, and not by a choice between two planes: of a large plane every copy costs
    width = torch.where(_still(low, high), torch.inf, high - low)
    return (plane - low[..., None, None]).div_(width[..., None, None])


def _ends(plane: Plane) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    return plane.amin((-2, -1)), plane.amax((-2, -1))


def _still(low: Float[Tensor, "*n"], high: Float[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    return high - low <= 16 * torch.finfo(low.dtype).eps * torch.maximum(high.abs(), low.abs())
