from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import equicam
from equicam import Fusion, Recipe, Views
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded
from tests.unit.test_errors import Answers

PAPER = Recipe(protocol="paper")


def test_fields_have_the_promised_shapes_and_ranges(cnn, x):
    e = equicam.explain(cnn, x, views=6)
    shapes = dict.fromkeys(("map", "raw", "peum"), (2, 32, 32)) | {"view_maps": (2, 6, 8, 8)}
    shapes |= dict.fromkeys(("peum_score", "target"), (2,))
    shapes |= dict.fromkeys(("view_confidence", "view_flips", "view_kept"), (2, 6))
    types = {"target": torch.int64, "view_flips": torch.bool, "view_kept": torch.bool}
    for name, shape in shapes.items():
        value = getattr(e, name)
        assert (value.shape, value.dtype) == (shape, types.get(name, torch.float64)), name
    assert (e.map.amin(), e.map.amax()) == (0, 1)
    assert e.raw.amax() != 1
    torch.testing.assert_close(e.peum_score, e.peum.mean((1, 2)))
    assert (e.peum_score > 0).all()
    assert (e.layer, len(e.flags), e.views.to_plain()) == ("trunk", 2, (0, 60, 120, 180, 240, 300))


def test_eighteen_views_unless_told_otherwise_and_three_of_the_authors_lack_the_presented_one(cnn, x):
    assert len(equicam.explain(cnn, x).views.to_plain()) == 18
    assert equicam.explain(cnn, x, views=Views((0, 10))).views.to_plain() == (0, 10)
    e = equicam.explain(cnn, x, views=3, recipe=PAPER)
    assert (e.views.to_plain(), e.view_confidence.shape) == ((-180, -60, 60), (2, 3))
    probabilities = cnn.module(x).softmax(1)
    assert e.target.tolist() == probabilities.argmax(1).tolist()
    torch.testing.assert_close(e.confidence, probabilities.amax(1).detach())
    assert not torch.isclose(e.confidence[:, None], e.view_confidence).any()


def test_the_papers_protocol_is_the_authors_grid_fill_and_variants(cnn, x):
    published = equicam.explain(cnn, x, views=6, recipe=PAPER)
    assert published.views.to_plain() == (-180, -120, -60, 0, 60, 120)
    by_hand = equicam.explain(cnn, x, views=Views.evenly(6, start=-180), recipe=Recipe(fill="zeros"))
    assert_alive(published.map)
    assert torch.equal(published.map, by_hand.map)
    assert not torch.allclose(published.map, equicam.explain(cnn, x, views=6).map, atol=1e-3)
    kept = equicam.explain(cnn, x, views=6, recipe=Recipe(protocol="paper", fill="reflect"))
    torch.testing.assert_close(kept.map, equicam.explain(cnn, x, views=6).map)
    for method in ("grad-cam++", "aug-cam"):
        ours = equicam.explain(cnn, x, method=method, recipe=Recipe(fill="zeros"))
        theirs = equicam.explain(cnn, x, method=method, recipe=PAPER)
        assert not torch.allclose(ours.map, theirs.map, atol=1e-6), method
    assert equicam.explain(cnn, x, method="grad-cam", recipe=PAPER).views.to_plain() == (0,)


def test_options_reach_the_gates(cnn, x):
    one = equicam.explain(cnn, x, method="equigrad-cam+pcf", views=5, recipe=Recipe(tau=0.0))
    two = equicam.explain(cnn, x, method="equigrad-cam+pcf", views=5, recipe=Recipe(tau=1.0))
    assert one.view_kept.any()
    assert not two.view_kept.any()
    assert all("none-kept" in f for f in two.flags)
    flat = equicam.explain(cnn, x, method="equigrad-cam+soft", views=5, recipe=Recipe(gamma=0))
    torch.testing.assert_close(flat.map, equicam.explain(cnn, x, views=5).map)
    sharp = equicam.explain(cnn, x, method="equigrad-cam+soft", views=5, recipe=Recipe(gamma=30.0))
    assert not torch.allclose(sharp.map, flat.map, atol=1e-3)


def test_a_target_is_for_all_or_each_and_flips_are_against_the_presented_top1(cnn, x):
    once = equicam.explain(cnn, x, target=3, views=2)
    each = equicam.explain(cnn, x, target=torch.tensor([3, 3], dtype=torch.int32), views=2)
    assert once.target.tolist() == [3, 3]
    assert torch.equal(once.map, each.map)
    assert not torch.equal(once.map, equicam.explain(cnn, x, target=[3, 1], views=2).map)
    top = equicam.explain(cnn, x, views=6)
    other = equicam.explain(cnn, x, views=6, target=(top.target + 1) % 5)
    assert torch.equal(top.view_flips, other.view_flips)
    assert not other.view_flips[:, 0].any()


class Blank(Cnn):
    """Scores that fall with every feature: no evidence for any class."""

    def forward(self, x):
        return -self.trunk(x).mean((1, 2, 3))[:, None] * torch.arange(1, 4, dtype=x.dtype)


