"""Which maps to review first: a queue ranked by a signal, a blind random control arm, and how good the queue is.

Rank 1 is the least trustworthy image. One of which the signal says nothing ranks before all others; ties are broken by a
permutation seeded by `seed`, not by name. How well signals find unstable maps is measured on the calibration subset, by Eq;
docs/audit.md says when another signal is recommended.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.core.transforms import Transform
from equicam.errors import EquicamError
from equicam.evaluate import statistics
from equicam.evaluate.statistics import NAN, Correlation, Estimate, Floats, HeldOut, Indices
from equicam.reasons import SIGNALS
from equicam.runs.signals import (
    COLUMNS,
    ROWS,
    ViewNames,
    queue_arm,
    ranking_scores,
    refuse_unknown,
    signal_values,
    triage_reasons,
    view_column,
)
from equicam.runs.verdicts import ReviewKey
from equicam.shards import finite_table, json_ready, map_concurrently

READ_AT_A_TIME = 4096  # images
ReadRows = Callable[[Sequence[str], Sequence[str]], pa.Table]
"""The rows of these images, in any order; these columns."""
Targets = NDArray[Any]
NameOutput = Callable[[int | None], str]
Scores = Mapping[str, Floats]
"""Of every image, by signal; the highest is reviewed first."""
Reasons = dict[int, list[dict[str, str]]]
"""Of images by index, as cells of a table."""


MIN_IMAGES, MIN_UNSTABLE = 100, 10  # with fewer, no signal is judged
TENTH = 0.10
RESAMPLES = 1000  # of each interval
UNKNOWN = Estimate(NAN, NAN, NAN, 0)


@dataclass(frozen=True)
class _SignalScores:
    """How well one signal finds unstable maps: the order of review that it gives, of stability that of 1 − stability."""

    spearman: Correlation  # with 1 − Eq; where the signal is undefined it ranks highest
    auroc: Estimate  # for unstable
    captured: Estimate  # share of the tenth with the lowest Eq that is in the signal's first tenth


@dataclass(frozen=True)
class _StabilityCheck:
    """How far stability, measured on the run's views, is from Eq, measured at other angles."""

    pearson: Correlation
    mean_difference: float  # mean of |stability − Eq|
    bias: float  # mean of stability − Eq
    sentence: str


@dataclass(frozen=True)
class _SignalQuality:
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
    signals: dict[str, _SignalScores]  # every signal that is defined somewhere
    comparison: str  # the same as a sentence
    differences: dict[str, Estimate]  # AUROC of every other signal − that of the ranking signal, paired
    better: str | None  # another signal that finds unstable maps better; None: none is shown to
    advice: str | None
    check: _StabilityCheck | None  # None: the rows have no stability


@dataclass(frozen=True)
class _UnstableMaps:
    """How many maps are unstable: counted, because stability is measured on every image."""

    below: float  # a map is unstable when its stability is below this
    count: int
    in_queue: int
    undefined: int  # maps without a stability: blank, constant, or not measured
    sentence: str


