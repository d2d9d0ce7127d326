"""PEUM as a triage rule: how many of the least stable maps does a review budget find?"""

from collections.abc import Iterator
from functools import partial

import numpy as np

from equicam.evaluation import statistics, summary
from equicam.evaluation.statistics import Estimate, Floats
from equicam.paper.context import Bench, Experiment, Line, beside, number
from equicam.paper.domains import DOMAINS, tuned
from equicam.paper.measure import both, p_line, region, rest

WORST = 0.10


def run(bench: Bench) -> Iterator[Line]:
    """PEUM against 1 − Eq of Grad-CAM; the share of the worst tenth found in the first tenth and fifth."""
    done = list(_measured(bench)) if bench.domain else []
    yield from done
    yield from rest(("peum.",), done, lambda known: _otherwise(known.of.split()[0]))


def _measured(bench: Bench) -> Iterator[Line]:
    tables = both(bench, ["grad-cam", "equigrad-cam"], ["eq", "peum", "disagreement"])
    pairs: dict[bool, tuple[Floats, Floats]] = {}
    for p, rows in tables.items():
        peum = summary.pick(rows, "peum", "equigrad-cam", "full").value
        pairs[p] = peum, 1 - summary.pick(rows, "eq", "grad-cam", region(p)).value
    r = {p: statistics.pearson(*pair) for p, pair in pairs.items()}
    ours, theirs = (Estimate(r[p].r, r[p].low, r[p].high, r[p].n) for p in (False, True))
    start = f"peum.{bench.claimed_domain}"
    yield beside(f"{start}.r", clean=ours, as_published=theirs, what="r of PEUM with 1 − Eq", tolerance=0.06)
    for name, what, measure, tolerance in (
        ("cap10", "worst tenth found in a tenth", partial(_found, budget=0.1), 0.05),
        ("lift10", "the same over chance", partial(statistics.capture_lift, budget=WORST), 0.5),
        ("cap20", "worst tenth found in a fifth", partial(_found, budget=0.2), 0.05),
    ):
        ours, theirs = (statistics.bootstrap(measure, *pairs[p]) for p in (False, True))
        yield beside(f"{start}.{name}", clean=ours, as_published=theirs, what=what, tolerance=tolerance)
    other = {
        p: (summary.pick(rows, "disagreement", "equigrad-cam", region(p)).value, pairs[p][1])
        for p, rows in tables.items()
    }
    ours, theirs = (statistics.bootstrap(partial(_found, budget=0.1), *other[p]) for p in (False, True))
    what = "worst tenth found in a tenth, by disagreement of the views"
    yield Line("", what, "not in the paper", ours, theirs, "measured")
    blind = {
        p: number(statistics.capture(0 * bad, bad, budget=WORST), len(bad)) for p, (_, bad) in pairs.items()
    }
    known = bench.claimed_domain in DOMAINS
    yield beside(
        "peum.random" if known else "",
        clean=blind[False],
        as_published=blind[True],
        what="a signal that knows nothing",
    )
    if known:
        yield p_line("peum.p", f"log10 p of r, {bench.domain} alone", {p: r[p].log10_p for p in r}, r[True].n)


def _found(signal: Floats, badness: Floats, *, budget: float) -> float:
    """The share of the worst tenth among the pictures with the highest signal."""
    reviewed, worst = (
        np.argsort(-v, kind="stable")[: max(1, round(share * len(v)))]
        for v, share in ((signal, budget), (badness, WORST))
    )
    return float(np.isin(worst, reviewed).mean())


def _otherwise(domain: str) -> str:
    return tuned(domain if domain in DOMAINS else DOMAINS[0], "triage")


EXPERIMENT = Experiment(
    "PEUM as a triage rule",
    ("peum.",),
    run,
    needs="--domain, its test pictures and weights",
)
