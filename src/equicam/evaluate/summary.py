"""Summaries of an evaluation's rows: each metric over the images, under conditions, and with its uncertainty."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.evaluate import statistics
from equicam.evaluate.rows import MetricColumn, ReasonCode, matching, resampled_groups
from equicam.evaluate.rows import pick as pick
from equicam.evaluate.rows import pick_prediction as pick_prediction
from equicam.evaluate.statistics import Column, Comparison, Correlation, Estimate, Floats, HeldOut

LOWER_IS_BETTER = {
    "deletion", "energy-drop", "peum", "disagreement", "flip-rate", "confidence-drop", "misclassified",
}  # fmt: skip
SHARES = {"misclassified", "pointing", "constant"}
"""What an image either is or is not."""
CONFIDENCE_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Where = NDArray[np.bool_] | slice
EVERYWHERE = slice(None)


@dataclass(frozen=True)
class SummaryRow:
    """One metric of one method in one region, over the images."""

    score: str
    method: str | None
    region: str | None
    value: Estimate
    floor: float  # NaN: none
    skill: Estimate | None
    constant: float  # the share of values that count 0 because a map was constant
    without_constant: float  # the mean without those
    reason: str  # the commonest reason, where nothing is defined


def summarise(table: pa.Table, *, resamples: int = 2000) -> list[SummaryRow]:
    """Every metric of every method over the images, with intervals by group, or by image where images have no groups."""
    names = ("score", "method", "region")
    some = table.filter(pc.is_valid(table["score"])).select(names)
    first = {n: {v: i for i, v in enumerate(pc.unique(some[n]).to_pylist())} for n in names}
    keys = some.group_by(names).aggregate([]).to_pylist()
    keys.sort(key=lambda key: [first[n][key[n]] for n in names])
    found = []
    for (score, method), group in itertools.groupby(keys, key=lambda key: (key["score"], key["method"])):
        rows = table.filter(matching(score=score, method=method))
        found += [_summary_row(rows, score, method, key["region"], resamples) for key in group]
    return found


def _summary_row(
    table: pa.Table, score: str, method: str | None, region: str | None, resamples: int
) -> SummaryRow:
    rows = pick(table, score, method, region)
    skill = None
    if np.isfinite(rows.floor).any() and score.startswith(("eq", "stage")):
        skill = _interval(statistics.skill, rows, rows.value, rows.floor, resamples=resamples)
    every = pick(table, score, method, region, each_angle=True, required=False)
    every = every if len(every) else rows
    constant = every.reason == ReasonCode.CONSTANT_MAP
    defined = np.isfinite(every.value)
    return SummaryRow(
        score, method, region, mean_of(rows, resamples=resamples), statistics.mean(rows.floor), skill,
        constant=statistics.mean(constant[defined].astype(np.float64)),
        without_constant=statistics.mean(every.value[~constant]),
        reason=Counter(r for r in rows.reason if r).most_common(1)[0][0] if any(rows.reason) else "",
    )  # fmt: skip


def _interval(
    statistic: statistics.Statistic,
    rows: MetricColumn,
    *columns: Column,
    where: Where = EVERYWHERE,
    resamples: int = 2000,
) -> Estimate:
    """A statistic of columns of some rows, with an interval by group, or by image where images have no groups."""
    return statistics.bootstrap(
        statistic, *(column[where] for column in columns), cluster=rows.ids[where],
        group=None if rows.group is None else rows.group[where], resamples=resamples,
    )  # fmt: skip


def mean_of(rows: MetricColumn, where: Where = EVERYWHERE, *, resamples: int = 2000) -> Estimate:
    """The mean of some rows, with an interval.

    Shares of images without groups have Wilson's: a bootstrap of 100 of 100 would have none.
    """
    known = rows.value[where][~np.isnan(rows.value[where])]
    if rows.group is None and rows.score in SHARES and np.isin(known, (0, 1)).all():
        return statistics.proportion(int(known.sum()), known.size)
    return _interval(statistics.mean, rows, rows.value, where=where, resamples=resamples)


def count_groups(table: pa.Table) -> int | None:
    """How many groups the readable images come from, an image without one being its own; None if none has a group."""
    some = table.filter(pc.is_valid(table["score"]))
    groups = resampled_groups(some["id"].to_pylist(), some["group"].to_pylist())
    return None if groups is None else len(set(groups))


def groups_remark(groups: int | None) -> Iterator[str]:
    """That intervals are by group, and whether there are enough groups."""
    if groups is not None:
        few = f"; with fewer than {statistics.MIN_GROUPS} groups they are unreliable (too narrow)"
        yield f"intervals are over {groups} groups of images{few if groups < statistics.MIN_GROUPS else ''}"


def by_angle(table: pa.Table, method: str, *, region: str = "disc") -> list[tuple[float, Estimate]]:
    """The mean Eq over images at every angle."""
    rows = pick(table, "eq", method, region, each_angle=True)
    return [(float(angle), mean_of(rows, rows.angles == angle)) for angle in np.unique(rows.angles)]


@dataclass(frozen=True)
class ConditionalEq:
    """Eq over all pairs of image and angle, over pairs with a consistent prediction, and weighted by confidence."""

    all: Estimate
    consistent: Estimate
    weighted: Estimate
    consistency_rate: Estimate


def conditional(table: pa.Table, method: str, *, region: str = "disc") -> ConditionalEq:
    """Does a map drift only where the prediction does? Pairs pooled, intervals by image."""
    eq = pick(table, "eq", method, region, each_angle=True)
    is_consistent, weight = (
        pick_prediction(table, name, method, each_angle=True).at_pairs_of(eq)
        for name in ("consistent", "confidence-kept")
    )
    return ConditionalEq(
        mean_of(eq),
        mean_of(eq, is_consistent == 1),
        _interval(statistics.weighted_mean, eq, eq.value, weight),
        _interval(statistics.mean, eq, is_consistent),
    )


def by_confidence(table: pa.Table, method: str, *, region: str = "disc") -> list[tuple[str, Estimate]]:
    """Eq by the probability of the class in the presented image: [e0, e1), …, the last closed."""
    eq = pick(table, "eq", method, region)
    confidence = pick_prediction(table, "presented-confidence", method).by_id(eq.ids)
    bins = np.digitize(confidence, CONFIDENCE_EDGES) - (confidence == 1)  # NaN lands behind the last
    return [
        (f"{low:g}–{high:g}", _interval(statistics.mean, eq, np.where(bins == i, eq.value, np.nan)))
        for i, (low, high) in enumerate(itertools.pairwise(CONFIDENCE_EDGES), 1)
    ]


def drift_and_confidence(
    table: pa.Table, method: str, *, region: str = "disc"
) -> tuple[Correlation, Correlation, Correlation]:
    """1 − Eq against p_c(x) − p_c(R_θ x), |log p_c(R_θ x) / p_c(x)|, and 1 − p_c(R_θ x), where the top-1 is kept."""
    eq = pick(table, "eq", method, region, each_angle=True)
    rotated, is_consistent = (
        pick_prediction(table, name, method, each_angle=True).at_pairs_of(eq)
        for name in ("confidence", "consistent")
    )
    presented = pick_prediction(table, "presented-confidence", method).by_id(eq.ids)
    tiny = np.finfo(np.float64).tiny
    log_ratio = np.abs(np.log(np.maximum(rotated, tiny) / np.maximum(presented, tiny)))
    some = is_consistent == 1
    group = None if eq.group is None else eq.group[some]
    lost, ratio, missing = (
        statistics.pearson(1 - eq.value[some], of[some], cluster=eq.ids[some], group=group)
        for of in (presented - rotated, log_ratio, 1 - rotated)
    )
    return lost, ratio, missing


def contrast(
    table: pa.Table, method: str, other: str, *, score: str = "eq", region: str | None = "disc"
) -> Comparison:
    """Paired by image: how much and how consistently one method is above another (below, where low is better)."""
    a, b = pick(table, score, method, region), pick(table, score, other, region)
    if list(a.ids) != list(b.ids):
        raise EquicamError("a paired comparison", "the same images", "others", "one evaluation of both")
    if score in LOWER_IS_BETTER:
        a, b = b, a
    return statistics.compare(a.value, b.value, group=a.group)


@dataclass(frozen=True)
class _OcclusionEffect:
    """Probability lost without a region, in both frames, and how much more is lost without the drift region."""

    region: str
    presented: Estimate
    rotated: Estimate
    drift_above: Comparison | None  # paired by image, in the presented frame; None for the drift region


def occlusion_effects(table: pa.Table, method: str, *, region: str = "disc") -> list[_OcclusionEffect]:
    """The causal test by region. A drop says little by itself, hence drift minus each control."""
    drift = pick(table, "causal-drift", method, region)
    names = {s for s in pc.unique(table["score"]).to_pylist() if s and s.startswith("causal-")}
    regions = sorted(name.removeprefix("causal-") for name in names if f"{name}-rotated" in names)
    regions.sort(key=lambda name: (name != "drift", name != "agreement"))
    found = []
    for name in regions:
        here, there = (pick(table, f"causal-{name}{frame}", method, region) for frame in ("", "-rotated"))
        above = None
        if name != "drift":
            above = statistics.compare(drift.value, here.by_id(drift.ids), group=drift.group)
        found.append(_OcclusionEffect(name, mean_of(here), mean_of(there), above))
    return found


@dataclass(frozen=True)
class SignalSummary:
    """How well a signal indicates unstable maps: against 1 − Eq, and for finding the worst with a review budget."""

    name: str
    pearson: Correlation
    spearman: Correlation
    auroc: Estimate  # of the worst tenth
    capture: Estimate  # share of the worst found, over chance
    held_out: HeldOut  # mean 1 − Eq of the reviewed over that of all
    wrong: Estimate  # AUROC for misclassified images
    behind_peum: Estimate | None  # PEUM's Pearson minus this one's


def signals(
    table: pa.Table, method: str = "equigrad-cam", *, of: str = "grad-cam", region: str = "disc",
    resamples: int = 1000, angles: Collection[int | float] | None = None,
) -> list[SignalSummary]:  # fmt: skip
    """PEUM and its baselines against 1 − Eq (equivariance) of a single-view map, over all angles or over these.

    Disagreement and stability are correlations of aligned maps, as Eq is, and share its form. At angles that the views have
    (`angles=None` may hold some), they compare the very maps that Eq compares.
    """
    eq = pick(table, "eq", of, region)
    badness = 1 - eq.value
    if angles is not None:
        badness = 1 - _mean_at(pick(table, "eq", of, region, each_angle=True), angles, eq.ids)
    cut = np.nanquantile(badness, 0.9) if np.isfinite(badness).any() else np.nan
    worst = np.where(np.isnan(badness), np.nan, badness >= cut)
    wrong = pick(table, "misclassified").by_id(eq.ids)
    options: dict[str, Any] = {"group": eq.group, "resamples": resamples}

    def boot(statistic: statistics.Statistic, *columns: Column) -> Estimate:
        return statistics.bootstrap(statistic, *columns, **options)

    found: list[SignalSummary] = []
    peum = None
    for name, signal in _signal_columns(table, method, eq.ids):
        behind = None if peum is None else boot(statistics.Gap(statistics.pearson_r), badness, peum, signal)
        peum = signal if peum is None else peum
        found.append(
            SignalSummary(
                name,
                statistics.pearson(signal, badness, **options),
                statistics.spearman(signal, badness, **options),
                boot(statistics.auroc, signal, worst),
                boot(statistics.capture_lift, signal, badness),
                statistics.held_out_lift(signal, badness, **options),
                boot(statistics.auroc, signal, wrong),
                behind,
            )
        )
    return found


def _mean_at(every: MetricColumn, angles: Collection[int | float], ids: NDArray[np.object_]) -> Floats:
    """Each image's mean over some angles."""
    at = [every.angles == angle for angle in {*map(float, angles)}]
    values = [replace(every, ids=every.ids[w], value=every.value[w]).by_id(ids) for w in at]
    found: Floats = np.mean(values, axis=0)
    return found


def _signal_columns(table: pa.Table, method: str, ids: NDArray[np.object_]) -> Iterator[tuple[str, Floats]]:
    """The signals that the evaluation has, by name: each is high where a map is unstable."""
    for name, score, of, region in (
        ("peum (full)", "peum", method, "full"),
        ("peum (disc)", "peum", method, "disc"),
        ("disagreement", "disagreement", method, "disc"),
        ("disagreement", "disagreement", method, "full"),
        ("1 − stability", "stability", method, "disc"),
        ("flip-rate", "flip-rate", None, None),
        ("confidence-drop", "confidence-drop", None, None),
    ):
        rows = pick(table, score, of, region, required=False)
        if len(rows):
            yield name, 1 - rows.by_id(ids) if score == "stability" else rows.by_id(ids)
