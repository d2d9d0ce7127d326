"""views="auto" against the obvious: explain with 6, 12 and 24 views and take the first that has settled."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import equicam
from equicam.core.alignment import Alignment
from equicam.core.fusion import AdaptiveViews
from equicam.core.uncertainty import mean_converged, mean_error
from equicam.core.views import Views
from equicam.methods import resolve
from equicam.recipe import Recipe
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded

NETS = {"cnn": (Cnn, "trunk"), "vit": (Vit, "blocks.1.norm1")}


def few(views: int) -> tuple[int, ...]:
    return tuple(range(0, 24, 24 // views))


def explain_slowly(model, picture, method):
    """By number of views: the explanation, each view's own aligned map and its weight."""
    every = {}
    for count in (24, 12, 6):
        found = equicam.explain(model, picture, method=method, views=count)
        for angle in found.views.to_plain():
            if angle not in every:
                one = equicam.explain(
                    model, equicam.rotate(picture, angle), method="grad-cam", target=found.target
                )
                every[angle] = equicam.rotate(one.map, -angle)[0].numpy()
        weights = np.ones(count)
        if "pcf" in method:
            weights = np.where(found.view_kept[0], found.view_confidence[0], 0)
        else:
            assert found.view_kept.all()
        yield count, (found, np.array([every[angle] for angle in found.views.to_plain()]), weights)


def first_enough(slow, tolerance, below):
    """The first number of views whose mean is near enough, or whose map is unstable, and why it is."""
    for count in (6, 12, 24):
        _, maps, weights = slow[count]
        if count == 24:
            return count, "all"
        if weights.sum() == 0:
            continue
        weights = weights / weights.sum()
        size = maps.shape[-1]
        y, x = np.mgrid[:size, :size] - (size - 1) / 2
        disc = x**2 + y**2 <= (size / 2) ** 2
        mean = np.tensordot(weights, maps, 1)
        spread = np.tensordot(weights, (maps - mean) ** 2, 1)
        effective = 1 / (weights**2).sum()
        if effective >= 2 and np.sqrt(spread[disc].mean()) / effective <= tolerance * mean[disc].std():
            return count, "converged"
        others = [np.corrcoef(maps[0][disc], one[disc])[0, 1] for one in maps[1:]]
        if count >= 12 and np.mean(others) + 2 * np.std(others, ddof=1) / np.sqrt(len(others)) < below:
            return count, "unstable"
    raise AssertionError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.0], True),  # constant maps agree
        ([0.0, 0.0], True),
        ([float("nan"), 1.0], False),
        ([float("inf"), 1.0], False),
        ([float("nan"), float("nan")], False),
    ],
)
def test_maps_that_are_not_finite_have_not_converged(values, expected):
    maps = torch.stack([torch.full((1, 9, 9), value, dtype=torch.float64) for value in values])
    alignment = Alignment(Views([0, 180]), True, "reflect", torch.full((2, 1), 0.5, dtype=torch.float64))
    assert mean_converged(maps, alignment, 0.1).tolist() == [expected]


def test_one_view_has_not_converged_whatever_the_tolerance():
    alignment = Alignment(Views([0]), True, "reflect", torch.ones((1, 1), dtype=torch.float64))
    maps = torch.rand(1, 1, 9, 9, dtype=torch.float64)
    assert mean_converged(maps, alignment, 1e9).tolist() == [False]
    assert mean_error(maps, alignment).isnan().all()


