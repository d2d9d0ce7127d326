"""Where a map moves: the correlation of each view's map with the presented view's, as a small drawing.

It is written out by hand: the review page draws one for every image, and matplotlib loads slowly.
"""

import math
from collections.abc import Sequence

from markupsafe import Markup

from equicam.core.transforms import Transform
from equicam.steadiness import LOW_CORRELATION

CURVE_LOW = -0.5  # the lower end of the drawing
Point = tuple[float, float, str]  # where a view stands on the axis, its correlation and its label


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
    lines = curve_lines(transforms, correlations, by_angle=by_angle)
    known = [point for line in lines for point in line]
    if len(known) < 2:
        return Markup()
    count = len(transforms)
    places = range(0, 361, 90) if by_angle else sorted({1, (1 + count) // 2, count})
    width, height, left, top, bottom = 300, 116, 42, 6, 32
    right, floor = width - 14, height - bottom

    def x(place: int | float) -> float:
        return left + (right - left) * (place - places[0]) / (places[-1] - places[0])

    def y(r: float) -> float:
        return top + (floor - top) * (1 - max(r, CURVE_LOW)) / (1 - CURVE_LOW)

    _, lowest, view = min(known, key=lambda point: point[1])
    label = (
        f"Correlation of each view’s map with the presented view’s {curve_order(transforms)}; "
        f"lowest {lowest:.2f} in the view {view}."
    )
    parts = [f'<svg class="curve" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">']
    text = 'font-size="10" fill="currentColor">'
    for r in (1.0, LOW_CORRELATION, 0.0):
        dashes = ' stroke-dasharray="5 3"' if r == LOW_CORRELATION else ""
        parts.append(
            f'<line x1="{left}" x2="{right}" y1="{y(r):.1f}" y2="{y(r):.1f}" stroke="#8a8594" stroke-width=".8"{dashes}/>'
            f'<text x="{left - 5}" y="{y(r) + 3.5:.1f}" text-anchor="end" {text}{r:g}</text>'
        )
    text, unit = f'text-anchor="middle" {text}', "°" if by_angle else ""
    parts += [f'<text x="{x(at):.1f}" y="{floor + 13}" {text}{at}{unit}</text>' for at in places]
    parts += [
        f'<text x="{(left + right) / 2:.1f}" y="{height - 4}" {text}{"angle of rotation (°)" if by_angle else "view"}</text>',
        f'<text transform="translate(9 {(top + floor) / 2:.1f}) rotate(-90)" {text}correlation</text>',
    ]
    for line, dashes in zip(lines, ("", ' stroke-dasharray="2 2"'), strict=False):
        points = " ".join(f"{x(place):.1f},{y(r):.1f}" for place, r, _ in line)
        stroke = f'stroke="currentColor" stroke-width="1.2"{dashes}'
        parts.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        parts += [_mark(x(place), y(r), r, f"{name}: {r:.2f}") for place, r, name in line]
    return Markup("".join([*parts, "</svg>"]))  # noqa: S704  # numbers, and labels made of numbers


def curve_lines(
    transforms: Sequence[Transform], correlations: Sequence[int | float | None], *, by_angle: bool
) -> list[list[Point]]:
    """The views with a correlation in their order; or by angle, mirrored ones apart, where 0° closes the circle."""
    lines: list[list[Point]] = [[], []] if by_angle else [[]]
    for number, (one, r) in enumerate(zip(transforms, correlations, strict=False), start=1):
        if r is not None and math.isfinite(r):
            place = one.degrees % 360 if by_angle else number
            lines[by_angle and one.mirrored].append((float(place), float(r), one.label))
    for line in lines if by_angle else ():
        line.sort()
        line += [(360.0, r, label) for place, r, label in line[:1] if place == 0]
    return lines


def _mark(h: float, v: float, r: float, title: str) -> str:
    """A circle, or a filled triangle where the map moves."""
    if r < LOW_CORRELATION:
        path = f"M{h - 3.6:.1f} {v + 3:.1f}h7.2L{h:.1f} {v - 3.6:.1f}z"
        return f'<path d="{path}" fill="currentColor"><title>{title}</title></path>'
    return f'<circle cx="{h:.1f}" cy="{v:.1f}" r="2.4" fill="none" stroke="currentColor"><title>{title}</title></circle>'
