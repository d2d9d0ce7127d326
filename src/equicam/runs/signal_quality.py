"""How well signals find unstable maps, measured on the calibration subset, and which signal to rank by.

The calibration subset has Eq, the rotation test at seven angles of its own. Every signal is measured on the same images.
Another than the ranking signal is recommended only if the interval of the difference of their AUROCs, bootstrapped on
the same images, lies above 0, it finds unstable maps better than chance, and it finds no fewer of the worst tenth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equicam.evaluate import statistics
from equicam.evaluate.statistics import NAN, Correlation, Estimate, Floats, HeldOut, Indices
from equicam.reasons import SIGNALS

MIN_IMAGES, MIN_UNSTABLE = 100, 10  # with fewer, no signal is judged
TENTH = 0.10
RESAMPLES = 1000  # of each interval
UNKNOWN = Estimate(NAN, NAN, NAN, 0)


@dataclass(frozen=True)
class SignalScores:
    """How well one signal finds unstable maps: the order of review that it gives, of stability that of 1 − stability."""

    spearman: Correlation  # with 1 − Eq; where the signal is undefined it ranks highest
    auroc: Estimate  # for unstable
    captured: Estimate  # share of the tenth with the lowest Eq that is in the signal's first tenth


@dataclass(frozen=True)
class StabilityCheck:
    """How far stability, measured on the run's views, is from Eq, measured at other angles."""

    pearson: Correlation
    mean_difference: float  # mean of |stability − Eq|
    bias: float  # mean of stability − Eq
    sentence: str


@dataclass(frozen=True)
class SignalQuality:
    """How well the ranking signal finds unstable maps on the calibration subset, and whether another is better."""

    n: int
    spearman: Correlation  # with 1 − Eq; where the signal is undefined it ranks highest
    pearson: Correlation  # with 1 − Eq, where the signal is defined
    lift: Estimate  # capture of the unstable at the budget's share, ÷ chance
    auroc: Estimate  # for unstable
    held_out: HeldOut  # mean 1 − Eq above a threshold set on the other half, ÷ the mean of all
    unstable: Estimate  # share of all
    outside: Estimate  # share of the images outside the queue
    sentence: str
    signals: dict[str, SignalScores]  # every signal that is defined somewhere
    comparison: str  # the same as a sentence
    differences: dict[str, Estimate]  # AUROC of every other signal − that of the ranking signal, paired
    better: str | None  # another signal that finds unstable maps better; None: none is shown to
    advice: str | None
    check: StabilityCheck | None  # None: the rows have no stability


def signal_quality(
    scores: Mapping[str, Floats], eq: Floats, queue: Indices, *, by: str, share: float, unstable: int | float
) -> SignalQuality | None:
    """Measure every signal where Eq is known; None if it is known nowhere."""
    known = ~np.isnan(eq)
    if not known.any():
        return None
    outside = np.ones(len(eq), dtype=bool)
    outside[queue] = False
    bad, outside, values = eq[known] < unstable, outside[known], scores[by][known]
    drift, defined = 1 - eq[known], np.isfinite(values)
    ordered = {
        name: _finite(score[known])
        for name, score in scores.items()
        if name == by or np.isfinite(score[known]).any()
    }
    signals = {name: _signal_scores(signal, drift, bad) for name, signal in ordered.items()}
    differences = _differences(ordered, bad, by)
    # how many more of the unstable maps the queue holds than a random draw of its size
    captured = statistics.proportion(int((bad & ~outside).sum()), int(bad.sum()))
    fraction = float((~outside).mean())  # of the calibration images, not of all
    low, mid, high = (
        v / fraction if fraction else NAN for v in (captured.low, captured.value, captured.high)
    )
    lift, mine = Estimate(mid, low, high, bad.size), signals[by]
    overall = statistics.proportion(int(bad.sum()), bad.size)
    missed = statistics.proportion(int((bad & outside).sum()), int(outside.sum()))
    nothing = HeldOut(NAN, UNKNOWN, NAN, NAN)
    enough = bool(bad.size >= MIN_IMAGES and min(bad.sum(), (~bad).sum()) >= MIN_UNSTABLE)
    low_eq = f"maps with an Eq below {unstable:g}"
    finds = "finds" if mine.auroc.low > 0.5 else "is not shown to find"
    judgement = f"{SIGNALS[by]} {finds} maps with an Eq (equivariance) below {unstable:g} better than chance"
    sentence = (
        f"{judgement if enough else 'too few images to say how good the queue is'}. Measured on {bad.size} images at seven "
        f"other angles: {_text(overall, share=True)} have an Eq{'' if enough else ' (equivariance)'} below {unstable:g}, outside the queue "
        f"{_text(missed, share=True)}. The first tenth by {SIGNALS[by]} holds {_text(mine.captured, share=True)} of the worst "
        f"tenth, where chance holds 10 %. A map with an Eq below {unstable:g} stands before another in "
        f"{_text(mine.auroc, share=True)} of pairs (AUROC), where chance has 50 %. The queue holds {_text(lift)} times as many "
        "of them as a random draw"
    )
    better = _better(signals, differences, by) if enough else None
    return SignalQuality(
        n=bad.size,
        spearman=mine.spearman,
        pearson=statistics.pearson(np.where(defined, values, NAN), drift),
        lift=lift,
        auroc=mine.auroc,
        held_out=statistics.held_out_lift(ordered[by], drift, quantile=1 - share) if share < 1 else nothing,
        unstable=overall,
        outside=missed,
        sentence=sentence,
        signals=signals,
        comparison=_comparison(signals, low_eq),
        differences=differences,
        better=better,
        advice=None if better is None else _advice(signals, differences, better, by, low_eq),
        check=_check(1 - scores["stability"][known], eq[known]),
    )


