"""Correlations over images with intervals, and p-values as log10, which does not underflow."""

from dataclasses import dataclass
from typing import Unpack

import numpy as np
from scipy.special import betainc, betaln
from scipy.stats import rankdata

from equicam.evaluate.statistics.columns import (
    NAN,
    Column,
    Floats,
    Ids,
    complete_rows,
    group_ties,
    has_no_spread,
    ratio,
)
from equicam.evaluate.statistics.intervals import (
    BOUNDS,
    COUNTS,
    SUMS,
    BootstrapOptions,
    Estimate,
    Gap,
    Statistic,
    bootstrap,
)


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


def paired_difference(
    statistic: Statistic,
    target: Column,
    signal_a: Column,
    signal_b: Column,
    *,
    cluster: Ids | None = None,
    **options: Unpack[BootstrapOptions],
) -> Estimate:
    """statistic(signal_a, target) − statistic(signal_b, target), both on the same resample of images."""
    return bootstrap(Gap(statistic), target, signal_a, signal_b, cluster=cluster, **options)


def _moments(a: Floats, b: Floats) -> tuple[Floats, ...]:
    a, b = a - a.mean(), b - b.mean()  # r stays the same, and no small differences of large sums arise
    return np.ones_like(a), a, b, a * a, b * b, a * b


def _r_of_moments(n: Floats, a: Floats, b: Floats, aa: Floats, bb: Floats, ab: Floats) -> Floats:
    spread_a, spread_b = n * aa - a * a, n * bb - b * b
    flat = (spread_a <= 1e-12 * n * aa) | (spread_b <= 1e-12 * n * bb)
    return ratio(n * ab - a * b, np.where(flat, 0, np.sqrt(np.abs(spread_a * spread_b))))


SUMS[pearson_r] = (_moments, _r_of_moments)


def _spearman_of_counts(a: Floats, b: Floats, counts: Floats) -> Floats:
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


COUNTS[spearman_r] = _spearman_of_counts
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
