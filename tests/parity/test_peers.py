"""The peers as oracles, where they are right; and where they are wrong, that we are not.

All of them keep the last ReLU's activations, so the layer here is the ReLU itself, out of place for their sake.
"""

import copy

import numpy as np
import pytest
import torch
from captum.attr import LayerGradCam, Saliency
from pytorch_grad_cam import AblationCAM, FinerCAM, GradCAM, GradCAMPlusPlus, LayerCAM, ScoreCAM, XGradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from torch import nn
from torchcam import methods as torchcam

import equicam
from equicam.core.chain import eigen_cam, grad_cam
from equicam.methods import METHODS, Method, resolve
from equicam.readers.gradients import Contrast, gradients_of
from equicam.readers.masking import score_cam
from equicam.recipe import Recipe
from tests.conftest import Cnn, Vit, assert_alive, explained, method_of, pictures, seeded


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
    planes = ours.view_maps[:, 0]
    alive = planes.flatten(1).amax(1) > 0
    assert alive.sum() >= at_least
    assert torch.equal(alive, theirs.flatten(1).amax(1) > 0)
    assert_alive(unit(planes[alive]), unit(theirs[alive]))
    torch.testing.assert_close(unit(planes[alive]), unit(theirs[alive]), atol=1e-5, rtol=0)


def same_maps(ours: equicam.Explanation, theirs: torch.Tensor) -> None:
    assert_alive(ours.map, theirs)
    torch.testing.assert_close(ours.map, theirs, atol=1e-5, rtol=0)


def grad_cam_layer_planes(peer, net, batch, layer, targets):
    """pytorch-grad-cam's plane before it is resized: what its weights and activations make."""
    cam = peer(net, [layer])
    cam(batch, targets=targets)
    read = cam.activations_and_grads
    acts, grads = read.activations[0].numpy(), read.gradients[0].numpy()
    plane = cam.get_cam_image(batch, layer, targets, acts, grads, False)
    read.release()
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
    ours = explained(net, batch, method=method, target=CLASSES)
    theirs_net = plain(net)
    targets = [ClassifierOutputTarget(c) for c in CLASSES]
    pairs(ours, grad_cam_layer_planes(peer, theirs_net, batch, theirs_net.trunk, targets))


def test_pytorch_grad_cam_whole_maps(net, batch):
    """Theirs is stretched before and after an OpenCV resize; both are bilinear between pixel areas."""
    ours = explained(net, batch, method="grad-cam")
    theirs_net = plain(net)
    with GradCAM(theirs_net, [theirs_net.trunk]) as cam:
        theirs = torch.from_numpy(cam(batch, targets=None))
    same_maps(ours, theirs)


def test_finer_cam_of_pytorch_grad_cam(net, batch):
    """Theirs weighs the contrast by probability and differentiates through it: our named variant."""
    reader = gradients_of(Contrast(gamma=1.0, weigh_by_prob=True))
    ours = explained(net, batch, method=Method("", combine=grad_cam, reader=reader))
    theirs_net = plain(net)
    finer = FinerCAM(theirs_net, [theirs_net.trunk])
    theirs = torch.from_numpy(finer(batch))
    same_maps(ours, theirs)


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
    ours = explained(net, batch, method="grad-cam", target=CLASSES)
    theirs = LayerGradCam(net, net.trunk).attribute(batch, CLASSES, relu_attributions=True)[:, 0].detach()
    pairs(ours, theirs)


@pytest.mark.parametrize(
    ("method", "peer"),
    [("grad-cam", torchcam.GradCAM), ("xgrad-cam", torchcam.XGradCAM), ("layer-cam", torchcam.LayerCAM)],
)
def test_torchcam(net, batch, method, peer):
    ours = explained(net, batch, method=method, target=CLASSES)
    theirs_net = plain(net)
    with peer(theirs_net, "trunk", input_shape=(3, 32, 32)) as cam:
        theirs = cam(CLASSES, theirs_net(batch), normalized=False)[0].detach()
    pairs(ours, theirs)


def test_finer_cam_of_torchcam(net, batch):
    ours = explained(net, batch, method="finer-cam", target=CLASSES)
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


