"""Figure signal-noise: Eq by confidence, and drift against the change of confidence."""

from collections.abc import Iterator

import pyarrow as pa
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from equicam.evaluation import summary
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.figure_pipeline import figure_row
from equicam.paper.rows import Row
from equicam.report.plots import INK, MAX_POINTS, QUEUED

STYLES = {"grad-cam": ("Grad-CAM", INK, "o"), "equigrad-cam": ("EquiGrad-CAM", QUEUED, "^")}


def measure(context: Context) -> Iterator[Row]:
    """Both methods, in the disc; the pairs on the right keep their top-1."""
    table = context.evaluate(list(STYLES)).table
    path = context.out / "signal-noise.png"
    with rc_context({"font.size": 9, "axes.spines.right": False, "axes.spines.top": False}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        _by_confidence(left, table)
        _against_change(right, table)
        figure.savefig(path, dpi=150)
    yield figure_row(path)


def _by_confidence(axes: Axes, table: pa.Table) -> None:
    for method, (name, colour, mark) in STYLES.items():
        bins = summary.by_confidence(table, method)
        bins = [(label, found) for label, found in bins if found.n]
        places = range(len(bins))
        value, low, high = ([getattr(found, f) for _, found in bins] for f in ("value", "low", "high"))
        axes.plot(places, value, color=colour, marker=mark, label=name, linewidth=1.2, markersize=5)
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xticks(places, [f"{label}\nn = {found.n}" for label, found in bins])
    axes.set(xlabel="probability of the class", ylabel="Eq", ylim=(min(0.0, axes.get_ylim()[0]), 1.02))
    axes.margins(x=0.08)
    axes.legend(frameon=False, loc="best")


def _against_change(axes: Axes, table: pa.Table) -> None:
    rotated, keeps = (summary.pick(table, name, each_angle=True) for name in ("confidence", "consistent"))
    presented = summary.pick(table, "presented-confidence")
    before = dict(zip(presented.ids, presented.value, strict=True))
    for method, (_, colour, mark) in STYLES.items():
        eq = summary.pick(table, "eq", method, "disc", each_angle=True)
        pairs = [
            (before[i] - p, 1 - v)
            for i, p, v, kept in zip(eq.ids, rotated.value, eq.value, keeps.value, strict=True)
            if kept == 1
        ]
        some = pairs[:: -(-len(pairs) // MAX_POINTS)] if pairs else []
        x, y = zip(*some, strict=True) if some else ((), ())
        axes.scatter(x, y, 9, color=colour, marker=mark, alpha=0.35, linewidth=0)
    axes.set(xlabel="probability lost in the rotation", ylabel="drift, 1 − Eq")


EXPERIMENT = Experiment("Figure signal-noise: drift and confidence", (), measure)
