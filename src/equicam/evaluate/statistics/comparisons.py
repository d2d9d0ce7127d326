"""Paired comparison of two columns, and correction for several tests; p-values as log10, which does not underflow."""

from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr
from scipy.stats import wilcoxon

from equicam.errors import EquicamError
from equicam.evaluate.statistics.columns import (
    NAN,
    Column,
    Floats,
    Ids,
    cluster_codes,
    complete_rows,
    has_no_spread,
    is_complete,
    stack_columns,
)
from equicam.evaluate.statistics.intervals import Estimate, bootstrap, mean


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
        raise EquicamError("log10_ps", needs="a 1-D array of log10 p ≤ 0", got=log10_ps, fix="np.log10(p)")
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
