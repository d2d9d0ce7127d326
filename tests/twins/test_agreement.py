"""Agreement and repeatability against their definitions, view by view and pixel by pixel."""

import numpy as np
import pytest
import torch

import equicam
from equicam import Fusion, KeepConfident, Views, uniform
from equicam.core.agreement import HOT_SHARE, OUTLINE_FROM, coarse_grid, to_pixels, word_for
from equicam.core.views import disc
from tests.conftest import Cnn, pictures, seeded

SIDE = 32


def aligned_views(model, x, fusion, target):
    """Each view's own map, aligned: an explanation of every view alone."""
    maps = []
    for transform in fusion.views.transforms:
        view = Views([transform])
        alone = equicam.explain(model, view.act(x)[0], method="grad-cam", target=target)
        maps.append(view.align(alone.map[None], "reflect")[0])
    return torch.stack(maps).numpy()


def slow_agreement(maps, weights, views, size):
    """The weighted share of the views that cover a pixel in whose hottest fifth of the disc it lies."""
    inside = disc(size, torch.device("cpu")).numpy()
    counted, covered = np.zeros(size), np.zeros(size)
    for h, w, transform in zip(maps, weights, views.transforms, strict=True):
        ranked = np.sort(h[inside])[::-1]
        threshold = ranked[int(HOT_SHARE * len(ranked))]
        cover = Views([transform]).coverage(size, like=torch.zeros(0, dtype=torch.float64))[0].numpy()
        counted += w * cover * (h > threshold)
        covered += w * cover
    return np.divide(counted, covered, out=np.zeros(size), where=covered > 0)


@pytest.mark.parametrize("weigh", [uniform, KeepConfident(0.0)], ids=["uniform", "pcf"])
@pytest.mark.parametrize("views", [Views.evenly(7), Views.evenly(8, start=10)], ids=["7", "8 off 0°"])
def test_agreement_is_the_share_of_views_in_whose_hottest_fifth_a_pixel_lies(weigh, views):
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(3, SIDE, SIDE)
    fusion = Fusion(views, "features", "features", weigh)
    e = equicam.explain(model, x, method=fusion)
    maps = aligned_views(model, x, fusion, e.target)
    assert maps.std() > 0.01
    assert coarse_grid((SIDE, SIDE)) == (SIDE, SIDE)  # so that nothing is pooled here
    for i in range(len(x)):
        kept = e.view_kept[i].numpy()
        weights = np.ones(len(views)) if weigh is uniform else kept * e.view_confidence[i].numpy()
        expected = slow_agreement(maps[:, i], weights / weights.sum(), views, (SIDE, SIDE))
        assert expected.std() > 0.05
        assert e.agreement[i].numpy() == pytest.approx(expected, abs=1e-9)
        inside = disc((SIDE, SIDE), torch.device("cpu")).numpy()
        shown = e.map[i].numpy()
        ranked = np.sort(shown[inside])[::-1]
        outlined = (expected >= OUTLINE_FROM - 1e-6) & (shown > ranked[int(HOT_SHARE * len(ranked))])
        assert (e.coarse_outline[i].numpy() == outlined).all()
        area = outlined[inside].mean() if kept.sum() >= 6 else np.nan
        assert e.agreed_area[i].item() == pytest.approx(area, nan_ok=True)


@pytest.mark.parametrize("at", ["features", "combined", "map"])
@pytest.mark.parametrize("views", [Views.evenly(7), Views.evenly(8, start=10)], ids=["7", "8 off 0°"])
def test_repeatability_is_the_correlation_of_the_maps_of_two_halves(at, views):
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(3, SIDE, SIDE)
    e = equicam.explain(model, x, method=Fusion(views, at, at))
    halves = [
        equicam.explain(model, x, method=Fusion(Views(views.transforms[k::2]), at, at), target=e.target).raw
        for k in (0, 1)
    ]
    inside = disc((SIDE, SIDE), torch.device("cpu"))
    for i in range(len(x)):
        first, second = (half[i][inside].numpy() for half in halves)
        assert min(first.std() / first.max(), second.std() / second.max()) > 0.01
        assert e.repeatability[i].item() == pytest.approx(np.corrcoef(first, second)[0, 1], abs=1e-9)


def test_a_half_that_keeps_no_view_and_a_single_view_have_no_repeatability():
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(3, SIDE, SIDE)
    alone = equicam.explain(model, x, method="grad-cam")
    assert alone.repeatability.isnan().all()
    assert alone.agreed_area.isnan().all()
    none = equicam.explain(
        model, x, method=Fusion(Views.evenly(8), "features", "features", KeepConfident(1.0))
    )
    assert not none.view_kept.any()
    assert none.repeatability.isnan().all()


def test_an_outline_at_pixel_size_has_the_area_of_the_coarse_one():
    coarse = torch.zeros(1, 56, 56, dtype=torch.bool)
    coarse[:, 10:30, 20:44] = True
    assert to_pixels(coarse, (224, 224)).float().mean().item() == pytest.approx(
        coarse.float().mean().item(), rel=0.01
    )


def test_the_word_of_a_map():
    assert word_for(0.02, frozenset()) == "agreed"
    assert word_for(0.005, frozenset()) == "split"
    assert word_for(float("nan"), frozenset()) is None
    assert word_for(0.02, frozenset({"blank-views"})) == "blank"


def test_the_coarse_grid_of_an_outline_fits_512_bytes():
    for size in [(32, 32), (224, 224), (518, 518), (225, 300), (64, 640), (1024, 64)]:
        height, width = coarse_grid(size)
        assert height * width <= 4096
        assert max(height, width) > 32 or max(size) <= 32
