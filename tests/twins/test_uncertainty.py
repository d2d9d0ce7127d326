"""Disagreement and PEUM against their definitions, pair by pair and view by view."""

import itertools

import numpy as np
import pytest
import torch

from equicam.core.alignment import Alignment
from equicam.core.uncertainty import correlate_views, peum
from equicam.core.views import Views, disc
from tests.conftest import pictures


def disagreement(maps, region="disc"):
    return correlate_views(maps, region).disagreement


def pairwise_disagreement(maps: np.ndarray, inside: np.ndarray) -> float:
    """1 − mean of r over all pairs, r of a constant map being 0."""
    pixels = [m[inside] for m in maps]
    flat = [p.std() < 1e-8 for p in pixels]
    pairs = list(itertools.combinations(range(len(maps)), 2))
    r = [0.0 if flat[i] or flat[j] else np.corrcoef(pixels[i], pixels[j])[0, 1] for i, j in pairs]
    return 1 - float(np.mean(r))


@pytest.mark.parametrize("region", ["disc", "full"])
def test_disagreement_is_the_mean_over_all_pairs(region):
    maps = pictures(5, 20, 20).abs()  # five views of three images
    maps = torch.cat((maps, maps.flip(0)))[:6]
    maps[2, 1] = 0.25  # a constant map of one view
    assert maps.std() > 0.01
    inside = disc((20, 20), maps.device).numpy() if region == "disc" else np.ones((20, 20), bool)
    found = disagreement(maps, region)
    expected = [pairwise_disagreement(maps[:, i].numpy(), inside) for i in range(3)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert disagreement(maps.float(), region).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("region", ["disc", "full"])
def test_stability_is_the_mean_correlation_with_the_presented_view(region):
    maps = torch.cat((pictures(5, 20, 20).abs(), pictures(5, 20, 20).abs().flip(0)))[:6]
    maps[2, 1] = 0.25  # a constant map of one view
    maps[0, 2] = 0.5  # and of a presented one
    assert maps.std() > 0.01
    inside = disc((20, 20), maps.device).numpy() if region == "disc" else np.ones((20, 20), bool)
    found = correlate_views(maps, region)
    pixels = maps.numpy()[:, :, inside]

    def r(a: np.ndarray, b: np.ndarray) -> float:
        return 0.0 if min(a.std(), b.std()) < 1e-8 else float(np.corrcoef(a, b)[0, 1])

    expected = np.array([[r(pixels[0, i], pixels[t, i]) for i in range(3)] for t in range(6)])
    assert found.with_presented.numpy() == pytest.approx(expected, abs=1e-12)
    assert found.stability.tolist() == pytest.approx(expected[1:].mean(0), abs=1e-12)
    rounded = correlate_views(maps.float(), region).stability
    assert rounded.tolist() == pytest.approx(expected[1:].mean(0), abs=1e-6)
    assert correlate_views(maps[:1]).stability.isnan().all()


def test_one_view_has_nothing_to_disagree_with():
    assert disagreement(pictures(1)).isnan().all()
    assert disagreement(torch.zeros(1, 2, 8, 8)).isnan().all()


def test_equal_views_agree_and_opposite_ones_do_not():
    one = pictures(1)[:, :1]
    assert disagreement(torch.cat((one, one))).item() == pytest.approx(0, abs=1e-12)
    assert disagreement(torch.cat((one, -one))).item() == pytest.approx(2, abs=1e-12)


def test_peum_is_the_weighted_variance_pixel_by_pixel():
    maps = pictures(4)  # four views of three images
    weights = torch.rand(4, 3, dtype=torch.float64)
    weights = weights / weights.sum(0)
    found = peum(maps, Alignment(Views.evenly(4), True, "reflect", weights))
    mean = sum(weights[t][:, None, None] * maps[t] for t in range(4))
    expected = sum(weights[t][:, None, None] * (maps[t] - mean) ** 2 for t in range(4))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
