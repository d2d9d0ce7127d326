"""Equal compute: do other methods catch up when they are given as much time?"""

from collections.abc import Iterator

from equicam.paper.context import Bench, Experiment, Line, not_run, others
from equicam.paper.measure import both, eq_line

ROWS = {"equal.rise400": ("rise-400", 400), "equal.scorecam80": ("score-cam-80", 81)}
DEFINED_ANEW = (
    "its weights are plain probabilities, the full Score-CAM's are not: it says nothing about the budget"
)


def run(bench: Bench) -> Iterator[Line]:
    """RISE with 400 masks and Score-CAM with 80 channels, beside Grad-CAM and six views."""
    here = bench.backbone == "resnet50"
    costly = [method for method, _ in ROWS.values()] if bench.costly and here else []
    tables = both(bench, ["grad-cam", "equigrad-cam", *costly], views=6)
    yield eq_line("", tables, "grad-cam", reason="one pass a map")
    yield eq_line("", tables, "equigrad-cam", reason="six passes a map")
    done = []
    for claim, (method, passes) in ROWS.items() if here else ():
        if method in costly:
            reason = DEFINED_ANEW if method == "score-cam-80" else f"{passes} passes a map"
            done.append(eq_line(claim, tables, method, reason=reason))
        else:
            done.append(not_run(claim, f"{passes} forward passes a map: --costly, with --n"))
    yield from done
    yield from others("equal.", done, bench)


EXPERIMENT = Experiment("Equal compute: RISE-400 and Score-CAM-80", ("equal.",), run)
