"""The PEUM audit: which signal finds unstable maps?"""

from collections.abc import Collection, Iterator

from equicam.core.transforms import as_transform
from equicam.core.views import Views
from equicam.evaluate import summary
from equicam.evaluate.equivariance import ANGLES
from equicam.evaluate.summary import SignalSummary
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Contradiction, Row, compare, correlation, number

SIGNALS = {
    "PEUM": "peum (full)",
    "pairwise CAM disagreement": "disagreement",
    "flip rate": "flip-rate",
    "confidence drop": "confidence-drop",
}
MISCLASSIFIED = {"PEUM": "peum (full)", "flip": "flip-rate", "confdrop": "confidence-drop"}
CAPTURE = {"PEUM": "peum (full)", "disagreement": "disagreement", "1 − stability": "1 − stability"}
GRID = Views.evenly(18)
OFF_GRID = tuple(
    angle for angle in ANGLES if as_transform(angle).key not in {one.key for one in GRID.transforms}
)
"""The evaluation angles that none of 18 views has."""
SIX_VIEWS = "theirs compares six of the 18 views; over all pairs disagreement is the better signal"


def measure(context: Context) -> Iterator[Row]:
    """Pearson with 1 − Eq(grad-cam), lift at a held-out threshold, AUROC for wrong predictions."""
    tables = context.evaluate_both(["grad-cam", "equigrad-cam"], ["eq", "peum", "disagreement", "stability"])
    found = tables.map(_signals)
    for name, signal in SIGNALS.items():
        r = found.map(lambda of, signal: correlation(of[signal].pearson), signal)
        yield compare(f"audit.r.{name}", r, label=f"r of {signal}")
    r = found.map(lambda of: correlation(of["1 − stability"].pearson))
    yield compare("", r, label="r of 1 − stability", published="not in the text")
    ahead = found.map(lambda of: of["disagreement"].behind_peum)
    behind = None if ahead.clean is None else Contradiction(ahead.clean, SIX_VIEWS)
    reason = behind.remark if behind and behind.holds else ""
    yield compare("audit.diff", ahead, label="PEUM ahead of disagreement", artefact=behind, reason=reason)
    lift = found.map(lambda of: of["peum (full)"].held_out)
    held_out, in_sample = lift.map(lambda h: h.lift), lift.map(lambda h: number(h.in_sample, h.lift.n))
    yield compare("audit.lift.heldout", held_out, label="mean ratio, held out")
    yield compare("audit.lift.insample", in_sample, label="mean ratio, in sample")
    for name, signal in MISCLASSIFIED.items():
        auroc = found.map(lambda of, signal: of[signal].wrong, signal)
        label = f"{signal}: AUROC for wrong predictions"
        yield compare(f"audit.auroc.{name}", auroc, label=label)
    for name, signal in CAPTURE.items():
        capture = found.map(lambda of, signal: of[signal].capture, signal)
        label = f"{name}: capture of the worst tenth, × chance"
        yield compare("", capture, label=label, published="not in the text")

    yield from _off_the_grid(tables)


def _off_the_grid(tables: Both[Evaluation]) -> Iterator[Row]:
    """The same against Eq at angles that no view has: signals that compare views share the form of the target."""
    found = tables.map(_signals, OFF_GRID)
    at = ", ".join(f"{angle:g}°" for angle in OFF_GRID)
    for name, signal in {**SIGNALS, "1 − stability": "1 − stability"}.items():
        r = found.map(lambda of, signal: correlation(of[signal].pearson), signal)
        yield compare("", r, label=f"r of {signal}, off the grid", reason=f"Eq at {at}, which no view has")
        if name in CAPTURE or signal == "disagreement":
            capture = found.map(lambda of, signal: of[signal].capture, signal)
            yield compare("", capture, label=f"{signal}: capture of the worst tenth, × chance, off the grid")
    ahead = found.map(lambda of: of["disagreement"].behind_peum)
    yield compare("", ahead, label="PEUM ahead of disagreement, off the grid")


def _signals(found: Evaluation, angles: Collection[int | float] | None = None) -> dict[str, SignalSummary]:
    return {s.name: s for s in summary.signals(found.table, region=found.region, angles=angles)}


EXPERIMENT = Experiment("PEUM audit: which signal finds unstable maps", ("audit.",), measure)
