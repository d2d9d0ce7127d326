"""Means with percentile bootstrap intervals that resample whole images, or whole groups of images.

Images of one group (a patient, a slide, a scene) are alike, so an interval over images is too narrow: with groups, all
images of a group are resampled together (a cluster bootstrap). With few groups such an interval is too narrow, so it is
widened as Student's t widens one over G observations: by t(G − 1) / z · √(G / (G − 1)).

SciPy's bootstrap knows no clusters. Statistics that need only sums over rows are resampled from each image's sums, and
those that need only how often each row was chosen from these counts: all resamples at once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypedDict, Unpack

import numpy as np
from scipy.stats import norm, t

from equicam.errors import EquicamError
from equicam.evaluate.statistics.columns import (
    NAN,
    Column,
    Floats,
    Ids,
    Indices,
    cluster_codes,
    complete_rows,
    is_complete,
    ratio,
    refuse_outside,
    share_above,
    stack_columns,
)

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
        raise EquicamError("weights", needs="numbers ≥ 0", got=w.min(), fix="clipping them at 0")
    return float(ratio(w @ v, w.sum()))


def skill(values: Column | int | float, floors: Column | int | float) -> float:
    """(v̄ − f̄) / (1 − f̄): the share of the way from the floor to 1, of two numbers or two columns."""
    v, f = complete_rows(*np.atleast_1d(values, floors))
    return float(share_above(v.mean(), f.mean())) if v.size else NAN


# Statistics that need only sums over rows: the terms to sum, and the statistic of the sums.
SUMS: dict[Statistic, tuple[Callable[..., tuple[Floats, ...]], Callable[..., Floats]]] = {
    mean: (lambda v: (v, np.ones_like(v)), lambda v, n: ratio(v, n)),
    weighted_mean: (lambda v, w: (w * v, w), lambda wv, w: ratio(wv, w)),
    skill: (lambda v, f: (v, f, np.ones_like(v)), lambda v, f, n: share_above(v / n, f / n)),
}
BOUNDS: dict[Statistic, tuple[float, float]] = {}
"""The least and the largest value of a statistic that has them."""
# Statistics of every resample from its counts [resamples, rows]; the columns come before them.
COUNTS: dict[Statistic, Callable[..., Floats]] = {}


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
        raise EquicamError("resamples", needs="at least one", got=resamples, fix="resamples=2000")
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
        [_resample(statistic, table, codes, chosen) for chosen in _resample_clusters(count, resamples, seed)]
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


def pooled_mean(
    values: Column,
    *,
    weights: Column | None = None,
    cluster: Ids | None = None,
    **options: Unpack[BootstrapOptions],
) -> Estimate:
    """Mean over pairs (image × angle), weighted or not, with an interval over images."""
    if weights is None:
        return bootstrap(mean, values, cluster=cluster, **options)
    return bootstrap(weighted_mean, values, weights, cluster=cluster, **options)


def means_by_bin(
    values: Column,
    by: Column,
    *,
    edges: Sequence[int | float] | Floats,
    cluster: Ids | None = None,
    **options: Unpack[BootstrapOptions],
) -> list[tuple[str, Estimate]]:
    """Mean of values by bins of `by`: [e0, e1), …, the last closed; rows outside the edges are in none."""
    if len(edges) < 2 or not (np.diff(edges) > 0).all():
        raise EquicamError("edges", needs="two or more rising numbers", got=list(edges), fix="[0, 0.5, 1]")
    v, x = stack_columns(values, by)
    bins = np.digitize(x, edges) - (x == edges[-1])  # 1 is the first; NaN lands behind the last
    return [
        (f"{low:g}–{high:g}", pooled_mean(np.where(bins == i, v, NAN), cluster=cluster, **options))
        for i, (low, high) in enumerate(pairwise(edges), 1)
    ]


def _resample_clusters(n: int, resamples: int, seed: int) -> Iterator[Indices]:
    """Samples of n clusters with replacement, some at a time so that memory stays flat."""
    rng, chunk = np.random.default_rng(seed), max(1, 1_000_000 // n)
    for start in range(0, resamples, chunk):
        yield rng.integers(n, size=(min(chunk, resamples - start), n))


def _resample(statistic: Statistic, table: Floats, codes: Indices, chosen: Indices) -> Floats:
    """The statistic of each resample, the fastest way there is."""
    if isinstance(statistic, Gap):
        target, a, b = table
        of_a, of_b = (
            _resample(statistic.statistic, np.stack([signal, target]), codes, chosen) for signal in (a, b)
        )
        return of_a - of_b
    if statistic in SUMS:
        return _resample_sums(statistic, table, codes, chosen)
    if statistic in COUNTS:
        return COUNTS[statistic](*table, _count_chosen(chosen)[:, codes])
    return _resample_rows(statistic, table, codes, chosen)


def _count_chosen(chosen: Indices) -> Floats:
    """How often each cluster was chosen, [resamples, clusters]."""
    m, n = chosen.shape
    often = np.bincount((chosen + n * np.arange(m)[:, None]).ravel(), minlength=m * n)
    return often.reshape(m, n).astype(np.float64)


def _resample_rows(statistic: Statistic, table: Floats, codes: Indices, chosen: Indices) -> Floats:
    """The statistic of each resample, all rows of a cluster as often as it was chosen."""
    order, sizes = np.argsort(codes, kind="stable"), np.bincount(codes)
    starts = np.cumsum(sizes) - sizes
    values = np.empty(len(chosen))
    for i, clusters in enumerate(chosen):
        count = sizes[clusters]
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        values[i] = statistic(*table[:, order[np.repeat(starts[clusters], count) + step]])
    return values


def _resample_sums(statistic: Statistic, table: Floats, codes: Indices, chosen: Indices) -> Floats:
    """The same from each cluster's sums × how often it was chosen."""
    terms, finish = SUMS[statistic]
    sums = np.stack([np.bincount(codes, term) for term in terms(*table)])
    return finish(*(sums @ _count_chosen(chosen).T))
