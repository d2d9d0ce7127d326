"""Where a map moves: the correlation of each view's map with the presented view's, as a small drawing.

It is written out by hand: the review page draws one for every image, and matplotlib loads slowly.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from equicam.core.transforms import Transform
from equicam.steadiness import LOW_CORRELATION

CURVE_LOW = -0.5  # the lower end of the drawing
Point = tuple[float, float, str]
"""Where a view stands on the axis, its correlation and its label."""


def curve_order(transforms: Sequence[Transform]) -> str:
    """How `view_curve` lays out these views."""
    if not all(one.is_rigid for one in transforms):
        return "in the order of the views"
    return "by angle, the mirrored ones dashed" if any(one.mirrored for one in transforms) else "by angle"


def view_curve(transforms: Sequence[Transform], correlations: Sequence[int | float | None]) -> Markup:
    """The correlation of each view's map with the presented view's, as a small drawing; "" without any.

    Views below LOW_CORRELATION, where the map moves, are filled triangles.
    """
    by_angle = all(one.is_rigid for one in transforms)
    lines = _lines_by_angle(transforms, correlations) if by_angle else [_line(transforms, correlations)]
    known = [point for line in lines for point in line]
    if len(known) < 2:
        return Markup()
    count = len(transforms)
    ticks = {90 * n: f"{90 * n}°" for n in range(5)}
    if not by_angle:
        ticks = {n: f"{n}" for n in sorted({1, (1 + count) // 2, count})}
    width, height, left, top, bottom = 300, 116, 42, 6, 32
    right, floor = width - 14, height - bottom

    def x(place: int | float) -> float:
        return left + (right - left) * (place - min(ticks)) / (max(ticks) - min(ticks))

    def y(r: float) -> float:
        return top + (floor - top) * (1 - max(r, CURVE_LOW)) / (1 - CURVE_LOW)

    _, lowest, view = min(known, key=lambda point: point[1])
    label = (
        f"Correlation of each view’s map with the presented view’s {curve_order(transforms)}; "
        f"lowest {lowest:.2f} in the view {view}."
    )
    parts = [f'<svg class="curve" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">']
    for r in (1.0, LOW_CORRELATION, 0.0):
        dashes = ' stroke-dasharray="5 3"' if r == LOW_CORRELATION else ""
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(r):.1f}" y2="{y(r):.1f}" stroke="#8a8594" stroke-width=".8"{dashes}/>'
            f'<text x="{left - 5}" y="{y(r) + 3.5:.1f}" text-anchor="end" font-size="10" fill="currentColor">{r:g}</text>'
        )
    parts += [
        f'<text x="{x(tick):.1f}" y="{floor + 13}" text-anchor="middle" font-size="10" fill="currentColor">{text}</text>'
        for tick, text in ticks.items()
    ]
    parts += [
        f'<text x="{(left + right) / 2:.1f}" y="{height - 4}" text-anchor="middle" font-size="10" fill="currentColor">{"angle of rotation (°)" if by_angle else "view"}</text>',
        f'<text transform="translate(9 {(top + floor) / 2:.1f}) rotate(-90)" text-anchor="middle" font-size="10" fill="currentColor">correlation</text>',
    ]
    for line, dashes in zip(lines, ("", ' stroke-dasharray="2 2"'), strict=False):
        points = " ".join(f"{x(place):.1f},{y(r):.1f}" for place, r, _ in line)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.2"{dashes}/>'
        )
        parts += [_mark(x(place), y(r), r, f"{name}: {r:.2f}") for place, r, name in line]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704  # numbers, and labels made of numbers


def _line(transforms: Sequence[Transform], correlations: Sequence[int | float | None]) -> list[Point]:
    """The views in their order, those with a correlation."""
    pairs = enumerate(zip(transforms, correlations, strict=False), start=1)
    return [(float(n), float(r), one.label) for n, (one, r) in pairs if r is not None and math.isfinite(r)]


def _lines_by_angle(
    transforms: Sequence[Transform], correlations: Sequence[int | float | None]
) -> list[list[Point]]:
    """Rotations over their angle, and mirrored ones over theirs; a line that starts at 0° closes the circle."""
    lines: list[list[Point]] = [[], []]
    for number, r, label in _line(transforms, correlations):
        one = transforms[int(number) - 1]
        lines[one.mirrored].append((float(one.degrees % 360), r, label))
    for line in lines:
        line.sort()
        line += [(360.0, r, label) for place, r, label in line[:1] if place == 0]
    return lines


def _mark(h: float, v: float, r: float, title: str) -> str:
    """A circle, or a filled triangle where the map moves."""
    if r < LOW_CORRELATION:
        path = f"M{h - 3.6:.1f} {v + 3:.1f}h7.2L{h:.1f} {v - 3.6:.1f}z"
        return f'<path d="{path}" fill="currentColor"><title>{title}</title></path>'
    return f'<circle cx="{h:.1f}" cy="{v:.1f}" r="2.4" fill="none" stroke="currentColor"><title>{title}</title></circle>'
