"""Statistics over images: the only place that averages them, computes intervals and tests differences.

A column is a 1-D array; NaN is "undefined", and a row with a NaN in any column is left out of that statistic. Intervals
are percentile bootstraps that resample whole images, because the angles of one image are not independent, and whole
groups where images belong to groups, because images of one patient or scene are not independent either.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaln, log_ndtr
from scipy.stats import beta, binomtest, norm, t, wilcoxon

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
Column = NDArray[np.float64] | NDArray[np.bool_]
Indices = NDArray[np.intp]
Ids = NDArray[Any] | Sequence[str] | Sequence[int]
Statistic = Callable[..., float]
NAN = float("nan")
MIN_GROUPS = 20
"""With fewer groups an interval over groups is unreliable, the more so if they differ in size."""


@dataclass(frozen=True)
class Estimate:
    """A number over n images with its interval."""

    value: float
    low: float
    high: float
    n: int
    groups: int | None = None  # the interval is over this many groups of images; None: over images


@dataclass(frozen=True)
class _Resamples:
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


@dataclass(frozen=True)
class _FromCounts:
    """A statistic of columns, computed for all resamples at once; of the columns as they are, each row counts once."""

    of: Callable[..., Floats]  # (column, …, resamples) → [resamples]

    def __call__(self, *columns: Column | int | float) -> float:
        """Its value over the rows that are defined in every column."""
        table, _ = _complete(*map(np.atleast_1d, columns))
        rows = table.shape[1]
        once = _Resamples(np.ones((1, rows)), np.arange(rows))
        return float(self.of(*table, once)[0]) if rows else NAN


@_FromCounts
def mean(values: Floats, some: _Resamples) -> Floats:
    """Σ v / n."""
    return _ratio(some.sum(values), some.sum(1))


@_FromCounts
def weighted_mean(values: Floats, weights: Floats, some: _Resamples) -> Floats:
    """Σ w v / Σ w."""
    if (weights < 0).any():
        raise EquicamError("weights", "numbers ≥ 0", weights.min(), "clipping them at 0")
    return _ratio(some.sum(weights * values), some.sum(weights))


@_FromCounts
def skill(values: Floats, floors: Floats, some: _Resamples) -> Floats:
    """(v̄ − f̄) / (1 − f̄): the share of the way from the floor to 1, of two numbers or two columns."""
    n = some.sum(1)
    return _share_above(some.sum(values) / n, some.sum(floors) / n)


@_FromCounts
def pearson_r(a: Floats, b: Floats, some: _Resamples) -> Floats:
    """Σ (a − ā)(b − b̄) / √(Σ (a − ā)² Σ (b − b̄)²), NaN where a side is constant."""
    if _has_no_spread(a) or _has_no_spread(b):
        return np.full(len(some.counts), NAN)
    a, b = a - a.mean(), b - b.mean()  # r stays the same, and no small differences of large sums arise
    n, sum_a, sum_b, aa, bb, ab = (some.sum(term) for term in (1, a, b, a * a, b * b, a * b))
    spread_a, spread_b = n * aa - sum_a**2, n * bb - sum_b**2
    flat = (spread_a <= 1e-12 * n * aa) | (spread_b <= 1e-12 * n * bb)
    r = _ratio(n * ab - sum_a * sum_b, np.where(flat, 0, np.sqrt(np.abs(spread_a * spread_b))))
    return np.clip(r, -1, 1)


@_FromCounts
def spearman_r(a: Floats, b: Floats, some: _Resamples) -> Floats:
    """Pearson of average ranks."""
    counts = some.of_rows
    x, y = _ranks_of_counts(a, counts), _ranks_of_counts(b, counts)
    x, y = (v - (counts * v).sum(1, keepdims=True) / counts.sum(1, keepdims=True) for v in (x, y))
    xx, yy, xy = ((counts * v).sum(1) for v in (x * x, y * y, x * y))
    return np.clip(_ratio(xy, np.sqrt(xx * yy)), -1, 1)


@_FromCounts
def auroc(signal: Floats, positive: Floats, some: _Resamples) -> Floats:
    """P(signal of a positive > of a negative) + ½ P(equal)."""
    if not np.isin(positive, (0, 1)).all():
        raise EquicamError("positive", "0, 1 or NaN", positive, "y > threshold")
    counts = some.of_rows
    order, starts, _ = _group_ties(signal)
    positives, negatives = (
        np.add.reduceat(counts[:, order] * y[order], starts, axis=1) for y in (positive, 1 - positive)
    )
    below = np.cumsum(negatives, axis=1) - negatives / 2
    return _ratio((positives * below).sum(1), positives.sum(1) * negatives.sum(1))


def capture(
    signal: Column, badness: Column, *, budget: int | float = 0.10, worst: int | float | None = None
) -> float:
    """Share of the w worst by badness among the k highest by signal, k = round(budget n) ≥ 1; ties in random order.

    w is k, or round(worst n) if `worst` is given.
    """
    (s, bad), _ = _complete(signal, badness)
    k = _count_reviewed(s.size, budget)
    w = k if worst is None else _count_reviewed(s.size, worst)
    # Ties on both sides break independently, so E[overlap] = Σ P(i among the w worst) P(i among the k highest).
    return float(_probability_in_top(s, k) @ _probability_in_top(bad, w) / w) if s.size else NAN


def capture_lift(signal: Column, badness: Column, *, budget: int | float = 0.10) -> float:
    """Capture ÷ (k/n): 1 is the lift of a random signal."""
    n = len(_complete(signal, badness)[0][0])
    return capture(signal, badness, budget=budget) * n / _count_reviewed(n, budget)


def _mean_ratio(signal: Column, badness: Column, *, threshold: int | float) -> float:
    """Mean badness where signal ≥ threshold ÷ mean badness of all."""
    (s, bad), _ = _complete(signal, badness)
    return float(_ratio(mean(bad[s >= threshold]), mean(bad)))


def kappa(a: Column, b: Column) -> float:
    """Cohen's κ = (p_o − p_e) / (1 − p_e) of two reviewers' verdicts as codes; NaN where both give one verdict only."""
    (x, y), _ = _complete(a, b)
    if not x.size:
        return NAN
    codes = np.unique(np.concatenate([x, y]))
    expected = sum(float((x == code).mean() * (y == code).mean()) for code in codes)
    return float(_share_above(float((x == y).mean()), expected))


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


_BOUNDS: dict[Any, tuple[float, float]] = {
    pearson_r: (-1.0, 1.0),
    spearman_r: (-1.0, 1.0),
    auroc: (0.0, 1.0),
    capture: (0.0, 1.0),
    capture_lift: (0.0, np.inf),
}
"""The least and the largest value of a statistic that has them."""


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
    table, kept = _complete(*columns)
    codes = _cluster_codes(cluster, kept)
    n = count = int(codes.max(initial=-1)) + 1
    groups = None
    if group is not None:
        codes = _cluster_codes(group, kept)
        groups = count = int(codes.max(initial=-1)) + 1
    value = float(statistic(*table)) if n else NAN
    if count < 2:  # one image, or one group, says nothing about the next
        return Estimate(value, NAN, NAN, n, groups)
    chunks = _draw_counts(count, resamples, seed)
    found = np.concatenate([_values(statistic, table, _Resamples(counts, codes)) for counts in chunks])
    found = found[~np.isnan(found)]
    if 2 * found.size < resamples:
        return Estimate(value, NAN, NAN, n, groups)
    low, high = (float(one) for one in np.quantile(found, [(1 - level) / 2, (1 + level) / 2]))
    if groups is not None:
        wider = t.ppf((1 + level) / 2, groups - 1) / norm.ppf((1 + level) / 2)
        wider = float(wider * (groups / (groups - 1)) ** 0.5)
        least, most = _bounds(statistic, table)
        low, high = max(least, value - wider * (value - low)), min(most, value + wider * (high - value))
    return Estimate(value, low, high, n, groups)


def _bounds(statistic: Statistic, table: Floats) -> tuple[float, float]:
    """Between which a statistic lies whatever the sample: a mean, between the smallest and the largest value."""
    if statistic in (mean, weighted_mean):
        return float(table[0].min()), float(table[0].max())
    if isinstance(statistic, MeanOverPairs):
        statistic = statistic.statistic
    return _BOUNDS.get(statistic.func if isinstance(statistic, partial) else statistic, (-np.inf, np.inf))


def _draw_counts(n: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each of n clusters is drawn, with replacement; some resamples at a time so that memory stays flat."""
    rng, chunk = np.random.default_rng(seed), max(1, 1_000_000 // n)
    for start in range(0, resamples, chunk):
        chosen = rng.integers(n, size=(min(chunk, resamples - start), n))
        rows = len(chosen)
        often = np.bincount((chosen + n * np.arange(rows)[:, None]).ravel(), minlength=rows * n)
        yield often.reshape(rows, n).astype(np.float64)


def _values(statistic: Statistic, table: Floats, some: _Resamples) -> Floats:
    """The statistic of each resample."""
    if isinstance(statistic, Gap):
        target, a, b = table
        of_a, of_b = (_values(statistic.statistic, np.stack([signal, target]), some) for signal in (a, b))
        return of_a - of_b
    if isinstance(statistic, _FromCounts):
        return statistic.of(*table, some)
    rows = np.arange(table.shape[1])
    return np.array([statistic(*table[:, np.repeat(rows, n)]) for n in some.of_rows.astype(np.intp)])


def proportion(successes: int, n: int, *, level: float = 0.95) -> Estimate:
    """A share with its Wilson interval."""
    if not n:
        return Estimate(NAN, NAN, NAN, 0)
    interval = binomtest(successes, n).proportion_ci(level, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), n)


