"""How well a signal finds the worst images: AUROC, capture and the mean badness of the reviewed."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from scipy.stats import rankdata

from equicam.errors import EquicamError
from equicam.evaluate.statistics.columns import (
    NAN,
    Column,
    Floats,
    Ids,
    cluster_codes,
    complete_rows,
    group_ties,
    is_complete,
    ratio,
    refuse_outside,
    stack_columns,
)
from equicam.evaluate.statistics.intervals import BOUNDS, COUNTS, Estimate, bootstrap, mean


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
        raise EquicamError("positive", needs="0, 1 or NaN", got=y, fix="y > threshold")
    p, q = y.sum(), (1 - y).sum()
    return float(ratio(rankdata(s) @ y - p * (p + 1) / 2, p * q))


def _auroc_of_counts(signal: Floats, positive: Floats, counts: Floats) -> Floats:
    order, starts, _ = group_ties(signal)
    positives, negatives = (
        np.add.reduceat(counts[:, order] * y[order], starts, axis=1) for y in (positive, 1 - positive)
    )
    below = np.cumsum(negatives, axis=1) - negatives / 2
    return ratio((positives * below).sum(1), positives.sum(1) * negatives.sum(1))


COUNTS[auroc] = _auroc_of_counts
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
        raise EquicamError("budget", needs="a share in (0, 1]", got=budget, fix="budget=0.10")
    return max(1, round(budget * n))


def _probability_in_top(x: Floats, k: int) -> Floats:
    """P(among the k highest) when ties stand in random order."""
    cut = np.partition(x, -k)[-k]
    above, level = np.count_nonzero(x > cut), np.count_nonzero(x == cut)
    chance: Floats = (x > cut) + (k - above) / level * (x == cut)
    return chance
