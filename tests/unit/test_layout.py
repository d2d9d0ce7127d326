import pytest
import torch
from torch import nn

from equicam import EquicamError, Layout
from equicam.readers.layout import channels_of, infer


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((2, 2048, 7, 7), (224, 224), Layout("nchw")),
        ((2, 7, 7, 768), (224, 224), Layout("nhwc")),
        ((2, 512, 7, 10), (224, 300), Layout("nchw")),
        ((2, 12, 17, 24), (33, 47), Layout("nchw")),
        ((2, 64, 32, 17), (253, 129), Layout("nchw")),
        ((2, 7, 10, 512), (224, 300), Layout("nhwc")),
        ((2, 8, 7, 7), (224, 224), Layout("nchw")),
        ((2, 7, 7, 8), (224, 224), Layout("nhwc")),
        ((2, 7, 7, 7), (224, 224), Layout("nchw")),
        ((2, 197, 768), (224, 224), Layout("tokens", 1, (14, 14))),
        ((2, 198, 768), (224, 224), Layout("tokens", 2, (14, 14))),
        ((2, 201, 768), (224, 224), Layout("tokens", 5, (14, 14))),
        ((2, 196, 768), (224, 224), Layout("tokens", 0, (14, 14))),
        ((2, 50, 768), (224, 224), Layout("tokens", 1, (7, 7))),
        ((2, 261, 384), (224, 224), Layout("tokens", 5, (16, 16))),
        ((2, 577, 384), (384, 384), Layout("tokens", 1, (24, 24))),
        ((2, 281, 384), (224, 320), Layout("tokens", 1, (14, 20))),
    ],
)
def test_the_layout_is_inferred(shape, size, expected):
    assert infer(shape, size) == expected


def test_what_a_layer_says_of_its_channels_settles_it():
    assert infer((2, 8, 8, 8), (224, 224), channels=8) == Layout("nchw")
    assert infer((2, 8, 8, 9), (224, 224), channels=9) == Layout("nhwc")
    assert infer((2, 384, 14, 14), (224, 224), channels=384) == Layout("nchw")  # a LayerNorm2d
    assert {channels_of(one) for one in (nn.LayerNorm(5), nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))} == {5}
    assert channels_of(nn.ReLU()) is None


def test_planes_of_every_layout_are_the_same_positions():
    grid = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    tokens = torch.cat((torch.full((2, 2, 3), -1.0), grid.flatten(2).transpose(1, 2)), 1)
    assert torch.equal(Layout("nchw").planes(grid), grid)
    assert torch.equal(Layout("nhwc").planes(grid.permute(0, 2, 3, 1)), grid)
    assert torch.equal(Layout("tokens", 2, (4, 5)).planes(tokens), grid)
    assert Layout("tokens", grid=(4, 5)).resolve((2, 22, 3), (64, 80)) == Layout("tokens", 2, (4, 5))


@pytest.mark.parametrize("shape", [(2, 10), (2, 3, 4, 5, 6), (2, 999, 768)])
def test_what_is_not_spatial_is_refused(shape):
    with pytest.raises(EquicamError):
        infer(shape, (224, 224))
