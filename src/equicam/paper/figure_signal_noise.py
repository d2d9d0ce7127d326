"""Figure signal-noise: Eq by confidence, and drift against the change of confidence."""

from collections.abc import Iterator

import pyarrow as pa
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equicam.evaluation import summary
from equicam.paper.context import Bench, Experiment, Line
from equicam.report.plots import INK, MOST_POINTS, QUEUED

LOOKS = {"grad-cam": ("Grad-CAM", INK, "o"), "equigrad-cam": ("EquiGrad-CAM", QUEUED, "^")}


def run(bench: Bench) -> Iterator[Line]:
    """Both methods, in the disc; the pairs on the right keep their top-1."""
    rows = bench.rows(list(LOOKS))
    path = bench.out / "signal-noise.png"
    with rc_context({"font.size": 9, "axes.spines.right": False, "axes.spines.top": False}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _by_confidence(left, rows)
        _against_change(right, rows)
        figure.savefig(path, dpi=150)
    yield Line("", "figure", "figure", None, None, "measured", f"drawn: {path}")


def _by_confidence(axes: Axes, rows: pa.Table) -> None:
    for method, (name, colour, mark) in LOOKS.items():
        bins = summary.by_confidence(rows, method)
        bins = [(words, found) for words, found in bins if found.n]
        places = range(len(bins))
        value, low, high = ([getattr(found, f) for _, found in bins] for f in ("value", "low", "high"))
        axes.plot(places, value, color=colour, marker=mark, label=name, linewidth=1.2, markersize=5)
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xticks(places, [f"{words}\nn = {found.n}" for words, found in bins])
    axes.set(xlabel="probability of the class", ylabel="Eq", ylim=(min(0.0, axes.get_ylim()[0]), 1.02))
    axes.margins(x=0.08)
    axes.legend(frameon=False, loc="best")


def _against_change(axes: Axes, rows: pa.Table) -> None:
    turned, keeps = (summary.pick(rows, name, each_angle=True) for name in ("confidence", "consistent"))
    sure = summary.pick(rows, "presented-confidence")
    before = dict(zip(sure.ids, sure.value, strict=True))
    for method, (_, colour, mark) in LOOKS.items():
        eq = summary.pick(rows, "eq", method, "disc", each_angle=True)
        pairs = [
            (before[i] - p, 1 - v)
            for i, p, v, kept in zip(eq.ids, turned.value, eq.value, keeps.value, strict=True)
            if kept == 1
        ]
        some = pairs[:: -(-len(pairs) // MOST_POINTS)] if pairs else []
        axes.scatter(
            [x for x, _ in some],
            [y for _, y in some],
            9,
            color=colour,
            marker=mark,
            alpha=0.35,
            linewidth=0,
        )
    axes.set(xlabel="probability lost in the turn", ylabel="drift, 1 − Eq")


EXPERIMENT = Experiment("Figure signal-noise: drift and confidence", (), run)
