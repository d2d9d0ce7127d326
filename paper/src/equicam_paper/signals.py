"""Which signal finds unstable maps? The PEUM audit, and how many of the least stable maps a review budget finds."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from equicam.core.transforms import as_transform
from equicam.core.views import Views
from equicam.evaluate import statistics, summary
from equicam.evaluate.equivariance import ANGLES
from equicam.evaluate.rows import MetricColumn
from equicam.evaluate.statistics import Estimate, Floats, Ids
from equicam.evaluate.summary import SignalSummary
from equicam_paper.claims import DOMAINS, Claim
from equicam_paper.context import Context, Evaluation
from equicam_paper.measure import is_constant, mean_over, seed_rows
from equicam_paper.plots import DRIFT, Scatter
from equicam_paper.rows import (
    Both,
    Contradiction,
    Remark,
    Row,
    compare,
    correlation,
    number,
    scaled,
    with_verdict,
)
from equicam_paper.trainings import TRAININGS, WEIGHTS, fine_tuning

METRICS = ("eq", "peum", "disagreement", "stability")
UNSTABLE = "1 − stability"
PEUM = "peum (full)"
SIGNALS = {
    "PEUM": PEUM,
    "pairwise CAM disagreement": "disagreement",
    "flip rate": "flip-rate",
    "confidence drop": "confidence-drop",
}
MISCLASSIFIED = {"PEUM": PEUM, "flip": "flip-rate", "confdrop": "confidence-drop"}
CAPTURE = {"PEUM": PEUM, "disagreement": "disagreement", UNSTABLE: UNSTABLE}
GRID = {one.key for one in Views.evenly(18).transforms}
OFF_GRID = tuple(angle for angle in ANGLES if as_transform(angle).key not in GRID)
"""The evaluation angles that none of 18 views has."""
AT_OFF_GRID = f"Eq at {', '.join(f'{angle:g}°' for angle in OFF_GRID)}, which no view has"
OFF_GRID_LABEL = "{}, off the grid"
SIX_VIEWS = "theirs compares six of the 18 views; over all pairs disagreement is the better signal"


def peum_audit(context: Context) -> Iterator[Row]:
    """Pearson with 1 − Eq(grad-cam), lift at a held-out threshold, AUROC for wrong predictions."""
    tables = context.evaluate_both(["grad-cam", "equigrad-cam"], METRICS)
    found = tables.map(_signals)
    for name, signal in SIGNALS.items():
        yield compare(f"audit.r.{name}", found.map(_r, signal), label=f"r of {signal}")
    yield compare("", found.map(_r, UNSTABLE), label=f"r of {UNSTABLE}", published="not in the text")
    ahead = found.map(lambda of: of["disagreement"].behind_peum)
    behind = None if ahead.clean is None else Contradiction(ahead.clean, SIX_VIEWS)
    reason = behind.remark if behind and behind.holds else ""
    yield compare("audit.diff", ahead, label="PEUM ahead of disagreement", artefact=behind, reason=reason)
    lift = found.map(lambda of: of[PEUM].held_out)
    in_sample = lift.map(lambda h: number(h.in_sample, h.lift.n))
    yield compare("audit.lift.heldout", lift.map(lambda h: h.lift), label="mean ratio, held out")
    yield compare("audit.lift.insample", in_sample, label="mean ratio, in sample")
    for name, signal in MISCLASSIFIED.items():
        auroc = found.map(lambda of, signal: of[signal].wrong, signal)
        yield compare(f"audit.auroc.{name}", auroc, label=f"{signal}: AUROC for wrong predictions")
    for name, signal in CAPTURE.items():
        label = f"{name}: capture of the worst tenth, × chance"
        yield compare("", found.map(_capture, signal), label=label, published="not in the text")
    # at angles that no view has too: signals that compare views share the form of the target
    found = tables.map(_signals, OFF_GRID)
    for signal in (*SIGNALS.values(), UNSTABLE):
        yield compare("", found.map(_r, signal), label=f"r of {signal}, off the grid", reason=AT_OFF_GRID)
        if signal in CAPTURE.values():
            label = f"{signal}: capture of the worst tenth, × chance, off the grid"
            yield compare("", found.map(_capture, signal), label=label)
    ahead = found.map(lambda of: of["disagreement"].behind_peum)
    yield compare("", ahead, label="PEUM ahead of disagreement, off the grid")


def _signals(found: Evaluation, angles: Collection[int | float] | None = None) -> dict[str, SignalSummary]:
    return {s.name: s for s in summary.signals(found.table, region=found.region, angles=angles)}


def _r(of: dict[str, SignalSummary], signal: str) -> Estimate:
    return correlation(of[signal].pearson)


def _capture(of: dict[str, SignalSummary], signal: str) -> Estimate:
    return of[signal].capture


def scatter_signals(context: Context) -> list[Scatter]:
    """PEUM and 1 − stability against 1 − Eq of Grad-CAM, image by image, in the disc."""
    table = context.evaluate(["grad-cam", "equigrad-cam"], METRICS).table
    eq = summary.pick(table, "eq", "grad-cam", "disc")
    peum = summary.pick(table, "peum", "equigrad-cam", "full").by_id(eq.ids)
    moved = 1 - summary.pick(table, "stability", "equigrad-cam", "disc").by_id(eq.ids)
    return [
        Scatter(title, label, DRIFT, x, 1 - eq.value, statistics.pearson(x, 1 - eq.value, group=eq.group))
        for title, label, x in (
            ("PEUM", "PEUM, variance of the aligned maps", peum),
            ("stability", "1 − stability, over 18 views", moved),
        )
    ]


WORST = 0.10  # the share of images, with the lowest Eq of Grad-CAM, that a reviewer should find
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
CONSTANT = "constant maps, which count Eq 0"


@dataclass(frozen=True)
class Pair:
    """A signal and 1 − Eq of Grad-CAM, one value of each per image."""

    signal: Floats
    drift: Floats
    group: Ids | None  # of the images


def triage(context: Context) -> Iterator[Row]:
    """Signals against 1 − Eq of Grad-CAM, over all seeds: at all angles, and at those that no view has."""
    seeds = [one.evaluate_both(["grad-cam", "equigrad-cam"], METRICS) for one in all_seeds(context)]
    start = f"peum.{context.claimed_domain}"
    for name, label, signal, statistic in QUANTITIES:
        yield from _rows(f"{start}.{name}" if name else "", label, _pairs(seeds, signal), statistic)
    if context.claimed_domain in DOMAINS:
        yield from _chance_and_p(_pairs(seeds, "peum"), context.domain)
    constant = [one.map(is_constant, "grad-cam") for one in seeds]
    yield compare("", Both.together(constant).map(mean_over), label=CONSTANT)
    for name, label, signal, statistic in QUANTITIES:
        if name not in ("lift10", "cap20"):
            off = _pairs(seeds, signal, OFF_GRID)
            yield from _rows("", OFF_GRID_LABEL.format(label), off, statistic, reason=AT_OFF_GRID)


def all_seeds(context: Context) -> list[Context]:
    """The network with the weights of every seed; without further ones, as it is."""
    names = [f"{WEIGHTS['no aug']}{seed}" for seed in TRAININGS]
    seeds = [context.with_weights(context.extra[name]) for name in names if name in context.extra]
    # its own evaluation is there already
    return [context if one.weights_digest == context.weights_digest else one for one in seeds] or [context]


def _rows(
    claim: str, label: str, seeds: Sequence[Both[Pair]], statistic: statistics.Statistic, reason: str = ""
) -> Iterator[Row]:
    """The mean over seeds with an interval over images or groups of them, and every seed where there are several."""
    each = [pair.map(lambda one: over_seeds([one], statistic)) for pair in seeds]
    yield from seed_rows(claim, label, Both.together(seeds).map(over_seeds, statistic), each, reason)


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
    wilson = scaled(statistics.proportion(round(found.value / scale * n), n), scale)
    return replace(found, low=wilson.low, high=wilson.high)


def _chance_and_p(seeds: Sequence[Both[Pair]], domain: str) -> Iterator[Row]:
    """What a signal without information finds, and the p of r, of the seeds the largest."""
    chance = seeds[0].map(lambda pair: number(IN_TENTH(0 * pair.drift, pair.drift), len(pair.drift)))
    label = "a signal without information"
    yield with_verdict("peum.random", chance, "by definition", label=label, reason="chance")
    r = (pair.map(lambda one: statistics.pearson(one.signal, one.drift, group=one.group)) for pair in seeds)
    each = [one.map(lambda found: found.log10_p) for one in r]
    found = Both.together(each).map(max).map(number, len(seeds[0].clean.drift))
    of_both = f"the claim is about both domains, this is {domain} alone"
    yield with_verdict("peum.p", found, "undecided", label="log10 p of r", reason=of_both)


def _pairs(
    seeds: Sequence[Both[Evaluation]], signal: str, angles: Collection[int | float] | None = None
) -> list[Both[Pair]]:
    """Of every seed; all have the images of the first, in its order."""
    images = seeds[0].clean.column("eq", "grad-cam")
    return [one.map(_pair, signal, images, angles) for one in seeds]


def _pair(
    found: Evaluation, signal: str, images: MetricColumn, angles: Collection[int | float] | None
) -> Pair:
    """A signal and drift, over all angles or over these."""
    eq = found.column("eq", "grad-cam").by_id(images.ids)
    if angles is not None:
        every = found.column("eq", "grad-cam", each_angle=True)
        at = [every.angles == angle for angle in angles]
        by_angle = [replace(every, ids=every.ids[w], value=every.value[w]).by_id(images.ids) for w in at]
        eq = np.mean(by_angle, axis=0)
    region = {"peum": "full", "stability": "disc"}.get(signal, found.region)
    value = summary.pick(found.table, signal, "equigrad-cam", region).by_id(images.ids)
    return Pair(1 - value if signal == "stability" else value, 1 - eq, images.group)


def _missing(_context: Context, claim: Claim) -> Remark:
    return fine_tuning(claim.domain if claim.domain in DOMAINS else DOMAINS[0], "triage")


MORE = {
    "peum-audit": {"scatters": scatter_signals},
    "triage": {"scatters": scatter_signals, "missing": _missing},
}
