"""Statistics over images: the only place that averages them, computes intervals and tests differences.

A column is a 1-D array; NaN is "undefined", and a row with a NaN in any column is left out of that statistic. Intervals
are percentile bootstraps that resample whole images, because the angles of one image are not independent, and whole
groups where images belong to groups, because images of one patient or scene are not independent either.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, log_ndtr
from scipy.stats import beta, binomtest, norm, rankdata, t, wilcoxon

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
Column = NDArray[np.float64] | NDArray[np.bool_]
Indices = NDArray[np.intp]
Ids = NDArray[Any] | Sequence[str] | Sequence[int]
NAN = float("nan")


def stack_columns(*columns: Column) -> Floats:
    """The columns as rows of one array [columns, rows]."""
    shapes = [np.shape(c) for c in columns]
    if not columns or len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise EquicamError("columns", "1-D arrays of one length", shapes, "one entry per row")
    table = np.stack([np.asarray(c, dtype=np.float64) for c in columns])
    if np.isinf(table).any():
        raise EquicamError("columns", "finite numbers or NaN", "inf", "NaN where undefined")
    return table


def is_complete(table: Floats) -> NDArray[np.bool_]:
    """Where a row has no NaN."""
    missing: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(table))
    return ~missing


def complete_rows(*columns: Column) -> Floats:
    """The rows without a NaN, [columns, rows]."""
    table = stack_columns(*columns)
    return table[:, is_complete(table)]


def cluster_codes(cluster: Ids | None, kept: NDArray[np.bool_]) -> Indices:
    """0 … n − 1 for each kept row: the image it belongs to."""
    if cluster is None:
        return np.arange(np.count_nonzero(kept))
    ids = np.asarray(cluster)
    if ids.shape != kept.shape or ids.dtype.kind in "fc":  # NaN would be one big image
        got = f"{ids.dtype} of shape {ids.shape}"
        raise EquicamError("cluster", f"{kept.size} string or integer ids", got, "one id per row")
    return np.unique(ids[kept], return_inverse=True)[1]


def group_ties(values: Floats) -> tuple[Indices, Indices, Indices]:
    """The order of the values, where each group of equal ones begins in it, and each row's group."""
    order = np.argsort(values, kind="stable")
    _, starts, group = np.unique(values[order], return_index=True, return_inverse=True)
    back = np.empty_like(order)
    back[order] = group
    return order, starts, back


def ratio(top: Any, bottom: Any) -> Floats:
    """Quotient, NaN where bottom is 0."""
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.asarray(top / np.where(bottom == 0, NAN, bottom))


def share_above(value: Any, floor: Any) -> Floats:
    """(value − floor) / (1 − floor), NaN where the floor is 1 to rounding."""
    room = 1 - np.asarray(floor)
    return ratio(value - floor, np.where(np.abs(room) > 1e-12, room, 0))


def has_no_spread(x: Floats) -> bool:
    """Whether a column of numbers (not a map) has no spread beyond rounding, or fewer than two rows."""
    return x.size < 2 or bool(np.ptp(x) <= 1e-12 * np.abs(x).max())


def refuse_outside(name: str, share: float) -> None:
    """Raise an error unless the share lies between 0 and 1."""
    if not 0 < share < 1:
        raise EquicamError(name, "a share between 0 and 1", share, f"{name}=0.90")


Statistic = Callable[..., float]
MIN_GROUPS = 20
"""With fewer groups an interval over groups is unreliable, the more so if they differ in size."""


class BootstrapOptions(TypedDict, total=False):
    """The keywords of `bootstrap` that other functions pass on."""

    resamples: int
    level: float
    seed: int
    group: Ids | None


@dataclass(frozen=True)
class Estimate:
    """A number over n images with its interval."""

    value: float
    low: float
    high: float
    n: int
    groups: int | None = None  # the interval is over this many groups of images; None: over images


def mean(values: Column) -> float:
    """Σ v / n over defined rows."""
    (v,) = complete_rows(values)
    return float(v.mean()) if v.size else NAN


