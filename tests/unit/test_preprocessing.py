"""What a preprocessing does is read from its steps; its table of levels gives the same to the bit, or there is none."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms import InterpolationMode, v2

import equicam
from equicam.models.images import standard_preprocessing
from equicam.models.preprocessing import (
    Preprocessing,
    preprocessing_facts,
    preprocessing_sentence,
    read_steps,
    with_preprocessing,
)
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.2, 0.2)
AS_NUMBERS = (v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True))


def net():
    return nn.Sequential(nn.Conv2d(3, 2, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def striped():
    return Image.linear_gradient("L").resize((120, 90)).convert("RGB")


def test_it_is_torchvisions():
    model = equicam.load("mobilenet_v2", weights="random")
    ours = with_preprocessing(model, size=128, crop=112)
    theirs = type(model.preprocess)(crop_size=112, resize_size=128)
    assert torch.allclose(ours.preprocess(striped()), theirs(striped()), atol=1e-6)
    assert ours.preprocess(striped()).std() > 0.1
    assert (ours.mean, ours.std) == (model.mean, model.std)


def test_what_is_not_given_stays():
    model = equicam.load("timm:vit_tiny_patch16_224", weights="random")
    changed = with_preprocessing(model, mean=MEAN)
    assert changed.preprocess == Preprocessing(248, 224, MEAN, model.std, "bicubic")
    assert with_preprocessing(model) is model
    x = torch.tensor(MEAN)[:, None, None] * torch.ones(3, 224, 224)
    image = Image.fromarray((x * 255).round().byte().permute(1, 2, 0).numpy())
    assert changed.preprocess(image).abs().max() < 0.01


def test_a_function_cannot_be_read():
    model = equicam.wrap(net(), layer="0", preprocess=lambda image: v2.functional.to_image(image) / 255)
    with pytest.raises(equicam.EquicamError, match="size and crop, because the model's own cannot be read"):
        with_preprocessing(model, mean=MEAN)
    changed = with_preprocessing(model, crop=64, mean=MEAN, std=STD)
    assert changed.preprocess == Preprocessing(64, 64, MEAN, STD)


def test_context_finds_the_crop():
    model = with_preprocessing(equicam.wrap(net(), layer="0"), size=96, crop=64)
    steps = read_steps(model.preprocess)
    assert (steps.has_margin, steps.crop) == (True, (64, 64))


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([v2.Resize((64, 96))], "resized to 64×96; mean 0.5,0.4,0.3; std 0.2,0.2,0.2; the model sees 100 % of a square image, 100 % of one of 4:3"),
        ([v2.Resize(100), v2.CenterCrop(50)], "short side resized to 100; centre crop 50×50; mean 0.5,0.4,0.3; std 0.2,0.2,0.2; the model sees 25 % of a square image, 19 % of one of 4:3"),
        ([v2.CenterCrop(256)], "input 256×256; mean 0.5,0.4,0.3; std 0.2,0.2,0.2; the model sees 25 % of a square image, 21 % of one of 4:3"),
    ],
)  # fmt: skip
def test_the_sentence(steps, sentence):
    preprocess = v2.Compose([*steps, *AS_NUMBERS, v2.Normalize(MEAN, STD)])
    model = equicam.wrap(net(), layer="0", preprocess=preprocess, mean=MEAN, std=STD)
    assert preprocessing_sentence(preprocessing_facts(model)) == f"preprocessing: {sentence}"


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"size": "8"}, {"size": 10**6}, {"mean": [1e99] * 3}, {"mean": 5}, {"std": [0, 0, 0]}, {"interpolation": "x"}, {"more": 1}],
)  # fmt: skip
def test_a_manifest_with_other_values_is_refused(wrong):
    good = Preprocessing(96, 64, MEAN, STD).to_json()
    assert Preprocessing.from_json(good).to_json() == good
    with pytest.raises(equicam.EquicamError):
        Preprocessing.from_json(good | wrong)


USUAL = {
    "standard": standard_preprocessing(256, 224, IMAGENET_MEAN, IMAGENET_STD),
    "torchvision's": torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms(),
    "bicubic": Preprocessing(100, 96, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic"),
    "a square": v2.Compose([v2.Resize((80, 64)), v2.CenterCrop((64, 48)), *AS_NUMBERS]),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_same_to_the_bit(name):
    preprocess, rng = USUAL[name], np.random.default_rng(5)
    table = read_steps(preprocess).levels
    assert table is not None
    for size in ((211, 640, 3), (900, 301, 3), (120, 120, 3)):
        image = Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8))
        expected = preprocess(image).numpy()
        assert expected.std() > 0.02
        assert np.array_equal(table(image).to_numbers(), expected)


STEPS = USUAL["standard"].transforms
OTHER = {
    "contrast": [*STEPS, v2.Lambda(lambda x: (x - x.mean()) / x.std())],  # a pixel depends on the others
    "grey": [v2.Resize(64), v2.CenterCrop(48), v2.Grayscale(3), *STEPS[2:]],
    "no crop": [v2.Resize(64, InterpolationMode.BILINEAR), *STEPS[2:]],
    "a tensor": [AS_NUMBERS[0], v2.Resize(64, antialias=False), v2.CenterCrop(48), v2.ToDtype(torch.float32)],
}


@pytest.mark.parametrize("steps", OTHER.values(), ids=OTHER)
def test_other_steps_have_no_table(steps):
    assert read_steps(v2.Compose(steps)).levels is None
    assert read_steps(lambda image: torch.zeros(3, *image.size)).levels is None
