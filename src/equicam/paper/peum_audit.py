"""The PEUM audit: which signal tells an unstable map?"""

from collections.abc import Iterator

from equicam.evaluation import summary
from equicam.evaluation.statistics import Estimate
from equicam.paper.context import Bench, Experiment, Line, correlated, line

SIGNALS = {
    "PEUM": "peum (full)",
    "pairwise CAM disagreement": "disagreement",
    "flip rate": "flip-rate",
    "confidence drop": "confidence-drop",
}
WRONG = {"PEUM": "peum (full)", "flip": "flip-rate", "confdrop": "confidence-drop"}


def run(bench: Bench) -> Iterator[Line]:
    """Pearson with 1 − Eq(grad-cam), lift at a held-out threshold, AUROC for wrong predictions."""
    scores = ["eq", "peum", "disagreement"]
    tables = {p: bench.rows(["grad-cam", "equigrad-cam"], scores, as_published=p) for p in (True, False)}
    found = {
        p: {s.name: s for s in summary.signals(t, region="full" if p else "disc")} for p, t in tables.items()
    }
    for words, name in SIGNALS.items():
        ours, theirs = (correlated(found[p][name].pearson) for p in (False, True))
        yield line(f"audit.r.{words}", clean=ours, as_published=theirs, what=f"r of {name}", tolerance=0.06)
    ahead = {p: found[p]["disagreement"].behind_peum for p in (True, False)}
    clean_ahead = ahead[False]
    loses = clean_ahead is not None and clean_ahead.high < 0
    why = (
        "theirs compares six of the 18 views; over all pairs disagreement is the better signal"
        if loses
        else ""
    )
    yield line(
        "audit.diff",
        clean=clean_ahead,
        as_published=ahead[True],
        what="PEUM ahead of disagreement",
        artefact=why,
        reason=why,
    )
    lift = {p: found[p]["peum (full)"].held_out for p in (True, False)}
    yield line(
        "audit.lift.heldout",
        clean=lift[False].lift,
        as_published=lift[True].lift,
        what="mean ratio, held out",
        tolerance=0.25,
    )
    insample = [
        Estimate(lift[p].in_sample, float("nan"), float("nan"), lift[p].lift.n) for p in (False, True)
    ]
    yield line(
        "audit.lift.insample",
        clean=insample[0],
        as_published=insample[1],
        what="mean ratio, in sample",
        tolerance=0.25,
    )
    for words, name in WRONG.items():
        ours, theirs = found[False][name].wrong, found[True][name].wrong
        yield line(
            f"audit.auroc.{words}",
            clean=ours,
            as_published=theirs,
            what=f"{name}: AUROC for wrong predictions",
            tolerance=0.06,
        )
    captured = {p: found[p]["peum (full)"].capture for p in (True, False)}
    yield Line(
        "",
        "PEUM: capture of the worst tenth, × chance",
        "not in the text",
        captured[False],
        captured[True],
        "measured",
    )


EXPERIMENT = Experiment("PEUM audit: which signal tells an unstable map", ("audit.",), run)
