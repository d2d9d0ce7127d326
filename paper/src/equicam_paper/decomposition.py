"""The stage-wise decomposition: at which stage of the chain equivariance is lost."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from equicam.core.chain import is_constant
from equicam.evaluate import summary
from equicam.evaluate.rows import MetricColumn
from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.measure import eq_row, layer_gradient
from equicam_paper.rows import Both, Row, by_definition, compare, few_images, number, too_few, with_verdict

STAGES = {
    "activations A": "stage-activations",
    "gradient field g": "stage-gradients",
    "alpha Pearson": "stage-weights",
    "alpha_cos": "stage-weights-cosine",
    "pre-ReLU weighted sum": "stage-combined",
    "after ReLU": "stage-rectified",
    "final map": "stage-map",
}
COSINES = {"feature": "stage-pooled-cosine", "logit": "stage-logits-cosine"}
IDENTITY = "; an identity: the class is held fixed and the gradient is the same everywhere"
IMAGES = 4


def measure(context: Context) -> Iterator[Row]:
    """Every stage, with the similarity of unrelated images, which the paper leaves out."""
    found = context.evaluate_both(["grad-cam"], ["eq", "stages"])
    for name, metric in STAGES.items():
        yield _stage(f"decomp.{name}.{context.backbone}", metric, found)
    for name, metric in COSINES.items():
        cosine = summary.pick(found.clean.table, metric, "grad-cam", "no grid")
        rotated, unrelated = (
            summary.mean_of(replace(cosine, value=values)) for values in (cosine.value, cosine.floor)
        )
        yield compare(f"cos.{name}.rot", Both(rotated, None), label=f"{name}, rotated")
        yield compare(f"cos.{name}.unrelated", Both(unrelated, None), label=f"{name}, unrelated")
    whole = eq_row(f"decomp.published Grad-CAM (main).{context.backbone}", found, "grad-cam")
    yield replace(whole, label="grad-cam, evaluated whole")
    theirs = found.as_published
    last = theirs.mean("stage-map", "grad-cam", "full")
    apart = abs(last.value - theirs.eq("grad-cam").value)
    few = too_few(last) if apart > claims()["decomp.reproduces"].values[0] else None
    verdict = (
        "by definition"
        if apart <= claims()["decomp.reproduces"].values[0]
        else "undecided"
        if few
        else "differs"
    )
    yield with_verdict(
        "decomp.reproduces", Both(None, number(apart, last.n)), verdict, reason="one quantity computed in two ways",
        label="the last stage against grad-cam evaluated whole", why=few,
    )  # fmt: skip
    if (name := f"decomp.const_channels.{context.backbone}") in claims():
        label = "channels whose gradient is the same everywhere"
        yield by_definition(
            name,
            _constant_channels(context),
            label=label,
            reason=IDENTITY.removeprefix("; "),
            unless=few_images(IMAGES),
        )


def _stage(claim: str, metric: str, found: Both[Evaluation]) -> Row:
    grid = "no grid" if "weights" in metric else None
    mean = found.map(lambda e: e.mean(metric, "grad-cam", grid or e.region))
    reason = _unrelated(summary.pick(found.clean.table, metric, "grad-cam", grid or "disc"))
    if "weights" in metric and claim in claims() and mean.as_published.value > 0.9999:
        label = metric.removeprefix("stage-")
        return with_verdict(claim, mean, "by definition", label=label, reason=reason + IDENTITY)
    return compare(claim, mean, label=metric.removeprefix("stage-"), reason=reason)


def _unrelated(stage: MetricColumn) -> str:
    """The mean similarity of unrelated images, or why there is none."""
    if np.isnan(stage.floor).all():
        return stage.reason[0] or ""
    return f"unrelated images {float(stage.floor[~np.isnan(stage.floor)].mean()):.3f}"


def _constant_channels(context: Context) -> int:
    x = context.open_some(IMAGES)
    constant = is_constant(layer_gradient(context.model, x)).all(0)
    return int(constant.sum())


EXPERIMENT = Experiment("Decomposition: where equivariance is lost", ("decomp.", "cos."), measure)