def weighted_mean(values: Column, weights: Column) -> float:
    """Σ w v / Σ w."""
    v, w = complete_rows(values, weights)
    if (w < 0).any():
        raise EquicamError("weights", "numbers ≥ 0", w.min(), "clipping them at 0")
    return float(ratio(w @ v, w.sum()))


def skill(values: Column | int | float, floors: Column | int | float) -> float:
    """(v̄ − f̄) / (1 − f̄): the share of the way from the floor to 1, of two numbers or two columns."""
    v, f = complete_rows(*np.atleast_1d(values, floors))
    return float(share_above(v.mean(), f.mean())) if v.size else NAN


@dataclass(frozen=True)
class Resamples:
    """Some resamples of whole clusters, as how often each was chosen."""

    counts: Floats  # [resamples, clusters]
    codes: Indices  # the cluster of each row

    @property
    def of_rows(self) -> Floats:
        """How often each row was chosen, [resamples, rows]."""
        return self.counts[:, self.codes]

    def sum(self, term: Floats | int) -> Floats:
        """Σ of a term over the rows of each resample."""
        weights = np.broadcast_to(term, self.codes.shape)
        sums: Floats = self.counts @ np.bincount(self.codes, weights, self.counts.shape[1])
        return sums


# Statistics of all resamples at once; the columns come before the resamples. Others are computed one by one.
AT_ONCE: dict[Statistic, Callable[..., Floats]] = {
    mean: lambda v, some: ratio(some.sum(v), some.sum(1)),
    weighted_mean: lambda v, w, some: ratio(some.sum(w * v), some.sum(w)),
    skill: lambda v, f, some: share_above(some.sum(v) / some.sum(1), some.sum(f) / some.sum(1)),
}
BOUNDS: dict[Statistic, tuple[float, float]] = {}
"""The least and the largest value of a statistic that has them."""


@dataclass(frozen=True)
class Gap:
    """statistic(signal_a, target) − statistic(signal_b, target)."""

    statistic: Statistic

    def __call__(self, target: Floats, signal_a: Floats, signal_b: Floats) -> float:
        """The difference on these rows."""
        return self.statistic(signal_a, target) - self.statistic(signal_b, target)


@dataclass(frozen=True)
class MeanOverPairs:
    """The mean of statistic(a, b) over several pairs of columns: a₀, b₀, a₁, b₁, …"""

    statistic: Statistic

    def __call__(self, *columns: Floats) -> float:
        """The mean on these rows."""
        pairs = zip(columns[::2], columns[1::2], strict=True)
        return float(np.mean([self.statistic(a, b) for a, b in pairs]))


