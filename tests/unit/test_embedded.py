"""The embedded model and its synthetic patches: exact labels, good accuracy, maps that drift under rotation."""

import numpy as np
import pytest
import torch

import equicam
from equicam.demo import PATCHES, SHEET, synthetic_patches
from equicam.models.layers import choose_layer
from equicam.models.libraries import EMBEDDED_WEIGHTS, EmbeddedNet
from scripts.synthetic import CENTRE, MIN_TUMOUR_PIXELS, SEED, SIZE, draw, draw_many


@pytest.fixture(scope="module")
def patches():
    return list(draw_many(200, seed=1_000_003))


@pytest.fixture(scope="module")
def x(patches):
    model = equicam.load("embedded")
    from PIL import Image

    from equicam.models.images import preprocess_image

    return torch.stack([preprocess_image(model, Image.fromarray(p.image)) for p in patches])


def test_a_patch_depends_on_its_seed_and_index_alone():
    one, again, many = draw(5, seed=3), draw(5, seed=3), list(draw_many(3, seed=3, start=4))[1]
    for other in (again, many):
        assert np.array_equal(one.image, other.image)
        assert np.array_equal(one.tumour, other.tumour)
    assert not np.array_equal(one.image, draw(5, seed=4).image)


def test_the_label_is_geometry(patches):
    for p in patches:
        assert (p.image.shape, p.image.dtype) == ((SIZE, SIZE, 3), np.uint8)
        assert p.label == int(p.tumour[CENTRE, CENTRE].sum() >= MIN_TUMOUR_PIXELS)
    labels = np.array([p.label for p in patches])
    assert 0.42 < labels.mean() < 0.58
    elsewhere = np.mean([p.tumour.any() for p in patches if not p.label])
    assert elsewhere > 0.3  # where the tumour is matters, not whether there is any


def test_the_model_is_good_but_not_perfect_on_fresh_draws(patches, x):
    model = equicam.load("embedded")
    with torch.no_grad():
        top1 = model.module(x).argmax(1)
    accuracy = (top1 == torch.tensor([p.label for p in patches])).float().mean().item()
    assert 0.80 <= accuracy <= 0.95
    assert EMBEDDED_WEIGHTS.stat().st_size <= 2_000_000


def test_it_is_as_good_on_the_patches_of_the_demo():
    """They are those of the generator, but for what a JPEG changes."""
    model, drawn = equicam.load("embedded"), list(draw_many(PATCHES, seed=SEED))
    shipped = synthetic_patches()
    apart = [np.abs(np.asarray(a, float) - b.image).mean() for a, b in zip(shipped, drawn, strict=True)]
    assert max(apart) < 6
    top1 = equicam.explain(model, shipped, method="grad-cam").target
    accuracy = (top1 == torch.tensor([p.label for p in drawn])).float().mean().item()
    assert 0.80 <= accuracy <= 0.95
    assert SHEET.stat().st_size <= 700_000
    with pytest.raises(equicam.EquicamError, match="at most 200"):
        synthetic_patches(201)


def test_its_grad_cam_drifts_and_equigrad_cam_does_not(x):
    """Eq inside the inscribed disc over two of the paper's angles that are not on the view grid."""
    model, some = equicam.load("embedded"), x[:8]
    y = torch.arange(SIZE) - (SIZE - 1) / 2
    disc = (y[:, None] ** 2 + y**2) <= (SIZE / 2) ** 2

    def eq(method: str) -> float:
        base = equicam.explain(model, some, method=method)
        scores = []
        for degrees in (45, 135):
            turned = equicam.rotate(some, degrees)
            rotated = equicam.explain(model, turned, method=method, target=base.target).map
            a, b = rotated[:, disc], equicam.rotate(base.map, degrees)[:, disc]
            a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
            scores.append((a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)))
        return torch.cat(scores).mean().item()

    drifting, steady = eq("grad-cam"), eq("equigrad-cam")
    assert drifting < 0.75
    assert steady > 0.93


def test_load_embedded():
    model = equicam.load("embedded")
    assert model.layer == choose_layer(model.module) == "layer4"
    assert (model.classes, model.name) == (EmbeddedNet.classes, "embedded")
    assert not model.module.training
