"""PEUM as a triage rule: how many of the least stable maps does a review budget find?"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Floats
from equicam.paper.claims import DOMAINS, Claim
from equicam.paper.context import Context, Evaluation
from equicam.paper.domains import fine_tuning
from equicam.paper.experiment import Experiment
from equicam.paper.measure import p_row
from equicam.paper.rows import Remark, Row, compare, correlation, number, with_verdict

WORST = 0.10
"""The share of images, with the lowest Eq of Grad-CAM, that a reviewer should find."""
Pair = tuple[Floats, Floats]
"""A signal and 1 − Eq of Grad-CAM."""


def measure(context: Context) -> Iterator[Row]:
    """PEUM against 1 − Eq of Grad-CAM; the share of the worst tenth found in the first tenth and fifth."""
    if not context.domain:
        return
    found = context.evaluate_both(["grad-cam", "equigrad-cam"], ["eq", "peum", "disagreement", "stability"])
    peum = found.map(lambda e: _pair(e, "peum", "full"))
    r = peum.map(lambda pair: statistics.pearson(*pair))
    start, label = f"peum.{context.claimed_domain}", "r of PEUM with 1 − Eq"
    yield compare(f"{start}.r", r.map(correlation), label=label)
    in_tenth = partial(_found, budget=0.1)
    for name, label, share in (
        ("cap10", "worst tenth found in a tenth", in_tenth),
        ("lift10", "the same over chance", partial(statistics.capture_lift, budget=WORST)),
        ("cap20", "worst tenth found in a fifth", partial(_found, budget=0.2)),
    ):
        value = peum.map(lambda pair, share: statistics.bootstrap(share, *pair), share)
        yield compare(f"{start}.{name}", value, label=label)
    disagreement = found.map(lambda e: _pair(e, "disagreement", e.region))
    value = disagreement.map(lambda pair: statistics.bootstrap(in_tenth, *pair))
    yield compare("", value, label="worst tenth found in a tenth, by disagreement of the views")
    instability = found.map(_instability)
    value = instability.map(lambda pair: statistics.bootstrap(in_tenth, *pair))
    yield compare("", value, label="worst tenth found in a tenth, by 1 − stability")
    known = context.claimed_domain in DOMAINS
    chance = peum.map(
        lambda pair: number(statistics.capture(0 * pair[1], pair[1], budget=WORST), len(pair[1]))
    )
    if known:
        label = "a signal without information"
        yield with_verdict("peum.random", chance, "by definition", label=label, reason="chance")
        log10_p = r.map(lambda c: c.log10_p)
        yield p_row("peum.p", f"log10 p of r, {context.domain} alone", log10_p, r.as_published.n)


def _pair(found: Evaluation, signal: str, region: str) -> Pair:
    value = summary.pick(found.table, signal, "equigrad-cam", region).value
    return value, 1 - summary.pick(found.table, "eq", "grad-cam", found.region).value


def _instability(found: Evaluation) -> Pair:
    stability, drift = _pair(found, "stability", "disc")
    return 1 - stability, drift


def _found(signal: Floats, badness: Floats, *, budget: float) -> float:
    """The share of the worst tenth among the images with the highest signal."""
    reviewed, worst = (
        np.argsort(-v, kind="stable")[: max(1, round(share * len(v)))]
        for v, share in ((signal, budget), (badness, WORST))
    )
    return float(np.isin(worst, reviewed).mean())


def _missing(_context: Context, claim: Claim) -> Remark:
    return fine_tuning(claim.domain if claim.domain in DOMAINS else DOMAINS[0], "triage")


EXPERIMENT = Experiment(
    "PEUM as a triage rule",
    ("peum.",),
    measure,
    needs="--domain, its test images and weights",
    missing=_missing,
)
