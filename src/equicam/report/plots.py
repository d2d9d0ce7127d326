"""Distributions as inline SVG: text stays text, equal numbers give equal bytes, and colour is never the only mark."""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from equicam.auditing.triage_reasons import LOW_CORRELATION
from equicam.core.transforms import Transform

Column = Float[np.ndarray, " n"]
INK, QUEUED, REST = "#26232e", "#5b2a86", "#d9d6e0"
MAX_POINTS = 2000
CURVE_LOW = -0.5  # the lower end of a curve over views
_STYLE: Any = {
    "svg.hashsalt": "equicam",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.edgecolor": "#8a8594",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "hatch.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def signal_histogram(signal: Column, queued: Bool[np.ndarray, " n"], *, name: str) -> str:
    """The distribution of the ranking signal, with the queued share of each bar hatched."""
    known = np.isfinite(signal)
    signal, queued = signal[known], queued[known]
    with rc_context(_STYLE):
        figure, axes = _axes(name, "images")
        edges = np.linspace(0, _top(signal), min(40, max(12, round(len(signal) ** 0.5))) + 1)
        _stack(axes, signal, queued, edges.tolist())
        return _svg(figure, "signal", f"Histogram of {name}; the queued share of each bar is hatched.")


def stability_histogram(stability: Column, queued: Bool[np.ndarray, " n"], *, unstable: float) -> str:
    """The distribution of stability; left of the line a map is unstable."""
    known = np.isfinite(stability)
    stability, queued = stability[known], queued[known]
    with rc_context(_STYLE):
        figure, axes = _axes("stability", "images")
        low = min(0.0, float(stability.min(initial=0.0)))
        width = (1 - low) / min(40, max(12, round(len(stability) ** 0.5)))
        # no bar stands on both sides of the line
        below = unstable - width * np.arange(np.ceil(max(0.0, unstable - low) / width), 0, -1)
        above = unstable + width * np.arange(np.ceil((1 - unstable) / width) + 1)
        _stack(axes, stability, queued, [*below.tolist(), *above.tolist()])
        axes.axvline(unstable, color=INK, linestyle=(0, (5, 3)), linewidth=1)
        axes.annotate(
            "unstable", (unstable, 1), (-4, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8, ha="right", va="bottom",
        )  # fmt: skip
        return _svg(
            figure,
            "stability",
            "Histogram of stability, with the line below which maps are unstable; the queued share of each bar is hatched.",
        )


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
    width, height, left, top, bottom = 300, 96, 30, 6, 16
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
        f'<text x="{x(tick):.1f}" y="{height - 3}" text-anchor="middle" font-size="10" fill="currentColor">{text}</text>'
        for tick, text in ticks.items()
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
    return [(float(n), float(r), one.label) for n, (one, r) in pairs if r is not None and np.isfinite(r)]


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


def flip_histogram(flips: Int[np.ndarray, " n"], views: int) -> str:
    """The distribution of the number of views that predict another class."""
    counts = np.bincount(np.clip(flips, 0, views), minlength=views + 1)
    last = max(4, int(np.flatnonzero(counts).max(initial=0)))
    counts = counts[: last + 1]
    with rc_context(_STYLE):
        figure, axes = _axes(f"views with another prediction, of {views}", "images")
        bars = axes.bar(
            np.arange(len(counts)), counts, width=0.84, color=REST, edgecolor="#8a8594", linewidth=0.6
        )
        if len(counts) <= 24:
            axes.bar_label(bars, [f"{c}" if c else "" for c in counts], fontsize=7, padding=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure, "flips", "Histogram of the number of views that predict another class.")


def signal_against_drift(
    signal: Column, drift: Column, queued: Bool[np.ndarray, " n"], *, unstable: float, name: str
) -> str:
    """The ranking signal against 1 − Eq where both are measured; above the line a map is unstable."""
    order = np.argsort(signal, kind="stable")
    order = order[:: -(-len(order) // MAX_POINTS)] if len(order) else order
    signal, drift, queued = signal[order], drift[order], queued[order]
    with rc_context(_STYLE):
        figure, axes = _axes(name, "1 − Eq of the single view")
        axes.scatter(
            signal[~queued], drift[~queued], 12, facecolor="none", edgecolor="#6f6a7a", linewidth=0.7,
            label="other images",
        )  # fmt: skip
        axes.scatter(
            signal[queued], drift[queued], 17, color=QUEUED, marker="^", label="in the queue", linewidth=0
        )
        axes.axhline(unstable, color=INK, linestyle=(0, (5, 3)), linewidth=1)
        axes.annotate(
            "unstable above this line", (0, unstable), (5, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
        axes.set(
            xlim=(-0.03 * _top(signal), 1.04 * _top(signal)), ylim=(0, 1.08 * max(_top(drift), unstable))
        )
        axes.legend(frameon=False, loc="lower right", reverse=True, handletextpad=0.2)
        return _svg(
            figure,
            "drift",
            f"{name} against 1 − Eq, one mark per image, with the line above which maps are unstable.",
        )


def _stack(axes: Axes, values: Column, queued: Bool[np.ndarray, " n"], edges: list[float]) -> None:
    """A histogram with the queued share of each bar hatched."""
    axes.hist(
        [values[~queued], values[queued]], edges, stacked=True, label=["other images", "in the queue"],
        color=[REST, QUEUED], edgecolor="white", linewidth=0.5,
    )  # fmt: skip
    for patch in axes.containers[-1] if axes.containers else ():
        patch.set_hatch("////")
    axes.legend(frameon=False, loc="upper right", reverse=True)


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(3.8, 2.7), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=ylabel == "images"))
    return figure, axes


def _top(values: Column) -> float:
    """The upper end of an axis from 0, also where all values are 0."""
    return float(values.max(initial=0.0)) or 1e-3


def _svg(figure: Figure, name: str, label: str) -> str:
    """A figure as an element of a page: no prologue, metadata or style of its own, unique ids, the page's font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg {box.group() if box else ""} role="img" aria-label="{label}">'
    text = opening + text[text.index(">") + 1 :]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    return text.replace("xlink:href", "href").strip()
