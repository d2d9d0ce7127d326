"""Eq by confidence: is drift a matter of unsure predictions?"""

from collections.abc import Iterator

from equicam.evaluation import summary
from equicam.paper.context import Bench, Experiment, Line, line, not_run


def run(bench: Bench) -> Iterator[Line]:
    """Eq in bins of the class probability; the paper's bin edges are not known, ours are fifths."""
    tables = {p: bench.rows(["grad-cam", "equigrad-cam"], as_published=p) for p in (True, False)}
    bins = {
        (p, m): summary.by_confidence(t, m, region="full" if p else "disc")
        for p, t in tables.items()
        for m in ("grad-cam", "equigrad-cam")
    }
    why = "the published bins are of the first 200 classes, which score higher"
    for claim, method, i, reason in (
        ("cond.bins.gc.lo", "grad-cam", 0, why),
        ("cond.bins.gc.hi", "grad-cam", -1, why),
        ("cond.bins.eg", "equigrad-cam", -1, ""),
    ):
        (name, ours), (_, theirs) = (bins[p, method][i] for p in (False, True))
        if ours.n and theirs.n:
            what = f"{method}, p in {name}" if method == "grad-cam" else f"{method}, surest bin"
            yield line(claim, clean=ours, as_published=theirs, what=what, reason=reason)
        else:
            yield not_run(claim, f"no picture has p in {name}: --data with more of them")
    for method in ("grad-cam", "equigrad-cam"):
        for (name, ours), (_, theirs) in zip(bins[False, method], bins[True, method], strict=True):
            if not ours.n:
                continue
            yield Line("", f"{method}, p in {name} (n = {ours.n})", "drawn only", ours, theirs, "measured")


EXPERIMENT = Experiment("Confidence strata", ("cond.bins",), run)