@dataclass(frozen=True)
class Triage:
    """The images to review, in order of place, and how good the queue is."""

    rows: pa.Table
    by: str  # the signal they are ranked by
    unstable: _UnstableMaps
    quality: _SignalQuality | None  # None: no calibration subset
    budget: int
    ok: int
    bad: int
    quotas: dict[str, int]  # places of the queue by class; classes of one name together
    seed: int
    keyed: bool = False  # the control arm and the places need the run's key

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined or infinite."""
        names = ("by", "budget", "ok", "bad", "quotas", "seed", "keyed")
        plain = {name: getattr(self, name) for name in names}
        plain |= {"unstable": asdict(self.unstable), "quality": self.quality and asdict(self.quality)}
        return json_ready(plain) | {"rows": finite_table(self.rows).to_pylist()}  # type: ignore[no-any-return]

    def queue(self) -> list[dict[str, Any]]:
        """The rows of the queue arm, by rank."""
        return queue_arm(self.rows).to_pylist()  # type: ignore[no-any-return]


def triage(
    items: pa.Table,
    *,
    by: str = "stability",
    budget: str | int = "10%",
    control: int | float = 0.20,
    unstable: int | float = 0.5,
    quotas: bool = True,
    transforms: Sequence[Transform],
    classes: Sequence[str] | None = None,
    name_output: NameOutput | None = None,
    seed: int = 0,
    extended: Sequence[int] = (),
    key: ReviewKey | None = None,
    read_rows: ReadRows | None = None,
    top: int | None = None,
) -> Triage:
    """Rank images by a signal and deal `budget` reviews: a share `control` to a random arm, the rest to the queue.

    Each number of `extended` deals as many reviews more, after those before. With the run's `key`, nobody without it can
    compute which images the seed draws for the control arm. `read_rows` gives the columns with a value for each view,
    which `items` then need not have. With `top`, only the queue's first images have reasons; the others have null.
    `name_output` names what is explained, where it is no class.
    """
    status = np.flatnonzero(pc.equal(items["status"], "ok").to_numpy())
    place = status[pc.sort_indices(items["id"].take(pa.array(status))).to_numpy()]  # in the run, by id
    ok = items.take(pa.array(place))
    refuse_unknown(by, ok)
    if len(transforms) < 2:
        got = f"one view, which has no {SIGNALS[by]} to rank by"
        raise EquicamError("triage", "a run of several views", got, "equicam audit --views 6")
    if not 0 <= control < 1:
        raise EquicamError("control", "a share from 0 to below 1", control, "control=0.20")
    if not -1 < unstable <= 1:
        raise EquicamError("unstable", "a stability, above −1 and at most 1", unstable, "unstable=0.5")
    ids = ok["id"].to_pylist()
    entropy = hashlib.sha256(json.dumps([seed, *ids]).encode()).digest()
    rng = np.random.default_rng(int.from_bytes(entropy))
    scores = {name: ranking_scores(ok, name) for name in COLUMNS}
    score, target = scores[by], ok["target"].fill_null(-1).to_numpy()
    order = np.lexsort((rng.permutation(len(score)), -score))
    arms = _Arms(*(np.array([], dtype=np.intp) for _ in range(4)))
    for number, more in enumerate((_reviews(budget, len(score)), *extended)):
        free = len(score) - arms.chosen.size
        if number and more < 1:
            raise EquicamError("more", "a number of reviews from 1", more, "more=50")
        if number and not free:
            raise EquicamError(
                "more", "images that are in no arm yet", "none: every image is under review", "equicam report"
            )
        more = min(more, free)
        if key is not None:
            purpose = f"control arm, extension {number}" if number else "control arm"
            rng = np.random.default_rng(int(key.digest(purpose, str(seed), *ids), 16))
        controls = _controls(more, free, control)
        arms = _deal(arms, order, target if quotas else None, more - controls, controls, rng)
    rank = np.argsort(order) + 1
    explained = arms.chosen if top is None else arms.queue[np.argsort(rank[arms.queue])][: max(0, top)]
    read = read_rows or partial(_rows_of, items)
    views = [(view.label, view.is_identity) for view in transforms]
    reasons = _reasons(ok, explained[np.argsort(place[explained])], scores[by], by, views, read)
    reviews, queue = arms.chosen.size, np.concatenate([arms.queue, arms.passed])
    name = name_output or partial(_class_name, classes=classes)
    named = Counter(map(name, target[arms.queue].tolist() if quotas else ()))
    return Triage(
        rows=_rows(ok, rank, arms, scores, by, name, reasons),
        by=by,
        unstable=_unstable_maps(signal_values(ok, "stability"), queue, below=unstable),
        quality=_signal_quality(
            scores, ok["eq"].to_numpy(), queue, by=by, share=reviews / max(len(score), 1), unstable=unstable
        ),
        budget=reviews,
        ok=len(score),
        bad=items.num_rows - len(score),
        quotas=dict(named),
        seed=seed,
        keyed=key is not None,
    )


def _class_quotas(counts: dict[int, int], places: int) -> dict[int, int]:
    """Places of each class in the queue, in proportion to its images, rounded down; with many classes that may be 0."""
    total = max(sum(counts.values()), 1)
    return {target: places * count // total for target, count in sorted(counts.items())}


def _reviews(budget: str | int, ok: int) -> int:
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(%?)", str(budget).strip()):
        number = Fraction(match[1])
        if match[2] and 0 < number <= 100:
            return math.ceil(number * ok / 100)
        if not match[2] and number >= 1 and number.denominator == 1:
            return min(int(number), ok)
    raise EquicamError(
        "the budget", "a share from above 0% to 100%, or a number of images from 1", repr(budget), '"10%"'
    )


def _controls(reviews: int, ok: int, control: int | float) -> int:
    """Reviews for the control arm: none if every image is reviewed anyway, and never all."""
    if reviews == ok or control == 0:
        return 0
    return min(max(math.floor(control * reviews + 0.5), int(reviews >= 5)), reviews - 1)


@dataclass(frozen=True)
class _Arms:
    """Images dealt so far, as indices."""

    queue: Indices
    controls: Indices  # a random sample of the images outside the queue
    passed: Indices  # controls whose rank an extended queue has reached
    chosen: Indices  # all of them, by place


def _deal(
    arms: _Arms, order: Indices, target: Targets | None, places: int, controls: int, rng: np.random.Generator
) -> _Arms:
    """Lengthen the queue by the next `places` images and the random sample of the rest by `controls`.

    With targets, each class has a quota of the places. Images of the control arm among the next ones stay there, and as
    many more are drawn in their stead: the controls outside the queue are a simple random sample of the images outside it,
    however often the queue was extended.
    """
    left = order[~np.isin(order, np.concatenate([arms.queue, arms.passed]))]
    following = left[:0]
    if target is not None:
        following = _by_class(left, target, _class_quotas(Counter(target[left].tolist()), places))
    # places left over by rounding go by rank, whatever the class
    following = np.concatenate([following, left[~np.isin(left, following)][: places - len(following)]])
    is_control = np.isin(following, arms.controls)
    passed, queued = following[is_control], following[~is_control]
    rest = np.setdiff1d(left, np.concatenate([following, arms.controls]))
    added = rng.choice(rest, controls + passed.size, replace=False)
    return _Arms(
        queue=np.concatenate([arms.queue, queued]),
        controls=np.concatenate([np.setdiff1d(arms.controls, passed), added]),
        passed=np.concatenate([arms.passed, passed]),
        chosen=np.concatenate([arms.chosen, rng.permutation(np.concatenate([queued, added]))]),
    )


def _by_class(order: Indices, target: Targets, places: dict[int, int]) -> Indices:
    """The first images of every class, as many as it has places."""
    classes, which = np.unique(target[order], return_inverse=True)
    grouped = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[grouped], np.arange(len(classes)))
    number = np.empty(len(order), dtype=np.intp)  # of each image within its class
    number[grouped] = np.arange(len(order)) - starts[which[grouped]]
    most = np.array([places.get(name, 0) for name in classes.tolist()], dtype=np.intp)
    return order[number < most[which]]


def _class_name(target: int | None, classes: Sequence[str] | None) -> str:
    if target is None or classes is None or not 0 <= target < len(classes):
        return str(target)
    return classes[target]


def _rows(
    ok: pa.Table, rank: Indices, arms: _Arms, scores: Scores, by: str, name_of: NameOutput, reasons: Reasons
) -> pa.Table:
    chosen = arms.chosen
    rows = ok.take(pa.array(chosen))
    names = {target: name_of(target) for target in pc.unique(rows["target"]).to_pylist()}
    columns = {
        **{column: _defined(signal_values(ok, name)[chosen]) for name, column in COLUMNS.items()},
        "peum_above": _defined(_share_below(scores["peum"], signal_values(ok, "peum")[chosen])),
        "arm": np.where(np.isin(chosen, arms.queue), "queue", "control"),
        "rank": rank[chosen],
        "place": np.arange(1, len(chosen) + 1),
        "represents_rest": np.isin(chosen, arms.controls),
        "by": [by] * len(chosen),
        "class": [names[target] for target in rows["target"].to_pylist()],
        "flags": [flags or [] for flags in rows["flags"].to_pylist()],
        "reasons": [reasons.get(i) for i in chosen.tolist()],
    }
    made = {name: pa.array(values, ROWS.field(name).type) for name, values in columns.items()}
    for other in ROWS:
        if other.name not in made:
            copied = other.name in rows.column_names
            made[other.name] = rows[other.name] if copied else pa.nulls(len(rows), other.type)
    return pa.table(made, schema=ROWS)


def _reasons(
    ok: pa.Table, chosen: Indices, score: Floats, by: str, views: ViewNames, read_rows: ReadRows
) -> Reasons:
    """The reasons of these images, by index; they are in the run's order, so that each shard is read once."""
    columns = ["id", "view_top1", view_column(by)]
    lower = 100 * np.searchsorted(np.sort(score), score) // max(len(score), 1)
    signal, facts = signal_values(ok, by), ok.select(["id", "target", "confidence", "views_kept", "flags"])

    def read(some: Indices) -> list[dict[str, Any]]:
        rows = facts.take(pa.array(some)).to_pylist()
        of_views = {row["id"]: row for row in read_rows([row["id"] for row in rows], columns).to_pylist()}
        return [row | of_views[row["id"]] for row in rows]

    by_index: Reasons = {}
    batches = [chosen[start : start + READ_AT_A_TIME] for start in range(0, len(chosen), READ_AT_A_TIME)]
    for some, rows in zip(batches, map_concurrently(read, batches, threads=1), strict=True):
        for i, row in zip(some.tolist(), rows, strict=True):
            above = None if np.isinf(score[i]) else int(lower[i])
            reasons = triage_reasons(row, by, views, value=float(signal[i]), above_percent=above)
            by_index[i] = [reason.to_row() for reason in reasons]
    return by_index