class Constant(nn.Module):
    """Features that are the same everywhere."""

    def __init__(self):
        super().__init__()
        self.level = nn.AdaptiveAvgPool2d(1)
        self.spread = nn.Upsample(size=(6, 6))

    def forward(self, x):
        return self.spread(self.level(x).exp()).mean((2, 3))


def test_blank_and_constant_maps_are_flagged_and_not_stretched_into_rounding_errors(x):
    e = equicam.explain(equicam.wrap(seeded(Blank), layer="trunk"), x, views=4)
    assert all("blank" in f and "constant" not in f for f in e.flags)
    assert e.map.abs().max() == 0
    assert e.map.isfinite().all()
    model, x = equicam.wrap(Constant(), layer="spread"), pictures(2).float()
    e = equicam.explain(model, x, views=5, method="equigrad-cam-out")
    single = equicam.explain(model, x, method="grad-cam")
    assert all("constant" in f and "blank" not in f for f in single.flags)
    assert single.map.max() == e.map.max() == 0
    assert single.raw.min() > 0
    assert all("blank" in f for f in e.flags)  # in output space a constant view counts as nothing


def test_unseen_corners_are_flagged(cnn, x):
    only45 = Fusion(Views((45.0,)), "features", "features")
    e = equicam.explain(cnn, x, method=only45, recipe=Recipe(fill="coverage"))
    assert all("low-coverage" in f for f in e.flags)
    assert e.raw[:, 0, 0].abs().max() == 0
    assert all("low-coverage" not in f for f in equicam.explain(cnn, x, method=only45).flags)


@pytest.mark.parametrize(("size", "odd"), [((32, 32), False), ((32, 24), True), ((33, 33), True)])
def test_odd_sizes_are_flagged(cnn, size, odd):
    e = equicam.explain(cnn, pictures(1, *size), views=2)
    assert (e.map.shape, "odd-size" in e.flags[0]) == ((1, *size), odd)


@pytest.mark.parametrize("flat", [False, True])
def test_a_single_logit_is_two_classes(flat, x):
    net = seeded(lambda: Answers(lambda s: s[:, 0] if flat else s, classes=1))
    model = equicam.wrap(net, layer="trunk", task="binary")
    z = net(x).reshape(-1).detach()
    e = equicam.explain(model, x, views=2)
    assert e.target.tolist() == (z > 0).long().tolist()
    for c, sign in ((0, -1), (1, 1)):
        found = equicam.explain(model, x, method="grad-cam", target=c)
        torch.testing.assert_close(found.view_confidence[:, 0], (sign * z).sigmoid())
        plane = grad_cam_plane(net.trunk(x), lambda acts, sign=sign: sign * net.rest(acts))
        torch.testing.assert_close(found.view_maps[:, 0], plane, atol=1e-10, rtol=0)
        if plane.max() > 0:
            assert_alive(found.map[plane.flatten(1).max(1).values > 0])