def _finite(values: Floats) -> Floats:
    """Replace ∞ by a number above every other: only the order matters."""
    defined = np.isfinite(values)
    return np.where(defined, values, 2 * values.max(initial=0, where=defined) + 1)


def _signal_scores(signal: Floats, drift: Floats, bad: np.ndarray) -> SignalScores:
    # Wilson, because a bootstrap of no captures is [0, 0]; ties give fractions of an image, which are rounded
    worst = max(1, round(TENTH * drift.size))
    captured = statistics.proportion(round(worst * statistics.capture(signal, drift, budget=TENTH)), worst)
    return SignalScores(
        statistics.spearman(signal, drift, resamples=RESAMPLES),
        statistics.bootstrap(statistics.auroc, signal, bad, resamples=RESAMPLES),
        captured,
    )


def _differences(ordered: Mapping[str, Floats], bad: np.ndarray, by: str) -> dict[str, Estimate]:
    others = [name for name in ordered if name != by]
    # several signals are compared with one, so each interval is wider (Bonferroni)
    level = 1 - 0.05 / max(1, len(others))
    return {
        name: statistics.bootstrap(
            statistics.Gap(statistics.auroc),
            bad,
            ordered[name],
            ordered[by],
            level=level,
            resamples=RESAMPLES,
        )
        for name in others
    }


def _better(signals: Mapping[str, SignalScores], differences: Mapping[str, Estimate], by: str) -> str | None:
    mine = signals[by]
    ahead = [
        name
        for name, difference in differences.items()
        if difference.low > 0
        and signals[name].auroc.low > 0.5
        and signals[name].captured.value >= mine.captured.value
    ]
    return max(ahead, key=lambda name: signals[name].auroc.value, default=None)


def _comparison(signals: Mapping[str, SignalScores], low_eq: str) -> str:
    each = [
        f"{SIGNALS[name]} {_text(one.captured, share=True)} and {_text(one.auroc)}"
        for name, one in signals.items()
    ]
    return f"share of the worst tenth found in a tenth, and AUROC for {low_eq}: {'; '.join(each)}; chance 10 % and 0.50"


def _advice(
    signals: Mapping[str, SignalScores],
    differences: Mapping[str, Estimate],
    better: str,
    by: str,
    low_eq: str,
) -> str:
    return (
        f"--by {better} finds {low_eq} better here: an AUROC of {_text(signals[better].auroc)} against "
        f"{_text(signals[by].auroc)} of {SIGNALS[by]}, a difference of {_text(differences[better])}"
    )


def _check(stability: Floats, eq: Floats) -> StabilityCheck | None:
    defined = np.isfinite(stability)
    if not defined.any():
        return None
    stability, eq = stability[defined], eq[defined]
    r, apart = statistics.pearson(stability, eq), float(np.abs(stability - eq).mean())
    bias = float((stability - eq).mean())
    sentence = (
        f"stability, from the run's views, and Eq (equivariance), measured at seven other angles, have a correlation of {_text(r)} and "
        f"differ by {apart:.2f} on average (stability − Eq: {bias:+.2f}"
        + (", so that more maps are below a cut-off by stability than by Eq)" if bias < 0 else ")")
    )
    return StabilityCheck(r, apart, bias, sentence)


def _text(e: Estimate | Correlation, *, share: bool = False) -> str:
    value = e.r if isinstance(e, Correlation) else e.value
    if np.isnan(value) or np.isnan(e.low):
        return "undefined"
    if share:
        return f"{100 * value:.0f} % [{100 * e.low:.0f}, {100 * e.high:.0f}]"
    return f"{value:.2f} [{e.low:.2f}, {e.high:.2f}]"
