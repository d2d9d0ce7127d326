"""Every statistic against SciPy, sklearn or a slow twin; intervals against a simulation that can fail."""

from dataclasses import astuple
from functools import partial
from itertools import permutations, product
from math import isnan, log10, sqrt

import numpy as np
import pytest
import scipy.stats
from scipy.integrate import quad
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from equicam.errors import EquicamError
from equicam.evaluate.statistics import (
    Gap,
    _mean_ratio,
    auroc,
    bonferroni,
    bootstrap,
    capture,
    capture_lift,
    compare,
    difference,
    held_out_lift,
    holm,
    kappa,
    mean,
    pearson,
    pearson_r,
    proportion,
    skill,
    spearman,
    spearman_r,
    weighted_mean,
)

NAN = float("nan")
EMPTY = np.array([])


def numbers(*values):
    return np.array(values, dtype=np.float64)


def unpack(found):
    """The fields of a result without groups, which must have none."""
    *fields, groups = astuple(found)
    assert groups is None
    return tuple(fields)


def noise(n, seed=0, *, nan=0.0):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=n)
    values[rng.random(n) < nan] = NAN
    return values


def plain(statistic):
    """The same, but computed resample by resample."""
    return lambda *columns: statistic(*columns)


# Means


def test_means_leave_nan_out():
    assert mean(numbers(1, NAN, 3)) == 2
    assert weighted_mean(numbers(1, 5, NAN, 9), numbers(3, 1, 7, NAN)) == 2
    assert skill(numbers(0.8, 0.6, 0.1), numbers(0.3, 0.1, NAN)) == pytest.approx(0.5 / 0.8)
    assert skill(0.98, 0.2) == pytest.approx(0.975)
    assert mean(np.array([True, False])) == 0.5
    assert _mean_ratio(numbers(1, 2, 3, NAN), numbers(1, 3, 5, 9), threshold=2) == 4 / 3


@pytest.mark.parametrize(
    "value",
    [
        mean(EMPTY),
        mean(numbers(NAN, NAN)),
        weighted_mean(numbers(1, 2), numbers(0, 0)),
        skill(0.5, 1.0),
        skill(0.5, 1 - 2**-53),
        skill(numbers(0.5, 0.6), numbers(0.9, 1.1)),
        skill(EMPTY, EMPTY),
        auroc(numbers(1, 2), numbers(1, 1)),
        auroc(numbers(1, 2), numbers(0, 0)),
        pearson_r(numbers(1, 2, 3), numbers(0.1, 0.1, 0.1)),
        pearson_r(numbers(1), numbers(1)),
        spearman_r(EMPTY, EMPTY),
        capture(EMPTY, EMPTY),
        capture_lift(EMPTY, EMPTY),
        _mean_ratio(numbers(1, 2), numbers(1, 2), threshold=3),
        _mean_ratio(numbers(1, 2), numbers(0, 0), threshold=1),
        kappa(numbers(1, 1), numbers(1, 1)),
        kappa(EMPTY, EMPTY),
        held_out_lift(numbers(1), numbers(1)).lift.value,
    ],
)
def test_undefined_is_nan(value):
    assert isnan(value)


# Bootstrap


def slow_bootstrap(statistic, columns, cluster, *, resamples, level, seed):
    rows = {i: np.flatnonzero(np.asarray(cluster) == i) for i in sorted(set(cluster))}
    names = list(rows)
    drawn = np.random.default_rng(seed).integers(len(names), size=(resamples, len(names)))
    values = []
    for draw in drawn:
        picked = [row for i in draw for row in rows[names[i]]]
        values.append(statistic(*(c[picked] for c in columns)))
    return np.percentile(values, [50 * (1 - level), 50 * (1 + level)])


