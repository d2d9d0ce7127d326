"""Turning pictures and planes. Nothing outside this module knows what an angle is.

Degrees, positive counter-clockwise as displayed. One bilinear `grid_sample` with reflection about the border
pixels equals reflect-pad, rotate, crop; multiples of 90° that fit the grid are exact.
"""

import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import grid_sample

from equicam.errors import EquicamError

Degrees = int | float
Fill = Literal["reflect", "zeros", "coverage"]
"""What stands where a turned plane looks outside the picture; `coverage` is zeros, divided out in the mean."""

FILLS: tuple[Fill, ...] = get_args(Fill)


def refuse_unknown(fill: str) -> None:
    """Only the fills there are."""
    if fill not in FILLS:
        raise EquicamError("fill", needs=f"one of {', '.join(FILLS)}", got=repr(fill), fix='fill="reflect"')


def rotate(
    x: Float[Tensor, "*m H W"], degrees: Degrees, *, fill: Fill = "reflect"
) -> Float[Tensor, "*m H W"]:
    """R_θ x: the content of x turned counter-clockwise about the centre, in the same frame."""
    height, width = x.shape[-2:]
    return _turn(x.reshape(1, -1, height, width), (float(degrees),), fill).reshape(x.shape)


def rotate_all(
    x: Float[Tensor, "*m H W"], angles: Sequence[Degrees], *, fill: Fill = "reflect"
) -> Float[Tensor, "a *m H W"]:
    """R_θ x for every angle."""
    height, width = x.shape[-2:]
    turned = _turn(x.reshape(1, -1, height, width), tuple(map(float, angles)), fill)
    return turned.view(len(angles), *x.shape)


def rotate_each(
    x: Float[Tensor, "b c H W"], degrees: Float[Tensor, " b"], *, fill: Fill = "reflect"
) -> Float[Tensor, "b c H W"]:
    """Every picture turned by an angle of its own, as `rotate` would."""
    height, width = x.shape[-2:]
    angles = degrees.to(x.device, torch.float64)
    grid = _looks(torch.deg2rad(angles)[:, None, None], height, width).to(x.dtype)
    return grid_sample(
        x, grid, "bilinear", "reflection" if fill == "reflect" else "zeros", align_corners=True
    )


@dataclass(frozen=True)
class Views:
    """A set of turns: `act` makes the views of a picture, `undo` turns planes read from them back."""

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
        """θ_t = start + 360 t / count; `start=-180` is the paper authors' grid, without 0° when count is odd."""
        if count < 1:
            raise EquicamError(
                "Views.evenly", needs="a count of 1 or more", got=count, fix="Views.evenly(18)"
            )
        return Views(tuple(start + 360.0 * t / count for t in range(count)))

    def __len__(self) -> int:
        return len(self.angles)

    @property
    def presented(self) -> int | None:
        """Which view is the picture as presented (0°), if any."""
        return next((t for t, a in enumerate(self.angles) if a % 360 == 0), None)

    def presented_first(self) -> tuple["Views", list[int]]:
        """The same views behind the presented one, and where each of ours stands in that order."""
        kept = self.presented
        rest = [t for t in range(len(self)) if t != kept]
        place = {t: 1 + i for i, t in enumerate(rest)} | ({} if kept is None else {kept: 0})
        ordered = Views((0.0, *(self.angles[t] for t in rest)))
        return ordered, [place[t] for t in range(len(self))]

    def act(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "t b c H W"]:
        """R_θt x for every view; outside the picture is its reflection."""
        b, c, height, width = x.shape
        turned = _turn(x.reshape(1, b * c, height, width), self.angles, "reflect")
        return turned.view(len(self), b, c, height, width)

    def undo(self, planes: Float[Tensor, "t *m h w"], fill: Fill) -> Float[Tensor, "t *m h w"]:
        """M_t y_t: every view's planes turned back to the presented frame."""
        height, width = planes.shape[-2:]
        flat = planes.reshape(len(self), -1, height, width)
        return _turn(flat, tuple(-a for a in self.angles), fill).view(planes.shape)

    def undo_transposed(self, planes: Float[Tensor, "t *m h w"], fill: Fill) -> Float[Tensor, "t *m h w"]:
        """M_tᵀ y_t: how much every cell of a view's own grid counts in what `undo` makes of it."""
        # on the CPU, where this scatter is deterministic
        with torch.enable_grad():
            zero = torch.zeros(planes.shape, dtype=torch.float64, requires_grad=True)
            (counts,) = torch.autograd.grad(self.undo(zero, fill), zero, planes.cpu().double())
        return counts.to(planes)

    def coverage(self, size: tuple[int, int], *, like: Tensor) -> Float[Tensor, "t h w"]:
        """M_t 1 with zeros outside: the share of each cell that view t has seen."""
        ones = torch.ones((len(self), *size), dtype=like.dtype, device=like.device)
        return self.undo(ones, "zeros")


