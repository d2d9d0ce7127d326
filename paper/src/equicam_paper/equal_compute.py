"""Equal compute: do other methods catch up with the time of 18 views?"""

from collections.abc import Iterator

from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.measure import eq_row, stretched_row
from equicam_paper.rows import Row, costly, not_run

PASSES = {"equal.rise400": ("rise-400", 400), "equal.scorecam80": ("score-cam-80", 81)}
ANOTHER_METHOD = "its weights are plain probabilities, those of the full Score-CAM are not: it says nothing about the budget"


def measure(context: Context) -> Iterator[Row]:
    """RISE with 400 masks and Score-CAM with 80 channels, next to Grad-CAM and to EquiGrad-CAM with the paper's 18 views."""
    published = context.backbone == "resnet50"
    methods = [method for method, _ in PASSES.values()] if context.costly else []
    with context.masked_scores():
        found = context.evaluate_both(["grad-cam", "equigrad-cam", *methods])
        stretched = [stretched_row(context, found, method) for method in methods]
    yield eq_row("", found, "grad-cam", reason="one pass per map")
    yield eq_row(
        "",
        found,
        "equigrad-cam",
        reason="18 passes per map, forward and backward; the budget that the others are given",
    )
    for claim, (method, passes) in PASSES.items():
        if method in methods:
            reason = ANOTHER_METHOD if method == "score-cam-80" else f"{passes} passes per map"
            yield eq_row(claim if published else "", found, method, reason=reason)
        elif published:
            yield not_run(claim, costly(passes))
    yield from stretched


EXPERIMENT = Experiment("Equal compute: RISE-400 and Score-CAM-80", ("equal.",), measure)
