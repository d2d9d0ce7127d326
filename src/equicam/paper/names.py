"""Networks as a page writes them."""

NAMES = {
    "resnet50": "ResNet-50",
    "mobilenet_v2": "MobileNetV2",
    "vgg16": "VGG-16",
    "vit_b_16": "ViT-B/16",
    "vit_small": "ViT-S/14",
}
"""By the name of their folder of rows."""
