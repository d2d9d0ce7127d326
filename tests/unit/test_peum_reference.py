"""Where a PEUM stands among reference images: against the obvious, and where there is no reference."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import equicam
from equicam import Views, peum_reference
from equicam.core.transforms import Transform
from equicam.peum_reference import PeumPlace, has_reference, place_peum
from equicam.recipe import Recipe
from tests.conftest import Cnn, assert_alive, pictures, seeded

ROOT = Path(__file__).parents[2]
TABLE = json.loads(Path(peum_reference.__file__).with_suffix(".json").read_text())
NETWORK, REFERENCE = next(iter(TABLE.items()))
COUNTS = [int(count) for count in REFERENCE["quantiles"]]


def slow_share(score: float, quantiles: list[float]) -> float:
    """Walk through the percents until one is passed."""
    if score <= quantiles[0]:
        return 0.0
    for percent in range(100):
        low, high = quantiles[percent], quantiles[percent + 1]
        if low < score <= high:
            return (percent + (score - low) / (high - low)) / 100
    return 1.0


def slow_quantiles(views: int) -> list[float]:
    known = {int(count): np.array(values) for count, values in REFERENCE["quantiles"].items()}
    few = max(count for count in known if count <= views)
    many = min(count for count in known if count >= views)
    if few == many:
        return list(known[few])
    slope = (known[many] - known[few]) / (1 / many - 1 / few)
    return list(known[few] + slope * (1 / views - 1 / few))


def test_the_table_is_of_real_images():
    assert {4, 6, 9, 12, 18, 36} <= set(COUNTS)
    for network in TABLE.values():
        assert network["images"] >= 100
        for values in network["quantiles"].values():
            assert len(values) == 101
            assert np.all(np.diff(values) >= 0)
            assert 0 < values[5] < values[50] < values[95] < 0.25
    medians = {count: REFERENCE["quantiles"][str(count)][50] for count in COUNTS}
    assert medians[4] < medians[6] < medians[18]  # fewer views show less of the variance


@pytest.mark.parametrize("views", [4, 6, 8, 9, 10, 12, 18, 24, 36])
def test_the_share_is_that_of_a_slow_search(views):
    quantiles = slow_quantiles(views)
    scores = np.concatenate(([0, 1], quantiles, np.geomspace(1e-5, 0.25, 97)))
    places = [place_peum(float(score), Views.evenly(views).transforms) for score in scores]
    assert [place.higher_than for place in places] == pytest.approx(
        [slow_share(score, quantiles) for score in scores], abs=1e-9
    )
    assert {(p.views, p.network, p.images) for p in places} == {(views, NETWORK, REFERENCE["images"])}
    ordered = [places[i].higher_than for i in np.argsort(scores, kind="stable")]
    assert ordered == sorted(ordered)
    assert (ordered[0], ordered[-1]) == (0, 1)


def test_interpolated_numbers_of_views_are_near_the_measured():
    """Leave a tabulated number of views out: its neighbours place its quantiles within a few percent."""
    known = {int(count): values for count, values in REFERENCE["quantiles"].items()}
    counts = sorted(count for count in known if count >= peum_reference.INTERPOLATED_FROM)
    for few, views, many in zip(counts, counts[1:], counts[2:], strict=False):
        t = (1 / few - 1 / views) / (1 / few - 1 / many)
        guess = (1 - t) * np.array(known[few]) + t * np.array(known[many])
        error = [abs(slow_share(score, list(guess)) - i / 100) for i, score in enumerate(known[views])]
        assert max(error[1:-1]) < 0.05, (views, max(error))


def test_views_without_a_reference():
    uneven = [Transform(0), Transform(10), Transform(20), Transform(30), Transform(40), Transform(50)]
    for views in (*map(Views.evenly, (1, 2, 5, 37)), Views.dihedral(8), Views(uneven)):
        assert place_peum(0.02, views.transforms) is None
    assert place_peum(0.02, Views.evenly(8, start=-180).transforms) is not None  # the same angles
    assert place_peum(0.02, Views.evenly(8, start=10).transforms) is None
    assert place_peum(float("nan"), Views.evenly(18).transforms) is None


def test_the_page_shows_its_medians():
    page = (ROOT / "docs/method.md").read_text()
    columns = sorted({int(count) for of in TABLE.values() for count in of["quantiles"]})
    assert f"| views | {' | '.join(map(str, columns))} |" in page
    for name, of in TABLE.items():
        known = [of["quantiles"].get(str(count)) for count in columns]
        medians = [f"{values[50]:.4f}".removeprefix("0") if values else "" for values in known]
        assert f"| {name}, {of['images']:,} images | {' | '.join(medians)} |" in page


def test_in_words():
    assert str(PeumPlace(0.634, 1000, "ResNet-50", 18)) == (
        "higher than 63 % of 1,000 ImageNet images with ResNet-50 and 18 views"
    )
    assert PeumPlace(0.999, 1000, "ResNet-50", 18).short == "higher than 99 %"
    assert PeumPlace(0.001, 1000, "ResNet-50", 18).short == "higher than 1 %"
    assert PeumPlace(1.0, 1000, "ResNet-50", 18).short == "higher than all"
    assert PeumPlace(0.0, 1000, "ResNet-50", 18).short == "lower than all"


@pytest.mark.parametrize(
    ("recipe", "known"),
    [
        (Recipe(), True),
        (Recipe("equigrad-cam-out", views=6), True),
        (Recipe("grad-cam", views=6, fill="reflect"), True),
        (Recipe(views="auto"), True),
        (Recipe("equigrad-cam+pcf"), False),
        (Recipe("aug-cam"), False),
        (Recipe("layer-cam", views=6), False),
        (Recipe(equicam.Fusion(Views.evenly(6), "map", "map")), False),
        (Recipe(as_published=True), False),
        (Recipe(fill="coverage"), False),
        (Recipe(context="auto"), False),
    ],
)
def test_only_the_peum_that_was_measured_has_a_reference(recipe, known):
    assert has_reference(recipe) is known


@pytest.fixture(scope="module")
def model() -> equicam.Model:
    return equicam.wrap(seeded(Cnn), layer="trunk")


def test_methods_with_a_reference_have_the_same_peum(model):
    found = [equicam.explain(model, pictures(2), method=name, views=6) for name in peum_reference.METHODS]
    assert_alive(found[0].map)
    assert found[0].peum_score.min() > 1e-4
    for other in found[1:]:
        torch.testing.assert_close(other.peum_score, found[0].peum_score, atol=1e-12, rtol=0)
    other = equicam.explain(model, pictures(2), method="aug-cam", views=6)
    assert (other.peum_score - found[0].peum_score).abs().min() > 1e-4


def test_an_explanation_places_its_peum(model, tmp_path):
    e = equicam.explain(model, pictures(3), views=6)
    expected = [place_peum(score, Views.evenly(6).transforms) for score in e.peum_score.tolist()]
    assert e.peum_places == tuple(expected)
    assert f"PEUM {float(e.peum_score[0]):.4f} ({expected[0]})" in str(e)
    assert str(expected[0]) in e._repr_html_()
    assert str(expected[0]).replace(" ", "") in "".join(
        "".join(axes.get_title(loc="left").split()) for axes in e[0].plot().axes
    )
    assert equicam.Explanation.load(e.save(tmp_path / "e.pt")).peum_places == e.peum_places
    blank = replace(e, flags=(frozenset({"blank"}), frozenset(), frozenset()))
    assert blank.peum_places == (None, *expected[1:])


def test_an_explanation_without_a_reference(model, tmp_path):
    for options in (
        {"method": "equigrad-cam+soft"},
        {"views": 5},
        {"views": Views.dihedral(8)},
        {"fill": "zeros"},
    ):
        e = equicam.explain(model, pictures(1), **({"views": 6} | options))
        assert e.peum_places == (None,)
        assert "ImageNet" not in str(e)
    state = equicam.explain(model, pictures(1), views=6).state()
    torch.save(
        {key: value for key, value in state.items() if key != "has_peum_reference"}, tmp_path / "old.pt"
    )
    assert equicam.Explanation.load(tmp_path / "old.pt").peum_places == (None,)


def test_adaptive_views_are_placed_by_the_views_that_were_used(model):
    e = equicam.explain(model, pictures(3), views=12)
    used = torch.tensor([[True] * 12, [True, False] * 6, [True, *[False] * 5] * 2])
    places = replace(e, view_used=used).peum_places
    scores = e.peum_score.tolist()
    expected = [
        place_peum(score, Views.evenly(n).transforms) for score, n in zip(scores, (12, 6, 2), strict=True)
    ]
    assert places == tuple(expected)
    assert [place and place.views for place in places] == [12, 6, None]


def test_nothing_is_looked_up_before_it_is_printed(model, monkeypatch):
    def refuse() -> None:
        raise AssertionError

    monkeypatch.setattr(peum_reference, "_networks", refuse)
    e = equicam.explain(model, pictures(1), views=7)
    with pytest.raises(AssertionError):
        str(e)
