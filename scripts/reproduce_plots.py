"""The plots of docs/reproduce.md, made from the rows that `equicam reproduce` wrote."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

Rows = dict[str, dict[str, Any]]
"""An experiment's rows that were run, by label."""
THEIRS, OURS, PUBLISHED = "#7a8793", "#1f6f8b", "#c2571a"
PROTOCOLS = (("as_published", THEIRS, "by their protocol"), ("clean", OURS, "by ours"))
EQ = "Eq (equivariance)\n1: the map rotates with the image"
TITLES = {
    "main": "How well the maps of each method rotate with the image",
    "t-sweep": "EquiGrad-CAM: how many views it needs",
    "angles": "How well maps rotate, by the angle of rotation",
    "causal": "Does the network use the pixels whose saliency moves?",
    "rotation-augmentation": "Training with rotated images against aligning views",
}


def value(row: dict[str, Any] | None, protocol: str) -> float:
    """A row's number by either protocol; NaN where it has none."""
    found = row and row[protocol] and row[protocol]["value"]
    return float("nan") if found is None else float(found)


def write_plot(experiment: str, rows: Rows, path: Path) -> bool:
    """Write the experiment's plot, if it has one."""
    if experiment not in PLOTS or not rows:
        return False
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(6.8, 3.0), layout="constrained")
        axes = figure.subplots()
        PLOTS[experiment](rows, axes)
        network = path.stem.removesuffix(f"-{experiment}")
        axes.set_title(f"{TITLES[experiment]} ({network})", fontsize=10, loc="left")
        figure.savefig(path, dpi=110)
    return True


def _published(row: dict[str, Any]) -> float:
    try:
        return float(row["published"].split()[0])
    except ValueError:
        return float("nan")


def _diamonds(axes: Any, at: list[int], rows: list[dict[str, Any]]) -> None:
    """The published numbers, if there are any."""
    published = [_published(row) for row in rows]
    if not all(map(math.isnan, published)):
        axes.plot(at, published, "D", color=PUBLISHED, ms=5, label="published", ls="")


def _bars(axes: Any, rows: Rows, labels: list[str], ticks: list[str] | None = None) -> None:
    for (protocol, colour, legend), shift in zip(PROTOCOLS, (-0.2, 0.2), strict=True):
        at = [i + shift for i in range(len(labels))]
        axes.bar(at, [value(rows[n], protocol) for n in labels], 0.38, color=colour, label=legend)
        for x, n in zip(at, labels, strict=True):
            found = rows[n][protocol]
            if found and found["low"] is not None:
                axes.plot([x, x], [found["low"], found["high"]], color="black", lw=1)
    _diamonds(axes, list(range(len(labels))), [rows[n] for n in labels])
    axes.set_xticks(range(len(labels)), ticks or labels, rotation=18, ha="right")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _methods(rows: Rows, axes: Any) -> None:
    labels = [label for label in rows if label != "relative gain, %"]
    _bars(axes, rows, labels, [label.split(":")[0] for label in labels])
    axes.set_ylabel(EQ)


def _regions(rows: Rows, axes: Any) -> None:
    _bars(axes, rows, [label for label in rows if label.endswith((", presented", ", rotated"))])
    axes.set_ylabel("probability of the class lost\nwhen the region is hidden")


def _training(rows: Rows, axes: Any) -> None:
    _bars(axes, rows, [label for label in rows if label[:2] in ("GC", "EG") and "−" not in label])
    axes.set_ylabel(EQ)


def _views(rows: Rows, axes: Any) -> None:
    labels = [label for label in rows if label.startswith("T = ")]
    views = [int(label[4:]) for label in labels]
    for protocol, colour, legend in PROTOCOLS:
        axes.plot(views, [value(rows[n], protocol) for n in labels], "o-", color=colour, ms=4, label=legend)
    _diamonds(axes, views, [rows[n] for n in labels])
    axes.set_xscale("log", base=2)
    axes.set_xticks(views, [str(v) for v in views])
    axes.set_xlabel("number of views")
    axes.set_ylabel(EQ)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _angles(rows: Rows, axes: Any) -> None:
    for method, colour in (("grad-cam", THEIRS), ("equigrad-cam", OURS)):
        labels = [label for label in rows if label.startswith(f"{method} at")]
        angles = [float(label.split()[-1].rstrip("°")) for label in labels]
        for protocol, style, whose in (("as_published", "--", "theirs"), ("clean", "-", "ours")):
            eq = [value(rows[n], protocol) for n in labels]
            axes.plot(angles, eq, style, marker="o", ms=3, color=colour, label=f"{method}, {whose}")
    axes.set_xlabel("rotation of the image, degrees")
    axes.set_ylabel(EQ)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


PLOTS: dict[str, Callable[[Rows, Any], None]] = {
    "main": _methods,
    "t-sweep": _views,
    "angles": _angles,
    "causal": _regions,
    "rotation-augmentation": _training,
}
