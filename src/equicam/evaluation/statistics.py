"""Numbers over images: the only module that averages them, draws intervals and tests differences.

A column is a 1-D array; NaN is "undefined", and a row with a NaN in any column leaves that statistic. Intervals are
percentile bootstraps that draw whole images, because the angles of one image are not independent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, log_ndtr, ndtri
from scipy.stats import rankdata, wilcoxon

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
Column = NDArray[np.float64] | NDArray[np.bool_]
Places = NDArray[np.intp]
Ids = NDArray[Any] | Sequence[str] | Sequence[int]
Statistic = Callable[..., float]
NAN = float("nan")


class Draws(TypedDict, total=False):
    """How an interval is drawn: the keywords of `bootstrap` that others pass on."""

    resamples: int
    level: float
    seed: int


@dataclass(frozen=True)
class Estimate:
    """A number over n images with its interval."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Comparison:
    """a − b over n images: mean with interval, and a one-sided Wilcoxon test of a > b with its effect sizes."""

    n: int
    mean: float
    low: float
    high: float
    median: float
    log10_p: float
    rank_biserial: float
    dz: float
    wins: float


@dataclass(frozen=True)
class Correlation:
    """r with interval over n images; log10_p (two-sided) is NaN where rows are clustered, for they are dependent."""

    r: float
    low: float
    high: float
    log10_p: float
    n: int


@dataclass(frozen=True)
class HeldOut:
    """A threshold set on one half; lift and share reviewed on the other; the lift when set and scored on all."""

    threshold: float
    lift: Estimate
    reviewed: float
    in_sample: float


def mean(values: Column) -> float:
    """Σ v / n over defined rows."""
    (v,) = _complete(values)
    return float(v.mean()) if v.size else NAN


def weighted_mean(values: Column, weights: Column) -> float:
    """Σ w v / Σ w."""
    v, w = _complete(values, weights)
    if (w < 0).any():
        raise EquicamError("weights", needs="numbers ≥ 0", got=w.min(), fix="clipping them at 0")
    return float(_ratio(w @ v, w.sum()))


def skill(values: Column | int | float, floors: Column | int | float) -> float:
    """(v̄ − f̄) / (1 − f̄): how much of the way from the floor to 1, of two numbers or two columns."""
    v, f = _complete(*np.atleast_1d(values, floors))
    return float(_above(v.mean(), f.mean())) if v.size else NAN


# Statistics that only need sums over rows: what to sum, and what the sums give. `bootstrap` then skips the rows.
_SUMS: dict[Statistic, tuple[Callable[..., tuple[Floats, ...]], Callable[..., Floats]]] = {
    mean: (lambda v: (v, np.ones_like(v)), lambda v, n: _ratio(v, n)),
    weighted_mean: (lambda v, w: (w * v, w), lambda wv, w: _ratio(wv, w)),
    skill: (lambda v, f: (v, f, np.ones_like(v)), lambda v, f, n: _above(v / n, f / n)),
}


def bootstrap(
    statistic: Statistic,
    *columns: Column,
    cluster: Ids | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """statistic(*columns) with the percentile interval over draws of whole clusters (images) with replacement."""
    _refuse_outside("level", level)
    if resamples < 1:
        raise EquicamError("resamples", needs="at least one draw", got=resamples, fix="resamples=2000")
    table = _table(*columns)
    kept = _kept(table)
    table, codes = table[:, kept], _codes(cluster, kept)
    n = int(codes.max(initial=-1)) + 1
    value = float(statistic(*table)) if n else NAN
    if n < 2:  # one image says nothing about the next
        return Estimate(value, NAN, NAN, n)
    draw = _resampled_sums if statistic in _SUMS else _resampled_rows
    drawn = np.concatenate([draw(statistic, table, codes, chosen) for chosen in _chosen(n, resamples, seed)])
    drawn = drawn[~np.isnan(drawn)]
    if 2 * drawn.size < resamples:
        return Estimate(value, NAN, NAN, n)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, float(low), float(high), n)


