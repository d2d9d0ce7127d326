"""PEUM as a triage rule: how many of the least stable maps does a review budget find?"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate, Floats, Ids
from equicam_paper.claims import DOMAINS, Claim
from equicam_paper.context import Context, Evaluation
from equicam_paper.domains import fine_tuning
from equicam_paper.experiment import Experiment
from equicam_paper.measure import describe_seeds, is_constant, mean_over
from equicam_paper.peum_audit import OFF_GRID
from equicam_paper.rotation_augmentation import TRAININGS, WEIGHTS
from equicam_paper.rows import Both, Remark, Row, compare, correlation, number, with_verdict

WORST = 0.10
"""The share of images, with the lowest Eq of Grad-CAM, that a reviewer should find."""
IN_TENTH = partial(statistics.capture, budget=WORST)
IN_FIFTH = partial(statistics.capture, budget=0.2, worst=WORST)
LIFT = partial(statistics.capture_lift, budget=WORST)
SHARES = (IN_TENTH, IN_FIFTH, LIFT)
"""Statistics that are a share of the worst images; the lift is one over chance."""
QUANTITIES = (
    ("r", "r of PEUM with 1 − Eq", "peum", statistics.pearson_r),
    ("cap10", "worst tenth found in a tenth", "peum", IN_TENTH),
    ("lift10", "the same over chance", "peum", LIFT),
    ("cap20", "worst tenth found in a fifth", "peum", IN_FIFTH),
    ("", "worst tenth found in a tenth, by disagreement of the views", "disagreement", IN_TENTH),
    ("", "worst tenth found in a tenth, by 1 − stability", "stability", IN_TENTH),
)
"""The end of a claim's name, the label, the signal and what is measured of it."""
OFF_GRID_LABEL = "{}, off the grid"
CONSTANT = "constant maps, which count Eq 0"


@dataclass(frozen=True)
class Pair:
    """A signal and 1 − Eq of Grad-CAM, one value of each per image."""

    signal: Floats
    drift: Floats
    group: Ids | None  # of the images


def measure(context: Context) -> Iterator[Row]:
    """Signals against 1 − Eq of Grad-CAM, over all seeds: at all angles, and at those that no view has."""
    seeds = [
        one.evaluate_both(["grad-cam", "equigrad-cam"], ["eq", "peum", "disagreement", "stability"])
        for one in trainings(context)
    ]
    start = f"peum.{context.claimed_domain}"
    for name, label, signal, statistic in QUANTITIES:
        pairs = _pairs(seeds, signal)
        yield from _rows(f"{start}.{name}" if name else "", label, pairs, statistic)
    if context.claimed_domain in DOMAINS:
        yield from _chance_and_p(_pairs(seeds, "peum"), context.domain)
    constant = [one.map(is_constant, "grad-cam") for one in seeds]
    of_protocols = Both([one.clean for one in constant], [one.as_published for one in constant])
    yield compare("", of_protocols.map(mean_over), label=CONSTANT)
    at = f"Eq at {', '.join(f'{angle:g}°' for angle in OFF_GRID)}, which no view has"
    for name, label, signal, statistic in QUANTITIES:
        if name not in ("lift10", "cap20"):
            off = _pairs(seeds, signal, OFF_GRID)
            yield from _rows("", OFF_GRID_LABEL.format(label), off, statistic, reason=at)


def trainings(context: Context) -> list[Context]:
    """The network with the weights of every seed; without further ones, as it is."""
    plain = WEIGHTS["no aug"]
    seeds = [
        context.with_weights(context.extra[f"{plain}{seed}"])
        for seed in TRAININGS
        if f"{plain}{seed}" in context.extra
    ]
    if not seeds:
        return [context]
    # its own evaluation is there already
    return [context if one.weights_digest == context.weights_digest else one for one in seeds]


