"""How well signals find unstable maps, measured on the calibration subset, and which signal to rank by.

Both signals are measured on the same images. One is recommended only if the interval of the difference of their AUROCs,
bootstrapped on the same images, excludes 0, the signal finds unstable maps better than chance, and it finds no fewer of
the worst tenth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equicam.evaluation import statistics
from equicam.evaluation.statistics import NAN, Correlation, Estimate, Floats, HeldOut, Indices
from equicam.reasons import SIGNALS

MIN_IMAGES, MIN_UNSTABLE = 100, 10  # with fewer, no signal is judged
TENTH = 0.10
UNKNOWN = Estimate(NAN, NAN, NAN, 0)


@dataclass(frozen=True)
class SignalScores:
    """How well one signal finds unstable maps."""

    spearman: Correlation  # with 1 − Eq; where the signal is undefined it ranks highest
    auroc: Estimate  # for unstable
    captured: Estimate  # share of the tenth with the lowest Eq that is in the signal's first tenth


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
    signals: dict[str, SignalScores]  # every signal
    difference: Estimate  # AUROC of disagreement − AUROC of PEUM, on the same bootstrap draws
    better: str | None  # the signal to rank by; None: undecided
    advice: str


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
    ordered = {name: _finite(score[known]) for name, score in scores.items()}
    signals = {name: _signal_scores(signal, drift, bad) for name, signal in ordered.items()}
    difference = statistics.paired_difference(statistics.auroc, bad, ordered["disagreement"], ordered["peum"])
    # how many more of the unstable maps the queue holds than a random draw of its size
    captured = statistics.proportion(int((bad & ~outside).sum()), int(bad.sum()))
    fraction = len(queue) / len(eq)
    low, mid, high = (
        v / fraction if fraction else NAN for v in (captured.low, captured.value, captured.high)
    )
    lift, mine = Estimate(mid, low, high, bad.size), signals[by]
    overall = statistics.proportion(int(bad.sum()), bad.size)
    missed = statistics.proportion(int((bad & outside).sum()), int(outside.sum()))
    nothing = HeldOut(NAN, UNKNOWN, NAN, NAN)
    enough = bool(bad.size >= MIN_IMAGES and min(bad.sum(), (~bad).sum()) >= MIN_UNSTABLE)
    judgement = "finds them better than chance" if mine.auroc.low > 0.5 else "is not shown to find them"
    sentence = (
        f"measured on {bad.size} images: {_text(overall, share=True)} are unstable (Eq < {unstable:g}), outside the queue "
        f"{_text(missed, share=True)}; {SIGNALS[by]} and 1 − Eq have a Spearman correlation of {_text(mine.spearman)}, an AUROC of "
        f"{_text(mine.auroc)} and {_text(lift)} times the capture of chance at this budget; "
        f"{f'{SIGNALS[by]} {judgement}' if enough else 'too few to say'}"
    )
    undefined = [SIGNALS[name] for name, score in scores.items() if not np.isfinite(score[known]).any()]
    better = _better(signals, difference) if enough and not undefined else None
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
        difference=difference,
        better=better,
        advice=_advice(signals, difference, better, by=by, enough=enough, undefined=undefined),
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
        statistics.spearman(signal, drift), statistics.bootstrap(statistics.auroc, signal, bad), captured
    )


def _better(signals: Mapping[str, SignalScores], difference: Estimate) -> str | None:
    if not (difference.low > 0 or difference.high < 0):
        return None
    first, second = ("disagreement", "peum") if difference.low > 0 else ("peum", "disagreement")
    mine, other = signals[first], signals[second]
    return first if mine.auroc.low > 0.5 and mine.captured.value >= other.captured.value else None


def _advice(
    signals: Mapping[str, SignalScores],
    difference: Estimate,
    better: str | None,
    *,
    by: str,
    enough: bool,
    undefined: list[str],
) -> str:
    if undefined:
        verb = "are" if len(undefined) > 1 else "is"
        return f"not compared: {' and '.join(undefined)} {verb} undefined on every calibration image"
    mine, other = signals["disagreement"], signals["peum"]
    if better:
        end = f"--by {better} finds them better" + (", and ranks here" if better == by else "")
    elif not enough:
        end = "too few to recommend one"
    elif max(mine.auroc.low, other.auroc.low) <= 0.5:
        end = "neither is shown to find them"
    else:
        end = "neither is shown to be better"
    return (
        f"disagreement finds {_text(mine.captured, share=True)} of the worst tenth in its first tenth, PEUM "
        f"{_text(other.captured, share=True)}, chance 10 %; for unstable maps an AUROC of {_text(mine.auroc)} against "
        f"{_text(other.auroc)}, a difference of {_text(difference)}: {end}"
    )


def _text(e: Estimate | Correlation, *, share: bool = False) -> str:
    value = e.r if isinstance(e, Correlation) else e.value
    if np.isnan(value) or np.isnan(e.low):
        return "undefined"
    if share:
        return f"{100 * value:.0f} % [{100 * e.low:.0f}, {100 * e.high:.0f}]"
    return f"{value:.2f} [{e.low:.2f}, {e.high:.2f}]"