def _rows_of(items: pa.Table, ids: Sequence[str], columns: Sequence[str]) -> pa.Table:
    return items.select(list(columns)).filter(pc.is_in(items["id"], pa.array(ids, pa.string())))


def _share_below(scores: Floats, values: Floats) -> Floats:
    """The share of the finite scores below each value; NaN without either."""
    known = np.sort(scores[np.isfinite(scores)])
    below = np.searchsorted(known, values) / len(known) if len(known) else np.nan
    return np.where(np.isfinite(values), below, np.nan)


def _defined(values: Floats) -> pa.Array:
    """Null where a value is NaN or infinite."""
    return pa.array(values, mask=~np.isfinite(values))


def _unstable_maps(stability: Floats, queue: Indices, *, below: int | float) -> _UnstableMaps:
    unstable, undefined = stability < below, int(np.isnan(stability).sum())
    count, held = int(unstable.sum()), int(unstable[queue].sum())
    none = (
        ""
        if not undefined
        else f"; {undefined:,} {'has' if undefined == 1 else 'have'} none (blank, constant or not measured)"
    )
    sentence = "no map has a stability: all are blank or constant, or it was not measured"
    if undefined < stability.size:
        counts = f"{count:,} of {stability.size:,} maps ({100 * count / stability.size:.1f} %)"
        sentence = f"{counts} have a stability below {below:g}, {held:,} of them in the queue{none}"
    return _UnstableMaps(float(below), count, held, undefined, sentence)


