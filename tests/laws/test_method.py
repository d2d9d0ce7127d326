"""Equivariance as a theorem, and what else must hold of the method for any network.

If the views form a group that contains the quarter turns (4 divides T), turning the picture by 90° permutes the
views, so map and PEUM turn with it: exactly, whatever the network, wherever at least one view is kept.
"""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import equicam
from equicam import Fusion, KeepConfident, SoftGate, Views, uniform
from equicam.core.chain import grad_cam_pp, layer_cam, xgrad_cam
from equicam.core.weights import normalise
from equicam.methods import Method
from tests.conftest import ChannelsLast, Cnn, Vit, assert_alive, light, methods_for, pictures, seeded

NETS = {"cnn": (Cnn, "trunk"), "vit": (Vit, "blocks.1.norm1"), "nhwc": (ChannelsLast, "norm")}
LOCI = [
    ("features", "features"),
    ("features", "combined"),
    ("features", "map"),
    ("combined", "combined"),
    ("rectified", "rectified"),
    ("upsampled", "upsampled"),
    ("map", "map"),
]


def net(kind: str, seed: int = 1) -> equicam.Model:
    build, layer = NETS[kind]
    return equicam.wrap(seeded(build, seed), layer=layer)


def quarter(x: torch.Tensor, turns: int = 1) -> torch.Tensor:
    return torch.rot90(x, turns, (-2, -1))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("count", [4, 12])
@pytest.mark.parametrize(
    "weigh", [uniform, KeepConfident(0.10), SoftGate(2.0)], ids=["uniform", "pcf", "soft"]
)
@pytest.mark.parametrize(("align_at", "mean_at"), LOCI)
def test_a_quarter_turn_of_the_picture_turns_map_and_peum(kind, count, weigh, align_at, mean_at):
    model, x = net(kind), pictures()
    fusion = Fusion(Views.evenly(count), align_at, mean_at, weigh)
    straight = equicam.explain(model, x, method=fusion)
    turned = equicam.explain(model, quarter(x), method=fusion, target=straight.target)
    assert straight.view_kept.any(1).all()
    assert_alive(straight.map, turned.map)
    assert (straight.peum.flatten(1).max(1).values > 1e-4).all()
    close(turned.map, quarter(straight.map))
    close(turned.raw, quarter(straight.raw))
    close(turned.peum, quarter(straight.peum))


@given(
    seed=st.integers(0, 10_000),
    turns=st.integers(1, 3),
    fill=st.sampled_from(["reflect", "zeros", "coverage"]),
)
@settings(max_examples=15, deadline=None)
def test_the_theorem_holds_for_random_networks_pictures_and_fills(seed, turns, fill):
    model, x = net("cnn", seed), pictures(1, 24, 24, seed)
    straight = equicam.explain(model, x, views=4, recipe=equicam.Recipe(fill=fill))
    turned = equicam.explain(
        model, quarter(x, turns), views=4, target=straight.target, recipe=equicam.Recipe(fill=fill)
    )
    if "blank" not in straight.flags[0]:
        assert_alive(straight.map)
    close(turned.map, quarter(straight.map, turns))
    close(turned.peum, quarter(straight.peum, turns))


@pytest.mark.parametrize("combine", [grad_cam_pp, xgrad_cam, layer_cam])
def test_the_theorem_holds_for_every_combine(combine):
    method = Method("", Fusion(Views.evenly(4), "features", "features"), combine)
    model, x = net("cnn"), pictures()
    straight = equicam.explain(model, x, method=method)
    turned = equicam.explain(model, quarter(x), method=method, target=straight.target)
    assert_alive(straight.map)
    close(turned.map, quarter(straight.map))


def test_one_view_does_not_have_it():
    """The theorem is not vacuous: single-view Grad-CAM of the same networks breaks it."""
    model, x = net("cnn"), pictures()
    straight = equicam.explain(model, x, method="grad-cam")
    turned = equicam.explain(model, quarter(x), method="grad-cam", target=straight.target)
    assert (turned.map - quarter(straight.map)).abs().max() > 0.05


def test_without_turning_back_the_average_stays_put_instead():
    model, x = net("cnn"), pictures()
    straight = equicam.explain(model, x, method="aug-cam", views=4)
    turned = equicam.explain(model, quarter(x), method="aug-cam", views=4, target=straight.target)
    assert_alive(straight.map)
    close(turned.map, straight.map)


def test_the_authors_grid_is_the_same_set_of_views_when_even():
    model, x = net("cnn"), pictures()
    ours = equicam.explain(model, x, views=Views.evenly(6))
    authors = equicam.explain(model, x, views=Views.evenly(6, start=-180))
    assert_alive(ours.map)
    close(ours.map, authors.map)
    close(ours.view_confidence.roll(3, 1), authors.view_confidence)


@given(order=st.permutations(range(5)), weigh=st.sampled_from([uniform, KeepConfident(0.33), SoftGate(1.0)]))
@settings(max_examples=12, deadline=None)
def test_the_order_of_views_changes_nothing(order, weigh):
    model, x = net("cnn"), pictures(1, 20, 20)
    angles = (0.0, 40.0, 90.0, 171.5, 300.0)
    one = equicam.explain(model, x, method=Fusion(Views(angles), "features", "features", weigh))
    shuffled = Views(tuple(angles[i] for i in order))
    two = equicam.explain(model, x, method=Fusion(shuffled, "features", "features", weigh))
    close(one.map, two.map)
    close(one.peum, two.peum)
    close(one.view_confidence[:, list(order)], two.view_confidence)
    assert torch.equal(one.view_kept[:, list(order)], two.view_kept)