def upper_bound(successes: int, n: int, *, confidence: float = 0.95) -> float:
    """One-sided Clopper–Pearson: the share p with P(at most this many successes of n | p) = 1 − confidence; 1 if all."""
    if not 0 <= successes <= n:
        raise EquicamError("successes", f"a count from 0 to {n}", successes, "successes=0")
    if not 0 < confidence < 1:
        raise EquicamError("confidence", "a share between 0 and 1", confidence, "confidence=0.95")
    return 1.0 if successes == n else float(beta.ppf(confidence, successes + 1, n - successes))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """A − b of two independent shares (Newcombe): d − √((a − a₋)² + (b₊ − b)²) … d + √((a₊ − a)² + (b − b₋)²)."""
    d = a.value - b.value
    low = d - float(np.hypot(a.value - a.low, b.high - b.value))
    high = d + float(np.hypot(a.high - a.value, b.value - b.low))
    return Estimate(d, low, high, a.n + b.n)


@dataclass(frozen=True)
class Comparison:
    """a − b: the mean with its interval, and a one-sided Wilcoxon test of a > b with its effect sizes."""

    difference: Estimate
    log10_p: float
    rank_biserial: float
    wins: float


def compare(
    a: Column, b: Column, *, group: Ids | None = None, resamples: int = 2000, seed: int = 0
) -> Comparison:
    """Is a above b on the same images? Paired differences d = a − b, one row per image.

    With groups the interval resamples groups, and the test takes the mean difference of each group as one observation.
    It leaves out zeros, is exact for up to 50 distinct |d|, else the normal approximation with tie correction.
    """
    (x, y), kept = _complete(a, b)
    d, codes = x - y, _cluster_codes(group, kept)
    found = bootstrap(mean, d, group=None if group is None else codes, resamples=resamples, seed=seed)
    if not d.size:
        return Comparison(found, NAN, NAN, NAN)
    wins = float((d > 0).mean() + (d == 0).mean() / 2)
    tested = np.bincount(codes, d) / np.bincount(codes)
    ranked = tested[tested != 0]
    n = ranked.size
    if not n:
        return Comparison(found, 0.0, NAN, wins)  # T⁺ = 0 is the only possible value: p = 1
    exact = n == tested.size == np.unique(np.abs(ranked)).size <= 50
    test = wilcoxon(ranked, alternative="greater", method="exact" if exact else "asymptotic")
    # in logarithms, because p underflows
    log10_p = np.log10(test.pvalue) if exact else log_ndtr(-test.zstatistic) / np.log(10)
    return Comparison(found, float(log10_p), float(4 * test.statistic / (n * (n + 1)) - 1), wins)


