"""Distributions as inline SVG: text stays text, the same numbers give the same bytes, and grey paper suffices."""

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

Column = Float[np.ndarray, " n"]
INK, QUEUED, REST = "#26232e", "#5b2a86", "#d9d6e0"
MOST_POINTS = 2000
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


def score_histogram(score: Column, queued: Bool[np.ndarray, " n"], *, named: str) -> str:
    """How what ranks is spread over the pictures, the queue's part of each bar marked."""
    known = np.isfinite(score)
    score, queued = score[known], queued[known]
    with rc_context(_STYLE):
        figure, axes = _axes(named, "pictures")
        edges = np.linspace(0, _top(score), min(40, max(12, round(len(score) ** 0.5))) + 1)
        axes.hist(
            [score[~queued], score[queued]], edges.tolist(), stacked=True, label=["other pictures", "in the queue"],
            color=[REST, QUEUED], edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        for patch in axes.containers[-1] if axes.containers else ():
            patch.set_hatch("////")
        axes.legend(frameon=False, loc="upper right", reverse=True)
        return _svg(
            figure, "score", f"Histogram of {named}; the part of each bar that is in the queue is hatched."
        )


def flip_histogram(flipping: Int[np.ndarray, " n"], views: int) -> str:
    """In how many views the prediction is another one."""
    counts = np.bincount(np.clip(flipping, 0, views), minlength=views + 1)
    last = max(4, int(np.flatnonzero(counts).max(initial=0)))
    counts = counts[: last + 1]
    with rc_context(_STYLE):
        figure, axes = _axes(f"views with another prediction, of {views}", "pictures")
        bars = axes.bar(
            np.arange(len(counts)), counts, width=0.84, color=REST, edgecolor="#8a8594", linewidth=0.6
        )
        if len(counts) <= 24:
            axes.bar_label(bars, [f"{c}" if c else "" for c in counts], fontsize=7, padding=1.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure, "flips", "Histogram of the number of views whose prediction is another one.")


def against_drift(
    score: Column, drift: Column, queued: Bool[np.ndarray, " n"], *, unstable: float, named: str
) -> str:
    """What ranks against 1 − Eq of the pictures where both were measured; above the line a map counts as unstable."""
    order = np.argsort(score, kind="stable")
    order = order[:: -(-len(order) // MOST_POINTS)] if len(order) else order
    score, drift, queued = score[order], drift[order], queued[order]
    with rc_context(_STYLE):
        figure, axes = _axes(named, "1 − Eq of the single view")
        axes.scatter(
            score[~queued], drift[~queued], 12, facecolor="none", edgecolor="#6f6a7a", linewidth=0.7,
            label="other pictures",
        )  # fmt: skip
        axes.scatter(
            score[queued], drift[queued], 17, color=QUEUED, marker="^", label="in the queue", linewidth=0
        )
        axes.axhline(unstable, color=INK, linestyle=(0, (5, 3)), linewidth=1)
        axes.annotate(
            "unstable above this line", (0, unstable), (5, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=8,
        )  # fmt: skip
        axes.set(xlim=(-0.03 * _top(score), 1.04 * _top(score)), ylim=(0, 1.08 * max(_top(drift), unstable)))
        axes.legend(frameon=False, loc="lower right", reverse=True, handletextpad=0.2)
        return _svg(
            figure,
            "drift",
            f"{named} against 1 − Eq, one mark a picture, with the line above which maps are unstable.",
        )


def _axes(across: str, up: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(3.8, 2.7), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.set(xlabel=across, ylabel=up)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=up == "pictures"))
    return figure, axes


def _top(values: Column) -> float:
    """The end of an axis from 0, also where there is nothing above it."""
    return float(values.max(initial=0.0)) or 1e-3


def _svg(figure: Figure, name: str, said: str) -> str:
    """As an element of a page: no prologue, metadata or style of its own, ids that no other plot has, the page's font."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg {box.group() if box else ""} role="img" aria-label="{said}">'
    text = opening + text[text.index(">") + 1 :]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
    return text.replace("xlink:href", "href").strip()
