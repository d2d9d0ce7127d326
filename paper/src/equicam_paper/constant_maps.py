"""Why Score-CAM's maps are constant: the authors' weights, not the method."""

from collections.abc import Iterator

import numpy as np

from equicam.evaluate import statistics
from equicam.evaluate.statistics import Floats
from equicam.explain import explain
from equicam_paper.claims import claims
from equicam_paper.context import FORWARD_PASSES, Context
from equicam_paper.experiment import Experiment
from equicam_paper.measure import SCORE_CAM_WEIGHTS
from equicam_paper.rows import Both, Contradiction, Row, compare, costly, not_run

IMAGES_PER_BATCH = 16


def measure(context: Context) -> Iterator[Row]:
    """The share of constant Score-CAM maps with the authors' weights and with the original's."""
    claim = f"const.scorecam.{context.backbone}"
    if not context.costly:
        if claim in claims():
            yield not_run(claim, costly(FORWARD_PASSES["score-cam"]))
        return
    with context.masked_scores():
        constant = Both(_constant(context, "ours"), _constant(context, "paper"))
    group = [item.group or item.id for item in context.sample] if context.groups else None
    share = constant.map(lambda c: statistics.proportion(int(c.sum()), len(c)))
    fewer = statistics.compare(constant.clean, constant.as_published, group=group).difference
    yield compare(
        claim, share, label="score-cam: constant maps", reason=SCORE_CAM_WEIGHTS,
        artefact=Contradiction(fewer, "with the original's weights fewer maps are constant"),
    )  # fmt: skip


def _constant(context: Context, protocol: str) -> Floats:
    """Which images have a constant map."""
    items, constant = context.sample, []
    how = {name: value for name, value in context.options.items() if name in ("dtype", "compiled")}
    for start in range(0, len(items), IMAGES_PER_BATCH):
        x = context.open(items[start : start + IMAGES_PER_BATCH])
        found = explain(context.model, x, method="score-cam", protocol=protocol, **how)
        constant += [bool(flags & {"blank", "constant"}) for flags in found.flags]
    return np.array(constant, dtype=np.float64)


EXPERIMENT = Experiment("Constant Score-CAM maps", ("const.scorecam.",), measure)
