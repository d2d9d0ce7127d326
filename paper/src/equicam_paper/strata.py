"""Eq by confidence: does drift come from predictions of low confidence?"""

from collections.abc import Iterator

from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Row, compare, not_run

PUBLISHED = (
    ("cond.bins.gc.lo", "grad-cam", 0),
    ("cond.bins.gc.hi", "grad-cam", -1),
    ("cond.bins.eg", "equigrad-cam", -1),
)
"""Claims with their method and bin."""
METHODS = ("grad-cam", "equigrad-cam")
Bins = dict[str, list[tuple[str, Estimate]]]


def measure(context: Context) -> Iterator[Row]:
    """Eq in bins of the class probability; the paper's bin edges are not known, ours are fifths."""
    found = context.evaluate_both(METHODS)
    first = context.on_first_classes(found).map(_bins)
    for claim, method, i in PUBLISHED:
        (name, ours), (_, theirs) = first.clean[method][i], first.as_published[method][i]
        if ours.n and theirs.n:
            where = f"p in {name}" if method == "grad-cam" else "most confident bin"
            label, of_first = f"{method}, {where}, first classes", context.labelled
            yield compare(claim, Both(ours, theirs), label=label, of_first_classes=of_first)
        else:
            yield not_run(claim, f"no image has p in {name}: --data with more of them")
    bins = found.map(_bins)
    for method in METHODS:
        for (name, ours), (_, theirs) in zip(bins.clean[method], bins.as_published[method], strict=True):
            if ours.n:
                label = f"{method}, p in {name} (n = {ours.n})"
                yield compare("", Both(ours, theirs), label=label, published="plotted only")


def _bins(found: Evaluation) -> Bins:
    return {m: summary.by_confidence(found.table, m, region=found.region) for m in METHODS}


EXPERIMENT = Experiment("Confidence strata", ("cond.bins",), measure)