class TupleLayer(nn.Module):
    """A layer that returns its features first in a tuple, as Hugging Face blocks do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x), "and more"


class WithTuple(Cnn):
    def __init__(self):
        super().__init__()
        self.trunk = TupleLayer(self.trunk)

    def forward(self, x):
        return self.rest(self.trunk(x)[0])


class Overwritten(Cnn):
    """What the layer took is changed in place afterwards."""

    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x):
        acts = self.trunk(x)
        scores = self.rest(self.same(acts).clone())
        acts.zero_()
        return scores


class Small(Cnn):
    """Memory for four views; who passes more halves the pass and goes on."""

    seen: ClassVar[list[int]] = []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > 4:
            raise torch.OutOfMemoryError("too many views")
        return super().forward(x)


@pytest.mark.parametrize(
    ("build", "layer"),
    [
        pytest.param(lambda: Answers(lambda s: (s, s[:, :2])), "trunk", id="tuple"),
        pytest.param(lambda: Answers(lambda s: (s[:, 0], s)), "trunk", id="numbers first"),
        pytest.param(lambda: Answers(lambda s: [s[:, :, None, None], s]), "trunk", id="picture first"),
        pytest.param(lambda: Answers(lambda s: {"features": s[:, :1], "logits": s}), "trunk", id="logits"),
        pytest.param(lambda: Answers(lambda s: {"out": s}), "trunk", id="dict with out"),
        pytest.param(lambda: Answers(lambda s: SimpleNamespace(logits=s)), "trunk", id="object"),
        pytest.param(WithTuple, "trunk", id="layer returns a tuple"),
        pytest.param(Overwritten, "same", id="layer's input overwritten"),
        pytest.param(Small, "trunk", id="out of memory"),
    ],
)
def test_however_a_network_answers_its_map_is_the_same(build, layer, cnn, x):
    e = equicam.explain(equicam.wrap(seeded(build), layer=layer), x, views=6)
    assert_alive(e.map)
    torch.testing.assert_close(e.map, equicam.explain(cnn, x, views=6).map, atol=1e-10, rtol=0)
    assert build is not Small or max(Small.seen) > 4


def grad_cam_plane(acts, scores_of):
    """Grad-CAM of the score that a function makes of the features."""
    leaf = acts.detach().clone().requires_grad_()
    grads = torch.autograd.grad(scores_of(leaf).sum(), leaf)[0]
    return (grads.mean((2, 3), keepdim=True) * leaf).sum(1).relu().detach()


def test_an_in_place_relu_after_the_layer_does_not_reach_its_activation(x):
    net = seeded(Cnn)
    e = equicam.explain(equicam.wrap(net, layer="last"), x, method="grad-cam")
    acts = net.last(net.trunk(x)).detach()
    assert acts.min() < 0
    plane = grad_cam_plane(acts, lambda a: net.head(a.relu().mean((2, 3))).gather(1, e.target[:, None]))
    assert_alive(e.map)
    torch.testing.assert_close(e.view_maps[:, 0], plane, atol=1e-10, rtol=0)


def test_a_layer_used_twice_is_read_where_it_ran_last(x):
    class Shared(Cnn):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, v):
            return self.head(self.relu(self.last(self.relu(self.trunk(v)))).mean((2, 3)))

    net = seeded(Shared)
    e = equicam.explain(equicam.wrap(net, layer="relu"), x, method="grad-cam")
    later = equicam.explain(equicam.wrap(net, layer="last"), x, method="grad-cam")
    assert_alive(e.map, later.map)
    acts = net.last(net.trunk(x)).relu().detach()
    plane = (net.head.weight[e.target][:, :, None, None] * acts).sum(1).relu().detach() / acts[0, 0].numel()
    torch.testing.assert_close(e.view_maps[:, 0], plane, atol=1e-10, rtol=0)


@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_prefix_tokens_are_found(prefix, x):
    net = seeded(lambda: Vit((32, 24), prefix), seed=7)
    e = equicam.explain(equicam.wrap(net, layer="blocks.1.norm1"), pictures(1, 32, 24), views=4)
    assert e.view_maps.shape == (1, 4, 8, 6)
    assert_alive(e.map)


def test_channel_weights_are_rectified_on_tokens_behind_a_class_token_unless_told_otherwise(x):
    def found(net, rectify):
        return equicam.explain(equicam.wrap(net, "blocks.1.norm1", rectify_weights=rectify), x).map

    net, pooled = seeded(Vit), seeded(lambda: Vit(prefix=0))
    assert torch.equal(found(net, None), found(net, True))
    assert not torch.allclose(found(net, None), found(net, False), atol=1e-3)
    assert torch.equal(found(pooled, None), found(pooled, False))


def test_out_of_memory_with_one_view_is_told(x):
    class Full(Cnn):
        def forward(self, v):
            raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError):
        equicam.explain(equicam.wrap(seeded(Full), layer="trunk"), x)


def test_pictures_and_paths_are_preprocessed(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (300, 260, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "a.png")
    model = equicam.wrap(seeded(Cnn).float(), layer="trunk")
    one = equicam.explain(model, picture, views=2)
    assert (one.map.shape, one.map.dtype) == ((1, 224, 224), torch.float32)
    for images in (str(tmp_path / "a.png"), tmp_path / "a.png", [picture], [tmp_path / "a.png"]):
        assert torch.equal(equicam.explain(model, images, views=2).map, one.map)
    own = replace(model, preprocess=lambda p: torch.full((3, 16, 16), p.width / 260.0))
    assert equicam.explain(own, picture, views=2).map.shape == (1, 16, 16)


def test_a_plain_module_gets_its_layer_chosen_and_stated(x):
    e = equicam.explain(seeded(Cnn), x, views=2)
    assert e.layer == "after.0"  # the ReLU behind the last convolution, before pooling
    assert equicam.explain(seeded(Vit), x, views=2).layer == "blocks.1.norm1"
    net = seeded(Cnn)
    assert equicam.wrap(net, layer=net.trunk).layer == "trunk"  # given as the submodule itself


def test_names_are_functions_even_after_their_modules_are_imported():
    import importlib

    for name in ("explain", "methods"):
        importlib.import_module(f"equicam.{name}")
        assert callable(getattr(equicam, name))
    assert set(equicam.__all__) <= set(dir(equicam))
    with pytest.raises(AttributeError, match="nothing"):
        equicam.nothing  # noqa: B018


@pytest.mark.parametrize(("buffer", "weights"), [("float64", "float32"), ("float32", "float64")])
def test_a_buffer_of_another_type_does_not_decide_the_input(buffer, weights):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("temperature", torch.ones((), dtype=getattr(torch, buffer)))
            self.net = seeded(Cnn).to(getattr(torch, weights))

        def forward(self, x):
            return self.net(x) / self.temperature.to(x.dtype)

    model = equicam.wrap(Scaled(), layer="net.trunk")
    assert model.dtype == getattr(torch, weights)
    assert_alive(equicam.explain(model, pictures(2), views=2).map)
