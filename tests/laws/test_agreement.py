"""What must hold of agreement and repeatability for any network."""

import pytest
import torch

import equicam
from equicam import Fusion, KeepConfident, Views, uniform
from equicam.core.agreement import OUTLINE_FROM, to_pixels
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded

NETS = {"cnn": (Cnn, "trunk"), "vit": (Vit, "blocks.1.norm1")}


def net(kind: str) -> equicam.Model:
    build, layer = NETS[kind]
    return equicam.wrap(seeded(build, 1), layer=layer)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=0, equal_nan=True)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("weigh", [uniform, KeepConfident(0.0)], ids=["uniform", "pcf"])
@pytest.mark.parametrize("at", ["features", "map"])
def test_a_quarter_turn_of_the_image_rotates_the_agreement(kind, weigh, at):
    model, x = net(kind), pictures()
    fusion = Fusion(Views.evenly(12), at, at, weigh)
    straight = equicam.explain(model, x, method=fusion)
    rotated = equicam.explain(model, torch.rot90(x, 1, (-2, -1)), method=fusion, target=straight.target)
    assert_alive(straight.map)
    assert straight.agreement.std() > 0.01
    close(rotated.agreement, torch.rot90(straight.agreement, 1, (-2, -1)))
    close(rotated.agreed_area, straight.agreed_area)
    size = (x.shape[-2], x.shape[-1])
    assert straight.coarse_outline.any()
    outlined = to_pixels(straight.coarse_outline, size)
    assert torch.equal(to_pixels(rotated.coarse_outline, size), torch.rot90(outlined, 1, (-2, -1)))


@pytest.mark.parametrize("kind", NETS)
def test_the_order_of_views_changes_no_agreement(kind):
    model, x = net(kind), pictures()
    angles = Views.evenly(8).to_plain()
    first = equicam.explain(model, x, views=Views(angles))
    second = equicam.explain(model, x, views=Views(angles[3:] + angles[:3]), target=first.target)
    assert first.agreement.std() > 0.01
    close(first.agreement, second.agreement)


def test_a_network_that_follows_the_image_agrees_and_repeats_and_one_that_does_not_has_no_outline():
    x = pictures(2, 32, 32)
    peak = torch.zeros(32, 32, dtype=x.dtype)
    peak[4:10, 13:19] = 1  # far from the centre, the same in every view
    follows = equicam.equivariant(lambda views, _: views.mean(1).sigmoid(), views=8)(x, target=0)
    stays = equicam.equivariant(lambda views, _: peak.expand(len(views), -1, -1), views=8)(x, target=0)
    assert follows.repeatability.min() > 0.9
    assert follows.agreed_area.min() > 0.05
    assert stays.agreed_area.max() < 0.01
    assert stays.agreement.max() < OUTLINE_FROM


def test_images_alone_are_as_in_a_batch():
    model, x = net("cnn"), pictures()
    together = equicam.explain(model, x)
    for i in range(len(x)):
        alone = equicam.explain(model, x[i : i + 1])
        close(alone.agreement, together.agreement[i : i + 1])
        close(alone.repeatability, together.repeatability[i : i + 1])
