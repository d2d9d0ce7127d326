"""Networks whose maps are steady, less steady, and blank on some images."""

import torch

import equicam
from tests.conftest import Cnn, seeded


def build(seed: int, oriented: float) -> equicam.Model:
    net = seeded(Cnn, seed).float()
    for part in (net.trunk[0], net.trunk[3], net.last):
        weight = part.weight.data
        even = torch.stack([torch.rot90(weight, k, (2, 3)) for k in range(4)]).mean(0)
        part.weight.data = even + oriented * weight
    return equicam.wrap(net, layer="trunk", preprocess=equicam.load("embedded").preprocess)


def steady() -> equicam.Model:
    return build(5, 0.1)


def shaky() -> equicam.Model:
    return build(5, 0.3)


def blank() -> equicam.Model:
    return build(6, 0.3)