IDS = ["b", "a", "c", "a", "b", "e", "c", "c", "d", "e", "f", "a"]
PATIENTS = np.array([3, 1, 1, 2, 3, 3, 2, 1, 4, 4, 5, 5])
DRAWS = {"resamples": 300, "level": 0.8, "seed": 7}
OF_IDS = pytest.mark.parametrize(
    ("statistic", "columns"),
    [
        (mean, [noise(12)]),
        (weighted_mean, [noise(12), np.abs(noise(12, 1))]),
        (skill, [noise(12), noise(12, 1) / 9]),
        (pearson_r, [noise(12), noise(12, 1)]),
        (spearman_r, [noise(12).round(), noise(12, 1)]),
        (lambda a, b: float(np.median(a) * b.max()), [noise(12), noise(12, 1)]),
    ],
)


@OF_IDS
@pytest.mark.parametrize("cluster", [IDS, np.array([ord(i) for i in IDS]), np.array(IDS, dtype=object)])
def test_bootstrap_is_the_slow_loop(statistic, columns, cluster):
    found = bootstrap(statistic, *columns, cluster=cluster, **DRAWS)
    low, high = slow_bootstrap(statistic, columns, IDS, **DRAWS)
    assert low < high
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)
    assert (found.value, found.n) == (pytest.approx(statistic(*columns)), 6)


@OF_IDS
def test_with_groups_the_slow_loop_draws_groups(statistic, columns):
    found = bootstrap(statistic, *columns, cluster=IDS, group=PATIENTS, **DRAWS)
    low, high = slow_bootstrap(statistic, columns, list(PATIENTS), **DRAWS)
    assert low < high
    # wider than the percentiles, as Student's t with 4 degrees of freedom is wider than the normal distribution
    wider = scipy.stats.t.ppf(0.9, 4) / scipy.stats.norm.ppf(0.9) * sqrt(5 / 4)
    assert wider > 1.3
    value = statistic(*columns)
    wide = np.array([value - wider * (value - low), value + wider * (high - value)])
    if statistic in (pearson_r, spearman_r):
        wide = wide.clip(-1, 1)
    elif statistic in (mean, weighted_mean):
        wide = wide.clip(columns[0].min(), columns[0].max())
    assert (found.low, found.high) == pytest.approx(tuple(wide), rel=1e-12)
    assert (found.value, found.n, found.groups) == (pytest.approx(value), 6, 5)
    by_image = bootstrap(statistic, *columns, cluster=IDS, **DRAWS)
    assert (by_image.groups, by_image.value) == (None, found.value)
    assert by_image.low != found.low


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("statistic", "rows", "of"),
    [
        (mean, 3000, lambda columns: columns[:1]),
        (weighted_mean, 3000, lambda columns: columns[:2]),
        (skill, 3000, lambda columns: columns[:2]),
        (spearman_r, 300, lambda columns: columns[:2]),
        (auroc, 300, lambda columns: (columns[0], np.where(np.isnan(columns[1]), NAN, columns[1] > 0.5))),
    ],
)
def test_counts_and_rows_draw_the_same_images(statistic, rows, of, paired):
    columns = of([np.abs(noise(rows, i, nan=0.05)).round(2 if rows < 1000 else 9) for i in range(2)])
    cluster = np.arange(rows) // 2 if paired else None
    # 800 resamples of 3,000 rows are more than one chunk of draws
    find = partial(bootstrap, cluster=cluster, resamples=800 if rows > 1000 else 200, seed=3)
    fast, slow = find(statistic, *columns), find(plain(statistic), *columns)
    assert unpack(fast) == pytest.approx(unpack(slow), rel=1e-12)
    assert fast.low < fast.value < fast.high
    assert find(statistic, *columns, seed=4).low != fast.low


