"""The peers as oracles, where they are right; and where they are wrong, that we are not.

All of them keep the last ReLU's activations, so the layer here is the ReLU itself, out of place for their sake.
"""

import copy

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam
from pytorch_grad_cam import FinerCAM, GradCAM, GradCAMPlusPlus, LayerCAM, XGradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import nn
from torchcam import methods as torchcam

import equicam
from equicam.combine import grad_cam
from equicam.methods import Method, find
from equicam.readers.aim import Contrast
from equicam.readers.tap import tap
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded


def plain(module: nn.Module) -> nn.Module:
    """The same network with ReLUs that keep their input, which the peers need."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    return module


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return seeded(Cnn, seed=7).float()


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    return pictures(4).float()


CLASSES = [0, 3, 1, 4]


def unit(plane: np.ndarray | torch.Tensor) -> torch.Tensor:
    plane = torch.as_tensor(plane).float()
    low, high = plane.amin((-2, -1), keepdim=True), plane.amax((-2, -1), keepdim=True)
    return (plane - low) / (high - low)


def pairs(ours: equicam.Explanation, theirs: torch.Tensor, *, at_least: int = 3) -> None:
    """Layer-size planes, stretched to [0, 1], equal to 1e-5 wherever there is evidence at all."""
    planes = ours.planes[:, 0]
    alive = planes.flatten(1).amax(1) > 0
    assert alive.sum() >= at_least
    assert torch.equal(alive, theirs.flatten(1).amax(1) > 0)
    assert_alive(unit(planes[alive]), unit(theirs[alive]))
    torch.testing.assert_close(unit(planes[alive]), unit(theirs[alive]), atol=1e-5, rtol=0)


def grad_cam_layer_planes(peer, net, batch, layer, targets):
    """pytorch-grad-cam's plane before it is resized: what its weights and activations make."""
    cam = peer(net, [layer])
    cam(batch, targets=targets)
    acts, grads = (
        cam.activations_and_grads.activations[0].numpy(),
        cam.activations_and_grads.gradients[0].numpy(),
    )
    plane = cam.get_cam_image(batch, layer, targets, acts, grads, False)
    cam.activations_and_grads.release()
    return torch.from_numpy(np.maximum(plane, 0))


@pytest.mark.parametrize(
    ("method", "peer"),
    [
        ("grad-cam", GradCAM),
        ("grad-cam++", GradCAMPlusPlus),
        ("xgrad-cam", XGradCAM),
        ("layer-cam", LayerCAM),
    ],
)
def test_pytorch_grad_cam(net, batch, method, peer):
    ours = equicam.explain(equicam.wrap(net, layer="trunk"), batch, method=method, target=CLASSES)
    theirs_net = plain(net)
    theirs = grad_cam_layer_planes(
        peer, theirs_net, batch, theirs_net.trunk, [ClassifierOutputTarget(c) for c in CLASSES]
    )
    pairs(ours, theirs)


def test_pytorch_grad_cam_whole_maps(net, batch):
    """Theirs is stretched before and after an OpenCV resize; both are bilinear between pixel areas."""
    ours = equicam.explain(equicam.wrap(net, layer="trunk"), batch, method="grad-cam")
    theirs_net = plain(net)
    with GradCAM(theirs_net, [theirs_net.trunk]) as cam:
        theirs = torch.from_numpy(cam(batch, targets=None))
    assert_alive(ours.map, theirs)
    torch.testing.assert_close(ours.map, theirs, atol=1e-5, rtol=0)


def test_finer_cam_of_pytorch_grad_cam(net, batch):
    """Theirs weighs the contrast by probability and differentiates through it: our named variant."""
    reader = lambda *a, **k: tap(*a, **k, aim=Contrast(gamma=1.0, weigh_by_prob=True))  # noqa: E731
    ours = equicam.explain(
        equicam.wrap(net, layer="trunk"), batch, method=Method("", combine=grad_cam, reader=reader)
    )
    theirs_net = plain(net)
    finer = FinerCAM(theirs_net, [theirs_net.trunk])
    theirs = torch.from_numpy(finer(batch))
    assert_alive(ours.map, theirs)
    torch.testing.assert_close(ours.map, theirs, atol=1e-5, rtol=0)


def test_pytorch_grad_cam_on_tokens():
    net, batch = seeded(Vit, seed=7).float(), pictures(4).float()
    model = equicam.wrap(net, layer="blocks.1.norm1", rectify_weights=False)
    ours = equicam.explain(model, batch, method="grad-cam")
    with GradCAM(
        net, [net.blocks[1].norm1], lambda t: t[:, 1:].transpose(1, 2).reshape(len(t), -1, 8, 8)
    ) as cam:
        theirs = torch.from_numpy(cam(batch, targets=None))
    alive = theirs.flatten(1).amax(1) > 0
    assert alive.sum() >= 3
    torch.testing.assert_close(ours.map[alive], theirs[alive], atol=1e-5, rtol=0)