def _signal_quality(
    scores: Scores, eq: Floats, queue: Indices, *, by: str, share: float, unstable: int | float
) -> _SignalQuality | None:
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
    # several signals are compared with one, so each interval is wider (Bonferroni)
    level = 1 - 0.05 / max(1, len(ordered) - 1)
    gap = partial(
        statistics.bootstrap, statistics.Gap(statistics.auroc), bad, level=level, resamples=RESAMPLES
    )
    differences = {name: gap(signal, ordered[by]) for name, signal in ordered.items() if name != by}
    # how many more of the unstable maps the queue holds than a random draw of its size
    captured = statistics.proportion(int((bad & ~outside).sum()), int(bad.sum()))
    fraction = float((~outside).mean())  # of the calibration images, not of all
    value, low, high = (
        v / fraction if fraction else NAN for v in (captured.value, captured.low, captured.high)
    )
    lift, mine = Estimate(value, low, high, bad.size), signals[by]
    overall = statistics.proportion(int(bad.sum()), bad.size)
    missed = statistics.proportion(int((bad & outside).sum()), int(outside.sum()))
    held_out = HeldOut(NAN, UNKNOWN, NAN, NAN)
    if share < 1:
        held_out = statistics.held_out_lift(ordered[by], drift, quantile=1 - share)
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
    each = [
        f"{SIGNALS[name]} {_text(of.captured, share=True)} and {_text(of.auroc)}"
        for name, of in signals.items()
    ]
    better = _better(signals, differences, by) if enough else None
    advice = better and (
        f"--by {better} finds {low_eq} better here: an AUROC of {_text(signals[better].auroc)} against "
        f"{_text(mine.auroc)} of {SIGNALS[by]}, a difference of {_text(differences[better])}"
    )
    return _SignalQuality(
        n=bad.size,
        spearman=mine.spearman,
        pearson=statistics.pearson(np.where(defined, values, NAN), drift),
        lift=lift,
        auroc=mine.auroc,
        held_out=held_out,
        unstable=overall,
        outside=missed,
        sentence=sentence,
        signals=signals,
        comparison=f"share of the worst tenth found in a tenth, and AUROC for {low_eq}: {'; '.join(each)}; chance 10 % and 0.50",
        differences=differences,
        better=better,
        advice=advice,
        check=_check(1 - scores["stability"][known], eq[known]),
    )