class Unstrided(Cnn):
    """Features as large as the picture, so that nobody's way of upsampling masks matters."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.trunk:
            if isinstance(part, nn.Conv2d):
                part.stride = (1, 1)


@pytest.mark.parametrize("target", [None, CLASSES])
def test_score_cam_of_pytorch_grad_cam(target):
    """Theirs weighs by a softmax over channels of scores before the softmax over classes: our named variant."""
    net, batch = plain(seeded(Unstrided, seed=7)).float(), pictures(4, 12, 12).float()
    method = method_of(score_cam, weigh="softmax_of_logits")
    ours = explained(net, batch, method=method, target=target)
    chosen = [ClassifierOutputTarget(int(c)) for c in ours.target]
    with ScoreCAM(net, [net.trunk]) as cam:
        theirs = torch.from_numpy(cam(batch, targets=chosen))
    same_maps(ours, theirs)


def test_ablation_cam_of_pytorch_grad_cam(net, batch):
    ours = explained(net, batch, method="ablation-cam")
    theirs_net = plain(net)
    with AblationCAM(theirs_net, [theirs_net.trunk]) as cam:
        theirs = torch.from_numpy(cam(batch, targets=[ClassifierOutputTarget(int(c)) for c in ours.target]))
    same_maps(ours, theirs)


def test_eigen_cam_of_pytorch_grad_cam(net, batch):
    """Up to the sign, which a principal direction does not have: theirs is whatever the decomposition returns."""
    ours = explained(net, batch, method=METHODS["eigen-cam"])
    acts = net.trunk(batch).detach()
    signed = eigen_cam(acts, acts)
    theirs = torch.from_numpy(get_2d_projection(acts.numpy()))
    sign = (signed * theirs).sum((1, 2), keepdim=True).sign()
    torch.testing.assert_close(signed, sign * theirs, atol=1e-5, rtol=1e-4)
    assert_alive(ours.map)
    torch.testing.assert_close(ours.view_maps[:, 0], signed.relu())


# --- the peers' own objects, made equivariant ---


@pytest.mark.parametrize("peer", ["captum", "captum input", "pytorch-grad-cam", "torchcam"])
def test_a_peers_object_becomes_its_aligned_average(net, batch, peer):
    theirs_net = plain(net)
    target = torch.tensor(CLASSES)
    if peer == "captum":
        found, single = LayerGradCam(theirs_net, theirs_net.trunk), "rectified"
    elif peer == "captum input":
        found, single = Saliency(theirs_net), None
    elif peer == "pytorch-grad-cam":
        found, single = GradCAM(theirs_net, [theirs_net.trunk]), "map"
    else:
        found, single = torchcam.GradCAM(theirs_net, "trunk", input_shape=(3, 32, 32)), "map"
    e = equicam.equivariant(found, views=4)(batch, target)
    turned = equicam.equivariant(found, views=4)(torch.rot90(batch, 1, (-2, -1)), target)
    assert_alive(e.map)
    torch.testing.assert_close(turned.map, torch.rot90(e.map, 1, (-2, -1)), atol=1e-4, rtol=0)
    torch.testing.assert_close(turned.peum, torch.rot90(e.peum, 1, (-2, -1)), atol=1e-4, rtol=0)
    assert (e.peum_score > 0).all()
    if single == "map":  # they rectify and stretch each view as we do: output space, by another road
        ours = explained(net, batch, method="equigrad-cam-out", views=4, target=CLASSES)
        alive = [("blank" not in f) for f in ours.flags]
        assert sum(alive) >= 3
        torch.testing.assert_close(e.map[alive], ours.map[alive], atol=2e-3, rtol=0)


# --- what goes wrong in the peers ---


def test_the_layer_named_is_the_layer_read(net, batch):
    """pnpxai ignores the layer its user sets."""
    maps = [explained(net, batch, method="grad-cam", layer=layer).map for layer in ("trunk", "after.0")]
    assert_alive(*maps)
    assert (maps[0] - maps[1]).abs().max() > 0.1


def test_a_map_grows_with_its_raw_values(net, batch):
    """MONAI's default normaliser turns the map upside down; pytorch-grad-cam keeps no raw values."""
    e = explained(net, batch, views=4)
    assert_alive(e.map)
    for m, raw in zip(e.map.flatten(1), e.raw.flatten(1), strict=True):
        assert m.argmax() == raw.argmax()
        assert torch.corrcoef(torch.stack((m, raw)))[0, 1] > 0.9999


def test_a_view_explains_the_pinned_class_even_where_it_flips():
    """pytorch-grad-cam's aug_smooth takes each view's own top class."""
    model, x = equicam.wrap(seeded(Vit), layer="blocks.1.norm1"), pictures(6, seed=4)
    e = equicam.explain(model, x, views=8, method="equigrad-cam-out")
    flipped = e.view_flips.nonzero()
    assert len(flipped)
    for i, t in flipped.tolist():
        view = equicam.rotate(x[i : i + 1], e.views.to_plain()[t])
        pinned = equicam.explain(model, view, method="grad-cam", target=int(e.target[i]))
        own = equicam.explain(model, view, method="grad-cam")
        assert int(own.target) != int(e.target[i])
        torch.testing.assert_close(e.view_maps[i, t], pinned.view_maps[0, 0], atol=1e-9, rtol=0)


def test_upsampling_is_bilinear(net, batch):
    """Captum's interpolate is nearest by default."""
    e = explained(net, batch, method="grad-cam")
    assert all(len(m.unique()) > 64 for m in e.map)


def test_grad_cam_pp_divides_by_its_denominator(net, batch):
    """torchcam 0.5.0 divides a copy; the formula, element by element, is what we compute."""
    ours = explained(net, batch, method="grad-cam++", target=CLASSES)
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
    assert not torch.allclose(unit(ours.view_maps[:, 0]), unit(undivided), atol=1e-2)


def test_a_batch_does_not_mix_its_classes(net, batch):
    """MONAI 1.6.1 explains each image for every class predicted in the batch."""
    together = explained(net, batch, method="grad-cam", target=CLASSES)
    each = zip(batch.split(1), CLASSES, strict=True)
    alone = [explained(net, one, method="grad-cam", target=c).view_maps for one, c in each]
    torch.testing.assert_close(together.view_maps, torch.cat(alone), atol=1e-6, rtol=0)


def test_the_activation_is_the_layers_own_not_what_an_in_place_relu_left(net, batch):
    """pytorch-grad-cam (on a CPU) and torchcam read the post-ReLU tensor here; captum does not, nor do we."""
    ours = explained(net, batch, method="grad-cam", target=CLASSES, layer="last")
    captum = LayerGradCam(net, net.last).attribute(batch, CLASSES, relu_attributions=True)[:, 0].detach()
    pairs(ours, captum)
    after = explained(net, batch, method="grad-cam", target=CLASSES, layer="after.0")
    assert not torch.allclose(unit(ours.view_maps[:, 0]), unit(after.view_maps[:, 0]), atol=1e-2)


def test_published_variant_is_a_different_reading(net, batch):
    recipes = [Recipe("grad-cam++", protocol=one) for one in ("ours", "paper")]
    ours, papers = (explained(net, batch, method=resolve(one)).map for one in recipes)
    assert_alive(ours, papers)
    assert (ours - papers).abs().max() > 1e-4
