"""Transforms of the plane: rotations, reflections, scalings and shifts. Only this module and `views` compute with angles.

A transform flips the image top to bottom (if mirrored), rotates it counter-clockwise as displayed, scales it about its
centre and shifts it. It is plain mathematics, without pixels: a run's manifest can be read without torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from equicam.errors import EquicamError

Degrees = int | float


@dataclass(frozen=True)
class Transform:
    """A similarity of the plane: flip top to bottom if mirrored, rotate, scale about the centre, shift."""

    degrees: Degrees = 0.0  # counter-clockwise
    mirrored: bool = False
    scale: int | float = 1.0
    shift: tuple[int | float, int | float] = (0.0, 0.0)  # right and down, as shares of the shorter side

    def __post_init__(self) -> None:
        numbers = (self.degrees, self.scale, *self.shift)
        if not all(map(math.isfinite, numbers)) or self.scale <= 0 or len(self.shift) != 2:
            raise EquicamError(
                "Transform", "finite numbers and a scale above 0", self, "Transform(degrees=90)"
            )

    @cached_property
    def key(self) -> tuple[float | bool, ...]:
        """Equal for transforms that do the same, up to rounding."""
        rounded = (round(v, 9) + 0.0 for v in (self.degrees, self.scale, *self.shift))
        degrees, scale, right, down = rounded
        return degrees % 360, self.mirrored, scale, right, down

    @property
    def is_identity(self) -> bool:
        """Whether it leaves an image as it is."""
        return self.key == Transform().key

    @property
    def is_rigid(self) -> bool:
        """Whether it is a rotation or a reflection about the centre."""
        return self.key[2:] == (1.0, 0.0, 0.0)

    def permutes_pixels(self, step: int) -> bool:
        """Whether it is rigid and by a multiple of `step` degrees, those that map a grid onto itself."""
        return self.is_rigid and self.key[0] % step == 0

    @property
    def is_rotation(self) -> bool:
        """Whether it is a rotation about the centre."""
        return self.is_rigid and not self.mirrored

    def after(self, first: "Transform") -> "Transform":
        """The transform that does `first`, then this one."""
        sign = -1 if self.mirrored else 1
        moved = self._linear(first.shift)
        return Transform(
            (self.degrees + sign * first.degrees) % 360,
            self.mirrored != first.mirrored,
            self.scale * first.scale,
            (self.shift[0] + moved[0], self.shift[1] + moved[1]),
        )

    def inverse(self) -> "Transform":
        """The transform that takes images under this one back."""
        back = Transform(self.degrees if self.mirrored else -self.degrees, self.mirrored, 1 / self.scale)
        if self.shift == (0, 0):
            return back
        right, down = back._linear(self.shift)
        return Transform(back.degrees, back.mirrored, back.scale, (-right, -down))

    def move(self, right: Any, down: Any, *, side: int | float = 1) -> tuple[Any, Any]:
        """Where points go, numbers or arrays, right and down of the centre; `side` is the length of the shorter side."""
        moved = self._linear((right, down))
        return moved[0] + side * self.shift[0], moved[1] + side * self.shift[1]

    def _linear(self, vector: tuple[Any, Any]) -> tuple[Any, Any]:
        """A vector (right, down) without the shift."""
        right, down = vector[0], -vector[1] if self.mirrored else vector[1]
        cos, sin = (f(math.radians(self.degrees)) * self.scale for f in (math.cos, math.sin))
        return right * cos + down * sin, down * cos - right * sin

    @property
    def label(self) -> str:
        """For people: "60° mirrored, × 1.25, shifted 10 % right"."""
        parts = [f"{self.degrees:g}°" + (" mirrored" if self.mirrored else "")]
        if self.scale != 1:
            parts.append(f"× {self.scale:g}")
        for share, names in zip(self.shift, (("right", "left"), ("down", "up")), strict=True):
            if abs(share) > 1e-12:
                parts.append(f"shifted {100 * abs(share):g} % {names[share < 0]}")
        if len(parts) > 1 and self.key[:2] == (0.0, False):
            del parts[0]
        return ", ".join(parts)

    def to_plain(self) -> float | tuple[float, bool, float, float, float]:
        """Degrees for a rotation; otherwise degrees, mirrored, scale, right, down."""
        if self.is_rotation:
            return float(self.degrees)
        right, down = map(float, self.shift)
        return float(self.degrees), self.mirrored, float(self.scale), right, down


Element = Degrees | Transform | Sequence[int | float | bool]
"""A transform; a number is a rotation by as many degrees, and five values are those of `Transform.to_plain`."""


def as_transform(element: Element) -> Transform:
    """The transform of a number, of plain values, or itself."""
    if isinstance(element, Transform):
        return element
    if isinstance(element, Sequence) and len(element) == 5:
        degrees, mirrored, scale, right, down = element
        return Transform(float(degrees), bool(mirrored), float(scale), (float(right), float(down)))
    return Transform(float(element))  # type: ignore[arg-type]


def presented_index(transforms: Sequence[Transform]) -> int | None:
    """Where the image as it is stands among them, if it does."""
    return next((t for t, one in enumerate(transforms) if one.is_identity), None)


def canvas_size(size: tuple[int, int]) -> tuple[int, int]:
    """The smallest grid of the same centre that holds a rotated grid at every angle."""
    diagonal = math.hypot(*size)
    height, width = (s + 2 * math.ceil((diagonal - s) / 2 - 1e-9) for s in size)
    return height, width


@lru_cache(maxsize=256)  # for one image on a GPU it would take longer than what context adds there
def margin_needed(transforms: tuple[Transform, ...], size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns around an image of this size (height, width) that its views show."""
    rows, columns = ((length - 1) / 2 for length in size)
    reach_down = reach_right = 0.0
    for one in transforms:
        back = one.inverse()
        for corner in ((columns, rows), (columns, -rows)):
            right, down = back._linear(corner)
            away_right, away_down = (share * min(size) for share in back.shift)
            reach_right = max(reach_right, abs(right) + abs(away_right))
            reach_down = max(reach_down, abs(down) + abs(away_down))
    return max(0, math.ceil(reach_down - rows - 1e-6)), max(0, math.ceil(reach_right - columns - 1e-6))


def inner_radius(transforms: Sequence[Transform]) -> float:
    """The share of the inscribed disc's radius that stays inside it under every transform and its inverse."""
    reach = [1.0]
    for one in transforms:
        away = 2 * math.hypot(*one.shift)
        reach += [(1 - away) / one.scale, one.scale - away]
    return max(0.0, min(reach))