def hold(made: Tensor) -> Tensor:
    """A tensor kept for reuse; a graph that is being captured keeps it too, for it will look for it where it is now."""
    if (keeper := holding.get()) is not None:
        keeper.append(made)
    return made


holding: ContextVar[list[Tensor] | None] = ContextVar("holding", default=None)
"""Where tensors go that must outlive their cache, while a graph is captured."""


@lru_cache(maxsize=8)
def disc(size: tuple[int, int], device: torch.device) -> Bool[Tensor, "H W"]:
    """Pixels that stay in the picture at every angle: within half the shorter side of the centre."""
    height, width = size
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64)[None, :] - (width - 1) / 2
    return (x**2 + y**2 <= (min(size) / 2) ** 2).to(device)


def mean_weights(
    views: Views, size: tuple[int, int], fill: Fill, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t 1 h w"]:
    """c_t(q) = mean_p M_t[p,q]: what cell q of view t contributes to the mean of its turned plane."""
    return hold(_mean_weights(views, size, fill, dtype, device))


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def disc_places(size: tuple[int, int], device: torch.device) -> Int[Tensor, " p"]:
    """Where the pixels of `disc` stand in a plane laid out in a row."""
    return disc(size, device).flatten().nonzero().flatten()


@lru_cache(maxsize=32)
def _mean_weights(
    views: Views, size: tuple[int, int], fill: Fill, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t 1 h w"]:
    height, width = size
    share = torch.full((len(views), 1, height, width), 1 / (height * width), dtype=dtype, device=device)
    return views.undo_transposed(share, fill)


def picked(x: Shaped[Tensor, "s *m"], rows: Sequence[int]) -> Shaped[Tensor, "t *m"]:
    """Rows of x in this order; x itself where that is its own."""
    if list(rows) == list(range(len(x))):
        return x
    return x[hold(_index(tuple(rows), x.device))]


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _index(rows: tuple[int, ...], device: torch.device) -> Int[Tensor, " t"]:
    return torch.tensor(rows, device=device)


def _turn(x: Float[Tensor, "s m H W"], angles: Sequence[float], fill: Fill) -> Float[Tensor, "t m H W"]:
    """Planes turned by each angle: one set of planes for all of them (s = 1), or one for each (s = t)."""
    height, width = x.shape[-2:]
    refuse_unknown(fill)
    if min(height, width) < 2:
        raise EquicamError(
            "a turn", needs="a grid of 2×2 or more", got=f"{height}×{width}", fix="a layer with a finer grid"
        )
    lattice = 90 if height == width else 180
    runs = [
        (exact, list(run)) for exact, run in groupby(range(len(angles)), lambda t: angles[t] % lattice == 0)
    ]
    looked = [run for exact, run in runs if not exact]
    sampled: Iterator[Tensor] = iter(())
    if looked:
        source = x if len(x) == 1 else torch.cat([x[run[0] : run[-1] + 1] for run in looked])
        every = _sampled(source, tuple(angles[t] for run in looked for t in run), fill)
        sampled = iter(torch.split(every, [len(run) for run in looked]))
    pieces: list[Tensor] = []
    for exact, run in runs:
        if exact:
            pieces += [torch.rot90(x[t % len(x)], round(angles[t] / 90) % 4, (-2, -1))[None] for t in run]
        else:
            pieces.append(next(sampled))
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _sampled(x: Float[Tensor, "s m H W"], angles: tuple[float, ...], fill: Fill) -> Float[Tensor, "t m H W"]:
    """One bilinear look for every angle."""
    grid = hold(_grid(angles, x.shape[-2], x.shape[-1], x.dtype, x.device))
    padding = "reflection" if fill == "reflect" else "zeros"
    return grid_sample(x.expand(len(angles), -1, -1, -1), grid, "bilinear", padding, align_corners=True)


@lru_cache(maxsize=16)
@torch.inference_mode(
    False
)  # a grid made in somebody's inference mode must still serve a backward pass later
def _grid(
    angles: tuple[float, ...], height: int, width: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t H W 2"]:
    """Where each output pixel looks, in `grid_sample`'s units (±1 are the centres of the border pixels)."""
    turn = torch.deg2rad(torch.tensor(angles, dtype=torch.float64))[:, None, None]
    return _looks(turn, height, width).to(dtype=dtype, device=device)


def _looks(turn: Float[Tensor, "t 1 1"], height: int, width: int) -> Float[Tensor, "t H W 2"]:
    y = torch.arange(height, dtype=torch.float64, device=turn.device)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64, device=turn.device)[None, :] - (width - 1) / 2
    look_x = x * turn.cos() - y * turn.sin()
    look_y = x * turn.sin() + y * turn.cos()
    return torch.stack((look_x * 2 / (width - 1), look_y * 2 / (height - 1)), dim=-1)
