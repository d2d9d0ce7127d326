"""What a queue is worth on this data, and which signal would make a better one: measured on the calibrated pictures.

Both signals are measured on the same pictures, and one is recommended only where the interval of the difference of
their AUROCs, drawn on the same pictures, leaves 0 out, it finds unstable explanations better than chance, and it finds
no fewer of the worst tenth.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from equicam.auditing.signals import NAMES
from equicam.evaluation import statistics
from equicam.evaluation.statistics import NAN, Correlation, Estimate, Floats, HeldOut, Indices

FEW, FEW_UNSTABLE = 100, 10  # below either, a measurement says little
TENTH = 0.10
UNKNOWN = Estimate(NAN, NAN, NAN, 0)


@dataclass(frozen=True)
class Tells:
    """How well one signal finds unstable explanations."""

    spearman: Correlation  # with 1 − Eq, a signal that says nothing being the highest
    auroc: Estimate  # for unstable
    caught: Estimate  # share of the tenth with the lowest Eq that is in the signal's first tenth


@dataclass(frozen=True)
class Worth:
    """How well the signal that ranks finds unstable explanations, on the calibrated pictures, and whether another would better."""

    n: int
    spearman: Correlation  # with 1 − Eq, a signal that says nothing being the highest
    pearson: Correlation  # with 1 − Eq, where the signal says something
    lift: Estimate  # capture of the unstable at the budget's share, ÷ chance
    auroc: Estimate  # for unstable
    held_out: HeldOut  # mean 1 − Eq above a threshold set on the other half, ÷ the mean of all
    unstable: Estimate  # share of all
    outside: Estimate  # share of those outside the queue: what the queue misses
    sentence: str
    signals: dict[str, Tells]  # every signal there is
    ahead: Estimate  # AUROC of disagreement − AUROC of PEUM, on the same draws of pictures
    better: str | None  # the signal to rank by; None: these pictures do not say
    advice: str


def worth(
    scores: Mapping[str, Floats], eq: Floats, queue: Indices, *, by: str, share: float, unstable: int | float
) -> Worth | None:
    """Measured where Eq is known; None where it is nowhere."""
    known = ~np.isnan(eq)
    if not known.any():
        return None
    outside = np.ones(len(eq), dtype=bool)
    outside[queue] = False
    bad, outside, heard = eq[known] < unstable, outside[known], scores[by][known]
    drift, spoke = 1 - eq[known], np.isfinite(heard)
    ordered = {name: _finite(score[known]) for name, score in scores.items()}
    signals = {name: _tells(signal, drift, bad) for name, signal in ordered.items()}
    ahead = statistics.paired_difference(statistics.auroc, bad, ordered["disagreement"], ordered["peum"])
    # how much more of the unstable ones the queue holds than as many pictures at random would
    caught, part = statistics.proportion(int((bad & ~outside).sum()), int(bad.sum())), len(queue) / len(eq)
    low, mid, high = (v / part if part else NAN for v in (caught.low, caught.value, caught.high))
    lift, mine = Estimate(mid, low, high, bad.size), signals[by]
    overall = statistics.proportion(int(bad.sum()), bad.size)
    missed = statistics.proportion(int((bad & outside).sum()), int(outside.sum()))
    nothing = HeldOut(NAN, UNKNOWN, NAN, NAN)
    enough = bool(bad.size >= FEW and min(bad.sum(), (~bad).sum()) >= FEW_UNSTABLE)
    shown = "finds them better than chance" if mine.auroc.low > 0.5 else "is not shown to find them"
    told = (
        f"measured on {bad.size} pictures: {_said(overall, share=True)} are unstable (Eq < {unstable:g}), outside the queue "
        f"{_said(missed, share=True)}; {NAMES[by]} and 1 − Eq have a Spearman correlation of {_said(mine.spearman)}, an AUROC of "
        f"{_said(mine.auroc)} and {_said(lift)} times the catch of chance at this budget; "
        f"{f'{NAMES[by]} {shown}' if enough else 'too few to say'}"
    )
    mute = [NAMES[name] for name, score in scores.items() if not np.isfinite(score[known]).any()]
    better = _better(signals, ahead) if enough and not mute else None
    return Worth(
        n=bad.size,
        spearman=mine.spearman,
        pearson=statistics.pearson(np.where(spoke, heard, NAN), drift),
        lift=lift,
        auroc=mine.auroc,
        held_out=statistics.held_out_lift(ordered[by], drift, quantile=1 - share) if share < 1 else nothing,
        unstable=overall,
        outside=missed,
        sentence=told,
        signals=signals,
        ahead=ahead,
        better=better,
        advice=_advice(signals, ahead, better, by=by, enough=enough, mute=mute),
    )


def _finite(heard: Floats) -> Floats:
    """A finite number above every other where a signal says nothing: what is asked of it is only the order."""
    spoke = np.isfinite(heard)
    return np.where(spoke, heard, 2 * heard.max(initial=0, where=spoke) + 1)


def _tells(signal: Floats, drift: Floats, bad: np.ndarray) -> Tells:
    # Wilson, for a bootstrap of none found is [0, 0]; ties give fractions of a picture, which are rounded
    worst = max(1, round(TENTH * drift.size))
    caught = statistics.proportion(round(worst * statistics.capture(signal, drift, budget=TENTH)), worst)
    return Tells(
        statistics.spearman(signal, drift), statistics.bootstrap(statistics.auroc, signal, bad), caught
    )


def _better(signals: Mapping[str, Tells], ahead: Estimate) -> str | None:
    if not (ahead.low > 0 or ahead.high < 0):
        return None
    first, second = ("disagreement", "peum") if ahead.low > 0 else ("peum", "disagreement")
    mine, other = signals[first], signals[second]
    return first if mine.auroc.low > 0.5 and mine.caught.value >= other.caught.value else None


def _advice(
    signals: Mapping[str, Tells],
    ahead: Estimate,
    better: str | None,
    *,
    by: str,
    enough: bool,
    mute: list[str],
) -> str:
    if mute:
        say = "say" if len(mute) > 1 else "says"
        return f"not compared: {' and '.join(mute)} {say} nothing on any calibrated picture"
    mine, other = signals["disagreement"], signals["peum"]
    if better:
        end = f"--by {better} finds them better" + (", and is what ranks here" if better == by else "")
    elif not enough:
        end = "too few to recommend one"
    elif max(mine.auroc.low, other.auroc.low) <= 0.5:
        end = "neither is shown to find them"
    else:
        end = "that sets neither above the other"
    return (
        f"disagreement finds {_said(mine.caught, share=True)} of the worst tenth in its first tenth, PEUM "
        f"{_said(other.caught, share=True)}, chance 10 %; for unstable ones an AUROC of {_said(mine.auroc)} against "
        f"{_said(other.auroc)}, a difference of {_said(ahead)}: {end}"
    )


def _said(e: Estimate | Correlation, *, share: bool = False) -> str:
    value = e.r if isinstance(e, Correlation) else e.value
    if np.isnan(value) or np.isnan(e.low):
        return "undefined"
    if share:
        return f"{100 * value:.0f} % [{100 * e.low:.0f}, {100 * e.high:.0f}]"
    return f"{value:.2f} [{e.low:.2f}, {e.high:.2f}]"
