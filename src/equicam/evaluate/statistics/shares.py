"""Shares of images and agreement of two reviewers."""

import numpy as np
from scipy.stats import beta, binomtest

from equicam.errors import EquicamError
from equicam.evaluate.statistics.columns import NAN, Column, complete_rows, refuse_outside, share_above
from equicam.evaluate.statistics.intervals import Estimate


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
        raise EquicamError("successes", needs=f"a count from 0 to {n}", got=successes, fix="counting again")


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