def test_images_with_a_defined_row_count_and_nothing_one_image_or_one_group_has_no_interval():
    some = bootstrap(mean, numbers(1, NAN, NAN, 4, 5), cluster=["a", "a", "b", "c", "c"], resamples=50)
    for found, *expected in (
        (some, 10 / 3, 1, 4.5, 2),
        (bootstrap(mean, EMPTY), NAN, NAN, NAN, 0),
        (bootstrap(mean, numbers(NAN)), NAN, NAN, NAN, 0),
        (bootstrap(mean, numbers(1, 2), cluster=["a", "a"]), 1.5, NAN, NAN, 1),
        (proportion(0, 0), NAN, NAN, NAN, 0),
    ):
        assert unpack(found) == pytest.approx(tuple(expected), nan_ok=True)
    found = bootstrap(mean, numbers(1, 2, 3), group=["a", "a", "a"])
    assert (found.value, found.n, found.groups) == (2, 3, 1)
    assert isnan(found.low)


def test_undefined_resamples_are_left_out_until_they_are_the_most():
    signal = np.arange(30.0)
    few, rare = (signal == 25).astype(float), (signal % 10 == 5).astype(float)
    found = bootstrap(auroc, signal, rare, resamples=400)
    assert 0 <= found.low < found.value < found.high <= 1
    # P(the one positive is drawn) = 1 − (29/30)^30 = .64: defined often enough
    assert not isnan(bootstrap(auroc, signal, few, resamples=400).low)
    undefined = bootstrap(lambda v: 1.0 if len(set(v)) == 30 else NAN, signal, resamples=100)
    assert unpack(undefined) == pytest.approx((1, NAN, NAN, 30), nan_ok=True)


def test_intervals_by_image_cover_and_those_by_pair_do_not():
    rng = np.random.default_rng(11)
    images, angles, runs = 60, 7, 300
    cluster = np.repeat(np.arange(images), angles)
    hit = {"image": 0, "pair": 0}
    for seed in range(runs):
        pairs = rng.normal(size=images)[cluster] + 0.5 * rng.normal(size=images * angles)
        for name, ids in (("image", cluster), ("pair", None)):
            found = bootstrap(mean, pairs, cluster=ids, resamples=300, seed=seed)
            hit[name] += found.low <= 0 <= found.high
    assert 0.91 <= hit["image"] / runs <= 0.98
    assert hit["pair"] / runs < 0.70


# Groups


def test_intervals_by_group_cover_and_those_by_image_do_not():
    """Means, paired differences and correlations of images of 40 patients that differ from each other."""
    rng = np.random.default_rng(5)
    patients, each, runs = 40, 12, 250
    group = np.repeat(np.arange(patients), each)
    hit = dict.fromkeys(product(("mean", "difference", "correlation"), ("group", "image")), 0)
    for seed in range(runs):
        a, b, c = (rng.normal(size=patients)[group] + rng.normal(size=patients * each) for _ in range(3))
        for name, of in (("group", group), ("image", None)):
            options = {"group": of, "resamples": 250, "seed": seed}
            for what, found in (
                ("mean", bootstrap(mean, a, **options)),
                ("difference", compare(a, b, **options).difference),
                ("correlation", pearson(a, c, **options)),
            ):
                hit[what, name] += found.low <= 0 <= found.high
    for (what, name), count in hit.items():
        assert (0.90 <= count / runs <= 0.98) if name == "group" else (count / runs < 0.75), (what, name)


SIZES = (7, 8, 10, 12, 12, 14, 16, 16, 16, 20, 21, 21, 23, 26, 26, 29, 30, 32, 33, 33, 35, 35, 49, 56)
"""Images of the 24 test patients of BreakHis at 400×, as an example of a real study."""


@pytest.mark.parametrize("between", [0.1, 0.5])
def test_intervals_over_few_groups_of_different_size_cover(between):
    """`between` is the share of the variance between patients. Percentiles alone cover .93 here."""
    rng, runs = np.random.default_rng(3), 800
    group = np.repeat(np.arange(len(SIZES)), SIZES)
    hit = 0
    for seed in range(runs):
        of_patients = sqrt(between) * rng.normal(size=len(SIZES))[group]
        values = of_patients + sqrt(1 - between) * rng.normal(size=len(group))
        found = bootstrap(mean, values, group=group, resamples=400, seed=seed)
        hit += found.low <= 0 <= found.high
    assert 0.92 <= hit / runs <= 0.97, hit / runs