OTHERS = (
    ("vit", "equigrad-cam"), ("cnn", "equigrad-cam-out"), ("cnn", "equigrad-cam+pcf"), ("vit", "equigrad-cam+pcf"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("cnn", "equigrad-cam"),
        ("vit", "equigrad-cam-out"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS),
    ],
)
def test_auto_is_the_first_grid_that_has_settled(kind, method):
    build, layer = NETS[kind]
    model, x, counts = equicam.wrap(seeded(build), layer=layer), pictures(2, seed=2), set()
    auto = resolve(Recipe(method, views="auto"))
    stopped, default = set(), AdaptiveViews()
    slow = [dict(explain_slowly(model, picture[None], method)) for picture in x]
    for tolerance, below in (
        (0.04, -1.0),
        (default.tolerance, default.unstable_below),
        (0.3, default.unstable_below),
        (1e-6, 1.0),
    ):
        rule = replace(default, tolerance=tolerance, unstable_below=below)
        mine = replace(auto, fusion=replace(auto.fusion, adaptive=rule))
        found = equicam.explain(model, x, method=mine)
        assert len(found.views.to_plain()) == 24
        for i in range(len(x)):
            count, why = first_enough(slow[i], tolerance, below)
            twin = slow[i][count][0]
            counts.add(count)
            stopped.add(why)
            assert found.view_used[i].nonzero().flatten().tolist() == list(few(count))
            for field in ("map", "raw", "peum", "peum_score", "target", "confidence", "layer_map"):
                torch.testing.assert_close(
                    getattr(found, field)[i], getattr(twin, field)[0], atol=1e-9, rtol=0
                )
            for field in ("view_confidence", "view_flips", "view_kept", "view_maps"):
                some = getattr(found, field)[i][list(few(count))]
                torch.testing.assert_close(some, getattr(twin, field)[0], atol=1e-9, rtol=0)
            assert found.flags[i] == twin.flags[0]
            left = sorted(set(range(24)) - set(few(count)))
            assert found.view_confidence[i][left].isnan().all()
            assert not found.view_kept[i][left].any()
    assert counts == {6, 12, 24} if method == "equigrad-cam" else len(counts) > 1, counts
    assert (
        stopped == {"converged", "unstable", "all"} if method == "equigrad-cam" else "unstable" in stopped
    ), stopped
    assert_alive(equicam.explain(model, x, views="auto").map)


def test_views_are_never_read_twice(cnn, x, monkeypatch):
    read = []
    forward = type(cnn.module).forward
    monkeypatch.setattr(
        type(cnn.module), "forward", lambda self, batch: read.append(len(batch)) or forward(self, batch)
    )
    found = equicam.explain(cnn, x, views="auto")
    assert sum(read) == int(found.view_used.sum())


def test_auto_in_an_evaluation(cnn):
    x = pictures(4, seed=2)
    rows = equicam.evaluate(
        cnn, x, methods=["grad-cam", "equigrad-cam"], scores=["eq", "views", "peum", "disagreement"],
        views="auto", angles=[90, 45],
    ).to_pylist()  # fmt: skip
    rows = sorted(rows, key=lambda row: row["id"])
    found = equicam.explain(cnn, x, views="auto")
    taken = [r["value"] for r in rows if r["score"] == "views"]
    assert taken == found.view_used.sum(1).tolist()
    peum = [r["value"] for r in rows if r["score"] == "peum" and r["region"] == "full"]
    assert peum == pytest.approx(found.peum_score.tolist())
    target = found.target
    turned = equicam.explain(cnn, equicam.rotate(x, 90), views="auto", target=target).map
    eq = [
        r["value"]
        for r in rows
        if (r["score"], r["method"], r["region"], r["angle"]) == ("eq", "equigrad-cam", "full", 90)
    ]
    for i, value in enumerate(eq):
        both = torch.stack((turned[i].flatten(), equicam.rotate(found.map, 90)[i].flatten()))
        assert value == pytest.approx(float(torch.corrcoef(both)[0, 1]), abs=1e-6)


def test_auto_has_its_limits(cnn, x, tmp_path):
    with pytest.raises(equicam.EquicamError, match="fixed grid"):
        equicam.explain(cnn, x, views="auto", as_published=True)
    assert resolve(Recipe("equigrad-cam", views="auto")).fusion.adaptive == AdaptiveViews()
    fine = resolve(Recipe("equigrad-cam-fine", views="auto")).fusion.adaptive
    assert fine == replace(AdaptiveViews(), tolerance=0.12)
    with pytest.raises(equicam.EquicamError, match="same views of every image"):
        equicam.audit(tmp_path, cnn, tmp_path / "run", views="auto")
