"""Views of images: the transforms of a set acting on pixels, and planes read from the views taken back.

One bilinear `grid_sample` with reflection about the border pixels equals reflect-pad, transform, crop.
Flips and multiples of 90° that map the grid onto itself are exact. A `Window` of a larger image is presented in its place:
views are cut from the whole, so that a rotated corner shows what is there.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, wraps
from itertools import groupby
from typing import Any, Literal, ParamSpec, get_args

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import grid_sample

from equicam.core.transforms import Degrees, Element, Transform, as_transform, inner_radius, presented_index
from equicam.errors import EquicamError, not_one_of

P = ParamSpec("P")
Keeper = Callable[..., Tensor]
"""(make, *args) → make(*args), or the tensor kept from an earlier call with the same arguments."""

keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


def constant(make: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A function whose results are kept where somebody keeps them. Its arguments are positional, and hashable."""

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        keep = keeper.get()
        return make(*args, **kwargs) if keep is None else keep(make, *args, **kwargs)

    return found


Fill = Literal["reflect", "zeros", "coverage"]
"""How an aligned plane is filled where its view saw nothing. `coverage` fills zeros and divides them out of the mean."""
FILLS: tuple[Fill, ...] = get_args(Fill)


def as_fill(fill: str) -> Fill:
    """The fill of that name; any other name is refused."""
    if fill not in FILLS:
        raise not_one_of("fill", FILLS, fill, 'fill="reflect"')
    return fill


@dataclass(frozen=True)
class Window:
    """The central part of a larger image that is presented, and how: every view is cut from the whole in one look."""

    size: tuple[int, int]
    presentation: Transform = Transform()  # noqa: RUF009  # frozen