def pooled(
    values: Column, *, weights: Column | None = None, cluster: Ids | None = None, **draws: Unpack[Draws]
) -> Estimate:
    """Mean over pairs (image × angle), weighted or not, with an interval over images."""
    if weights is None:
        return bootstrap(mean, values, cluster=cluster, **draws)
    return bootstrap(weighted_mean, values, weights, cluster=cluster, **draws)


def strata(
    values: Column,
    by: Column,
    *,
    edges: Sequence[int | float] | Floats,
    cluster: Ids | None = None,
    **draws: Unpack[Draws],
) -> list[tuple[str, Estimate]]:
    """Mean of values by bins of `by`: [e0, e1), …, the last closed; rows outside the edges are in none."""
    if len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise EquicamError("edges", needs="two or more rising numbers", got=list(edges), fix="[0, 0.5, 1]")
    v, x = _table(values, by)
    bins = np.digitize(x, edges) - (x == edges[-1])  # 1 is the first; NaN lands behind the last
    return [
        (f"{low:g}–{high:g}", pooled(np.where(bins == i, v, NAN), cluster=cluster, **draws))
        for i, (low, high) in enumerate(pairwise(edges), 1)
    ]


def proportion(successes: int, n: int, *, level: float = 0.95) -> Estimate:
    """Wilson: (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)."""
    if not 0 <= successes <= n:
        raise EquicamError("successes", needs=f"a count from 0 to {n}", got=successes, fix="counting again")
    _refuse_outside("level", level)
    if not n:
        return Estimate(NAN, NAN, NAN, 0)
    p, z = successes / n, float(ndtri((1 + level) / 2))
    centre, half = p + z**2 / (2 * n), z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5
    low, high = (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)
    return Estimate(p, low if successes else 0.0, high if successes < n else 1.0, n)  # else rounding


def difference(a: Estimate, b: Estimate) -> Estimate:
    """A − b of two independent shares (Newcombe): d − √((a − a₋)² + (b₊ − b)²) … d + √((a₊ − a)² + (b − b₋)²)."""
    d = a.value - b.value
    low = d - float(np.hypot(a.value - a.low, b.high - b.value))
    high = d + float(np.hypot(a.high - a.value, b.value - b.low))
    return Estimate(d, low, high, a.n + b.n)


def kappa(a: Column, b: Column) -> float:
    """Cohen's κ = (p_o − p_e) / (1 − p_e) of two readers' answers, given as codes; undefined where both say one thing."""
    x, y = _complete(a, b)
    if not x.size:
        return NAN
    codes = np.unique(np.concatenate([x, y]))
    expected = sum(float((x == code).mean() * (y == code).mean()) for code in codes)
    return float(_above(float((x == y).mean()), expected))


def compare(a: Column, b: Column, *, resamples: int = 2000, seed: int = 0) -> Comparison:
    """Is a above b on the same images? Paired differences d = a − b, one row an image."""
    x, y = _complete(a, b)
    d = x - y
    if not d.size:
        return Comparison(0, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN)
    found = bootstrap(mean, d, resamples=resamples, seed=seed)
    ranks = rankdata(np.abs(d[d != 0]))
    biserial = float(_ratio(np.sign(d[d != 0]) @ ranks, ranks.sum()))
    dz = NAN if _constant(d) else float(d.mean() / d.std(ddof=1))
    wins = float((d > 0).mean() + (d == 0).mean() / 2)
    middle, log10_p = float(np.median(d)), _log10_wilcoxon(d)
    return Comparison(found.n, found.value, found.low, found.high, middle, log10_p, biserial, dz, wins)


def bonferroni(log10_ps: Floats) -> Floats:
    """log10 min(1, m p) of the m defined tests."""
    adjusted: Floats = np.minimum(log10_ps + np.log10(max(_tests(log10_ps), 1)), 0.0)
    return adjusted


