"""Summaries of an evaluation's rows: each metric over the images, under conditions, and with its uncertainty."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.evaluate import statistics
from equicam.evaluate.rows import MetricColumn, ReasonCode, equals, pick, pick_prediction
from equicam.evaluate.statistics import Column, Comparison, Correlation, Estimate, Floats, HeldOut, Ids

__all__ = [
    "by_angle", "by_confidence", "conditional", "contrast", "count_groups", "drift_and_confidence", "groups_remark", "mean_of", "occlusion_effects", "pick",
    "pick_prediction", "signals", "summarise",
]  # fmt: skip

LOWER_IS_BETTER = {
    "deletion", "energy-drop", "peum", "disagreement", "flip-rate", "confidence-drop", "misclassified",
}  # fmt: skip
SHARES = {"misclassified", "pointing", "constant"}
"""What an image either is or is not."""
CONFIDENCE_EDGES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


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
        rows = table.filter(pc.and_(equals(table["score"], score), equals(table["method"], method)))
        found += [_summary_row(rows, score, method, key["region"], resamples) for key in group]
    return found


def _summary_row(
    table: pa.Table, score: str, method: str | None, region: str | None, resamples: int
) -> SummaryRow:
    rows = pick(table, score, method, region)
    value = mean_of(rows, resamples=resamples)
    skill = None
    if np.isfinite(rows.floor).any() and score.startswith(("eq", "stage")):
        skill = statistics.bootstrap(
            statistics.skill, rows.value, rows.floor, cluster=rows.ids, group=rows.group, resamples=resamples
        )
    every = pick(table, score, method, region, each_angle=True, required=False)
    every = every if len(every) else rows
    constant = every.reason == ReasonCode.CONSTANT_MAP
    defined = np.isfinite(every.value)
    return SummaryRow(
        score, method, region, value, statistics.mean(rows.floor), skill,
        constant=statistics.mean(constant[defined].astype(np.float64)),
        without_constant=statistics.mean(every.value[~constant]),
        reason=Counter(r for r in rows.reason if r).most_common(1)[0][0] if any(rows.reason) else "",
    )  # fmt: skip


def mean_of(
    rows: MetricColumn, where: NDArray[np.bool_] | slice = slice(None), *, resamples: int = 2000
) -> Estimate:
    """The mean of some rows, with an interval by group, or by image where images have no groups.

    Shares of images without groups have Wilson's interval: a bootstrap of 100 of 100 would have none.
    """
    value = rows.value[where]
    group = None if rows.group is None else rows.group[where]
    known = value[~np.isnan(value)]
    if group is None and rows.score in SHARES and np.isin(known, (0, 1)).all():
        return statistics.proportion(int(known.sum()), known.size)
    return statistics.bootstrap(
        statistics.mean, value, cluster=rows.ids[where], group=group, resamples=resamples
    )


def count_groups(table: pa.Table) -> int | None:
    """How many groups the readable images come from, an image without one being its own; None if none has a group."""
    some = table.filter(pc.is_valid(table["score"]))
    if some["group"].null_count == len(some):
        return None
    pairs = some.select(["id", "group"]).group_by(["id", "group"]).aggregate([]).to_pylist()
    return len({(one["group"], one["id"] if one["group"] is None else "") for one in pairs})


def groups_remark(groups: int | None) -> Iterator[str]:
    """That intervals are by group, and whether there are enough groups."""
    if groups is not None:
        few = f"; with fewer than {statistics.MIN_GROUPS} groups they are unreliable (too narrow)"
        yield f"intervals are over {groups} groups of images{few if groups < statistics.MIN_GROUPS else ''}"


def by_angle(
    table: pa.Table, method: str, *, score: str = "eq", region: str = "disc"
) -> list[tuple[float, Estimate]]:
    """The mean over images at every angle."""
    rows = pick(table, score, method, region, each_angle=True)
    at = {float(a): rows.angles == a for a in np.unique(rows.angles)}
    return [(angle, mean_of(rows, where)) for angle, where in at.items()]


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
    kept = is_consistent == 1
    pooled = partial(statistics.bootstrap, cluster=eq.ids, group=eq.group)
    return ConditionalEq(
        mean_of(eq),
        mean_of(eq, kept),
        pooled(statistics.weighted_mean, eq.value, weight),
        pooled(statistics.mean, is_consistent),
    )


def by_confidence(
    table: pa.Table, method: str, *, region: str = "disc", edges: Sequence[float] = CONFIDENCE_EDGES
) -> list[tuple[str, Estimate]]:
    """Eq by the probability of the class in the presented image."""
    eq = pick(table, "eq", method, region)
    confidence = pick_prediction(table, "presented-confidence", method).by_id(eq.ids)
    return means_by_bin(eq.value, confidence, edges=edges, cluster=eq.ids, group=eq.group)


def means_by_bin(
    values: Column,
    by: Column,
    *,
    edges: Sequence[int | float] | Floats,
    cluster: Ids | None = None,
    group: Ids | None = None,
) -> list[tuple[str, Estimate]]:
    """Mean of values by bins of `by`: [e0, e1), …, the last closed; rows outside the edges are in none."""
    if len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise EquicamError("edges", "two or more rising numbers", list(edges), "[0, 0.5, 1]")
    bins = np.digitize(by, edges) - (by == edges[-1])  # 1 is the first; NaN lands behind the last
    inside = [np.where(bins == i, values, np.nan) for i in range(1, len(edges))]
    return [
        (f"{low:g}–{high:g}", statistics.bootstrap(statistics.mean, some, cluster=cluster, group=group))
        for (low, high), some in zip(itertools.pairwise(edges), inside, strict=True)
    ]


def drift_and_confidence(
    table: pa.Table, method: str, *, region: str = "disc", consistent_only: bool = True
) -> tuple[Correlation, Correlation, Correlation]:
    """1 − Eq against p_c(x) − p_c(R_θ x), |log p_c(R_θ x) / p_c(x)|, and 1 − p_c(R_θ x); intervals clustered by image."""
    eq = pick(table, "eq", method, region, each_angle=True)
    rotated, is_consistent = (
        pick_prediction(table, name, method, each_angle=True).at_pairs_of(eq)
        for name in ("confidence", "consistent")
    )
    presented = pick_prediction(table, "presented-confidence", method).by_id(eq.ids)
    some = (is_consistent == 1) | (not consistent_only)
    tiny = np.finfo(np.float64).tiny
    log_ratio = np.abs(np.log(np.maximum(rotated, tiny) / np.maximum(presented, tiny)))
    drift, ids = 1 - eq.value[some], eq.ids[some]
    group = None if eq.group is None else eq.group[some]
    return (
        statistics.pearson(drift, (presented - rotated)[some], cluster=ids, group=group),
        statistics.pearson(drift, log_ratio[some], cluster=ids, group=group),
        statistics.pearson(drift, 1 - rotated[some], cluster=ids, group=group),
    )


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
class OcclusionEffect:
    """Probability lost without a region, in both frames, and how much more is lost without the drift region."""

    region: str
    presented: Estimate
    rotated: Estimate
    drift_above: (
        Comparison | None
    )  # paired by image, in the presented frame; None for the drift region itself


def occlusion_effects(table: pa.Table, method: str, *, region: str = "disc") -> list[OcclusionEffect]:
    """The causal test by region. A drop says little by itself, hence drift minus each control."""
    drift = pick(table, "causal-drift", method, region)
    names = {s for s in pc.unique(table["score"]).to_pylist() if s and s.startswith("causal-")}
    presented = sorted(name for name in names if f"{name}-rotated" in names)
    presented.sort(key=lambda s: (s != "causal-drift", s != "causal-agreement", s))
    found = []
    for score in presented:
        here, there = (pick(table, name, method, region) for name in (score, f"{score}-rotated"))
        above = None
        if score != "causal-drift":
            above = statistics.compare(drift.value, here.by_id(drift.ids), group=drift.group)
        found.append(OcclusionEffect(score.removeprefix("causal-"), mean_of(here), mean_of(there), above))
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
    behind_peum: Estimate | None = None  # PEUM's Pearson minus this one's


def signals(
    table: pa.Table, method: str = "equigrad-cam", *, of: str = "grad-cam", region: str = "disc", budget: float = 0.10,
    resamples: int = 1000, angles: Collection[int | float] | None = None,
) -> list[SignalSummary]:  # fmt: skip
    """PEUM and its baselines against 1 − Eq (equivariance) of a single-view map, over all angles or over these.

    Disagreement and stability are correlations of aligned maps, as Eq is, and share its form. At angles that the views have
    (`angles=None` may hold some), they compare the very maps that Eq compares.
    """
    eq = pick(table, "eq", of, region)
    if angles is not None:
        eq = replace(eq, value=_mean_at(pick(table, "eq", of, region, each_angle=True), angles, eq.ids))
    badness = 1 - eq.value
    cut = np.nanquantile(badness, 1 - budget) if np.isfinite(badness).any() else np.nan
    worst = np.where(np.isnan(badness), np.nan, badness >= cut)
    wrong = pick(table, "misclassified").by_id(eq.ids)
    boot = partial(statistics.bootstrap, group=eq.group, resamples=resamples)
    found: list[SignalSummary] = []
    peum: statistics.Floats | None = None
    for name, rows in _signal_columns(table, method):
        signal = rows.by_id(eq.ids)
        behind = None
        if peum is None:
            peum = signal
        else:
            behind = boot(statistics.Gap(statistics.pearson_r), badness, peum, signal)
        found.append(
            SignalSummary(
                name,
                statistics.pearson(signal, badness, group=eq.group, resamples=resamples),
                statistics.spearman(signal, badness, group=eq.group, resamples=resamples),
                boot(statistics.auroc, signal, worst),
                boot(partial(statistics.capture_lift, budget=budget), signal, badness),
                statistics.held_out_lift(
                    signal, badness, quantile=1 - budget, group=eq.group, resamples=resamples
                ),
                boot(statistics.auroc, signal, wrong),
                behind,
            )
        )
    return found


def _mean_at(
    every: MetricColumn, angles: Collection[int | float], ids: NDArray[np.object_]
) -> statistics.Floats:
    """Each image's mean over some angles."""
    at = {float(angle): every.angles == angle for angle in angles}
    values = [replace(every, ids=every.ids[w], value=every.value[w]).by_id(ids) for w in at.values()]
    found: statistics.Floats = np.mean(values, axis=0)
    return found


def _signal_columns(table: pa.Table, method: str) -> list[tuple[str, MetricColumn]]:
    """The signals that the evaluation has, by name."""
    places = [
        ("peum (full)", "peum", method, "full"),
        ("peum (disc)", "peum", method, "disc"),
        ("disagreement", "disagreement", method, "disc"),
        ("disagreement", "disagreement", method, "full"),
        ("stability", "stability", method, "disc"),
        ("flip-rate", "flip-rate", None, None),
        ("confidence-drop", "confidence-drop", None, None),
    ]
    found = [(name, pick(table, score, of, region, required=False)) for name, score, of, region in places]
    # a signal is high where a map is unstable
    found = [
        ("1 − stability", replace(rows, value=1 - rows.value)) if name == "stability" else (name, rows)
        for name, rows in found
    ]
    return [(name, rows) for name, rows in found if len(rows)]