def bootstrap(
    statistic: Statistic,
    *columns: Column,
    cluster: Ids | None = None,
    group: Ids | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """statistic(*columns) with the percentile interval over resamples of whole clusters (images), or of whole groups."""
    refuse_outside("level", level)
    if resamples < 1:
        raise EquicamError("resamples", "at least one", resamples, "resamples=2000")
    table = stack_columns(*columns)
    kept = is_complete(table)
    table, codes = table[:, kept], cluster_codes(cluster, kept)
    n = count = int(codes.max(initial=-1)) + 1
    groups = None
    if group is not None:
        codes = cluster_codes(group, kept)
        groups = count = int(codes.max(initial=-1)) + 1
    value = float(statistic(*table)) if n else NAN
    if count < 2:  # one image, or one group, says nothing about the next
        return Estimate(value, NAN, NAN, n, groups)
    found = np.concatenate(
        [
            _values(statistic, table, Resamples(counts, codes))
            for counts in _draw_counts(count, resamples, seed)
        ]
    )
    found = found[~np.isnan(found)]
    if 2 * found.size < resamples:
        return Estimate(value, NAN, NAN, n, groups)
    low, high = (float(one) for one in np.quantile(found, [(1 - level) / 2, (1 + level) / 2]))
    if groups is not None:
        wider = (
            float(t.ppf((1 + level) / 2, groups - 1) / norm.ppf((1 + level) / 2))
            * (groups / (groups - 1)) ** 0.5
        )
        least, most = _bounds(statistic, table)
        low, high = max(least, value - wider * (value - low)), min(most, value + wider * (high - value))
    return Estimate(value, low, high, n, groups)


def _bounds(statistic: Statistic, table: Floats) -> tuple[float, float]:
    """Between which a statistic lies whatever the sample: a mean, between the smallest and the largest value."""
    if statistic in (mean, weighted_mean):
        return float(table[0].min()), float(table[0].max())
    if isinstance(statistic, MeanOverPairs):
        statistic = statistic.statistic
    if isinstance(statistic, partial):
        statistic = statistic.func
    return BOUNDS.get(statistic, (-np.inf, np.inf))


def _draw_counts(n: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each of n clusters is drawn, with replacement; some resamples at a time so that memory stays flat."""
    rng, chunk = np.random.default_rng(seed), max(1, 1_000_000 // n)
    for start in range(0, resamples, chunk):
        chosen = rng.integers(n, size=(min(chunk, resamples - start), n))
        rows = len(chosen)
        often = np.bincount((chosen + n * np.arange(rows)[:, None]).ravel(), minlength=rows * n)
        yield often.reshape(rows, n).astype(np.float64)


def _values(statistic: Statistic, table: Floats, some: Resamples) -> Floats:
    """The statistic of each resample."""
    if isinstance(statistic, Gap):
        target, a, b = table
        of_a, of_b = (_values(statistic.statistic, np.stack([signal, target]), some) for signal in (a, b))
        return of_a - of_b
    if statistic in AT_ONCE:
        return AT_ONCE[statistic](*table, some)
    rows = np.arange(table.shape[1])
    return np.array([statistic(*table[:, np.repeat(rows, n)]) for n in some.of_rows.astype(np.intp)])


def proportion(successes: int, n: int, *, level: float = 0.95) -> Estimate:
    """A share with its Wilson interval."""
    _refuse_count(successes, n)
    refuse_outside("level", level)
    if not n:
        return Estimate(NAN, NAN, NAN, 0)
    interval = binomtest(successes, n).proportion_ci(level, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), n)


def upper_bound(successes: int, n: int, *, confidence: float = 0.95) -> float:
    """One-sided Clopper–Pearson: the share p with P(at most this many successes of n | p) = 1 − confidence; 1 if all."""
    _refuse_count(successes, n)
    refuse_outside("confidence", confidence)
    return 1.0 if successes == n else float(beta.ppf(confidence, successes + 1, n - successes))


def _refuse_count(successes: int, n: int) -> None:
    if not 0 <= successes <= n:
        raise EquicamError("successes", f"a count from 0 to {n}", successes, "counting again")


def difference(a: Estimate, b: Estimate) -> Estimate:
    """A − b of two independent shares (Newcombe): d − √((a − a₋)² + (b₊ − b)²) … d + √((a₊ − a)² + (b − b₋)²)."""
    d = a.value - b.value
    low = d - float(np.hypot(a.value - a.low, b.high - b.value))
    high = d + float(np.hypot(a.high - a.value, b.value - b.low))
    return Estimate(d, low, high, a.n + b.n)


def kappa(a: Column, b: Column) -> float:
    """Cohen's κ = (p_o − p_e) / (1 − p_e) of two reviewers' verdicts as codes; NaN where both give one verdict only."""
    x, y = complete_rows(a, b)
    if not x.size:
        return NAN
    codes = np.unique(np.concatenate([x, y]))
    expected = sum(float((x == code).mean() * (y == code).mean()) for code in codes)
    return float(share_above(float((x == y).mean()), expected))


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
    groups: int | None = None  # interval and test are over this many groups of images; None: over images

    @property
    def difference(self) -> Estimate:
        """The mean difference with its interval."""
        return Estimate(self.mean, self.low, self.high, self.n, self.groups)


def compare(
    a: Column, b: Column, *, group: Ids | None = None, resamples: int = 2000, seed: int = 0
) -> Comparison:
    """Is a above b on the same images? Paired differences d = a − b, one row per image.

    With groups the interval resamples groups, and the test takes the mean difference of each group as one observation.
    """
    kept = is_complete(stack_columns(a, b))
    x, y = complete_rows(a, b)
    d = x - y
    if not d.size:
        return Comparison(0, NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN)
    found = bootstrap(
        mean, d, group=None if group is None else np.asarray(group)[kept], resamples=resamples, seed=seed
    )
    tested = d
    if group is not None:
        codes = cluster_codes(group, kept)
        tested = np.bincount(codes, d) / np.bincount(codes)
    log10_p, biserial = _signed_ranks(tested)
    dz = NAN if has_no_spread(d) else float(d.mean() / d.std(ddof=1))
    wins = float((d > 0).mean() + (d == 0).mean() / 2)
    return Comparison(
        found.n, found.value, found.low, found.high, float(np.median(d)), log10_p, biserial, dz, wins, found.groups
    )  # fmt: skip


def bonferroni(log10_ps: Floats) -> Floats:
    """log10 min(1, m p) of the m defined tests."""
    adjusted: Floats = np.minimum(log10_ps + np.log10(max(_count_tests(log10_ps), 1)), 0.0)
    return adjusted


def holm(log10_ps: Floats) -> Floats:
    """log10 min(1, max_{j ≤ i} (m − j) p_(j)), j from 0, of the m defined tests."""
    m = _count_tests(log10_ps)
    order = np.argsort(log10_ps)[:m]  # NaN sorts last
    adjusted = np.full_like(log10_ps, NAN)
    adjusted[order] = np.minimum(np.maximum.accumulate(log10_ps[order] + np.log10(m - np.arange(m))), 0)
    return adjusted


def _count_tests(log10_ps: Floats) -> int:
    """How many are defined; values that cannot be log10 p are refused."""
    if log10_ps.ndim != 1 or (log10_ps > 0).any():
        raise EquicamError("log10_ps", "a 1-D array of log10 p ≤ 0", log10_ps, "np.log10(p)")
    return int(np.count_nonzero(~np.isnan(log10_ps)))


def _signed_ranks(d: Floats) -> tuple[float, float]:
    """log10 p of the one-sided signed-rank test of d > 0 without zeros, and the rank-biserial correlation.

    Exact for up to 50 distinct |d|; otherwise the normal approximation with tie correction, in logarithms.
    """
    kept = d[d != 0]
    n = kept.size
    if not n:
        return 0.0, NAN  # T⁺ = 0 is the only possible value: p = 1
    exact = n == d.size == np.unique(np.abs(kept)).size <= 50
    found = wilcoxon(kept, alternative="greater", method="exact" if exact else "asymptotic")
    biserial = float(4 * found.statistic / (n * (n + 1)) - 1)
    if exact:
        return float(np.log10(found.pvalue)), biserial
    return float(log_ndtr(-found.zstatistic) / np.log(10)), biserial


@dataclass(frozen=True)
class Correlation:
    """r with interval over n images; log10_p (two-sided) is NaN where rows are clustered and so not independent."""

    r: float
    low: float
    high: float
    log10_p: float
    n: int
    groups: int | None = None  # the interval is over this many groups of images; None: over images


def pearson_r(a: Column, b: Column) -> float:
    """Σ (a − ā)(b − b̄) / √(Σ (a − ā)² Σ (b − b̄)²), NaN where a side is constant."""
    x, y = complete_rows(a, b)
    if has_no_spread(x) or has_no_spread(y):
        return NAN
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x @ y) / np.sqrt((x @ x) * (y @ y)), -1, 1))


def spearman_r(a: Column, b: Column) -> float:
    """Pearson of average ranks."""
    x, y = complete_rows(a, b)
    return pearson_r(rankdata(x), rankdata(y))


def pearson(
    a: Column, b: Column, *, cluster: Ids | None = None, **options: Unpack[BootstrapOptions]
) -> Correlation:
    """Pearson's r with an interval over images."""
    return _correlation(pearson_r, a, b, cluster, options)


def spearman(
    a: Column, b: Column, *, cluster: Ids | None = None, **options: Unpack[BootstrapOptions]
) -> Correlation:
    """Spearman's r with an interval over images."""
    return _correlation(spearman_r, a, b, cluster, options)


def _pearson_at_once(a: Floats, b: Floats, some: Resamples) -> Floats:
    a, b = a - a.mean(), b - b.mean()  # r stays the same, and no small differences of large sums arise
    n, sum_a, sum_b, aa, bb, ab = (some.sum(term) for term in (1, a, b, a * a, b * b, a * b))
    spread_a, spread_b = n * aa - sum_a**2, n * bb - sum_b**2
    flat = (spread_a <= 1e-12 * n * aa) | (spread_b <= 1e-12 * n * bb)
    return ratio(n * ab - sum_a * sum_b, np.where(flat, 0, np.sqrt(np.abs(spread_a * spread_b))))


def _spearman_at_once(a: Floats, b: Floats, some: Resamples) -> Floats:
    counts = some.of_rows
    x, y, n = _ranks_of_counts(a, counts), _ranks_of_counts(b, counts), counts.sum(1, keepdims=True)
    x, y = (v - (counts * v).sum(1, keepdims=True) / n for v in (x, y))
    xx, yy, xy = ((counts * v).sum(1) for v in (x * x, y * y, x * y))
    return ratio(xy, np.sqrt(xx * yy))


def _ranks_of_counts(values: Floats, counts: Floats) -> Floats:
    """Average ranks of the rows of every resample; those of rows that were not chosen mean nothing."""
    order, starts, group = group_ties(values)
    ties = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks: Floats = (np.cumsum(ties, axis=1) - (ties - 1) / 2)[:, group]
    return ranks


AT_ONCE |= {pearson_r: _pearson_at_once, spearman_r: _spearman_at_once}
BOUNDS[pearson_r] = BOUNDS[spearman_r] = (-1.0, 1.0)


def _correlation(
    r: Statistic, a: Column, b: Column, cluster: Ids | None, options: BootstrapOptions
) -> Correlation:
    found = bootstrap(r, a, b, cluster=cluster, **options)
    independent = cluster is None and options.get("group") is None
    log10_p = _log10_p(found.value, found.n) if independent else NAN
    return Correlation(found.value, found.low, found.high, log10_p, found.n, found.groups)


def _log10_p(r: float, n: int) -> float:
    """Two-sided p of t = r √(ν / (1 − r²)), ν = n − 2: I_{1−r²}(ν/2, ½), in logarithms where p underflows."""
    if n < 3 or np.isnan(r):
        return NAN
    if abs(r) == 1:
        return -np.inf
    a, x = (n - 2) / 2, (1 - r) * (1 + r)
    p = float(betainc(a, 0.5, x))
    if p > 1e-250:
        return float(np.log10(p))
    # I_x(a, ½) = x^a / (a B(a, ½) |r|) · ₂F₁(1, ½; a + 1; −x/r²); two terms of ₂F₁ are enough: the third is 3/t⁴ < 3e-6
    series = 1 - x / r**2 / (2 * a + 2)
    log_p = a * (np.log1p(-r) + np.log1p(r)) - np.log(a * abs(r)) - betaln(a, 0.5) + np.log(series)
    return float(log_p / np.log(10))


@dataclass(frozen=True)
class HeldOut:
    """A threshold set on one half; lift and share reviewed on the other; the lift when set and measured on all."""

    threshold: float
    lift: Estimate
    reviewed: float
    in_sample: float


def auroc(signal: Column, positive: Column) -> float:
    """P(signal of a positive > of a negative) + ½ P(equal): (Σ ranks of positives − p(p + 1)/2) / (p q)."""
    s, y = complete_rows(signal, positive)
    if not np.isin(y, (0, 1)).all():
        raise EquicamError("positive", "0, 1 or NaN", y, "y > threshold")
    p, q = y.sum(), (1 - y).sum()
    return float(ratio(rankdata(s) @ y - p * (p + 1) / 2, p * q))


def _auroc_at_once(signal: Floats, positive: Floats, some: Resamples) -> Floats:
    counts = some.of_rows
    order, starts, _ = group_ties(signal)
    positives, negatives = (
        np.add.reduceat(counts[:, order] * y[order], starts, axis=1) for y in (positive, 1 - positive)
    )
    below = np.cumsum(negatives, axis=1) - negatives / 2
    return ratio((positives * below).sum(1), positives.sum(1) * negatives.sum(1))


AT_ONCE[auroc] = _auroc_at_once
BOUNDS[auroc] = (0.0, 1.0)


def capture(
    signal: Column, badness: Column, *, budget: int | float = 0.10, worst: int | float | None = None
) -> float:
    """Share of the w worst by badness among the k highest by signal, k = round(budget n) ≥ 1; ties in random order.

    w is k, or round(worst n) if `worst` is given.
    """
    s, bad = complete_rows(signal, badness)
    k = _count_reviewed(s.size, budget)
    w = k if worst is None else _count_reviewed(s.size, worst)
    # Ties on both sides break independently, so E[overlap] = Σ P(i among the w worst) P(i among the k highest).
    return float(_probability_in_top(s, k) @ _probability_in_top(bad, w) / w) if s.size else NAN


BOUNDS[capture] = (0.0, 1.0)


def capture_lift(signal: Column, badness: Column, *, budget: int | float = 0.10) -> float:
    """Capture ÷ (k/n): 1 is the lift of a random signal."""
    n = len(complete_rows(signal, badness)[0])
    return capture(signal, badness, budget=budget) * n / _count_reviewed(n, budget)


BOUNDS[capture_lift] = (0.0, np.inf)


def mean_ratio(signal: Column, badness: Column, *, threshold: int | float) -> float:
    """Mean badness where signal ≥ threshold ÷ mean badness of all."""
    s, bad = complete_rows(signal, badness)
    return float(ratio(mean(bad[s >= threshold]), mean(bad)))


def held_out_lift(
    signal: Column,
    badness: Column,
    *,
    quantile: float = 0.90,
    group: Ids | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> HeldOut:
    """mean_ratio on half B at the quantile of half A's signal; halves by one permutation, B resampled at that threshold.

    With groups, the halves are halves of the groups.
    """
    refuse_outside("quantile", quantile)
    kept = is_complete(stack_columns(signal, badness))
    table, codes = complete_rows(signal, badness), cluster_codes(group, kept)
    count = int(codes.max(initial=-1)) + 1
    if count < 2:
        return HeldOut(NAN, Estimate(NAN, NAN, NAN, 0), NAN, NAN)
    order = np.random.default_rng(seed).permutation(count)
    in_first = np.isin(codes, order[: count // 2])
    first, second = table[:, in_first], table[:, ~in_first]
    threshold = float(np.quantile(first[0], quantile))
    lift = bootstrap(
        partial(mean_ratio, threshold=threshold), *second, group=None if group is None else codes[~in_first],
        resamples=resamples, seed=seed,
    )  # fmt: skip
    in_sample = mean_ratio(*table, threshold=float(np.quantile(table[0], quantile)))
    return HeldOut(threshold, lift, float((second[0] >= threshold).mean()), in_sample)


def _count_reviewed(n: int, budget: int | float) -> int:
    """How many are reviewed: k = round(budget n), at least 1."""
    if not 0 < budget <= 1:
        raise EquicamError("budget", "a share in (0, 1]", budget, "budget=0.10")
    return max(1, round(budget * n))


def _probability_in_top(x: Floats, k: int) -> Floats:
    """P(among the k highest) when ties stand in random order."""
    cut = np.partition(x, -k)[-k]
    above, level = np.count_nonzero(x > cut), np.count_nonzero(x == cut)
    chance: Floats = (x > cut) + (k - above) / level * (x == cut)
    return chance
