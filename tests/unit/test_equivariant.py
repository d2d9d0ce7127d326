import pytest
import torch

import equicam
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
    summed = equicam.equivariant(lambda v, t: pool(v, 4).sum(1), views=5, max_views_per_forward=2)(
        x, [0, 0, 0]
    )
    assert_alive(coloured.map)
    torch.testing.assert_close(coloured.map, summed.map)
    assert coloured.view_maps.shape == (3, 5, 8, 8)


def test_it_serves_explainers_that_need_gradients_and_callers_without():
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(4 * 900, 3)
    )

    def saliency(x, target):
        with torch.enable_grad():
            v = x.clone().requires_grad_()
            return torch.autograd.grad(net(v).gather(1, target[:, None]).sum(), v)[0].abs()

    x = pictures().float()
    plain = equicam.equivariant(saliency, views=3)(x, 2)
    with torch.inference_mode():
        quiet = equicam.equivariant(saliency, views=3)(x, 2)
    assert_alive(plain.map)
    assert torch.equal(plain.map, quiet.map)
    with torch.autocast("cpu", torch.bfloat16):
        half = equicam.equivariant(saliency, views=3)(x, 2)
    assert half.map.dtype == half.peum.dtype == torch.float32
    assert not torch.equal(half.map, plain.map)  # the explainer itself was under autocast


def test_an_explainer_whose_maps_are_not_finite_is_refused():
    def broken(x, _target):
        return torch.log(x[:, 0] * 0)

    with pytest.raises(equicam.EquicamError, match="finite maps"):
        equicam.equivariant(broken, views=2)(pictures(), torch.tensor([1, 0]))


def test_a_plain_gradient_explainer_runs_in_the_callers_grad_mode():
    net, x = seeded(Cnn), pictures(2)

    def saliency(views, target):
        views = views.clone().requires_grad_()
        chosen = net(views).gather(1, target[:, None]).sum()
        (grad,) = torch.autograd.grad(chosen, views)
        return grad.abs().sum(1)

    e = equicam.equivariant(saliency, views=3)(x, target=1)
    assert_alive(e.map)
    with torch.no_grad(), pytest.raises(RuntimeError):
        equicam.equivariant(saliency, views=3)(x, target=1)