def holm(log10_ps: Floats) -> Floats:
    """log10 min(1, max_{j ≤ i} (m − j) p_(j)), j from 0, of the m defined tests."""
    m = _tests(log10_ps)
    order = np.argsort(log10_ps)[:m]  # NaN sorts last
    adjusted = np.full_like(log10_ps, NAN)
    adjusted[order] = np.minimum(np.maximum.accumulate(log10_ps[order] + np.log10(m - np.arange(m))), 0)
    return adjusted


def pearson_r(a: Column, b: Column) -> float:
    """Σ (a − ā)(b − b̄) / √(Σ (a − ā)² Σ (b − b̄)²), NaN where a side is constant."""
    x, y = _complete(a, b)
    if _constant(x) or _constant(y):
        return NAN
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1, 1))


def _moments(a: Floats, b: Floats) -> tuple[Floats, ...]:
    a, b = a - a.mean(), b - b.mean()  # r does not change, and small differences of large sums do not arise
    return np.ones_like(a), a, b, a * a, b * b, a * b


def _r_of_moments(n: Floats, a: Floats, b: Floats, aa: Floats, bb: Floats, ab: Floats) -> Floats:
    spread_a, spread_b = n * aa - a * a, n * bb - b * b
    flat = (spread_a <= 1e-12 * n * aa) | (spread_b <= 1e-12 * n * bb)
    return _ratio(n * ab - a * b, np.where(flat, 0, np.sqrt(np.abs(spread_a * spread_b))))


_SUMS[pearson_r] = (_moments, _r_of_moments)


def spearman_r(a: Column, b: Column) -> float:
    """Pearson of average ranks."""
    x, y = _complete(a, b)
    return pearson_r(rankdata(x), rankdata(y))


def pearson(a: Column, b: Column, *, cluster: Ids | None = None, **draws: Unpack[Draws]) -> Correlation:
    """Pearson's r with an interval over images."""
    return _correlation(pearson_r, a, b, cluster, draws)


def spearman(a: Column, b: Column, *, cluster: Ids | None = None, **draws: Unpack[Draws]) -> Correlation:
    """Spearman's r with an interval over images."""
    return _correlation(spearman_r, a, b, cluster, draws)


def auroc(signal: Column, positive: Column) -> float:
    """P(signal of a positive > of a negative) + ½ P(equal): (Σ ranks of positives − p(p + 1)/2) / (p q)."""
    s, y = _complete(signal, positive)
    if not np.isin(y, (0, 1)).all():
        raise EquicamError("positive", needs="0, 1 or NaN", got=y, fix="y > threshold")
    p, q = y.sum(), (1 - y).sum()
    return float(_ratio(rankdata(s) @ y - p * (p + 1) / 2, p * q))


def capture(signal: Column, badness: Column, *, budget: int | float = 0.10) -> float:
    """Share of the k worst by badness among the k highest by signal, k = round(budget n) ≥ 1; ties in random order."""
    s, bad = _complete(signal, badness)
    k = _reviewed(s.size, budget)
    # Ties on both sides break independently, so E[overlap] = Σ P(i among the k worst) P(i among the k highest).
    return float(_chance(s, k) @ _chance(bad, k) / k) if s.size else NAN


def capture_lift(signal: Column, badness: Column, *, budget: int | float = 0.10) -> float:
    """Capture ÷ (k/n): 1 is a signal that knows nothing."""
    n = len(_complete(signal, badness)[0])
    return capture(signal, badness, budget=budget) * n / _reviewed(n, budget)


def mean_ratio(signal: Column, badness: Column, *, threshold: int | float) -> float:
    """Mean badness where signal ≥ threshold ÷ mean badness of all."""
    s, bad = _complete(signal, badness)
    return float(_ratio(mean(bad[s >= threshold]), mean(bad)))


