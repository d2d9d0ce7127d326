"""The table of levels gives what the preprocessing gives, to the bit, and is refused where it does not."""

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision.transforms import InterpolationMode, v2

from equicam.models.images import standard_preprocessing
from equicam.models.preprocessing import Preprocessing, read_steps
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD

USUAL = {
    "standard": standard_preprocessing(256, 224, IMAGENET_MEAN, IMAGENET_STD),
    "torchvision's": torchvision.models.ResNet50_Weights.IMAGENET1K_V2.transforms(),
    "bicubic": Preprocessing(100, 96, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic"),
    "a square": v2.Compose(
        [
            v2.Resize((80, 64)),
            v2.CenterCrop((64, 48)),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    ),
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


def _contrast(x):
    return (x - x.mean()) / x.std()


@pytest.mark.parametrize(
    "preprocess",
    [
        v2.Compose([*USUAL["standard"].transforms, v2.Lambda(_contrast)]),  # a pixel depends on the others
        v2.Compose([v2.Resize(64), v2.CenterCrop(48), v2.Grayscale(3), *USUAL["standard"].transforms[2:]]),
        v2.Compose([v2.Resize(64, InterpolationMode.BILINEAR), *USUAL["standard"].transforms[2:]]),  # no crop
        v2.Compose(
            [v2.PILToTensor(), v2.Resize(64, antialias=False), v2.CenterCrop(48), v2.ToDtype(torch.float32)]
        ),
        lambda image: torch.zeros(3, *image.size),
    ],
    ids=["contrast", "grey", "no crop", "resized as a tensor", "a function"],
)
def test_other_steps_have_no_table(preprocess):
    assert read_steps(preprocess).levels is None