def test_an_interval_over_groups_stays_within_what_is_possible():
    group, right = np.arange(40) // 10, np.array([1.0] * 39 + [0.0])
    found = bootstrap(mean, right, group=group, resamples=200)
    assert found.groups == 4
    assert 0 <= found.low < found.value < found.high <= 1
    signal = np.concatenate([np.arange(20), np.arange(20)]).astype(float)
    found = pearson(signal, signal + 1e-3 * noise(40), group=np.arange(40) // 20, resamples=200)
    assert found.high <= 1
    badness, signal, group = noise(60), noise(60, 3), np.arange(60) // 12
    found, unbounded = (
        bootstrap(of, signal, badness, group=group, resamples=200)
        for of in (capture_lift, plain(capture_lift))
    )
    assert found.value == unbounded.value > 0 > unbounded.low
    assert (found.low, found.high) == (0, unbounded.high)


def test_the_paired_test_takes_a_group_as_one_observation():
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(24), 30)
    difference_of_groups = rng.normal(0.3, 1, size=24)
    d = difference_of_groups[group] + 0.1 * rng.normal(size=len(group))
    by_image, by_group = compare(d, 0 * d), compare(d, 0 * d, group=group)
    means = np.array([d[group == g].mean() for g in range(24)])
    p = scipy.stats.wilcoxon(means, alternative="greater").pvalue
    assert by_group.log10_p == pytest.approx(log10(p))
    assert by_image.log10_p < by_group.log10_p - 5
    assert by_group.difference == bootstrap(mean, d, group=group)
    assert (by_group.difference.n, by_group.difference.groups) == (720, 24)


