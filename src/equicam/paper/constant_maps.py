"""Why Score-CAM's maps are constant: the authors' weights, not the method."""

from collections.abc import Iterator

from equicam.evaluation import statistics
from equicam.evaluation.statistics import Estimate
from equicam.explain import explain
from equicam.paper.context import COSTLY, Bench, Experiment, Line, claims, line, not_run, others
from equicam.paper.measure import items_of, opened

A_BATCH = 16
THEIRS = (
    "its weights are what a masked picture gains over the whole one, mostly nothing; the original subtracts a "
    "blank picture's score"
)


def run(bench: Bench) -> Iterator[Line]:
    """The share of constant Score-CAM maps with the authors' weights and with the original's."""
    name, done = f"const.scorecam.{bench.backbone}", []
    if name in claims() and bench.costly:
        ours, theirs = (_share(bench, as_published=p) for p in (False, True))
        artefact = THEIRS if ours.high < theirs.low else ""
        done = [
            line(name, clean=ours, as_published=theirs, what="score-cam: constant maps", artefact=artefact)
        ]
    elif name in claims():
        done = [not_run(name, f"{COSTLY['score-cam']:,} forward passes a map: --costly, with --n")]
    yield from done
    yield from others("const.scorecam.", done, bench)


def _share(bench: Bench, *, as_published: bool) -> Estimate:
    items, still = items_of(bench), 0
    for start in range(0, len(items), A_BATCH):
        x = opened(bench, items[start : start + A_BATCH])
        found = explain(
            bench.model, x, method="score-cam", as_published=as_published, dtype=bench.options.get("dtype")
        )
        still += sum(bool(flags & {"blank", "constant"}) for flags in found.flags)
    return statistics.proportion(still, len(items))


EXPERIMENT = Experiment("Constant Score-CAM maps", ("const.scorecam.",), run)
