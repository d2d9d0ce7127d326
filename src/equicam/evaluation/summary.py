"""A table of rows, read: what a method scores over a data set, under which condition, and with what uncertainty."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.evaluation import statistics
from equicam.evaluation.statistics import Comparison, Correlation, Estimate, HeldOut

Floats = NDArray[np.float64]
BETTER_LOW = (
    "deletion",
    "energy-drop",
    "peum",
    "disagreement",
    "flip-rate",
    "confidence-drop",
    "misclassified",
)
STRATA = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Picked:
    """The rows of one score of one method, in order of picture and angle."""

    ids: NDArray[np.object_]
    angles: Floats
    value: Floats
    floor: Floats  # NaN where there is none
    reason: NDArray[np.object_]


def pick(
    table: pa.Table,
    score: str,
    method: str | None = None,
    region: str | None = None,
    *,
    each_angle: bool = False,
) -> Picked:
    """One value a picture, or one for each picture and angle."""
    keep = _is(table["score"], score)
    for name, wanted in (("method", method), ("region", region)):
        keep = pc.and_(keep, _is(table[name], wanted))
    keep = pc.and_(keep, pc.is_valid(table["angle"]) if each_angle else pc.is_null(table["angle"]))
    some = table.filter(keep).sort_by([("id", "ascending"), ("angle", "ascending")])
    if not len(some):
        there = sorted({s for s in table["score"].to_pylist() if s})
        raise EquicamError(
            f"rows of {score!r} of {method!r} in {region!r}", needs="an evaluation that has them",
            got=f"scores {', '.join(there)}", fix=f'evaluate(…, scores=["{score}"])',
        )  # fmt: skip
    angle, value, floor = (
        np.asarray(some[name].to_numpy(), dtype=np.float64) for name in ("angle", "value", "floor")
    )
    ids, reason = (np.array(some[name].to_pylist(), dtype=object) for name in ("id", "reason"))
    return Picked(ids, angle, value, floor, reason)


@dataclass(frozen=True)
class Line:
    """One line of the printed table."""

    score: str
    method: str | None
    region: str | None
    value: Estimate
    floor: float  # NaN: none
    skill: Estimate | None
    constant: float  # the share of values that count 0 because a map was constant
    otherwise: float  # the mean without those
    why: str  # the commonest reason, where nothing is defined


def summarise(table: pa.Table, *, resamples: int = 2000) -> list[Line]:
    """Every score of every method over the pictures, with image-clustered intervals."""
    names = ("score", "method", "region")
    some = table.filter(pc.is_valid(table["score"])).select(names)
    first = {n: {v: i for i, v in enumerate(pc.unique(some[n]).to_pylist())} for n in names}
    keys = some.group_by(names).aggregate([]).to_pylist()
    keys.sort(key=lambda key: [first[n][key[n]] for n in names])
    lines = []
    for (score, method), group in itertools.groupby(keys, key=lambda key: (key["score"], key["method"])):
        rows = table.filter(pc.and_(_is(table["score"], score), _is(table["method"], method)))
        lines += [_line(rows, score, method, key["region"], resamples) for key in group]
    return lines


def _line(table: pa.Table, score: str, method: str | None, region: str | None, resamples: int) -> Line:
    rows = pick(table, score, method, region)
    value = statistics.bootstrap(statistics.mean, rows.value, cluster=rows.ids, resamples=resamples)
    with_floor = bool(np.isfinite(rows.floor).any())
    skill = None
    if with_floor and score.startswith(("eq", "stage")):
        skill = statistics.bootstrap(
            statistics.skill, rows.value, rows.floor, cluster=rows.ids, resamples=resamples
        )
    try:
        every = pick(table, score, method, region, each_angle=True)
    except EquicamError:
        every = rows
    still = np.array([r is not None and r.startswith("constant map") for r in every.reason], dtype=bool)
    there = np.isfinite(every.value)
    return Line(
        score, method, region, value, statistics.mean(rows.floor), skill,
        constant=statistics.mean(still[there].astype(np.float64)),
        otherwise=statistics.mean(every.value[~still]),
        why=Counter(r for r in rows.reason if r).most_common(1)[0][0] if any(rows.reason) else "",
    )  # fmt: skip


def by_angle(
    table: pa.Table, method: str, *, score: str = "eq", region: str = "disc"
) -> list[tuple[float, Estimate]]:
    """The mean over pictures at every angle."""
    rows = pick(table, score, method, region, each_angle=True)
    return [
        (
            float(a),
            statistics.bootstrap(
                statistics.mean, rows.value[rows.angles == a], cluster=rows.ids[rows.angles == a]
            ),
        )
        for a in np.unique(rows.angles)
    ]


@dataclass(frozen=True)
class Conditional:
    """Eq over all pairs of picture and angle, over those that keep the top-1, and weighed by confidence."""

    all: Estimate
    stable: Estimate
    weighed: Estimate
    stable_rate: Estimate


def conditional(table: pa.Table, method: str, *, region: str = "disc") -> Conditional:
    """Whether a map drifts only where the prediction does: pairs pooled, intervals by picture."""
    eq = pick(table, "eq", method, region, each_angle=True)
    keeps, weight = (_beside(table, name, method, eq) for name in ("stable", "confidence-kept"))
    kept = keeps == 1
    return Conditional(
        statistics.pooled(eq.value, cluster=eq.ids),
        statistics.pooled(eq.value[kept], cluster=eq.ids[kept]),
        statistics.pooled(eq.value, weights=weight, cluster=eq.ids),
        statistics.pooled(keeps, cluster=eq.ids),
    )


def by_confidence(
    table: pa.Table, method: str, *, region: str = "disc", edges: Sequence[float] = STRATA
) -> list[tuple[str, Estimate]]:
    """Eq by the probability of the class in the presented picture."""
    eq, sure = pick(table, "eq", method, region), _own(table, "sure", method)
    by = _by_id(sure, eq.ids)
    return statistics.strata(eq.value, by, edges=edges, cluster=eq.ids)


def drift_and_confidence(
    table: pa.Table, method: str, *, region: str = "disc", stable_only: bool = True
) -> tuple[Correlation, Correlation]:
    """1 − Eq against p_c(x) − p_c(R_θ x), and against |log p_c(R_θ x) / p_c(x)|; intervals clustered by picture."""
    eq = pick(table, "eq", method, region, each_angle=True)
    turned, keeps = (_beside(table, name, method, eq) for name in ("confidence", "stable"))
    sure = _own(table, "sure", method)
    before = _by_id(sure, eq.ids)
    some = (keeps == 1) | (not stable_only)
    tiny = np.finfo(np.float64).tiny
    ratio = np.abs(np.log(np.maximum(turned, tiny) / np.maximum(before, tiny)))
    drift, ids = 1 - eq.value[some], eq.ids[some]
    return (
        statistics.pearson(drift, (before - turned)[some], cluster=ids),
        statistics.pearson(drift, ratio[some], cluster=ids),
    )


def contrast(
    table: pa.Table, method: str, other: str, *, score: str = "eq", region: str | None = "disc"
) -> Comparison:
    """Paired by picture: how much and how consistently one method is above another (below, where low is better)."""
    a, b = pick(table, score, method, region), pick(table, score, other, region)
    if list(a.ids) != list(b.ids):
        raise EquicamError(
            "a paired comparison", needs="the same pictures", got="others", fix="one evaluation of both"
        )
    return (
        statistics.compare(b.value, a.value) if score in BETTER_LOW else statistics.compare(a.value, b.value)
    )


@dataclass(frozen=True)
class Occluded:
    """Probability lost without a region, in both frames, and how much more is lost without the drift region."""

    region: str
    presented: Estimate
    turned: Estimate
    drift_above: (
        Comparison | None
    )  # paired by picture, in the presented frame; None for the drift region itself


def occluded(table: pa.Table, method: str, *, region: str = "disc") -> list[Occluded]:
    """The causal test by region: a drop says little by itself, hence drift minus each control."""
    found = sorted(
        {s for s in table["score"].to_pylist() if s and s.startswith("causal-") and not s.endswith("-turned")}
    )
    found.sort(key=lambda s: (s != "causal-drift", s != "causal-agreement", s))
    if not found:
        pick(table, "causal-drift", method, region)
    drift = pick(table, "causal-drift", method, region)
    made = []
    for score in found:
        here, there = (pick(table, name, method, region) for name in (score, f"{score}-turned"))
        above = None if score == "causal-drift" else statistics.compare(drift.value, _by_id(here, drift.ids))
        made.append(
            Occluded(
                score.removeprefix("causal-"),
                statistics.bootstrap(statistics.mean, here.value, cluster=here.ids),
                statistics.bootstrap(statistics.mean, there.value, cluster=there.ids),
                above,
            )
        )
    return made


@dataclass(frozen=True)
class Signal:
    """How well one number tells unstable maps: against 1 − Eq, and for finding the worst with a review budget."""

    name: str
    pearson: Correlation
    spearman: Correlation
    auroc: Estimate  # of the worst tenth
    capture: Estimate  # share of the worst found, over chance
    held_out: HeldOut  # mean instability of the reviewed over that of all
    wrong: Estimate  # AUROC for misclassified pictures
    ahead: Estimate | None = None  # PEUM's Pearson minus this one's


def signals(
    table: pa.Table, method: str = "equigrad-cam", *, of: str = "grad-cam", region: str = "disc", budget: float = 0.10,
    resamples: int = 1000,
) -> list[Signal]:  # fmt: skip
    """PEUM and its baselines against the instability 1 − Eq of a single-view map."""
    eq = pick(table, "eq", of, region)
    badness = 1 - eq.value
    cut = np.nanquantile(badness, 1 - budget) if np.isfinite(badness).any() else np.nan
    worst = (badness >= cut).astype(np.float64)
    wrong = _by_id(pick(table, "misclassified"), eq.ids)
    found, peum = [], None
    for name, region_of, whose in (
        ("peum", "full", method), ("peum", "disc", method), ("disagreement", None, method),
        ("flip-rate", None, None), ("confidence-drop", None, None),
    ):  # fmt: skip
        rows = _any_region(table, name, whose, region_of)
        if rows is None:
            continue
        signal = _by_id(rows, eq.ids)
        label = f"{name} ({region_of})" if name == "peum" else name
        ahead = None
        if peum is not None:
            ahead = statistics.paired_difference(
                statistics.pearson_r, badness, peum, signal, resamples=resamples
            )
        else:
            peum = signal
        boot = partial(statistics.bootstrap, resamples=resamples)
        found.append(
            Signal(
                label,
                statistics.pearson(signal, badness, resamples=resamples),
                statistics.spearman(signal, badness, resamples=resamples),
                boot(statistics.auroc, signal, worst),
                boot(partial(statistics.capture_lift, budget=budget), signal, badness),
                statistics.held_out_lift(signal, badness, quantile=1 - budget, resamples=resamples),
                boot(statistics.auroc, signal, wrong),
                ahead,
            )
        )
    return found


def _any_region(table: pa.Table, score: str, method: str | None, region: str | None) -> Picked | None:
    for tried in (region, "disc", "full") if score != "peum" else (region,):
        try:
            return pick(table, score, method, tried)
        except EquicamError:
            continue
    return None


def _by_id(rows: Picked, ids: NDArray[np.object_]) -> Floats:
    values = dict(zip(rows.ids, rows.value, strict=True))
    return np.array([values.get(i, np.nan) for i in ids], dtype=np.float64)


def _own(table: pa.Table, score: str, method: str, *, each_angle: bool = False) -> Picked:
    """What the model says; a control with another network or other pictures has rows of its own."""
    try:
        return pick(table, score, method, each_angle=each_angle)
    except EquicamError:
        return pick(table, score, each_angle=each_angle)


def _beside(table: pa.Table, score: str, method: str, eq: Picked) -> Floats:
    """A model's number for the same pictures and angles."""
    rows = _own(table, score, method, each_angle=True)
    values = dict(zip(zip(rows.ids, rows.angles, strict=True), rows.value, strict=True))
    return np.array([values[key] for key in zip(eq.ids, eq.angles, strict=True)], dtype=np.float64)


def _is(column: pa.ChunkedArray, wanted: str | None) -> pa.ChunkedArray:
    return pc.is_null(column) if wanted is None else pc.fill_null(pc.equal(column, wanted), False)