def test_clustered_or_grouped_correlations_have_no_p():
    image = np.repeat(noise(40), 7)
    a, b = image + 0.1 * noise(280, 1), np.repeat(noise(40, 2), 7) + 0.1 * noise(280, 3)
    of_image = np.repeat(np.arange(40), 7)
    apart, together = pearson(a, b), pearson(a, b, cluster=of_image, resamples=500)
    grouped = pearson(a, b, group=of_image // 5)
    assert (apart.n, together.n, together.r, grouped.groups) == (280, 40, apart.r, 8)
    assert [isnan(one.log10_p) for one in (apart, together, grouped)] == [False, True, True]
    assert together.high - together.low > 1.8 * (apart.high - apart.low)


# Shares


def test_proportion_is_wilson():
    z, p, n = scipy.stats.norm.ppf(0.95), 5 / 40, 40
    centre, half = p + z**2 / (2 * n), z * sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    interval = ((centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n))
    assert unpack(proportion(5, 40, level=0.9)) == pytest.approx((p, *interval, n), abs=1e-12)
    assert (proportion(0, 7).low, proportion(10, 10).high) == (0, 1)


def test_difference_is_newcombes():
    """His first worked example: 56/70 against 48/80, by the score method without continuity correction."""
    found = difference(proportion(56, 70), proportion(48, 80))
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    none = difference(proportion(0, 10), proportion(0, 20))
    assert none.low < 0 < none.high
    assert isnan(difference(proportion(1, 2), proportion(0, 0)).low)


def test_the_difference_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    a, b = rng.binomial(40, 0.5, 1500), rng.binomial(15, 0.2, 1500)
    found = [difference(proportion(int(x), 40), proportion(int(y), 15)) for x, y in zip(a, b, strict=True)]
    assert 0.93 < np.mean([d.low <= 0.3 <= d.high for d in found]) < 0.98


def test_kappa_is_that_of_sklearn_and_at_its_ends_by_hand():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        a = rng.integers(0, 5, 80)
        b = np.where(rng.random(80) < 0.6, a, rng.integers(0, 5, 80))
        assert kappa(a.astype(float), b.astype(float)) == pytest.approx(cohen_kappa_score(a, b), abs=1e-12)
    a = numbers(0, 1, 2, 0)
    assert kappa(a, a) == 1
    assert kappa(numbers(0, 1, 0, 1), numbers(1, 0, 1, 0)) == -1
    assert kappa(numbers(0, 0, 1, 1), numbers(0, 1, 0, 1)) == 0


# Tests


@pytest.mark.parametrize("shift", [-0.5, 0.0, 0.3, 2.0])
def test_compare_has_scipys_wilcoxon(shift):
    of_noise = {"exact": [(1, 9), (12, 9), (50, 9)], "asymptotic": [(51, 9), (40, 1), (400, 1)]}
    ties_or_zeros = [("asymptotic", numbers(*d), numbers(0, 0, 0, 0)) for d in ((1, 1, 2, 3), (0, 1, 2, 3))]
    for method, a, b in [
        *((m, (noise(n) + shift).round(k), noise(n, 1).round(k)) for m in of_noise for n, k in of_noise[m]),
        *ties_or_zeros,
    ]:
        options = {"alternative": "greater", "method": method, "correction": False}
        expected = log10(scipy.stats.wilcoxon(a, b, **options).pvalue)
        assert compare(a, b, resamples=50).log10_p == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_compare_does_not_underflow():
    found = compare(np.arange(1.0, 10_001), np.zeros(10_000), resamples=10)
    z = (10_000 * 10_001 / 4) / (10_000 * 10_001 * 20_001 / 24) ** 0.5
    # Mills: log sf(z) ≈ −z²/2 − log(z √2π) + log(1 − 1/z²)
    tail = -(z**2) / 2 - np.log(z * (2 * np.pi) ** 0.5) + np.log1p(-(z**-2))
    assert found.log10_p == pytest.approx(tail / np.log(10), rel=1e-9)
    assert found.log10_p < -1000


def test_compare_by_hand():
    found = compare(numbers(3, 5, 1, 4, NAN, 2), numbers(1, 1, 2, 4, 0, NAN))
    assert found.difference == bootstrap(mean, numbers(2, 4, -1, 0))
    assert found.rank_biserial == pytest.approx((2 + 3 - 1) / 6)  # ranks of the non-zero: 2, 3, 1
    assert found.wins == (2 + 0.5) / 4
    equal = compare(numbers(1, 2, 3), numbers(1, 2, 3))
    assert (equal.difference.value, equal.log10_p, equal.wins) == (0, 0, 0.5)
    assert isnan(equal.rank_biserial)
    none = compare(numbers(NAN), numbers(1))
    assert none.difference.n == 0
    assert all(isnan(v) for v in (*astuple(none.difference)[:3], *astuple(none)[1:]))


def test_corrections_by_hand():
    ps = numbers(0.01, NAN, 0.04, 0.03, 0.005)
    assert 10 ** bonferroni(np.log10(ps)) == pytest.approx([0.04, NAN, 0.16, 0.12, 0.02], nan_ok=True)
    assert 10 ** holm(np.log10(ps)) == pytest.approx([0.03, NAN, 0.06, 0.06, 0.02], nan_ok=True)
    assert holm(numbers(-400, -500, -0.1)) == pytest.approx([-400 + log10(2), -500 + log10(3), -0.1])
    assert bonferroni(numbers(-0.1, -0.2, -9)).tolist() == [0, 0, -9 + np.log10(3)]
    for correct in (bonferroni, holm):
        assert np.isnan(correct(numbers(NAN, NAN))).all()
        assert correct(EMPTY).size == 0


# Correlations


@pytest.mark.parametrize(
    ("ours", "theirs"), [(pearson, scipy.stats.pearsonr), (spearman, scipy.stats.spearmanr)]
)
@pytest.mark.parametrize(("n", "digits", "share"), [(3, 9, 0.5), (10, 9, 0.2), (200, 1, 0.3), (500, 9, 0.99)])
def test_correlations_are_scipys(ours, theirs, n, digits, share):
    a, b = np.round(noise(n), digits), np.round(share * noise(n) + (1 - share) * noise(n, 1), digits)
    found, reference = ours(a, b, resamples=20), theirs(a, b)
    assert found.n == n
    assert found.r == pytest.approx(reference.statistic, abs=1e-12)
    if reference.pvalue > 1e-290:
        assert found.log10_p == pytest.approx(log10(reference.pvalue), rel=1e-8, abs=1e-9)
    else:
        assert found.log10_p < -290


@pytest.mark.parametrize(
    ("n", "r"), [(900, 0.85), (3000, 0.8), (10_000, 0.6), (50, 1 - 1e-14), (40_000, -0.2)]
)
def test_a_correlations_p_does_not_underflow(n, r):
    """log p = log 2 + log f(t) + log ∫ f(s)/f(t) ds, by quadrature."""
    x, y = noise(n), noise(n, 1)
    x -= x.mean()
    y -= y.mean()
    y -= x * (x @ y) / (x @ x)
    x, y = x / (x @ x) ** 0.5, y / (y @ y) ** 0.5
    found = pearson(x, r * x + ((1 - r) * (1 + r)) ** 0.5 * y, resamples=2)
    nu, r = n - 2, abs(found.r)
    t = r * (nu / ((1 - r) * (1 + r))) ** 0.5
    scale = t / nu + 1 / t
    rest, _ = quad(
        lambda u: np.exp(-(nu + 1) / 2 * np.log1p((2 * t * u + u * u) / (nu + t * t))), 0, 200 * scale
    )
    expected = (np.log(2) + scipy.stats.t.logpdf(t, nu) + np.log(rest)) / np.log(10)
    assert found.log10_p < -200
    assert found.log10_p == pytest.approx(expected, rel=1e-7)


def test_a_correlations_edges():
    assert pearson(numbers(1, 2, 3), numbers(2, 4, 6)).log10_p == -np.inf
    assert isnan(pearson(numbers(1, 2), numbers(2, 4)).log10_p)
    assert isnan(spearman(numbers(1, 2, 3), numbers(2, 2, 2)).log10_p)
    assert pearson(numbers(1, 2, NAN, 4), numbers(1, 3, 9, NAN)).n == 2


# Triage


@pytest.mark.parametrize("digits", [0, 1, 9])
def test_auroc_is_sklearns(digits):
    positive = noise(300, 1) > 0.8
    signal = np.round(noise(300) + positive, digits)
    assert auroc(signal, positive) == pytest.approx(roc_auc_score(positive, signal), abs=1e-12)
    found = bootstrap(auroc, signal, positive, resamples=100)
    assert found.low < auroc(signal, positive) < found.high


def captured_in_order(signal, badness, k, order):
    first = [sorted(order[i], key=lambda j: -column[j])[:k] for i, column in enumerate((signal, badness))]
    return len(set(first[0]) & set(first[1])) / k


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [0.01, 0.4, 0.6, 1])
def test_capture_is_the_mean_over_all_orders_of_ties(seed, budget):
    rng = np.random.default_rng(seed)
    signal, badness = rng.integers(0, 3, 5) / 2, rng.integers(0, 3, 5) / 2
    k = max(1, round(budget * 5))
    orders = list(permutations(range(5)))
    slow = np.mean([captured_in_order(signal, badness, k, pair) for pair in product(orders, orders)])
    assert capture(signal, badness, budget=budget) == pytest.approx(slow)
    assert capture_lift(signal, badness, budget=budget) == pytest.approx(slow * 5 / k)


