"""The library against the paper written out in loops, in float64."""

import numpy as np
import pytest
import torch

import equicam
from equicam import KeepConfident, SoftGate, Views, uniform
from equicam.core.chain import grad_cam_pp, grad_cam_pp_of_products, layer_cam, xgrad_cam
from equicam.methods import Fusion, Method
from tests.conftest import ChannelsLast, Cnn, Vit, assert_alive, explained, pictures, seeded
from tests.twins import slow

STAGES = slow.STEPS
ALIGNED = [(a, m) for i, a in enumerate(STAGES) for m in STAGES[i:]]
FILLS = ("reflect", "zeros", "coverage")
GATES = {
    "uniform": (uniform, lambda p, top: 1.0),
    "pcf": (KeepConfident(0.331), lambda p, top: p if top and p >= 0.331 else 0.0),
    "soft": (SoftGate(0.5), lambda p, top: p**0.5),
}


def agree(ours: equicam.Explanation, twin: dict, index: int = 0) -> None:
    found = {f: getattr(ours, f)[index].numpy() for f in twin}
    assert_alive(torch.from_numpy(twin["map"])[None], torch.from_numpy(found["map"])[None])
    for field, expected in twin.items():
        np.testing.assert_allclose(found[field], expected, rtol=0, atol=1e-10, err_msg=field)


@pytest.fixture(scope="module")
def net():
    return seeded(Cnn)


def small(count: int = 1, **kwargs) -> torch.Tensor:
    return pictures(count, 20, 20, **kwargs)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("weigh", GATES)
@pytest.mark.parametrize(("align_at", "mean_at"), [*ALIGNED, (None, "features"), (None, "map")])
def test_every_fusion_weigher_and_fill(net, align_at, mean_at, weigh, fill):
    x = small()
    ours, theirs = GATES[weigh]
    fusion = Fusion(Views.evenly(5), align_at, mean_at, ours)
    found = explained(net, x, method=fusion, recipe=equicam.Recipe(fill=fill))
    twin = slow.Slow(net.trunk, net.rest).explain(
        x[0].numpy(), fusion.views.to_plain(), align_at, mean_at, theirs, fill
    )
    assert twin["view_kept"].sum() == (3 if weigh == "pcf" else 5)  # the gate bites, and leaves something
    agree(found, twin)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("align_at", "mean_at"), [("features", "features"), ("upsampled", "upsampled")])
@pytest.mark.parametrize(
    "combine", [grad_cam_pp, grad_cam_pp_of_products, xgrad_cam, layer_cam], ids=lambda c: c.__name__
)
def test_every_combine(net, combine, align_at, mean_at, fill):
    x = small()
    method = Method("", Fusion(Views.evenly(4, start=15.0), align_at, mean_at), combine)
    found = explained(net, x, method=method, recipe=equicam.Recipe(fill=fill))
    written_out = slow.Slow(net.trunk, net.rest, combine=getattr(slow, combine.__name__))
    twin = written_out.explain(
        x[0].numpy(), method.fusion.views.to_plain(), align_at, mean_at, lambda p, top: 1, fill
    )
    agree(found, twin)


@pytest.mark.parametrize("fill", FILLS)
def test_nothing_kept_falls_back_to_the_presented_view(net, fill):
    x = small()
    fusion = Fusion(Views((20.0, 200.0)), "features", "features", KeepConfident(1.0))
    found = explained(net, x, method=fusion, recipe=equicam.Recipe(fill=fill))
    twin = slow.Slow(net.trunk, net.rest).explain(
        x[0].numpy(), fusion.views.to_plain(), "features", "features", lambda p, top: 0.0, fill
    )
    agree(found, twin)
    alone = explained(net, x, method="grad-cam")
    np.testing.assert_allclose(found.map, alone.map, atol=1e-12)
    assert "none-kept" in found.flags[0]


@pytest.mark.parametrize("combine", ["grad_cam", "grad_cam_rectified"])
@pytest.mark.parametrize("prefix", [0, 1, 2, 5])
def test_tokens_on_a_grid_that_is_not_square(prefix, combine):
    net = seeded(lambda: Vit((24, 16), prefix))
    x = pictures(1, 24, 16)
    block = net.blocks[1]

    def trunk(v):
        patches = net.patch(v).flatten(2).transpose(1, 2)
        tokens = torch.cat((net.tokens.expand(len(v), -1, -1), patches), 1) + net.place
        return torch.cat((block.norm1(net.blocks[0](tokens)), net.blocks[0](tokens)), 2)

    def rest(both):
        y, before = both.chunk(2, 2)
        after = before.detach() + block.attn(y, y, y, need_weights=False)[0]
        return net.pool(net.norm(after + block.mlp(block.norm2(after))))

    def planes(both):
        return both.chunk(2, 2)[0][:, prefix:].transpose(1, 2).reshape(1, -1, 6, 4)

    model = equicam.wrap(net, layer="blocks.1.norm1", rectify_weights=combine == "grad_cam_rectified")
    fusion = Fusion(Views.evenly(3), "features", "features")
    found = equicam.explain(model, x, method=fusion)
    written_out = slow.Slow(trunk, rest, planes, getattr(slow, combine))
    agree(
        found,
        written_out.explain(x[0].numpy(), fusion.views.to_plain(), "features", "features", lambda p, top: 1),
    )
    assert found.view_maps.shape == (1, 3, 6, 4)


def test_channels_last_features():
    net = seeded(ChannelsLast)
    x = small()
    fusion = Fusion(Views.evenly(3), "features", "features")
    found = explained(net, x, method=fusion, layer="norm")
    written_out = slow.Slow(
        lambda v: net.norm(net.stem(v).permute(0, 2, 3, 1)), net.rest, lambda f: f.permute(0, 3, 1, 2)
    )
    agree(
        found,
        written_out.explain(x[0].numpy(), fusion.views.to_plain(), "features", "features", lambda p, top: 1),
    )


def test_finer_cam_contrasts_the_classes_nearest_on_the_presented_picture(net):
    x = small()
    scores = net(x)[0].detach()
    c = int(scores.argmax())
    nearest = sorted((k for k in range(5) if k != c), key=lambda k: abs(float(scores[k] - scores[c])))[:3]
    found = explained(net, x, method="finer-cam", views=4)
    twin = slow.Slow(net.trunk, net.rest).explain(
        x[0].numpy(), (0.0, 90.0, 180.0, 270.0), "upsampled", "upsampled", lambda p, top: 1,
        target=c, score=lambda s, c: s[c] - 0.6 * s[nearest].mean(),
    )  # fmt: skip
    agree(found, twin)
