"""The causal test: does the model use the pixels whose saliency moves?"""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter, itemgetter

import numpy as np

from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate, Floats
from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Contradiction, Remark, Row, compare, minus, note, too_few, with_verdict

SOFT = "a rotated random mask is soft, so its two drops differ by construction"
REGIONS = {"drift": "drift", "agreement": "agreement", "random": "scattered"}
"""The paper's regions and ours."""
USED = "inside the disc the drift region costs more than the same shape elsewhere"
FRAMES = {"d0": "presented", "dtheta": "rotated"}


def measure(context: Context) -> Iterator[Row]:
    """Drift, agreement and random regions; then, inside the disc, regions of the same shape and saliency."""
    tables = context.evaluate_both(["grad-cam"], ["causal"])
    found = tables.map(
        lambda e: {o.region: o for o in summary.occlusion_effects(e.table, "grad-cam", region=e.region)}
    )
    elsewhere = found.clean["drift-elsewhere"].drift_above
    used = None if elsewhere is None else Contradiction(minus(elsewhere.difference), USED)
    start = f"causal.{context.backbone}"
    for name, ours in REGIONS.items():
        for frame, side in FRAMES.items():
            drop: Both[Estimate] = found.map(itemgetter(ours)).map(attrgetter(side))
            yield compare(
                f"{start}.{name}.{frame}", drop, label=f"{ours}, {side}", artefact=used if name == "drift" else None
            )  # fmt: skip
    if f"{start}.ratio" in claims():
        yield compare(f"{start}.ratio", tables.map(_ratio), label="agreement over drift")
    if f"{start}.p" in claims():
        yield from _asymmetry(start, tables)
    for name, one in found.clean.items():
        if above := one.drift_above:
            values = {"mean": above.mean, "low": above.low, "high": above.high, "wins": above.wins}
            label, control = f"{name} (control)", Remark("control", values)
            yield compare("", Both(one.presented, None), label=label, reason=control)


def _asymmetry(start: str, tables: Both[Evaluation]) -> Iterator[Row]:
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
    yield with_verdict(
        f"{start}.p", mean, verdict, label="asymmetry of drift minus that of random", published=f"p = {claims()[f'{start}.p'].values[0]:g}",
        reason="judged by the interval over images: the published p takes the seven angles of an image as independent", why=why,
    )  # fmt: skip
    if f"{start}.median_diff" in claims():
        median = apart.map(lambda a: statistics.bootstrap(_median, a.value, cluster=a.ids, group=a.group))
        yield compare(f"{start}.median_diff", median, label="median of drift − random, asymmetry")


def _median(values: Floats) -> float:
    return float(np.median(values))


def _ratio(found: Evaluation) -> Estimate:
    """The mean cost of the agreement region over that of the drift region."""
    agreement, drift = (
        summary.pick(found.table, f"causal-{region}", "grad-cam", found.region)
        for region in ("agreement", "drift")
    )
    return statistics.bootstrap(
        _over, agreement.by_id(drift.ids), drift.value, cluster=drift.ids, group=drift.group
    )


def _over(a: Floats, b: Floats) -> float:
    """The ratio of two means; NaN where the second is 0, as it can be in a resample."""
    below = statistics.mean(b)
    return statistics.mean(a) / below if below else statistics.NAN


def _apart(found: Evaluation, region: str) -> MetricColumn:
    """The difference of a region's two drops, for every image and angle."""
    here, there = (
        summary.pick(found.table, f"causal-{region}{end}", "grad-cam", found.region, each_angle=True)
        for end in ("", "-rotated")
    )
    return replace(here, value=np.abs(here.value - there.value))


def _minus(a: MetricColumn, b: MetricColumn) -> MetricColumn:
    return replace(a, value=a.value - b.value)


EXPERIMENT = Experiment("Causal test: does the model use the drifting pixels?", ("causal.",), measure)