def test_capture_by_hand():
    badness = np.arange(100.0)
    for signal, captured in ((badness, 1), (-badness, 0), (np.zeros(100), 0.1)):
        assert capture(signal, badness) == pytest.approx(captured)
        assert capture_lift(signal, badness) == pytest.approx(10 * captured)
    assert capture(np.append(badness, NAN), np.append(badness, 1e9)) == 1
    assert bootstrap(capture_lift, badness, badness, resamples=50).n == 100


def test_held_out_lift_is_the_audit_step_by_step():
    badness = np.abs(noise(401))
    signal = badness + 0.5 * noise(401, 1)
    signal[7] = NAN
    found = held_out_lift(signal, badness, resamples=200, seed=5)
    kept = np.delete(np.arange(401), 7)
    order = np.random.default_rng(5).permutation(400)
    half_a, half_b = kept[order[:200]], kept[order[200:]]
    threshold = np.percentile(signal[half_a], 90)
    chosen = [i for i in half_b if signal[i] >= threshold]
    assert found.threshold == threshold
    assert found.reviewed == len(chosen) / 200
    assert found.lift.value == pytest.approx(badness[chosen].mean() / badness[half_b].mean())
    assert found.lift.low < found.lift.value < found.lift.high
    assert found.lift.n == 200
    top = kept[signal[kept] >= np.percentile(signal[kept], 90)]
    assert found.in_sample == pytest.approx(badness[top].mean() / badness[kept].mean())
    assert found.in_sample > 1.5
    assert held_out_lift(numbers(1, 2), numbers(1, 2)).lift.n == 1