def _finite(values: Floats) -> Floats:
    """Replace ∞ by a number above every other: only the order matters."""
    defined = np.isfinite(values)
    return np.where(defined, values, 2 * values.max(initial=0, where=defined) + 1)


def _signal_scores(signal: Floats, drift: Floats, bad: np.ndarray) -> _SignalScores:
    # Wilson, because a bootstrap of no captures is [0, 0]; ties give fractions of an image, which are rounded
    worst = max(1, round(TENTH * drift.size))
    captured = statistics.proportion(round(worst * statistics.capture(signal, drift, budget=TENTH)), worst)
    return _SignalScores(
        statistics.spearman(signal, drift, resamples=RESAMPLES),
        statistics.bootstrap(statistics.auroc, signal, bad, resamples=RESAMPLES),
        captured,
    )


def _better(signals: Mapping[str, _SignalScores], differences: Mapping[str, Estimate], by: str) -> str | None:
    mine = signals[by]
    ahead = [
        name
        for name, difference in differences.items()
        if difference.low > 0
        and signals[name].auroc.low > 0.5
        and signals[name].captured.value >= mine.captured.value
    ]
    return max(ahead, key=lambda name: signals[name].auroc.value, default=None)


def _check(stability: Floats, eq: Floats) -> _StabilityCheck | None:
    defined = np.isfinite(stability)
    if not defined.any():
        return None
    stability, eq = stability[defined], eq[defined]
    r, gaps = statistics.pearson(stability, eq), stability - eq
    apart, bias = float(np.abs(gaps).mean()), float(gaps.mean())
    sentence = (
        f"stability, from the run's views, and Eq (equivariance), measured at seven other angles, have a correlation of {_text(r)} and "
        f"differ by {apart:.2f} on average (stability − Eq: {bias:+.2f}"
        + (", so that more maps are below a cut-off by stability than by Eq)" if bias < 0 else ")")
    )
    return _StabilityCheck(r, apart, bias, sentence)


def _text(e: Estimate | Correlation, *, share: bool = False) -> str:
    value = e.r if isinstance(e, Correlation) else e.value
    if np.isnan(value) or np.isnan(e.low):
        return "undefined"
    if share:
        return f"{100 * value:.0f} % [{100 * e.low:.0f}, {100 * e.high:.0f}]"
    return f"{value:.2f} [{e.low:.2f}, {e.high:.2f}]"
