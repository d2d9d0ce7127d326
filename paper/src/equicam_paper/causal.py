"""Where drift comes from, and whether it matters: the stage-wise decomposition, and the causal test."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter, itemgetter

import numpy as np

from equicam.core.chain import is_constant
from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate, Floats
from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.measure import eq_row, layer_gradient, of_columns
from equicam_paper.rows import (
    Both,
    Contradiction,
    Remark,
    Row,
    by_definition,
    checked,
    compare,
    note,
    number,
    scaled,
    too_few,
    with_verdict,
)

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
IDENTITY = "an identity: the class is held fixed and the gradient is the same everywhere"
IMAGES = 4


def decomposition(context: Context) -> Iterator[Row]:
    """Every stage of the chain, with the similarity of unrelated images, which the paper leaves out."""
    found = context.evaluate_both(["grad-cam"], ["eq", "stages"])
    for name, metric in STAGES.items():
        yield _stage(f"decomp.{name}.{context.backbone}", metric, found)
    for name, metric in COSINES.items():
        cosine = summary.pick(found.clean.table, metric, "grad-cam", "no grid")
        for end, word, values in (("rot", "rotated", cosine.value), ("unrelated", "unrelated", cosine.floor)):
            mean = summary.mean_of(replace(cosine, value=values))
            yield compare(f"cos.{name}.{end}", Both(mean, None), label=f"{name}, {word}")
    whole = eq_row(f"decomp.published Grad-CAM (main).{context.backbone}", found, "grad-cam")
    yield replace(whole, label="grad-cam, evaluated whole")
    theirs = found.as_published
    last = theirs.mean("stage-map", "grad-cam", "full")
    apart = abs(last.value - theirs.eq("grad-cam").value)
    yield checked(
        "decomp.reproduces", Both(None, number(apart, last.n)), apart <= claims()["decomp.reproduces"].values[0],
        reason="one quantity computed in two ways", label="the last stage against grad-cam evaluated whole", unless=too_few(last),
    )  # fmt: skip
    if (name := f"decomp.const_channels.{context.backbone}") in claims():
        gradient = layer_gradient(context.model, context.open_some(IMAGES))
        yield by_definition(
            name, int(is_constant(gradient).all(0).sum()), label="channels whose gradient is the same everywhere",
            reason=IDENTITY, unless=too_few(number(0, IMAGES)),
        )  # fmt: skip


def _stage(claim: str, metric: str, found: Both[Evaluation]) -> Row:
    grid = "no grid" if "weights" in metric else None
    mean = found.map(lambda e: e.mean(metric, "grad-cam", grid or e.region))
    reason = _unrelated(summary.pick(found.clean.table, metric, "grad-cam", grid or "disc"))
    label = metric.removeprefix("stage-")
    if "weights" in metric and claim in claims() and mean.as_published.value > 0.9999:
        return with_verdict(claim, mean, "by definition", label=label, reason=f"{reason}; {IDENTITY}")
    return compare(claim, mean, label=label, reason=reason)


def _unrelated(stage: MetricColumn) -> str:
    """The mean similarity of unrelated images, or why there is none."""
    if np.isnan(stage.floor).all():
        return stage.reason[0] or ""
    return f"unrelated images {float(stage.floor[~np.isnan(stage.floor)].mean()):.3f}"


SOFT = "a rotated random mask is soft, so its two drops differ by construction"
REGIONS = {"drift": "drift", "agreement": "agreement", "random": "scattered"}
"""The paper's regions and ours."""
USED = "inside the disc the drift region costs more than the same shape elsewhere"
FRAMES = {"d0": "presented", "dtheta": "rotated"}
PAIRS = "judged by the interval over images: the published p takes an image's seven angles as independent"


def causal(context: Context) -> Iterator[Row]:
    """Drift, agreement and random regions; then, inside the disc, regions of the same shape and saliency."""
    tables = context.evaluate_both(["grad-cam"], ["causal"])
    effects = tables.map(lambda e: summary.occlusion_effects(e.table, "grad-cam", region=e.region))
    found = effects.map(lambda of: {one.region: one for one in of})
    elsewhere = found.clean["drift-elsewhere"].drift_above
    used = None if elsewhere is None else Contradiction(scaled(elsewhere.difference, -1), USED)
    start = f"causal.{context.backbone}"
    for name, ours in REGIONS.items():
        for frame, side in FRAMES.items():
            drop: Both[Estimate] = found.map(itemgetter(ours)).map(attrgetter(side))
            artefact = used if name == "drift" else None
            yield compare(f"{start}.{name}.{frame}", drop, label=f"{ours}, {side}", artefact=artefact)
    if f"{start}.ratio" in claims():
        yield compare(f"{start}.ratio", tables.map(drop_ratio), label="agreement over drift")
    if f"{start}.p" in claims():
        yield from asymmetry(start, tables)
    for name, one in found.clean.items():
        if above := one.drift_above:
            difference = above.difference
            values = {
                "mean": difference.value,
                "low": difference.low,
                "high": difference.high,
                "wins": above.wins,
            }
            control = Remark("control", values)
            yield compare("", Both(one.presented, None), label=f"{name} (control)", reason=control)


def asymmetry(start: str, tables: Both[Evaluation]) -> Iterator[Row]:
    """|d₀ − d_θ| of the drift and of the random region, and whether the first is larger, over pairs as in the paper."""
    drift, random = (tables.map(_apart, region) for region in ("drift", "scattered"))
    for name, apart in (("drift", drift), ("random", random)):
        mean = apart.map(summary.mean_of)
        yield compare(f"{start}.{name}.asym", mean, label=f"asymmetry, {name}", reason=SOFT)
    apart = Both(_minus(drift.clean, random.clean), _minus(drift.as_published, random.as_published))
    mean = apart.map(summary.mean_of)
    tested = mean.as_published  # a published p near 1: drift is not more asymmetric than random
    why = too_few(tested)
    if why is None and tested.low <= 0 <= tested.high:
        why = note("the interval holds 0")
    verdict = "undecided" if why else "matches" if tested.high < 0 else "differs"
    published = f"p = {claims()[f'{start}.p'].values[0]:g}"
    label = "asymmetry of drift minus that of random"
    yield with_verdict(f"{start}.p", mean, verdict, label=label, published=published, reason=PAIRS, why=why)
    if f"{start}.median_diff" in claims():
        median = apart.map(lambda a: of_columns(lambda values: float(np.median(values)), a))
        yield compare(f"{start}.median_diff", median, label="median of drift − random, asymmetry")


def drop_ratio(found: Evaluation) -> Estimate:
    """The mean cost of the agreement region over that of the drift region."""
    names = ("causal-agreement", "causal-drift")
    return of_columns(ratio_of_means, *(found.column(name, "grad-cam") for name in names))


def ratio_of_means(a: Floats, b: Floats) -> float:
    """The ratio of two means; NaN where the second is 0, as it can be in a resample."""
    below = statistics.mean(b)
    return statistics.mean(a) / below if below else statistics.NAN


def _apart(found: Evaluation, region: str) -> MetricColumn:
    """The difference of a region's two drops, for every image and angle."""
    names = (f"causal-{region}", f"causal-{region}-rotated")
    here, there = (found.column(name, "grad-cam", each_angle=True) for name in names)
    return replace(here, value=np.abs(here.value - there.value))


def _minus(a: MetricColumn, b: MetricColumn) -> MetricColumn:
    return replace(a, value=a.value - b.value)
