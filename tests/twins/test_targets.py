"""Labels, values and functions of the output against autograd written out by hand, on tiny and on real networks."""

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

import equicam
from equicam import Fusion, KeepConfident, SoftGate, Views, uniform
from tests.conftest import Cnn, assert_alive, explained, pictures, seeded
from tests.twins import slow


class SlowValue(slow.Slow):
    """A value of the output, which has no probability; or the score of a label, with its sigmoid, above ½ or not."""

    def __init__(self, trunk, rest, value, label=False):
        super().__init__(trunk, rest)
        self.value, self.label = value, label

    def read(self, image, target, score):
        acts = self.trunk(torch.from_numpy(image)[None]).detach().requires_grad_()
        value = self.value(self.rest(acts))[0]
        value.backward()
        p = value.sigmoid().item()
        probs = np.array([p, 1 - p] if self.label else [1.0])
        return (acts.detach()[0].numpy(), acts.grad[0].numpy()), probs, 0

    def of(self, x, gate=lambda p, top: 1.0):
        """Five views of one picture, averaged where they have features."""
        return self.explain(x[0].numpy(), Views.evenly(5).to_plain(), "features", "features", gate)


def agree(found: equicam.Explanation, twin: dict, *fields: str) -> None:
    assert_alive(torch.from_numpy(twin["map"])[None], found.map)
    for field in fields:
        np.testing.assert_allclose(getattr(found, field)[0], twin[field], rtol=0, atol=1e-10, err_msg=field)


ALL = ("map", "raw", "peum", "peum_score", "view_confidence", "view_flips", "view_kept")
GATES = {
    "uniform": (uniform, lambda p, predicted: 1.0),
    "pcf": (KeepConfident(0.1), lambda p, predicted: p if predicted and p >= 0.1 else 0.0),
    "soft": (SoftGate(0.5), lambda p, predicted: p**0.5),
}


@pytest.mark.parametrize("gate", GATES)
def test_a_label_has_sigmoid_gates(gate):
    net, x = seeded(Cnn), pictures(1, 20, 20, seed=3)
    ours, theirs = GATES[gate]
    fusion = Fusion(Views.evenly(5), "features", "features", ours)
    model = equicam.wrap(net, layer="trunk", task="multilabel")
    label = 2
    with torch.no_grad():  # some views have the label and some have not
        net.head.bias[label] -= net(fusion.views.act(x)[:, 0])[:, label].sort().values[1:3].mean()
    twin = SlowValue(net.trunk, net.rest, lambda y: y[:, label], label=True).of(x, theirs)
    assert 0 < twin["view_flips"].sum() < 5
    assert gate != "pcf" or 0 < twin["view_kept"].sum() < 5
    found = equicam.explain(model, x, method=fusion, target=label)
    agree(found, twin, *ALL)
    softmax = explained(net, x, method=fusion, target=label)
    assert not torch.allclose(softmax.view_confidence, found.view_confidence, atol=0.01)


@pytest.mark.parametrize("output", [0, 2])
def test_a_regression_output_is_explained_as_it_is(output):
    net, x = seeded(lambda: Cnn(classes=output + 1)), pictures(1, 20, 20)
    twin = SlowValue(net.trunk, net.rest, lambda y: y[:, output]).of(x)
    model = equicam.wrap(net, layer="trunk", task="regression")
    found = equicam.explain(model, x, views=5, target=output or None)
    agree(found, twin, "map", "raw", "peum", "peum_score")
    torch.testing.assert_close(found.output, net(x)[:, output].detach())


def test_a_function_of_the_output_is_explained():
    net, x = seeded(Cnn), pictures(1, 20, 20)

    def margin(y):
        return y[:, 1].square() - y[:, 4].tanh()

    twin = SlowValue(net.trunk, net.rest, margin).of(x)
    found = explained(net, x, views=5, target=margin)
    agree(found, twin, "map", "raw", "peum", "peum_score")
    torch.testing.assert_close(found.output, margin(net(x)).detach())


# Real architectures, with random weights: each view's own Grad-CAM plane, by hooks and autograd.


def randomised(net: nn.Module) -> nn.Module:
    """Weights and statistics under which the last features differ from place to place."""
    made = torch.Generator().manual_seed(0)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1, generator=made)
            part.running_var.uniform_(0.5, 1.5, generator=made)
        if isinstance(part, nn.Conv2d | nn.Linear):
            nn.init.normal_(part.weight, std=1.2 / part.weight[0].numel() ** 0.5, generator=made)
    return net.eval()


def multilabel():
    net = torchvision.models.mobilenet_v2()
    net.classifier[1] = nn.Linear(1280, 14)
    return randomised(net), "features", {"task": "multilabel"}, 5, lambda y: y[:, 5]


def regression():
    net = torchvision.models.resnet18(num_classes=1)
    return randomised(net), "layer4", {"task": "regression"}, None, lambda y: y[:, 0]


def segmentation():
    net = torchvision.models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None)

    def area(y):
        return y["out"].softmax(1)[:, 8].mean((1, 2))

    return randomised(net), "backbone.16", {}, area, area


def embedding():
    import timm

    net = timm.create_model("resnet18", num_classes=0)
    reference = nn.functional.normalize(torch.randn(512, generator=torch.Generator().manual_seed(1)), dim=0)

    def similarity(y):
        return nn.functional.normalize(y, dim=1) @ reference

    return randomised(net), "layer4", {}, similarity, similarity


@pytest.mark.parametrize("build", [multilabel, regression, segmentation, embedding])
def test_real_architectures(build):
    net, layer, options, target, value = build()
    x = pictures(1, 96, 96).float()
    found = equicam.explain(equicam.wrap(net, layer=layer, **options), x, views=3, target=target)
    kept: list[torch.Tensor] = []

    def keep(_module, _inputs, output):
        output.retain_grad()
        kept.append(output)
        return output

    handle = net.get_submodule(layer).register_forward_hook(keep)
    views = Views.evenly(3).act(x)[:, 0]
    explained = value(net(views))
    explained.sum().backward()
    handle.remove()
    weights = kept[0].grad.mean((2, 3), keepdim=True)
    planes = (weights * kept[0]).sum(1).relu().detach()
    assert (planes.flatten(1).std(1) > 1e-9).all()
    scale = planes.max()
    torch.testing.assert_close(found.view_maps[0] / scale, planes / scale, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.output, explained[:1].detach(), atol=1e-5, rtol=1e-4)
    if options.get("task") == "multilabel":
        torch.testing.assert_close(found.view_confidence[0], explained.sigmoid().detach(), atol=1e-4, rtol=0)
    else:
        assert found.confidence.isnan().all()
        assert not found.view_flips.any()
        assert found.probabilities is None
