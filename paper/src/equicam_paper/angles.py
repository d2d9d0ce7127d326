"""Eq by angle."""

from collections.abc import Iterator
from operator import itemgetter

from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Row, compare


def measure(context: Context) -> Iterator[Row]:
    """Grad-CAM and EquiGrad-CAM at every evaluation angle; the paper's text gives numbers at 135°."""
    methods = {"Grad-CAM": "grad-cam", "EquiGrad-CAM": "equigrad-cam"}
    found = context.evaluate_both(list(methods.values()))
    for name, method in methods.items():
        by = found.map(_by_angle, method)
        for angle in by.clean:
            claim = f"angle135.{context.backbone}.{name}" if angle == 135 else ""
            at: Both[Estimate] = by.map(itemgetter(angle))
            yield compare(claim, at, label=f"{method} at {angle:g}°", published="plotted only")


def _by_angle(found: Evaluation, method: str) -> dict[float, Estimate]:
    return dict(summary.by_angle(found.table, method, region=found.region))


EXPERIMENT = Experiment("Eq by angle", ("angle135.",), measure)