def crop_centre(x: Shaped[Tensor, "*m H W"], size: tuple[int, int]) -> Shaped[Tensor, "*m h w"]:
    """The central rows and columns. Differences in size must be even, so that the centre stays."""
    top, left = ((whole - part) // 2 for whole, part in zip(x.shape[-2:], size, strict=True))
    if min(top, left) < 0 or (x.shape[-2] - size[0]) % 2 or (x.shape[-1] - size[1]) % 2:
        raise EquicamError(
            "window", "a size below that of the images by even numbers",
            f"{size[0]}×{size[1]} of {x.shape[-2]}×{x.shape[-1]}", "images with one row or column less",
        )  # fmt: skip
    return x[..., top : top + size[0], left : left + size[1]]


def transform_all(
    x: Float[Tensor, "*m H W"], elements: Sequence[Element], *, fill: Fill = "reflect"
) -> Float[Tensor, "a *m H W"]:
    """Every transform of x; numbers are rotations."""
    planes = x.reshape(1, -1, *x.shape[-2:])
    return _transform(planes, [as_transform(e) for e in elements], fill).view(len(elements), *x.shape)


def rotate(
    x: Float[Tensor, "*m H W"], degrees: Degrees, *, fill: Fill = "reflect"
) -> Float[Tensor, "*m H W"]:
    """R_θ x: the content of x rotated counter-clockwise about the centre, in the same frame."""
    return transform_all(x, [degrees], fill=fill)[0]


def rotate_each(
    x: Float[Tensor, "b c H W"], degrees: Float[Tensor, " b"], *, fill: Fill = "reflect"
) -> Float[Tensor, "b c H W"]:
    """Every image rotated by its own angle, exactly as `rotate` does."""
    return _transform(x, [Transform(d) for d in degrees.tolist()], fill)


@dataclass(frozen=True)
class Views:
    """A set of transforms: `act` makes the views of an image, `align` takes planes read from them back.

    Numbers are rotations in degrees.
    """

    transforms: tuple[Transform, ...]

    def __init__(self, transforms: Sequence[Element]) -> None:
        try:
            found = tuple(map(as_transform, transforms))
        except (TypeError, ValueError, EquicamError):
            found = ()
        if not found:
            raise EquicamError(
                "Views", "at least one finite angle or Transform", transforms, "Views.evenly(18)"
            )
        object.__setattr__(self, "transforms", found)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.transforms)  # a captured call looks itself up by its views every time

    @staticmethod
    def evenly(count: int, *, start: Degrees = 0) -> "Views":
        """θ_t = start + 360 t / count. `start=-180` is the paper authors' grid, without 0° when count is odd."""
        if count < 1:
            raise EquicamError("Views.evenly", "a count of 1 or more", count, "Views.evenly(18)")
        return Views([start + 360.0 * t / count for t in range(count)])

    @staticmethod
    def dihedral(count: int) -> "Views":
        """Rotations by multiples of 720° / count, each followed by its reflection; 8 map a square grid onto itself."""
        if count < 2 or count % 2:
            raise EquicamError("Views.dihedral", "an even count", count, "Views.dihedral(18)")
        angles = [720.0 * t / count for t in range(count // 2)]
        return Views([Transform(angle, mirrored) for angle in angles for mirrored in (False, True)])

    @staticmethod
    def scales(*factors: int | float) -> "Views":
        """The image about its centre, larger or smaller."""
        return Views([Transform(scale=factor) for factor in factors])

    @staticmethod
    def shifts(*shares: tuple[int | float, int | float]) -> "Views":
        """The image moved right and down by shares of its shorter side."""
        return Views([Transform(shift=share) for share in shares])

    def __mul__(self, first: "Views") -> "Views":
        """Every transform of `first` followed by every one of ours, each once."""
        every = (own.after(other) for own in self.transforms for other in first.transforms)
        return Views(list({one.key: one for one in every}.values()))

    def __len__(self) -> int:
        return len(self.transforms)

    @property
    def labels(self) -> tuple[str, ...]:
        """The views for people."""
        return tuple(one.label for one in self.transforms)

    def to_plain(self) -> tuple[Any, ...]:
        """Plain values that `Views` accepts."""
        return tuple(one.to_plain() for one in self.transforms)

    @cached_property
    def radius(self) -> float:
        """The share of the disc's radius inside which every aligned plane shows what its view has seen."""
        return inner_radius(self.transforms)

    @property
    def presented(self) -> int | None:
        """The index of the presented view, if it is among them."""
        return presented_index(self.transforms)

    @cached_property
    def inverses(self) -> tuple[Transform, ...]:
        """The transforms that take planes back."""
        return tuple(one.inverse() for one in self.transforms)

    @cached_property
    def count_with_presented(self) -> int:
        """How many views are read: the presented view is read for its target even if it is not among them."""
        return len(self) + (self.presented is None)

    def presented_first(self) -> tuple["Views", list[int]]:
        """These views with the presented one first (added if missing), and the position of each of ours in that order."""
        presented = self.presented
        rest = [t for t in range(len(self)) if t != presented]
        index = {t: 1 + i for i, t in enumerate(rest)} | ({} if presented is None else {presented: 0})
        ordered = Views([Transform(), *(self.transforms[t] for t in rest)])
        return ordered, [index[t] for t in range(len(self))]

    def union(self, other: "Views") -> "Views":
        """These views, then those of the other that are not among them."""
        known = {one.key for one in self.transforms}
        return Views([*self.transforms, *(one for one in other.transforms if one.key not in known)])

    def indices_in(self, other: "Views") -> list[int]:
        """Where each of our views stands among the other's."""
        index = {one.key: t for t, one in enumerate(other.transforms)}
        return [index[one.key] for one in self.transforms]

    def act(self, x: Float[Tensor, "b c H W"], window: Window | None = None) -> Float[Tensor, "t b c h w"]:
        """Every view of the images, or of a window in them; reflected where a view reaches outside."""
        if window is None:
            return transform_all(x, self.transforms)
        transforms = [one.after(window.presentation) for one in self.transforms]
        found = _transform(x.reshape(1, -1, *x.shape[-2:]), transforms, "reflect", window.size)
        return found.view(len(self), *x.shape[:2], *window.size)

    def align(self, planes: Float[Tensor, "t *m h w"], fill: Fill) -> Float[Tensor, "t *m h w"]:
        """M_t y_t: every view's planes taken back to the presented frame."""
        flat = planes.reshape(len(self), -1, *planes.shape[-2:])
        return _transform(flat, self.inverses, fill).view(planes.shape)

    def align_transposed(self, planes: Float[Tensor, "t *m h w"], fill: Fill) -> Float[Tensor, "t *m h w"]:
        """M_tᵀ y_t: how much every cell of a view's own grid counts in its aligned plane, which has the same grid."""
        # on the CPU, where this scatter is deterministic
        with torch.enable_grad():
            zero = torch.zeros(planes.shape, dtype=torch.float64, requires_grad=True)
            (counts,) = torch.autograd.grad(self.align(zero, fill), zero, planes.cpu().double())
        return counts.to(planes)

    def coverage(self, size: tuple[int, int], *, like: Tensor) -> Float[Tensor, "t h w"]:
        """M_t 1 with zeros outside: the share of each cell that view t covers."""
        return _coverage(self, size, like.dtype, like.device)


@constant
def disc(size: tuple[int, int], device: torch.device, radius: float = 1.0) -> Bool[Tensor, "H W"]:
    """Pixels that stay in the image at every angle: within half the shorter side of the centre, or a share of it."""
    height, width = size
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2
    x = torch.arange(width, dtype=torch.float64)[None, :] - (width - 1) / 2
    return (x**2 + y**2 <= (radius * min(size) / 2) ** 2).to(device)


@constant
def disc_pixels(size: tuple[int, int], device: torch.device, radius: float = 1.0) -> Int[Tensor, " p"]:
    """Indices of the disc's pixels in a flattened plane."""
    return disc(size, device, radius).flatten().nonzero().flatten()


@constant
def column_means(
    views: Views, size: tuple[int, int], fill: Fill, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "t 1 h w"]:
    """c_t(q) = mean_p M_t[p,q]: the weight of cell q of view t in the mean of its aligned plane."""
    share = torch.full((len(views), 1, *size), 1 / (size[0] * size[1]), dtype=dtype, device=device)
    return views.align_transposed(share, fill)


def select(x: Shaped[Tensor, "s *m"], rows: Sequence[int]) -> Shaped[Tensor, "t *m"]:
    """Rows of x in this order; x itself, or a view of it, where they are evenly spaced."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if step > 0 and list(rows) == list(range(rows[0], rows[0] + step * len(rows), step)):
        return x[rows[0] : rows[-1] + 1 : step]
    return x[_index(tuple(rows), x.device)]


@constant
def _coverage(views: Views, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return views.align(torch.ones((len(views), *size), dtype=dtype, device=device), "zeros")


@constant
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device)


def _transform(
    x: Float[Tensor, "s m H W"],
    transforms: Sequence[Transform],
    fill: Fill,
    size: tuple[int, int] | None = None,
) -> Float[Tensor, "t m h w"]:
    """Planes under each transform: one set of planes for all (s = 1), or one for each (s = t); of a window's size."""
    height, width = size = size or (x.shape[-2], x.shape[-1])
    as_fill(fill)
    if min(size) < 2:
        raise EquicamError(
            "a rotation", "a grid of 2×2 or more", f"{height}×{width}", "a layer with a finer grid"
        )
    step = 90 if height == width else 180
    runs = [
        (exact, list(run))
        for exact, run in groupby(range(len(transforms)), lambda t: transforms[t].permutes_pixels(step))
    ]
    inexact = [run for exact, run in runs if not exact]
    sampled: list[Tensor] = []
    if inexact:
        source = x if len(x) == 1 else torch.cat([x[run[0] : run[-1] + 1] for run in inexact])
        every = _sample(source, tuple(transforms[t] for run in inexact for t in run), fill, size)
        sampled = list(torch.split(every, [len(run) for run in inexact]))
    pieces: list[Tensor] = []
    for exact, run in runs:
        if exact:
            pieces += [_exact(crop_centre(x[t % len(x)], size), transforms[t])[None] for t in run]
        else:
            pieces.append(sampled.pop(0))
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _exact(planes: Float[Tensor, "m H W"], one: Transform) -> Float[Tensor, "m H W"]:
    flipped = planes.flip(-2) if one.mirrored else planes
    return torch.rot90(flipped, round(one.degrees / 90) % 4, (-2, -1))


def _sample(
    x: Float[Tensor, "s m H W"], transforms: tuple[Transform, ...], fill: Fill, size: tuple[int, int]
) -> Float[Tensor, "t m h w"]:
    """Bilinear samples of the planes under every transform."""
    grid = _sampling_grid(transforms, size, (x.shape[-2], x.shape[-1]), x.dtype, x.device)
    padding = "reflection" if fill == "reflect" else "zeros"
    return grid_sample(x.expand(len(transforms), -1, -1, -1), grid, "bilinear", padding, align_corners=True)


@constant
def _sampling_grid(
    transforms: tuple[Transform, ...],
    size: tuple[int, int],
    whole: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Float[Tensor, "t H W 2"]:
    """The point of the whole that each output pixel samples, in `grid_sample`'s units (±1: centres of border pixels)."""

    def column(values: Sequence[int | float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[:, None, None]

    height, width = size
    theta = torch.deg2rad(column([one.degrees for one in transforms]))
    scale = column([one.scale for one in transforms])
    right, down = (column([one.shift[i] * min(size) for one in transforms]) for i in (0, 1))
    y = torch.arange(height, dtype=torch.float64)[:, None] - (height - 1) / 2 - down
    x = torch.arange(width, dtype=torch.float64)[None, :] - (width - 1) / 2 - right
    source_x = (x * theta.cos() - y * theta.sin()) / scale
    source_y = (x * theta.sin() + y * theta.cos()) / scale
    source_y = source_y * column([-1.0 if one.mirrored else 1.0 for one in transforms])
    grid = torch.stack((source_x * 2 / (whole[1] - 1), source_y * 2 / (whole[0] - 1)), dim=-1)
    return grid.to(dtype=dtype, device=device)
