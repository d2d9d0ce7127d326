"""The causal test: does the model use the pixels whose saliency moves?"""

from collections.abc import Iterator
from operator import attrgetter, itemgetter

import numpy as np
from numpy.typing import NDArray

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate, Floats
from equicam.paper.claims import claims
from equicam.paper.context import Context, Evaluation
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Remark, Row, compare, with_verdict

SOFT = "a rotated random mask is soft, so its two drops differ by construction"
REGIONS = {"drift": "drift", "agreement": "agreement", "random": "scattered"}
"""The paper's regions and ours."""
FRAMES = {"d0": "presented", "dtheta": "rotated"}


def measure(context: Context) -> Iterator[Row]:
    """Drift, agreement and random regions; then, inside the disc, regions of the same shape and saliency."""
    tables = context.evaluate_both(["grad-cam"], ["causal"])
    found = tables.map(
        lambda e: {o.region: o for o in summary.occlusion_effects(e.table, "grad-cam", region=e.region)}
    )
    elsewhere = found.clean["drift-elsewhere"].drift_above
    used = elsewhere is not None and elsewhere.low > 0
    artefact = "inside the disc the drift region costs more than the same shape elsewhere" if used else ""
    start = f"causal.{context.backbone}"
    for name, ours in REGIONS.items():
        for frame, side in FRAMES.items():
            drop: Both[Estimate] = found.map(itemgetter(ours)).map(attrgetter(side))
            yield compare(
                f"{start}.{name}.{frame}", drop, label=f"{ours}, {side}", artefact=artefact if name == "drift" else ""
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
        mean = apart.map(lambda a: statistics.bootstrap(statistics.mean, a[0], cluster=a[1]))
        yield compare(f"{start}.{name}.asym", mean, label=f"asymmetry, {name}", reason=SOFT)
    apart = Both(
        (drift.clean[0] - random.clean[0], drift.clean[1]),
        (drift.as_published[0] - random.as_published[0], drift.as_published[1]),
    )
    mean = apart.map(lambda a: statistics.bootstrap(statistics.mean, a[0], cluster=a[1]))
    tested = mean.as_published  # a published p near 1: drift is not more asymmetric than random
    verdict = "matches" if tested.high < 0 else "differs" if tested.low > 0 else "undecided"
    yield with_verdict(
        f"{start}.p", mean, verdict, label="asymmetry of drift minus that of random", published=f"p = {claims()[f'{start}.p'].values[0]:g}",
        reason="judged by the interval over images: the published p takes the seven angles of an image as independent",
    )  # fmt: skip
    if f"{start}.median_diff" in claims():
        median = apart.map(lambda a: statistics.bootstrap(_median, a[0], cluster=a[1]))
        yield compare(f"{start}.median_diff", median, label="median of drift − random, asymmetry")


def _median(values: Floats) -> float:
    return float(np.median(values))


def _ratio(found: Evaluation) -> Estimate:
    """The mean cost of the agreement region over that of the drift region."""
    agreement, drift = (
        summary.pick(found.table, f"causal-{region}", "grad-cam", found.region)
        for region in ("agreement", "drift")
    )
    return statistics.bootstrap(_over, agreement.by_id(drift.ids), drift.value, cluster=drift.ids)


def _over(a: Floats, b: Floats) -> float:
    return statistics.mean(a) / statistics.mean(b)


def _apart(found: Evaluation, region: str) -> tuple[Floats, NDArray[np.object_]]:
    """The difference of a region's two drops, and the image of each."""
    here, there = (
        summary.pick(found.table, f"causal-{region}{end}", "grad-cam", found.region, each_angle=True)
        for end in ("", "-rotated")
    )
    return np.abs(here.value - there.value), here.ids


EXPERIMENT = Experiment("Causal test: does the model use the drifting pixels?", ("causal.",), measure)