def bonferroni(log10_ps: Floats) -> Floats:
    """log10 min(1, m p) of the m defined tests."""
    adjusted: Floats = np.minimum(log10_ps + np.log10(np.count_nonzero(~np.isnan(log10_ps)) or 1), 0.0)
    return adjusted


def holm(log10_ps: Floats) -> Floats:
    """log10 min(1, max_{j ≤ i} (m − j) p_(j)), j from 0, of the m defined tests."""
    m = np.count_nonzero(~np.isnan(log10_ps))
    order = np.argsort(log10_ps)[:m]  # NaN sorts last
    adjusted = np.full_like(log10_ps, NAN)
    adjusted[order] = np.minimum(np.maximum.accumulate(log10_ps[order] + np.log10(m - np.arange(m))), 0)
    return adjusted


@dataclass(frozen=True)
class Correlation:
    """r with interval over n images; log10_p (two-sided) is NaN where rows are clustered and so not independent."""

    r: float
    low: float
    high: float
    log10_p: float
    n: int
    groups: int | None = None  # the interval is over this many groups of images; None: over images


def _correlate(
    r: Statistic,
    a: Column,
    b: Column,
    *,
    cluster: Ids | None = None,
    group: Ids | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Correlation:
    """A correlation with an interval over images."""
    found = bootstrap(r, a, b, cluster=cluster, group=group, resamples=resamples, seed=seed)
    log10_p = _log10_p(found.value, found.n) if cluster is None and group is None else NAN
    return Correlation(found.value, found.low, found.high, log10_p, found.n, found.groups)


pearson = partial(_correlate, pearson_r)
spearman = partial(_correlate, spearman_r)


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


def held_out_lift(
    signal: Column,
    badness: Column,
    *,
    quantile: float = 0.90,
    group: Ids | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> HeldOut:
    """_mean_ratio on half B at the quantile of half A's signal; halves by one permutation, B resampled at that threshold.

    With groups, the halves are halves of the groups.
    """
    table, kept = _complete(signal, badness)
    codes = _cluster_codes(group, kept)
    count = int(codes.max(initial=-1)) + 1
    if count < 2:
        return HeldOut(NAN, Estimate(NAN, NAN, NAN, 0), NAN, NAN)
    order = np.random.default_rng(seed).permutation(count)
    in_first = np.isin(codes, order[: count // 2])
    first, second = table[:, in_first], table[:, ~in_first]
    threshold = float(np.quantile(first[0], quantile))
    lift = bootstrap(
        partial(_mean_ratio, threshold=threshold), *second, group=None if group is None else codes[~in_first],
        resamples=resamples, seed=seed,
    )  # fmt: skip
    in_sample = _mean_ratio(*table, threshold=float(np.quantile(table[0], quantile)))
    return HeldOut(threshold, lift, float((second[0] >= threshold).mean()), in_sample)


def _complete(*columns: Column) -> tuple[Floats, NDArray[np.bool_]]:
    """The columns as rows of one array [columns, rows], without those where one has a NaN; and which are left."""
    shapes = [np.shape(c) for c in columns]
    if not columns or len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise EquicamError("columns", "1-D arrays of one length", shapes, "one entry per row")
    table = np.stack([np.asarray(c, dtype=np.float64) for c in columns])
    if np.isinf(table).any():
        raise EquicamError("columns", "finite numbers or NaN", "inf", "NaN where undefined")
    missing: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(table))
    return table[:, ~missing], ~missing


def _cluster_codes(cluster: Ids | None, kept: NDArray[np.bool_]) -> Indices:
    """0 … n − 1 for each kept row: the image it belongs to."""
    if cluster is None:
        return np.arange(np.count_nonzero(kept))
    ids = np.asarray(cluster)
    if ids.shape != kept.shape or ids.dtype.kind in "fc":  # NaN would be one big image
        got = f"{ids.dtype} of shape {ids.shape}"
        raise EquicamError("cluster", f"{kept.size} string or integer ids", got, "one id per row")
    return np.unique(ids[kept], return_inverse=True)[1]


def _group_ties(values: Floats) -> tuple[Indices, Indices, Indices]:
    """The order of the values, where each group of equal ones begins in it, and each row's group."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return np.argsort(values, kind="stable"), np.cumsum(sizes) - sizes, group


def _ranks_of_counts(values: Floats, counts: Floats) -> Floats:
    """Average ranks of the rows of every resample; those of rows that were not chosen mean nothing."""
    order, starts, group = _group_ties(values)
    ties = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks: Floats = (np.cumsum(ties, axis=1) - (ties - 1) / 2)[:, group]
    return ranks


def _ratio(top: Any, bottom: Any) -> Floats:
    """Quotient, NaN where bottom is 0."""
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.asarray(top / np.where(bottom == 0, NAN, bottom))


def _share_above(value: Any, floor: Any) -> Floats:
    """(value − floor) / (1 − floor), NaN where the floor is 1 to rounding."""
    room = 1 - np.asarray(floor)
    return _ratio(value - floor, np.where(np.abs(room) > 1e-12, room, 0))


def _has_no_spread(x: Floats) -> bool:
    """Whether a column of numbers (not a map) has no spread beyond rounding, or fewer than two rows."""
    return x.size < 2 or bool(np.ptp(x) <= 1e-12 * np.abs(x).max())


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
