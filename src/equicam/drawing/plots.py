"""Distributions as inline SVG: text stays text, equal numbers give equal bytes, and colour is never the only mark."""

import io
import re
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from equicam.steadiness import STEADY_FROM

Column = Float[np.ndarray, " n"]
Mask = Bool[np.ndarray, " n"]
INK, QUEUED, REST = "#26232e", "#5b2a86", "#d9d6e0"
MAX_POINTS = 2000
GREY, DARK_GREY = "#8a8594", "#6f6a7a"
_VARIABLES = {INK: "ink", QUEUED: "accent", REST: "bar", GREY: "mark", DARK_GREY: "mark", "#ffffff": "paper"}
"""The colours of the page, light or dark, that stand for those of a plot."""
_STYLE: Any = {"svg.hashsalt": "equicam", "svg.fonttype": "none", "font.size": 9, "hatch.linewidth": 0.7}
_STYLE |= {"axes.linewidth": 0.8, "axes.edgecolor": GREY}
_STYLE |= dict.fromkeys(("axes.spines.right", "axes.spines.top"), False)
_STYLE |= dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)
_HOLLOW: Any = {"facecolor": "none", "edgecolor": DARK_GREY}
_FILLED: Any = {"color": QUEUED, "marker": "^", "linewidth": 0}


@rc_context(_STYLE)
def signal_histogram(signal: Column, queued: Mask, *, name: str) -> str:
    """The distribution of the ranking signal, with the queued share of each bar hatched."""
    known = np.isfinite(signal)
    signal, queued = signal[known], queued[known]
    figure, axes = _axes(name, "images")
    edges = np.linspace(0, _top(signal), min(40, max(12, round(len(signal) ** 0.5))) + 1)
    _stack(axes, signal, queued, edges.tolist())
    _legend(figure, axes)
    return _svg(figure, "signal", f"Histogram of {name}; the queued share of each bar is hatched.")


@rc_context(_STYLE)
def stability_histogram(stability: Column, queued: Mask, *, unstable: float) -> str:
    """The distribution of stability; left of the first line it is low, right of the second a map can be steady."""
    known = np.isfinite(stability)
    stability, queued = stability[known], queued[known]
    figure, axes = _axes("stability", "images")
    low = min(0.0, float(stability.min(initial=0.0)))
    width = (1 - low) / min(40, max(12, round(len(stability) ** 0.5)))
    # no bar stands on both sides of the line
    below = unstable - width * np.arange(np.ceil(max(0.0, unstable - low) / width), 0, -1)
    above = unstable + width * np.arange(np.ceil((1 - unstable) / width) + 1)
    _stack(axes, stability, queued, [*below.tolist(), *above.tolist()])
    _legend(figure, axes)
    for at, words, dashes, shift, side in (
        (unstable, f"low: below {unstable:g}", (0, (5, 3)), -4, "right"),
        (STEADY_FROM, f"steady from {STEADY_FROM:g}", (0, (1, 1)), 4, "left"),
    ):
        axes.axvline(at, color=INK, linestyle=dashes, linewidth=1)
        axes.annotate(
            words, (at, 1), (shift, 3), xycoords=("data", "axes fraction"), textcoords="offset points",
            fontsize=8, ha=side, va="bottom",
        )  # fmt: skip
    label = "Histogram of stability, with lines where low ones are counted and where a map can be steady; the queued share of each bar is hatched."
    return _svg(figure, "stability", label)


