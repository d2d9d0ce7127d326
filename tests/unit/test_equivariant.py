import numpy as np
import pytest
import torch
from captum.attr import IntegratedGradients
from PIL import Image

import equicam
from equicam.methods import resolve
from equicam.models.images import as_batch
from equicam.recipe import Recipe
from tests.conftest import Cnn, assert_alive, pictures, seeded


def edges(x, target):
    """A made-up explainer with an up and a down, and a class that matters."""
    return (x[:, 0] * (1 + target[:, None, None])).diff(dim=1, prepend=x[:, 0, :1] * 0).abs()


def test_an_explainer_becomes_its_aligned_average_with_uncertainty():
    x, target = pictures(), torch.tensor([1, 0])
    explainer = equicam.equivariant(edges, views=4)
    e = explainer(x, target)
    by_hand = []
    for k in range(4):
        m = edges(torch.rot90(x, k, (-2, -1)), target)
        m = m - m.amin((1, 2), keepdim=True)
        by_hand.append(torch.rot90(m / m.amax((1, 2), keepdim=True), -k, (-2, -1)))
    stack = torch.stack(by_hand)
    mean = stack.mean(0)
    low, high = mean.amin((1, 2), keepdim=True), mean.amax((1, 2), keepdim=True)
    assert_alive(e.map)
    torch.testing.assert_close(e.map, (mean - low) / (high - low))
    torch.testing.assert_close(e.peum, stack.var(0, correction=0))
    turned = explainer(torch.rot90(x, 1, (-2, -1)), target)
    torch.testing.assert_close(turned.map, torch.rot90(e.map, 1, (-2, -1)))
    assert e.view_confidence.isnan().all()
    assert e.view_kept.all()
    assert not e.view_flips.any()


def test_coarse_and_coloured_maps_and_passes_of_any_size():
    x = pictures(3).float()
    pool = torch.nn.functional.avg_pool2d
    coloured = equicam.equivariant(lambda v, t: pool(v, 4), views=5)(x, 0)
    summing = equicam.equivariant(lambda v, t: pool(v, 4).sum(1), views=5, max_views_per_forward=2)
    summed = summing(x, [0, 0, 0])
    assert_alive(coloured.map)
    torch.testing.assert_close(coloured.map, summed.map)
    assert coloured.view_maps.shape == (3, 5, 8, 8)


def gradient_of(net):
    """A plain explainer that differentiates, and says nothing of grad modes."""

    def explainer(x, target):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(net(x).gather(1, target[:, None]).sum(), x)[0].abs()

    return explainer


def test_an_explainer_may_differentiate_whatever_its_caller_computes_in():
    net, x = seeded(Cnn).float(), pictures().float()
    explainer = equicam.equivariant(gradient_of(net), views=3)
    plain = explainer(x, 2)
    assert_alive(plain.map)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(explainer(x, 2).map, plain.map)
    with torch.autocast("cpu", torch.bfloat16):
        half = explainer(x, 2)
    assert half.map.dtype == half.peum.dtype == torch.float32
    assert not torch.equal(half.map, plain.map)  # the explainer itself was under autocast
    methods = {"mine": gradient_of(net)}
    rows = equicam.evaluate(equicam.wrap(net, layer="trunk"), x, methods=methods, scores=["eq"], angles=[90])
    turned = [r["value"] for r in rows.to_pylist() if (r["region"], r["angle"]) == ("disc", 90)]
    assert all(0 < value <= 1 for value in turned)


def test_files_and_pixels_are_preprocessed_as_where_a_network_says_nothing(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    explainer, x = equicam.equivariant(edges, views=2), as_batch(None, Image.fromarray(pixels))
    for given in (str(tmp_path / "photo.png"), tmp_path / "photo.png", Image.fromarray(pixels), pixels):
        assert torch.equal(explainer(given, 0).map, explainer(x, 0).map)
    with pytest.raises(equicam.EquicamError, match=r"images needs a tensor, .*got an empty list"):
        explainer([], 0)


def test_the_steps_of_integrated_gradients_run_in_batches_of_views():
    net, x, rows = seeded(Cnn).float(), pictures().float(), []
    attribution = IntegratedGradients(net)
    whole = attribution.attribute(x, target=1, n_steps=50)
    net.register_forward_hook(lambda _module, inputs, _output: rows.append(len(inputs[0])))
    found = equicam.equivariant(attribution, views=6, max_views_per_forward=4)(x, 1)
    assert max(rows) <= 4
    assert_alive(found.map)
    torch.testing.assert_close(found.view_maps[:, 0], whole.sum(1), atol=1e-5, rtol=0)


def test_an_explainer_is_no_method_and_the_error_names_what_takes_it():
    for explainer in (edges, IntegratedGradients(seeded(Cnn))):
        with pytest.raises(
            equicam.EquicamError, match=r"a Method or a Fusion, .*try equicam\.equivariant\(fn\)"
        ):
            resolve(Recipe(explainer))


def test_an_explainer_whose_maps_are_not_finite_is_refused():
    infinite = equicam.equivariant(lambda x, _target: torch.log(x[:, 0] * 0), views=2)
    with pytest.raises(equicam.EquicamError, match="finite maps"):
        infinite(pictures(), torch.tensor([1, 0]))
