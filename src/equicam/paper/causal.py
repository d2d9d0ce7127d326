"""The causal test: does the model use the pixels whose saliency moves?"""

import math
from collections.abc import Iterator
from operator import attrgetter, itemgetter

import numpy as np
from numpy.typing import NDArray

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate, Floats
from equicam.paper.claims import claims
from equicam.paper.context import Context, Evaluation
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Remark, Row, compare, number, with_verdict

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
        ratio = found.map(lambda of: number(of["agreement"].presented.value / of["drift"].presented.value))
        yield compare(f"{start}.ratio", ratio, label="agreement over drift", tolerance=0.5)
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
    pairs = Both((drift.clean[0], random.clean[0]), (drift.as_published[0], random.as_published[0]))
    larger = pairs.map(lambda pair: statistics.compare(*pair))
    yield with_verdict(
        f"{start}.p", larger.map(lambda c: number(c.log10_p, c.n)),
        "matches" if larger.as_published.log10_p > math.log10(0.5) else "differs",
        label="log10 p that drift is more asymmetric than random", published="p = 1",
        reason="its pairs are seven of each image and not independent; one-sided",
    )  # fmt: skip
    median = pairs.map(lambda pair: number(float(np.nanmedian(pair[0] - pair[1]))))
    yield compare(f"{start}.median_diff", median, label="median of drift − random, asymmetry")


def _apart(found: Evaluation, region: str) -> tuple[Floats, NDArray[np.object_]]:
    """The difference of a region's two drops, and the image of each."""
    here, there = (
        summary.pick(found.table, f"causal-{region}{end}", "grad-cam", found.region, each_angle=True)
        for end in ("", "-rotated")
    )
    return np.abs(here.value - there.value), here.ids


EXPERIMENT = Experiment("Causal test: does the model use the drifting pixels?", ("causal.",), measure)