def test_where_views_are_averaged_does_not_change_their_peum():
    model, x = net("cnn"), pictures(2)
    expected = equicam.explain(model, x, method="grad-cam", views=6).peum_score
    assert expected.min() > 1e-4
    for end in ("", "-combined", "-fine", "-out"):
        close(equicam.explain(model, x, method=f"equigrad-cam{end}", views=6).peum_score, expected)
    not_aligned = equicam.explain(model, x, method="aug-cam", views=6).peum_score
    assert (not_aligned - expected).abs().min() > 1e-4


@pytest.mark.parametrize("method", methods_for("cnn"))
def test_one_view_gives_no_uncertainty(method):
    found = equicam.explain(net("cnn"), pictures(), method=light(method), views=1)
    assert_alive(found.map)
    assert found.peum.abs().max() == 0
    assert found.peum_score.tolist() == [0, 0]


@given(
    prob=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    top=st.lists(st.booleans(), min_size=3, max_size=3),
    gate=st.one_of(st.just(uniform), st.floats(0, 1).map(KeepConfident), st.floats(0, 50).map(SoftGate)),
)
def test_weights_are_never_negative_and_sum_to_one_even_when_no_view_survives(prob, top, gate):
    given_prob = torch.tensor(prob, dtype=torch.float64)[:, None]
    gates = gate(given_prob, torch.tensor(top)[:, None])
    for place, count in (([0, 1, 2], 3), ([1, 2, 3], 4)):
        weights = normalise(gates, place, count)
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(0), torch.ones(1, dtype=torch.float64))
        if not (gates > 0).any():
            assert weights[0] == 1


@pytest.mark.parametrize(("kind", "method"), [(k, m) for k in ("cnn", "vit") for m in methods_for(k)])
def test_every_method_obeys_the_theorem(kind, method):
    """Whatever reads a view, random masks and noise included: it is a function of the view, and views are permuted."""
    model, x = net(kind), pictures(2, seed=2)
    straight = equicam.explain(model, x, method=light(method), views=4)
    turned = equicam.explain(model, quarter(x), method=light(method), views=4, target=straight.target)
    if method == "aug-cam":
        close(turned.map, straight.map)
    else:
        close(turned.map, quarter(straight.map))
        close(turned.peum, quarter(straight.peum))
    assert_alive(straight.map[["blank" not in f for f in straight.flags]])
    assert sum("blank" in f for f in straight.flags) <= 1


@pytest.mark.parametrize("method", equicam.methods())
def test_a_batch_is_its_images_one_by_one_each_with_its_own_class(method):
    # Opti-CAM starts from the mean over channels, which a fresh LayerNorm makes 0 up to rounding
    model = net("cnn" if method == "opti-cam" else "vit")
    x = pictures(5)
    classes = [3, 0, 1, 4, 2]
    together = equicam.explain(model, x, method=light(method), views=3, target=classes)
    for i, c in enumerate(classes):
        alone = equicam.explain(model, x[i : i + 1], method=light(method), views=3, target=c)
        for field in dataclasses.fields(alone):
            ours, theirs = getattr(together, field.name), getattr(alone, field.name)
            if isinstance(ours, torch.Tensor):
                # Adam divides by the size of its gradient, which magnifies rounding
                tolerance = 1e-6 if method == "opti-cam" else 1e-10
                torch.testing.assert_close(ours[i : i + 1], theirs, atol=tolerance, rtol=0)
        assert together.flags[i] == alone.flags[0]


@pytest.mark.parametrize("views", [5, Views.evenly(5, start=-180)], ids=["with 0°", "without 0°"])
@pytest.mark.parametrize("method", ["equigrad-cam+pcf", "equigrad-cam-out"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 10, 100])
def test_the_size_of_a_pass_changes_nothing(chunk, method, views):
    model, x = net("cnn"), pictures(3)
    whole = equicam.explain(model, x, method=method, views=views)
    parts = equicam.explain(model, x, method=method, views=views, max_views_per_forward=chunk)
    assert_alive(whole.map)
    for field in ("map", "raw", "peum", "peum_score", "view_confidence", "view_maps"):
        torch.testing.assert_close(getattr(parts, field), getattr(whole, field), atol=1e-10, rtol=0)
    assert torch.equal(parts.view_kept, whole.view_kept)
    assert parts.flags == whole.flags


def test_feature_space_and_combined_are_one_where_the_gradient_is_constant():
    """GAP + linear: g is the same at every position and view, so averaging gradients changes nothing."""
    model = equicam.wrap(seeded(Cnn), layer="after.0")
    x = pictures()
    feature = equicam.explain(model, x, method="equigrad-cam", views=6)
    combined = equicam.explain(model, x, method="equigrad-cam-combined", views=6)
    assert_alive(feature.map)
    close(feature.map, combined.map)
    xgrad = equicam.explain(model, x, method="xgrad-cam")
    torch.testing.assert_close(xgrad.map, equicam.explain(model, x, method="grad-cam").map, atol=1e-6, rtol=0)


def test_with_views_the_presented_one_is_first_asked_and_its_class_kept():
    """A view whose top-1 flips still explains the pinned class, and the flip is recorded."""
    model, x = net("vit"), pictures(6, seed=4)
    found = equicam.explain(model, x, views=8)
    with torch.no_grad():
        said = torch.stack([model.module(equicam.rotate(x, a)) for a in found.views.to_plain()], 1)
    assert torch.equal(found.target, said[:, 0].argmax(1))
    assert found.view_flips.any()
    assert torch.equal(found.view_flips, said.argmax(2) != found.target[:, None])
    p = said.softmax(2).gather(2, found.target[:, None, None].expand(-1, 8, 1))[..., 0]
    close(found.view_confidence, p)
    for i, flags in enumerate(found.flags):
        assert ("flipped" in flags) == bool(found.view_flips[i].any())