@rc_context(_STYLE)
def flip_histogram(flips: Int[np.ndarray, " n"], views: int) -> str:
    """The distribution of the number of views that predict another class."""
    counts = np.bincount(np.clip(flips, 0, views), minlength=views + 1)
    last = max(4, int(np.flatnonzero(counts).max(initial=0)))
    counts = counts[: last + 1]
    figure, axes = _axes(f"views with another prediction, of {views}", "images")
    bars = axes.bar(np.arange(len(counts)), counts, width=0.84, color=REST, edgecolor=GREY, linewidth=0.6)
    if len(counts) <= 24:
        axes.bar_label(bars, [f"{c}" if c else "" for c in counts], fontsize=7, padding=1.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _svg(figure, "flips", "Histogram of the number of views that predict another class.")


@rc_context(_STYLE)
def signal_against_drift(signal: Column, drift: Column, queued: Mask, *, unstable: float, name: str) -> str:
    """The ranking signal against 1 − Eq where both are measured; above the line Eq is low."""
    order = np.argsort(signal, kind="stable")
    order = order[:: -(-len(order) // MAX_POINTS)] if len(order) else order
    signal, drift, queued = signal[order], drift[order], queued[order]
    figure, axes = _axes(name, "1 − Eq of the single view")
    axes.scatter(signal[~queued], drift[~queued], 12, linewidth=0.7, label="other images", **_HOLLOW)
    axes.scatter(signal[queued], drift[queued], 17, label="in the queue", **_FILLED)
    axes.axhline(unstable, color=INK, linestyle=(0, (5, 3)), linewidth=1)
    axes.annotate(
        f"Eq = {1 - unstable:g}", (0, unstable), (5, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    low, top = min(0.0, float(signal.min(initial=0.0))), _top(signal)
    axes.set_xlim(low - 0.03 * (top - low), top + 0.04 * (top - low))
    axes.set_ylim(0, 1.08 * max(_top(drift), unstable))
    _legend(figure, axes)
    label = f"{name} against 1 − Eq, one mark per image, with a line above which Eq is low."
    return _svg(figure, "drift", label)


@rc_context(_STYLE)
def stability_against_stability(first: Column, second: Column) -> str:
    """The stability of the same images in two runs; above the diagonal the second is steadier."""
    known = np.flatnonzero(np.isfinite(first) & np.isfinite(second))
    known = known[:: -(-len(known) // MAX_POINTS)] if len(known) else known
    first, second = first[known], second[known]
    up, down = second > first, second < first
    figure, axes = _axes("stability in the first run", "stability in the second run")
    figure.set_size_inches(4.6, 4.4)
    low = min(0.0, float(first.min(initial=0.0)), float(second.min(initial=0.0)))
    axes.plot((low, 1), (low, 1), color=INK, linestyle=(0, (5, 3)), linewidth=1, zorder=1)
    axes.scatter(first[up], second[up], 18, label="steadier in the second", **_FILLED)
    shape: Any = _HOLLOW | {"marker": "v", "linewidth": 0.8}
    axes.scatter(first[down], second[down], 18, label="steadier in the first", **shape)
    if (same := ~up & ~down).any():
        axes.scatter(first[same], second[same], 7, color=INK, linewidth=0, label="the same")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set(xlim=(low - 0.02, 1.02), ylim=(low - 0.02, 1.02), aspect="equal")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside upper left", ncols=2, handletextpad=0.2)
    label = "Stability in the second run against stability in the first, one mark per image"
    return _svg(figure, "pairs", f"{label}, with the diagonal.")


def _stack(axes: Axes, values: Column, queued: Mask, edges: list[float]) -> None:
    """A histogram with the queued share of each bar hatched."""
    axes.hist(
        [values[~queued], values[queued]], edges, stacked=True, label=["other images", "in the queue"],
        color=[REST, QUEUED], edgecolor="white", linewidth=0.5,
    )  # fmt: skip
    for patch in axes.containers[-1] if axes.containers else ():
        patch.set_hatch("////")


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the axes, where it covers no bar and no point."""
    handles, labels = axes.get_legend_handles_labels()
    where: Any = {"loc": "outside lower center", "ncols": 2, "frameon": False, "handletextpad": 0.5}
    figure.legend(handles[::-1], labels[::-1], **where)


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
    text = re.sub(r'\bfill="(#[0-9a-f]{6})"', r'style="fill: \1"', text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(f": {colour}", f": var(--{variable})")
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    return text.replace("xlink:href", "href").strip()
