"""Eq by confidence: does drift come from predictions of low confidence?"""

from collections.abc import Iterator

from equicam.evaluation import summary
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Row, compare, not_run

FIRST_CLASSES = "the published bins are of the first 200 classes, which score higher"
PUBLISHED = (
    ("cond.bins.gc.lo", "grad-cam", 0, FIRST_CLASSES),
    ("cond.bins.gc.hi", "grad-cam", -1, FIRST_CLASSES),
    ("cond.bins.eg", "equigrad-cam", -1, ""),
)
"""Claims with their method, bin and reason."""


def measure(context: Context) -> Iterator[Row]:
    """Eq in bins of the class probability; the paper's bin edges are not known, ours are fifths."""
    methods = ("grad-cam", "equigrad-cam")
    found = context.evaluate_both(methods)
    bins = found.map(lambda e: {m: summary.by_confidence(e.table, m, region=e.region) for m in methods})
    for claim, method, i, reason in PUBLISHED:
        (name, ours), (_, theirs) = bins.clean[method][i], bins.as_published[method][i]
        if ours.n and theirs.n:
            where = f"p in {name}" if method == "grad-cam" else "most confident bin"
            yield compare(claim, Both(ours, theirs), label=f"{method}, {where}", reason=reason)
        else:
            yield not_run(claim, f"no image has p in {name}: --data with more of them")
    for method in methods:
        for (name, ours), (_, theirs) in zip(bins.clean[method], bins.as_published[method], strict=True):
            if ours.n:
                label = f"{method}, p in {name} (n = {ours.n})"
                yield compare("", Both(ours, theirs), label=label, published="plotted only")


EXPERIMENT = Experiment("Confidence strata", ("cond.bins",), measure)
