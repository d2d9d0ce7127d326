"""Rotations of images and planes. No other module computes with angles.

Angles are degrees, positive counter-clockwise as displayed. One bilinear `grid_sample` with reflection about the
border pixels equals reflect-pad, rotate, crop. Multiples of 90° that map the grid onto itself are exact.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import grid_sample

from equicam.core.constants import constant
from equicam.errors import EquicamError

Degrees = int | float
Fill = Literal["reflect", "zeros", "coverage"]
"""How a rotated plane is filled outside the image. `coverage` fills zeros and divides them out of the mean."""
FILLS: tuple[Fill, ...] = get_args(Fill)


def as_fill(fill: str) -> Fill:
    """The fill of that name; any other name is refused."""
    if fill not in FILLS:
        raise EquicamError("fill", needs=f"one of {', '.join(FILLS)}", got=repr(fill), fix='fill="reflect"')
    return fill


def rotate(
    x: Float[Tensor, "*m H W"], degrees: Degrees, *, fill: Fill = "reflect"
) -> Float[Tensor, "*m H W"]:
    """R_θ x: the content of x rotated counter-clockwise about the centre, in the same frame."""
    return rotate_all(x, [degrees], fill=fill)[0]


def rotate_all(
    x: Float[Tensor, "*m H W"], angles: Sequence[Degrees], *, fill: Fill = "reflect"
) -> Float[Tensor, "a *m H W"]:
    """R_θ x for every angle."""
    planes = x.reshape(1, -1, *x.shape[-2:])
    return _rotate(planes, [float(a) for a in angles], fill).view(len(angles), *x.shape)


def rotate_each(
    x: Float[Tensor, "b c H W"], degrees: Float[Tensor, " b"], *, fill: Fill = "reflect"
) -> Float[Tensor, "b c H W"]:
    """Every image rotated by its own angle, exactly as `rotate` does."""
    return _rotate(x, degrees.tolist(), fill)


@dataclass(frozen=True)
class Views:
    """A set of rotations: `act` makes the views of an image, `align` rotates planes read from them back."""

    angles: tuple[Degrees, ...]

    def __post_init__(self) -> None:
        try:
            angles = tuple(float(a) for a in self.angles)
        except (TypeError, ValueError):
            angles = ()
        if not angles or not all(map(math.isfinite, angles)):
            raise EquicamError(
                "Views", needs="at least one finite angle", got=self.angles, fix="Views.evenly(18)"
            )
        object.__setattr__(self, "angles", angles)

    @staticmethod
    def evenly(count: int, *, start: Degrees = 0) -> "Views":
        """θ_t = start + 360 t / count. `start=-180` is the paper authors' grid, without 0° when count is odd."""
        if count < 1:
            raise EquicamError(
                "Views.evenly", needs="a count of 1 or more", got=count, fix="Views.evenly(18)"
            )
        return Views(tuple(start + 360.0 * t / count for t in range(count)))

    def __len__(self) -> int:
        return len(self.angles)

    @property
    def presented(self) -> int | None:
        """The index of the presented view (0°), if it is among them."""
        return next((t for t, a in enumerate(self.angles) if a % 360 == 0), None)

    @property
    def count_with_presented(self) -> int:
        """How many views are read: the presented view is read for its target even if it is not among them."""
        return len(self) + (self.presented is None)

    def presented_first(self) -> tuple["Views", list[int]]:
        """These views with 0° first (added if missing), and the position of each of ours in that order."""
        presented = self.presented
        rest = [t for t in range(len(self)) if t != presented]
        index = {t: 1 + i for i, t in enumerate(rest)} | ({} if presented is None else {presented: 0})
        ordered = Views((0.0, *(self.angles[t] for t in rest)))
        return ordered, [index[t] for t in range(len(self))]

    def union(self, other: "Views") -> "Views":
        """These views, then those of the other that are not among them."""
        known = {a % 360 for a in self.angles}
        return Views((*self.angles, *(a for a in other.angles if a % 360 not in known)))

    def indices_in(self, other: "Views") -> list[int]:
        """Where each of our views stands among the other's."""
        index = {angle % 360: t for t, angle in enumerate(other.angles)}
        return [index[angle % 360] for angle in self.angles]

    def act(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "t b c H W"]:
        """R_θt x for every view, reflected where a view reaches outside the image."""
        return rotate_all(x, self.angles)

    def align(self, planes: Float[Tensor, "t *m h w"], fill: Fill) -> Float[Tensor, "t *m h w"]:
        """M_t y_t: every view's planes rotated back to the presented frame."""
        flat = planes.reshape(len(self), -1, *planes.shape[-2:])
        return _rotate(flat, [-a for a in self.angles], fill).view(planes.shape)

    def align_transposed(self, planes: Float[Tensor, "t *m h w"], fill: Fill) -> Float[Tensor, "t *m h w"]:
        """M_tᵀ y_t: how much every cell of a view's own grid counts in its aligned plane."""
        # on the CPU, where this scatter is deterministic
        with torch.enable_grad():
            zero = torch.zeros(planes.shape, dtype=torch.float64, requires_grad=True)
            (counts,) = torch.autograd.grad(self.align(zero, fill), zero, planes.cpu().double())
        return counts.to(planes)

    def coverage(self, size: tuple[int, int], *, like: Tensor) -> Float[Tensor, "t h w"]:
        """M_t 1 with zeros outside: the share of each cell that view t covers."""
        ones = torch.ones((len(self), *size), dtype=like.dtype, device=like.device)
        return self.align(ones, "zeros")