def test_a_threshold_is_held_out_by_group():
    """Images that repeat within a group are on one side of the split."""
    group = np.repeat(np.arange(30), 4)
    signal, badness = noise(30)[group], np.abs(noise(30, 1))[group]
    found = held_out_lift(signal, badness, group=group, resamples=50, seed=1)
    half = np.random.default_rng(1).permutation(30)[:15]
    assert found.threshold == pytest.approx(np.quantile(signal[np.isin(group, half)], 0.9))
    assert (found.lift.n, found.lift.groups) == (60, 15)


@pytest.mark.parametrize("statistic", [pearson_r, spearman_r, capture, auroc])
def test_a_gap_is_of_one_draw(statistic):
    target = noise(200)
    good, poor = target + 0.5 * noise(200, 1), target + 2 * noise(200, 2)
    target = target > 0 if statistic is auroc else target
    found, slow = (
        bootstrap(Gap(of), target, good, poor, resamples=100) for of in (statistic, plain(statistic))
    )
    assert found.value == statistic(good, target) - statistic(poor, target)
    assert found.low < found.value < found.high
    assert unpack(found) == pytest.approx(unpack(slow), rel=1e-10)
    assert unpack(bootstrap(Gap(statistic), target, good, good.copy(), resamples=50)) == (0, 0, 0, 200)


# Errors


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: pearson_r(numbers(1, 2), numbers(1)), "columns"),
        (lambda: mean(np.ones((2, 2))), "columns"),
        (lambda: bootstrap(mean), "columns"),
        (lambda: mean(numbers(1, np.inf)), "columns"),
        (lambda: weighted_mean(numbers(1), numbers(-1)), "weights"),
        (lambda: bootstrap(mean, numbers(1, 2), cluster=["a"]), "cluster"),
        (lambda: bootstrap(mean, numbers(1, 2), cluster=numbers(1, NAN)), "cluster"),
        (lambda: capture(numbers(1), numbers(1), budget=0), "budget"),
        (lambda: capture_lift(numbers(1), numbers(1), budget=1.5), "budget"),
        (lambda: auroc(numbers(1, 2), numbers(0, 2)), "positive"),
    ],
)
def test_what_cannot_be_computed_is_refused(call, what):
    with pytest.raises(EquicamError) as error:
        call()
    assert error.value.what == what
