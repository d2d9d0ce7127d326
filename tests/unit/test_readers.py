"""Readers on models that are built in other ways than the usual ones, and what they refuse."""

import pytest
import torch
import torchvision
from pytorch_grad_cam import FinerCAM
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import equicam
from equicam import EquicamError
from tests.conftest import Block, Cnn, Vit, assert_alive, explained, light, pictures, seeded


class ByBatch(Cnn):
    """Flattens by the batch size of its input, which a head that sees variants of one picture breaks."""

    def forward(self, x):
        b = x.shape[0]
        pooled = nn.functional.adaptive_avg_pool2d(self.last(self.trunk(x)).relu(), 1)
        return self.head(pooled.view(b, -1))


class Concatenated(Cnn):
    """Features of another branch beside the layer's, which do not broadcast."""

    def __init__(self):
        super().__init__()
        self.last = nn.Conv2d(12, 6, 3, padding=1)

    def forward(self, x):
        other = nn.functional.avg_pool2d(x, 4).repeat(1, 2, 1, 1)
        return self.rest(torch.cat((self.trunk(x), other), 1))


@pytest.mark.parametrize("build", [ByBatch, Concatenated])
@pytest.mark.parametrize("method", ["ablation-cam", "recipro-cam"])
def test_a_head_that_takes_no_more_rows_than_the_trunk_gets_the_whole_network(build, method):
    net, x = seeded(build, seed=7), pictures(2)
    e = explained(net, x, method=method)
    assert_alive(e.map)
    if build is ByBatch:  # the same network, written the usual way
        plain = seeded(Cnn, seed=7)
        torch.testing.assert_close(e.map, explained(plain, x, method=method).map)


def test_ablation_of_an_image_does_not_depend_on_its_batch():
    """In float32 a logit of another run differs by more than a channel of 512 may count."""
    torch.manual_seed(3)
    net, x = torchvision.models.resnet18().eval(), pictures(3, 64, 64).float()
    together = explained(net, x, "layer4", method="ablation-cam").raw
    for i in range(3):
        alone = explained(net, x[i : i + 1], "layer4", method="ablation-cam").raw[0]
        assert alone.std() > 1e-6
        assert (together[i] - alone).abs().max() <= 2e-6 * alone.abs().max()


def test_a_shift_of_all_logits_does_not_turn_ablation_cam_upside_down():
    net, x = seeded(Cnn, seed=7), pictures(2)
    model = equicam.wrap(net, layer="trunk")
    before = equicam.explain(model, x, method="ablation-cam")
    net.head.bias.data -= 10
    after = equicam.explain(model, x, method="ablation-cam")
    assert (net(x).amax(1) < 0).all()
    assert_alive(before.map)
    torch.testing.assert_close(after.map, before.map, atol=1e-8, rtol=0)


def test_recipro_cam_at_a_block_and_at_the_next_blocks_norm_is_one_thing():
    net, x = seeded(Vit), pictures(2)
    at_norm = explained(net, x, method="recipro-cam", layer="blocks.1.norm1")
    at_block = explained(net, x, method="recipro-cam", layer="blocks.0")
    assert_alive(at_norm.map)
    torch.testing.assert_close(at_block.map, at_norm.map, atol=1e-10, rtol=0)


class Twice(Cnn):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, v):
        return self.head(self.relu(self.last(self.relu(self.trunk(v)))).mean((2, 3)))


@pytest.mark.parametrize("method", ["ablation-cam", "recipro-cam"])
def test_a_layer_that_runs_twice_or_never_is_refused(method):
    x = pictures(2)
    with pytest.raises(EquicamError, match="needs to run once in a forward pass"):
        explained(seeded(Twice), x, method=method, layer="relu")
    net = seeded(Cnn)
    net.spare = nn.Conv2d(3, 3, 1)
    with pytest.raises(EquicamError, match="'spare' needs to run"):
        explained(net, x, method=method, layer="spare")
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())