def _rows(
    claim: str, label: str, pairs: Both[list[Pair]], statistic: statistics.Statistic, reason: str = ""
) -> Iterator[Row]:
    """The mean over seeds with an interval over images or groups of them, and every seed where there are several."""
    each = [
        Both(ours, theirs).map(lambda pair: over_seeds([pair], statistic))
        for ours, theirs in zip(pairs.clean, pairs.as_published, strict=True)
    ]
    notes = [reason, describe_seeds([one.clean for one in each]) if len(each) > 1 else ""]
    yield compare(claim, pairs.map(over_seeds, statistic), label=label, reason="; ".join(filter(None, notes)))
    if len(each) > 1:
        yield from (compare("", found, label=f"{label}, seed {i}") for i, found in enumerate(each))


def over_seeds(pairs: Sequence[Pair], statistic: statistics.Statistic) -> Estimate:
    """The mean over seeds of a statistic, all of them on the same resampled images."""
    first = pairs[0]
    if len(pairs) == 1 and statistic is statistics.pearson_r:
        return correlation(statistics.pearson(first.signal, first.drift, group=first.group))
    columns = [column for pair in pairs for column in (pair.signal, pair.drift)]
    found = statistics.bootstrap(statistics.MeanOverPairs(statistic), *columns, group=first.group)
    if statistic not in SHARES or found.low != found.high:
        return found
    # no resample finds any, or each finds all: certain only as far as there are images, or groups of them
    worst = max(1, round(WORST * len(first.drift)))
    scale = len(first.drift) / worst if statistic is LIFT else 1.0
    n = worst if first.group is None else min(worst, len(set(first.group)))
    wilson = statistics.proportion(round(found.value / scale * n), n)
    return replace(found, low=scale * wilson.low, high=scale * wilson.high)


def _chance_and_p(pairs: Both[list[Pair]], domain: str) -> Iterator[Row]:
    """What a signal without information finds, and the p of r, of the seeds the largest."""
    first = pairs.map(lambda of: of[0])
    chance = first.map(lambda pair: number(IN_TENTH(0 * pair.drift, pair.drift), len(pair.drift)))
    yield with_verdict(
        "peum.random", chance, "by definition", label="a signal without information", reason="chance"
    )
    log10_p = pairs.map(
        lambda of: max(statistics.pearson(one.signal, one.drift, group=one.group).log10_p for one in of)
    )
    of_both = f"the claim is about both domains, this is {domain} alone"
    yield with_verdict(
        "peum.p", log10_p.map(number, len(first.clean.drift)), "undecided", label="log10 p of r", reason=of_both
    )  # fmt: skip


def _pairs(
    seeds: Sequence[Both[Evaluation]], signal: str, angles: Collection[int | float] | None = None
) -> Both[list[Pair]]:
    """Of every seed; all have the images of the first, in its order."""
    images = summary.pick(seeds[0].clean.table, "eq", "grad-cam", seeds[0].clean.region)
    return Both(
        [_pair(one.clean, signal, images, angles) for one in seeds],
        [_pair(one.as_published, signal, images, angles) for one in seeds],
    )


def _pair(
    found: Evaluation, signal: str, images: MetricColumn, angles: Collection[int | float] | None
) -> Pair:
    """A signal and drift, over all angles or over these."""
    eq = summary.pick(found.table, "eq", "grad-cam", found.region).by_id(images.ids)
    if angles is not None:
        every = summary.pick(found.table, "eq", "grad-cam", found.region, each_angle=True)
        at = [every.angles == angle for angle in angles]
        by_angle = [replace(every, ids=every.ids[w], value=every.value[w]).by_id(images.ids) for w in at]
        eq = np.mean(by_angle, axis=0)
    region = {"peum": "full", "stability": "disc"}.get(signal, found.region)
    value = summary.pick(found.table, signal, "equigrad-cam", region).by_id(images.ids)
    return Pair(1 - value if signal == "stability" else value, 1 - eq, images.group)


def _missing(_context: Context, claim: Claim) -> Remark:
    return fine_tuning(claim.domain if claim.domain in DOMAINS else DOMAINS[0], "triage")


EXPERIMENT = Experiment(
    "PEUM as a triage rule",
    ("peum.",),
    measure,
    needs="images; the published numbers are of a --domain's",
    missing=_missing,
)
