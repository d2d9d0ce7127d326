"""The networks behind docs/reproduce.md that no library has by name."""

import timm
import torchvision
from torch import nn


def original() -> nn.Module:
    """ResNet-50 with the strides that the original weights (He et al.) were trained with."""
    net = torchvision.models.resnet50()
    for stage in (net.layer2, net.layer3, net.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    return net


def vit_small() -> nn.Module:
    """ViT-S/14 for images of any size."""
    return timm.create_model("vit_small_patch14_dinov2", num_classes=2, dynamic_img_size=True)