class Sigmoid(Cnn):
    def __init__(self):
        super().__init__(classes=1)

    def forward(self, x):
        return super().forward(x).sigmoid()


@pytest.mark.parametrize(
    "method", ["grad-cam", "score-cam", "rise", "smooth-grad-cam++", "opti-cam", "eigen-cam"]
)
def test_a_sigmoid_head_is_refused(method):
    with pytest.raises(EquicamError, match="needs logits, got probabilities"):
        explained(seeded(Sigmoid), pictures(2), method=light(method))


@pytest.mark.parametrize("name", ["timm:swin_tiny_patch4_window7_224", "timm:coatnet_nano_rw_224"])
@pytest.mark.parametrize("method", ["rollout", "transformer-attribution"])
def test_attention_in_windows_is_refused(name, method):
    model = equicam.load(name, weights="random")
    with pytest.raises(EquicamError, match="blocks all attend over all tokens, got attention over"):
        equicam.explain(model, torch.randn(1, 3, 224, 224), method=method)


class Weighty(Block):
    """Asks its attention for weights, as torch does unless told otherwise."""

    def attend(self, y):
        out, weights = self.attn(y, y, y)
        assert weights.shape == (len(y), y.shape[1], y.shape[1])
        torch.testing.assert_close(weights.sum(2), torch.ones_like(weights[..., 0]))
        return out


class Bound(Block):
    """Calls the fused kernel by a name bound at import."""

    def attend(self, y):
        parts = nn.functional.linear(y, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, 2)
        heads = [part.unflatten(2, (2, -1)).transpose(1, 2) for part in parts]
        return self.attn.out_proj(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Pooled(Vit):
    """Ends in an attention pool: one query over all tokens."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 12))
        self.gather = nn.MultiheadAttention(12, 2, batch_first=True)

    def pool(self, x):
        return self.head(self.gather(self.query.expand(len(x), -1, -1), x, x)[0][:, 0])


@pytest.mark.parametrize("method", ["rollout", "transformer-attribution"])
@pytest.mark.parametrize("kind", [Weighty, Bound])
def test_attention_is_found_however_it_is_called(kind, method):
    x, plain, other = pictures(2), seeded(Vit), seeded(Vit)
    other.blocks = nn.Sequential(kind(12), kind(12)).double().eval()
    other.load_state_dict(plain.state_dict())
    maps = [explained(n, x, method=method, layer="blocks.1.norm1").map for n in (plain, other)]
    assert_alive(*maps)
    torch.testing.assert_close(maps[0], maps[1], atol=1e-9, rtol=0)


def test_an_attention_pool_does_not_disturb_the_record_and_nothing_of_the_recorder_stays():
    assert_alive(explained(seeded(Pooled), pictures(2), method="rollout", layer="blocks.1.norm1").map)
    from torch.overrides import _get_current_function_mode_stack

    from equicam.readers.attention import Recorder

    fused = nn.functional.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), Recorder():
        raise ZeroDivisionError
    assert nn.functional.scaled_dot_product_attention is fused
    assert not _get_current_function_mode_stack()


def test_pytorch_grad_cams_finer_cam_is_not_taken_for_what_it_would_not_be():
    net = seeded(Cnn).float()
    with pytest.raises(EquicamError, match='method="finer-cam"'):
        equicam.equivariant(FinerCAM(net, [net.trunk]))(pictures(2).float(), 0)


def test_another_default_type_changes_no_noise():
    model, x = equicam.wrap(seeded(Cnn), layer="trunk"), pictures(2)
    before = equicam.explain(model, x, method=light("smooth-grad-cam++")).map
    torch.set_default_dtype(torch.float64)
    try:
        after = equicam.explain(model, x, method=light("smooth-grad-cam++")).map
    finally:
        torch.set_default_dtype(torch.float32)
    assert_alive(before)
    assert torch.equal(before, after)
