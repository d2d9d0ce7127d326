"""Why Score-CAM's maps are constant: the authors' weights, not the method."""

from collections.abc import Iterator

from equicam.evaluation import statistics
from equicam.evaluation.statistics import Estimate
from equicam.explain import explain
from equicam.paper.claims import claims
from equicam.paper.context import FORWARD_PASSES, Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Row, compare, costly, not_run

IMAGES_PER_BATCH = 16
THEIRS = (
    "its weights are the confidence a masked image gains over the whole one, mostly nothing; the original subtracts the "
    "confidence of a blank image"
)


def measure(context: Context) -> Iterator[Row]:
    """The share of constant Score-CAM maps with the authors' weights and with the original's."""
    claim = f"const.scorecam.{context.backbone}"
    if claim not in claims():
        return
    if not context.costly:
        yield not_run(claim, costly(FORWARD_PASSES["score-cam"]))
        return
    share = Both(_share(context, as_published=False), _share(context, as_published=True))
    artefact = THEIRS if share.clean.high < share.as_published.low else ""
    yield compare(claim, share, label="score-cam: constant maps", artefact=artefact)


def _share(context: Context, *, as_published: bool) -> Estimate:
    items, constant, dtype = context.sample, 0, context.options.get("dtype")
    for start in range(0, len(items), IMAGES_PER_BATCH):
        x = context.open(items[start : start + IMAGES_PER_BATCH])
        found = explain(context.model, x, method="score-cam", as_published=as_published, dtype=dtype)
        constant += sum(bool(flags & {"blank", "constant"}) for flags in found.flags)
    return statistics.proportion(constant, len(items))


EXPERIMENT = Experiment("Constant Score-CAM maps", ("const.scorecam.",), measure)