def disc(size: tuple[int, int], device: torch.device) -> Bool[Tensor, "H W"]:
    """Pixels that stay in the image at every angle: within half the shorter side of the centre."""
    return constant(_disc, size, device)


def disc_pixels(size: tuple[int, int], device: torch.device) -> Int[Tensor, " p"]:
    """Indices of the disc's pixels in a flattened plane."""
    return constant(_disc_pixels, size, device)


def column_means(
    views: Views, size: tuple[int, int], fill: Fill, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t 1 h w"]:
    """c_t(q) = mean_p M_t[p,q]: the weight of cell q of view t in the mean of its aligned plane."""
    return constant(_column_means, views, size, fill, dtype, device)


def select(x: Shaped[Tensor, "s *m"], rows: Sequence[int]) -> Shaped[Tensor, "t *m"]:
    """Rows of x in this order; x itself where the order is its own."""
    if list(rows) == list(range(len(x))):
        return x
    return x[constant(_index, tuple(rows), x.device)]


def _disc(size: tuple[int, int], device: torch.device) -> Tensor:
    height, width = size
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64)[None, :] - (width - 1) / 2
    return (x**2 + y**2 <= (min(size) / 2) ** 2).to(device)


def _disc_pixels(size: tuple[int, int], device: torch.device) -> Tensor:
    return _disc(size, device).flatten().nonzero().flatten()


def _column_means(
    views: Views, size: tuple[int, int], fill: Fill, dtype: torch.dtype, device: torch.device
) -> Tensor:
    share = torch.full((len(views), 1, *size), 1 / (size[0] * size[1]), dtype=dtype, device=device)
    return views.align_transposed(share, fill)


def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)


def _rotate(x: Float[Tensor, "s m H W"], angles: Sequence[float], fill: Fill) -> Float[Tensor, "t m H W"]:
    """Planes rotated by each angle: one set of planes for all angles (s = 1), or one for each (s = t)."""
    height, width = x.shape[-2:]
    as_fill(fill)
    if min(height, width) < 2:
        raise EquicamError(
            "a rotation", needs="a grid of 2×2 or more", got=f"{height}×{width}", fix="a layer with a finer grid"
        )  # fmt: skip
    exact_step = 90 if height == width else 180
    runs = [
        (exact, list(run))
        for exact, run in groupby(range(len(angles)), lambda t: angles[t] % exact_step == 0)
    ]
    inexact = [run for exact, run in runs if not exact]
    sampled: list[Tensor] = []
    if inexact:
        source = x if len(x) == 1 else torch.cat([x[run[0] : run[-1] + 1] for run in inexact])
        every = _sample(source, tuple(angles[t] for run in inexact for t in run), fill)
        sampled = list(torch.split(every, [len(run) for run in inexact]))
    pieces: list[Tensor] = []
    for exact, run in runs:
        if exact:
            pieces += [torch.rot90(x[t % len(x)], round(angles[t] / 90) % 4, (-2, -1))[None] for t in run]
        else:
            pieces.append(sampled.pop(0))
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _sample(x: Float[Tensor, "s m H W"], angles: tuple[float, ...], fill: Fill) -> Float[Tensor, "t m H W"]:
    """Bilinear samples of the planes at every angle."""
    grid = constant(_sampling_grid, angles, x.shape[-2], x.shape[-1], x.dtype, x.device)
    padding = "reflection" if fill == "reflect" else "zeros"
    return grid_sample(x.expand(len(angles), -1, -1, -1), grid, "bilinear", padding, align_corners=True)


def _sampling_grid(
    angles: tuple[float, ...], height: int, width: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t H W 2"]:
    """The point each output pixel samples, in `grid_sample`'s units (±1 are the centres of the border pixels)."""
    theta = torch.deg2rad(torch.tensor(angles, dtype=torch.float64))[:, None, None]
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64)[None, :] - (width - 1) / 2
    source_x = x * theta.cos() - y * theta.sin()
    source_y = x * theta.sin() + y * theta.cos()
    grid = torch.stack((source_x * 2 / (width - 1), source_y * 2 / (height - 1)), dim=-1)
    return grid.to(dtype=dtype, device=device)
