"""Eq by confidence: is drift a matter of unsure predictions?"""

from collections.abc import Iterator

from equicam.experiments.experiment import Bench, Experiment, Line, line
from equicam.scores import summary


def run(bench: Bench) -> Iterator[Line]:
    """Eq in bins of the class probability; the paper's bin edges are not known, ours are fifths."""
    tables = {p: bench.rows(["grad-cam", "equigrad-cam"], as_published=p) for p in (True, False)}
    by = {
        (p, m): [(name, e) for name, e in summary.by_confidence(t, m, region="full" if p else "disc") if e.n]
        for p, t in tables.items()
        for m in ("grad-cam", "equigrad-cam")
    }
    edges = {p: (by[p, "grad-cam"][0][1], by[p, "grad-cam"][-1][1]) for p in (True, False)}
    why = "the published bins are of the first 200 classes, which score higher"
    for name, i in (("cond.bins.gc.lo", 0), ("cond.bins.gc.hi", -1)):
        yield line(
            name,
            clean=edges[False][i],
            as_published=edges[True][i],
            what=f"grad-cam, p in {by[False, 'grad-cam'][i][0]}",
            reason=why,
        )
    last = [by[p, "equigrad-cam"][-1][1] for p in (False, True)]
    yield line("cond.bins.eg", clean=last[0], as_published=last[1], what="equigrad-cam, surest bin")
    for method in ("grad-cam", "equigrad-cam"):
        for (name, ours), (_, theirs) in zip(by[False, method], by[True, method], strict=True):
            yield Line("", f"{method}, p in {name} (n = {ours.n})", "drawn only", ours, theirs, "measured")


EXPERIMENT = Experiment("Confidence strata", ("cond.bins",), run)