def test_captum(net, batch):
    ours = equicam.explain(equicam.wrap(net, layer="trunk"), batch, method="grad-cam", target=CLASSES)
    theirs = LayerGradCam(net, net.trunk).attribute(batch, CLASSES, relu_attributions=True)[:, 0].detach()
    pairs(ours, theirs)


@pytest.mark.parametrize(
    ("method", "peer"),
    [("grad-cam", torchcam.GradCAM), ("xgrad-cam", torchcam.XGradCAM), ("layer-cam", torchcam.LayerCAM)],
)
def test_torchcam(net, batch, method, peer):
    ours = equicam.explain(equicam.wrap(net, layer="trunk"), batch, method=method, target=CLASSES)
    theirs_net = plain(net)
    with peer(theirs_net, "trunk", input_shape=(3, 32, 32)) as cam:
        theirs = cam(CLASSES, theirs_net(batch), normalized=False)[0].detach()
    pairs(ours, theirs)


def test_finer_cam_of_torchcam(net, batch):
    ours = equicam.explain(equicam.wrap(net, layer="trunk"), batch, method="finer-cam", target=CLASSES)
    theirs_net = plain(net)
    with torchcam.FinerCAM(theirs_net, "trunk", input_shape=(3, 32, 32)) as cam:
        theirs = cam(CLASSES, theirs_net(batch), normalized=False)[0].detach()
    pairs(ours, theirs)


def test_a_class_not_on_top_is_explained_for_itself(net, batch):
    """Finer-CAM's named class may lie far from the top; its neighbours in score are what it is set against."""
    aim = Contrast()
    scores = torch.tensor([[5.0, 1.0, 4.5, 0.9, 1.2, -3.0]])
    direction = aim(scores, torch.tensor([1]))
    assert direction[0, 1] == 1
    assert set(direction[0].nonzero().flatten().tolist()) == {1, 3, 4, 2}


# --- what goes wrong in the peers ---


def test_grad_cam_pp_divides_by_its_denominator(net, batch):
    """torchcam 0.5.0 divides a copy; the formula, element by element, is what we compute."""
    ours = equicam.explain(equicam.wrap(net, layer="trunk"), batch, method="grad-cam++", target=CLASSES)
    acts = net.trunk(batch).detach().requires_grad_()
    g = torch.autograd.grad(net.rest(acts).gather(1, torch.tensor(CLASSES)[:, None]).sum(), acts)[0]
    a = acts.detach()
    formula, undivided = torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)
    for n in range(4):
        for k in range(a.shape[1]):
            alpha = g[n, k] ** 2 / (2 * g[n, k] ** 2 + a[n, k].sum() * g[n, k] ** 3 + 1e-6)
            formula[n] += (alpha * g[n, k].relu()).sum() * a[n, k]
            undivided[n] += (g[n, k] ** 2 * g[n, k].relu()).sum() * a[n, k]
    pairs(ours, formula.relu())
    assert not torch.allclose(unit(ours.planes[:, 0]), unit(undivided), atol=1e-2)


def test_a_batch_does_not_mix_its_classes(net, batch):
    """MONAI 1.6.1 explains each image for every class predicted in the batch."""
    model = equicam.wrap(net, layer="trunk")
    together = equicam.explain(model, batch, method="grad-cam", target=CLASSES)
    alone = [
        equicam.explain(model, batch[i : i + 1], method="grad-cam", target=c).planes
        for i, c in enumerate(CLASSES)
    ]
    torch.testing.assert_close(together.planes, torch.cat(alone), atol=1e-6, rtol=0)


def test_the_activation_is_the_layers_own_not_what_an_in_place_relu_left(net, batch):
    """pytorch-grad-cam (on a CPU) and torchcam read the post-ReLU tensor here; captum does not, nor do we."""
    ours = equicam.explain(equicam.wrap(net, layer="last"), batch, method="grad-cam", target=CLASSES)
    captum = LayerGradCam(net, net.last).attribute(batch, CLASSES, relu_attributions=True)[:, 0].detach()
    pairs(ours, captum)
    after = equicam.explain(equicam.wrap(net, layer="after.0"), batch, method="grad-cam", target=CLASSES)
    assert not torch.allclose(unit(ours.planes[:, 0]), unit(after.planes[:, 0]), atol=1e-2)


def test_published_variant_is_a_different_reading(net, batch):
    model = equicam.wrap(net, layer="trunk")
    readings = {
        p: equicam.explain(model, batch, method=find("grad-cam++", as_published=p)).map for p in (False, True)
    }
    assert_alive(*readings.values())
    assert (readings[False] - readings[True]).abs().max() > 1e-4