def held_out_lift(
    signal: Column, badness: Column, *, quantile: float = 0.90, resamples: int = 2000, seed: int = 0
) -> HeldOut:
    """mean_ratio on half B at the quantile of half A's signal; halves by one permutation, B drawn at that threshold."""
    _refuse_outside("quantile", quantile)
    table = _complete(signal, badness)
    n = table.shape[1]
    if n < 2:
        return HeldOut(NAN, Estimate(NAN, NAN, NAN, 0), NAN, NAN)
    order = np.random.default_rng(seed).permutation(n)
    first, second = table[:, order[: n // 2]], table[:, order[n // 2 :]]
    threshold = float(np.quantile(first[0], quantile))
    lift = bootstrap(partial(mean_ratio, threshold=threshold), *second, resamples=resamples, seed=seed)
    in_sample = mean_ratio(*table, threshold=float(np.quantile(table[0], quantile)))
    return HeldOut(threshold, lift, float((second[0] >= threshold).mean()), in_sample)


def paired_difference(
    statistic: Statistic,
    target: Column,
    signal_a: Column,
    signal_b: Column,
    *,
    cluster: Ids | None = None,
    **draws: Unpack[Draws],
) -> Estimate:
    """statistic(signal_a, target) − statistic(signal_b, target), both on the same draw of images."""

    def gap(y: Floats, a: Floats, b: Floats) -> float:
        return statistic(a, y) - statistic(b, y)

    return bootstrap(gap, target, signal_a, signal_b, cluster=cluster, **draws)


def _table(*columns: Column) -> Floats:
    """The columns as rows of one array [columns, rows]."""
    shapes = [np.shape(c) for c in columns]
    if not columns or len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise EquicamError("columns", needs="1-D arrays of one length", got=shapes, fix="one entry a row")
    table = np.stack([np.asarray(c, dtype=np.float64) for c in columns])
    if np.isinf(table).any():
        raise EquicamError("columns", needs="finite numbers or NaN", got="inf", fix="NaN where undefined")
    return table


def _kept(table: Floats) -> NDArray[np.bool_]:
    """Where a row has no NaN."""
    missing: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(table))
    return ~missing


def _complete(*columns: Column) -> Floats:
    """The table of rows without a NaN."""
    table = _table(*columns)
    return table[:, _kept(table)]


def _codes(cluster: Ids | None, kept: NDArray[np.bool_]) -> Places:
    """0 … n − 1 for each kept row: which image it belongs to."""
    if cluster is None:
        return np.arange(np.count_nonzero(kept))
    ids = np.asarray(cluster)
    if ids.shape != kept.shape or ids.dtype.kind in "fc":  # NaN would be one big image
        got = f"{ids.dtype} of shape {ids.shape}"
        raise EquicamError("cluster", needs=f"{kept.size} string or integer ids", got=got, fix="one id a row")
    return np.unique(ids[kept], return_inverse=True)[1]


def _chosen(n: int, resamples: int, seed: int) -> Iterator[Places]:
    """Draws of n clusters out of n, some at a time so that memory stays flat."""
    rng, chunk = np.random.default_rng(seed), max(1, 1_000_000 // n)
    for start in range(0, resamples, chunk):
        yield rng.integers(n, size=(min(chunk, resamples - start), n))


def _resampled_rows(statistic: Statistic, table: Floats, codes: Places, chosen: Places) -> Floats:
    """The statistic on each draw, with all rows of a cluster as often as it was drawn."""
    order, sizes = np.argsort(codes, kind="stable"), np.bincount(codes)
    starts = np.cumsum(sizes) - sizes
    values = np.empty(len(chosen))
    for i, clusters in enumerate(chosen):
        count = sizes[clusters]
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        values[i] = statistic(*table[:, order[np.repeat(starts[clusters], count) + step]])
    return values


def _resampled_sums(statistic: Statistic, table: Floats, codes: Places, chosen: Places) -> Floats:
    """The same from each cluster's sums × how often it was drawn."""
    terms, finish = _SUMS[statistic]
    sums = np.stack([np.bincount(codes, term) for term in terms(*table)])
    m, n = chosen.shape
    often = np.bincount((chosen + n * np.arange(m)[:, None]).ravel(), minlength=m * n).reshape(m, n)
    return finish(*(sums @ often.T.astype(np.float64)))


def _refuse_outside(name: str, share: float) -> None:
    if not 0 < share < 1:
        raise EquicamError(name, needs="a share between 0 and 1", got=share, fix=f"{name}=0.90")


def _ratio(top: Any, bottom: Any) -> Floats:
    """Quotient, NaN where bottom is 0."""
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.asarray(top / np.where(bottom == 0, NAN, bottom))


def _above(value: Any, floor: Any) -> Floats:
    """(value − floor) / (1 − floor), NaN where the floor is 1 to rounding."""
    room = 1 - np.asarray(floor)
    return _ratio(value - floor, np.where(np.abs(room) > 1e-12, room, 0))


def _constant(x: Floats) -> bool:
    """No spread beyond rounding, or no two rows to spread."""
    return x.size < 2 or bool(np.ptp(x) <= 1e-12 * np.abs(x).max())


def _tests(log10_ps: Floats) -> int:
    """How many are defined, having refused what cannot be log10 p."""
    if log10_ps.ndim != 1 or (log10_ps > 0).any():
        raise EquicamError("log10_ps", needs="a 1-D array of log10 p ≤ 0", got=log10_ps, fix="np.log10(p)")
    return int(np.count_nonzero(~np.isnan(log10_ps)))


def _log10_wilcoxon(d: Floats) -> float:
    """One-sided signed-rank test of d > 0, zeros left out: exact to 50 distinct |d|, else z with tie correction."""
    kept = np.abs(d[d != 0])
    ties = np.unique(kept, return_counts=True)[1]
    n = kept.size
    if not n:
        return 0.0  # T⁺ = 0 is all there can be: p = 1
    if n == d.size == ties.size <= 50:
        return float(np.log10(wilcoxon(d, alternative="greater", method="exact").pvalue))
    above = rankdata(kept) @ (d[d != 0] > 0) - n * (n + 1) / 4
    variance = n * (n + 1) * (2 * n + 1) / 24 - (ties**3 - ties).sum() / 48
    return float(log_ndtr(-above / variance**0.5) / np.log(10))


def _log10_t(r: float, n: int) -> float:
    """Two-sided p of t = r √(ν / (1 − r²)), ν = n − 2: I_{1−r²}(ν/2, ½), in logarithms where p underflows."""
    if n < 3 or np.isnan(r):
        return NAN
    if abs(r) == 1:
        return -np.inf
    a, x = (n - 2) / 2, (1 - r) * (1 + r)
    p = float(betainc(a, 0.5, x))
    if p > 1e-250:
        return float(np.log10(p))
    # I_x(a, ½) = x^a / (a B(a, ½) |r|) · ₂F₁(1, ½; a + 1; −x/r²), and of ₂F₁ two terms do: the third is 3/t⁴ < 3e-6
    series = 1 - x / r**2 / (2 * a + 2)
    log_p = a * (np.log1p(-r) + np.log1p(r)) - np.log(a * abs(r)) - betaln(a, 0.5) + np.log(series)
    return float(log_p / np.log(10))


def _correlation(r: Statistic, a: Column, b: Column, cluster: Ids | None, draws: Draws) -> Correlation:
    found = bootstrap(r, a, b, cluster=cluster, **draws)
    log10_p = _log10_t(found.value, found.n) if cluster is None else NAN
    return Correlation(found.value, found.low, found.high, log10_p, found.n)


def _reviewed(n: int, budget: int | float) -> int:
    """How many are reviewed: k = round(budget n), at least 1."""
    if not 0 < budget <= 1:
        raise EquicamError("budget", needs="a share in (0, 1]", got=budget, fix="budget=0.10")
    return max(1, round(budget * n))


def _chance(x: Floats, k: int) -> Floats:
    """P(among the k highest) when ties stand in random order."""
    cut = np.partition(x, -k)[-k]
    above, level = np.count_nonzero(x > cut), np.count_nonzero(x == cut)
    chance: Floats = (x > cut) + (k - above) / level * (x == cut)
    return chance
