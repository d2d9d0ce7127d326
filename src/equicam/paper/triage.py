"""PEUM as a triage rule: how many of the least stable maps does a review budget find?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate, Floats, Ids
from equicam.paper.claims import DOMAINS, Claim
from equicam.paper.context import Context, Evaluation
from equicam.paper.domains import fine_tuning
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Remark, Row, compare, correlation, number, with_verdict

WORST = 0.10
"""The share of images, with the lowest Eq of Grad-CAM, that a reviewer should find."""


@dataclass(frozen=True)
class Pair:
    """A signal and 1 − Eq of Grad-CAM, one value of each per image."""

    signal: Floats
    drift: Floats
    group: Ids | None  # of the images

    def bootstrap(self, statistic: statistics.Statistic) -> Estimate:
        """A statistic of both with its interval."""
        return statistics.bootstrap(statistic, self.signal, self.drift, group=self.group)


def measure(context: Context) -> Iterator[Row]:
    """PEUM against 1 − Eq of Grad-CAM; the share of the worst tenth found in the first tenth and fifth."""
    found = context.evaluate_both(["grad-cam", "equigrad-cam"], ["eq", "peum", "disagreement", "stability"])
    peum = found.map(lambda e: _pair(e, "peum", "full"))
    r = peum.map(lambda pair: statistics.pearson(pair.signal, pair.drift, group=pair.group))
    start, label = f"peum.{context.claimed_domain}", "r of PEUM with 1 − Eq"
    yield compare(f"{start}.r", r.map(correlation), label=label)
    in_tenth = partial(statistics.capture, budget=WORST)
    for name, label, share in (
        ("cap10", "worst tenth found in a tenth", in_tenth),
        ("lift10", "the same over chance", partial(statistics.capture_lift, budget=WORST)),
        ("cap20", "worst tenth found in a fifth", partial(statistics.capture, budget=0.2, worst=WORST)),
    ):
        value = peum.map(Pair.bootstrap, share)
        yield compare(f"{start}.{name}", value, label=label)
    disagreement = found.map(lambda e: _pair(e, "disagreement", e.region))
    value = disagreement.map(Pair.bootstrap, in_tenth)
    yield compare("", value, label="worst tenth found in a tenth, by disagreement of the views")
    instability = found.map(_instability)
    value = instability.map(Pair.bootstrap, in_tenth)
    yield compare("", value, label="worst tenth found in a tenth, by 1 − stability")
    known = context.claimed_domain in DOMAINS
    chance = peum.map(
        lambda pair: number(statistics.capture(0 * pair.drift, pair.drift, budget=WORST), len(pair.drift))
    )
    if known:
        label = "a signal without information"
        yield with_verdict("peum.random", chance, "by definition", label=label, reason="chance")
        of_both = f"the claim is about both domains, this is {context.domain} alone"
        yield with_verdict(
            "peum.p", r.map(lambda c: number(c.log10_p, c.n)), "undecided", label="log10 p of r", reason=of_both
        )  # fmt: skip


def _pair(found: Evaluation, signal: str, region: str) -> Pair:
    eq = summary.pick(found.table, "eq", "grad-cam", found.region)
    value = summary.pick(found.table, signal, "equigrad-cam", region).by_id(eq.ids)
    return Pair(value, 1 - eq.value, eq.group)


def _instability(found: Evaluation) -> Pair:
    pair = _pair(found, "stability", "disc")
    return replace(pair, signal=1 - pair.signal)


def _missing(_context: Context, claim: Claim) -> Remark:
    return fine_tuning(claim.domain if claim.domain in DOMAINS else DOMAINS[0], "triage")


EXPERIMENT = Experiment(
    "PEUM as a triage rule",
    ("peum.",),
    measure,
    needs="images; the published numbers are of a --domain's",
    missing=_missing,
)
