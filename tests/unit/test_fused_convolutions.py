"""Convolutions with batch norm, addition and ReLU in one step are what the network computes, also after its weights change."""

from unittest.mock import Mock

import pytest
import torch
import torchvision
from torch import nn

from equicam.runtime.compile import fused_convolutions
from equicam.runtime.compile.traced import TracedCall

FUSED = torch.ops.equicam.convolution_relu.default


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Kernels of cuDNN are taken for granted; the operation has a CPU's in their place."""
    monkeypatch.setattr(fused_convolutions, "_uses_cudnn", lambda _x: True)
    torch.manual_seed(0)


@pytest.fixture
def x():
    return torch.rand(2, 5, 9, 9, dtype=torch.float64)


@pytest.fixture
def conv():
    return nn.Conv2d(5, 5, 3, padding=1).double().requires_grad_(False)


@pytest.fixture
def norm():
    return with_random_norms(nn.BatchNorm2d(5).double())


def with_random_norms(net):
    """Batch norms whose four constants all matter, kept from exploding."""
    generator = torch.Generator().manual_seed(3)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low, high in (
                (part.running_mean, -0.3, 0.3), (part.running_var, 0.5, 2.0), (part.weight, 0.3, 1.0), (part.bias, -0.2, 0.2),
            ):  # fmt: skip
                if tensor is not None:
                    tensor.data.uniform_(low, high, generator=generator)
    return net.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def trace(net, x, dtype=None, memory_format=torch.channels_last):
    def call(x):
        x = x.contiguous(memory_format=memory_format)
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
            return {"y": net(x)}

    return TracedCall(call, [x]), call


def nodes(traced, target):
    return [node for node in traced.run.graph.nodes if node.target is target]


def assert_same(forward, x, fused=None, **options):
    """Traced it computes what it does, in so many fused convolutions."""
    traced, call = trace(forward, x, **options)
    expected = call(x)["y"]
    assert expected.std() > 0.01
    torch.testing.assert_close(traced(x)["y"], expected)
    assert fused is None or len(nodes(traced, FUSED)) == fused
    return traced


class Residual(nn.Module):
    """One addition, written as the test says."""

    def __init__(self, add, downsample=False):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5)
        projection = nn.Sequential(nn.Conv2d(5, 5, 1, bias=False), nn.BatchNorm2d(5))
        self.down = projection if downsample else nn.Identity()
        self.add = add

    def forward(self, x):
        return self.add(self.norm(self.conv(x)), self.down(x)).relu()


@pytest.mark.parametrize(
    ("name", "fused"), [("resnet18", 17), ("resnet50", 49), ("vgg11", 8), ("vgg11_bn", 8)]
)
def test_a_network_computes_the_same_with_fused_convolutions(name, fused):
    net = with_random_norms(getattr(torchvision.models, name)().double())
    x, other = torch.rand(2, 2, 3, 64, 64, dtype=torch.float64)
    traced, call = trace(net, x)
    assert len(nodes(traced, FUSED)) == fused
    assert not nodes(traced, torch.ops.aten.native_batch_norm.default)
    for factor in (1, 1.1):
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(factor)
        traced.refresh()
        expected = call(other)["y"]
        assert expected.std() > 0.01
        assert (expected - call(x)["y"]).abs().max() > 1e-4  # the image matters
        torch.testing.assert_close(traced(other)["y"], expected, rtol=1e-9, atol=1e-9)


def test_in_half_precision_weights_are_rounded_once():
    net = with_random_norms(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
    x = torch.rand(2, 8, 16, 16)
    traced, call = trace(net, x, torch.bfloat16)
    (fused,) = nodes(traced, FUSED)
    scale = net[1].weight / (net[1].running_var + net[1].eps).sqrt()
    (kept,) = (kept for _, kept in traced.derived if kept.shape == net[0].weight.shape)
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(kept, (net[0].weight * scale[:, None, None, None]).bfloat16())
    exact = net(x)
    assert exact.std() > 0.01
    error = (traced(x)["y"].double() - exact).norm() / exact.norm()
    assert error <= 1.1 * (call(x)["y"].double() - exact).norm() / exact.norm()
    assert fused.args[0].op != "get_attr"


@pytest.mark.parametrize("downsample", [False, True])
@pytest.mark.parametrize(
    "add", [lambda a, b: a + b, lambda a, b: b + a, lambda a, b: a.add_(b)], ids=["a + b", "b + a", "a += b"]
)
def test_a_residual_is_added_whichever_side_it_is_on(add, downsample, x):
    traced = assert_same(with_random_norms(Residual(add, downsample).double()), x, fused=1)
    assert nodes(traced, FUSED)[0].args[3] is not None
    assert len(nodes(traced, torch.ops.aten.convolution.default)) == int(downsample)


@pytest.mark.parametrize(
    "forward",
    [
        lambda conv, norm, x: norm(conv(x)),  # no ReLU
        lambda conv, norm, x: (y := norm(conv(x))).relu() + y,  # what is rectified is also read elsewhere
        lambda conv, norm, x: norm(y := conv(x)).relu() + y,  # as is the convolution
        lambda conv, norm, x: (norm(conv(x)) + x[:1]).relu(),  # broadcast
        lambda conv, norm, x: torch.add(norm(conv(x)), x, alpha=2).relu(),
        lambda conv, norm, x: nn.functional.conv2d(x, conv.weight * x.mean(), padding=1).relu(),  # no constant weight
        lambda conv, norm, x: nn.functional.batch_norm(conv(x), None, None, training=True).relu(),
        lambda conv, norm, x: nn.functional.conv2d(x, conv.weight[:, :1], padding=1, groups=5).relu(),
    ],
)  # fmt: skip
def test_other_computations_are_left_as_they_are(forward, conv, norm, x):
    assert_same(lambda x: forward(conv, norm, x), x, fused=0)


def test_a_convolution_is_not_moved_behind_a_change_of_its_input(conv, norm, x):
    def forward(x):
        x = x * 2
        y = norm(conv(x))
        return (y + x.sub_(1)).relu()

    assert_same(forward, x, fused=0)


def _masked(weight):
    weight = weight.clone()
    weight[:, :, 1, 1] = 0
    return weight


def _assembled(weight):
    whole = torch.zeros_like(weight)
    whole[:, :, :2] = weight[:, :, :2]
    return whole


def _halved(weight):
    weight = weight.to(torch.float32)
    weight.mul_(0.5)
    return weight.double()


PERMUTATION, MASK = torch.tensor([4, 2, 0, 1, 3]), torch.rand(5, 5, 3, 3) > 0.5


@pytest.mark.parametrize(
    "change",
    [
        _masked, _assembled, _halved,
        lambda w: (w * 40).to(torch.int8).double() / 40,
        lambda w: w.relu().bool().double() - 0.5,
        lambda w: w[PERMUTATION],
        lambda w: w.masked_fill(MASK, 0),
        lambda w: w / w.norm(),
    ],
    ids=["masked", "assembled", "halved in place", "rounded", "signs", "permuted", "filled", "normalised"],
)  # fmt: skip
def test_weights_that_are_computed_are_the_ones_that_are_used(change, conv, x):
    assert_same(lambda x: nn.functional.conv2d(x, change(conv.weight), padding=1).relu(), x)


def test_a_bias_written_in_part_is_the_one_that_is_used(conv, x):
    def forward(x):
        bias = conv.bias.clone()
        bias[0] = 3
        return nn.functional.conv2d(x, conv.weight, bias, padding=1).relu()

    assert_same(forward, x)


def test_random_weights_are_random_in_every_call(x):
    weight = torch.rand(5, 5, 3, 3).double()
    traced, _ = trace(lambda x: nn.functional.conv2d(x, weight + torch.randn_like(weight)).relu(), x)
    assert not torch.equal(traced(x)["y"], traced(x)["y"])


def _into_a_chunk(conv, norm, x):
    both = torch.cat([x, 2 * x], 1)
    first, second = both.chunk(2, 1)
    second += norm(conv(first))
    second.relu_()
    return both * 1


def _into_a_buffer(conv, norm, x):
    both = torch.zeros(len(x), 10, *x.shape[2:], dtype=x.dtype)
    half = both[:, 5:]
    half += norm(conv(x))
    torch.relu_(half)
    return both + 0


def _into_a_detached(conv, norm, x):
    x = x * 2 - 1
    same = x.detach()
    same.add_(norm(conv(x))).relu_()
    return x + 0


def _of_another_layout(conv, norm, x):
    return (x.contiguous() + norm(conv(x))).relu().flatten(1)


@pytest.mark.parametrize("forward", [_into_a_chunk, _into_a_buffer, _into_a_detached, _of_another_layout])
def test_what_is_written_through_a_view_is_written_and_a_residual_has_its_layout(forward, conv, norm, x):
    if forward is _of_another_layout:
        conv.to(memory_format=torch.channels_last)
    assert_same(lambda x: forward(conv, norm, x), x)


def test_in_bfloat16_no_bias_of_a_norm_is_rounded_with_a_residual():
    convs, norm = [nn.Conv2d(8, 8, 1).requires_grad_(False) for _ in range(2)], nn.BatchNorm2d(8)
    norm = with_random_norms(norm)
    norm.bias.add_(20)
    x = torch.rand(2, 8, 9, 9)
    sums = (lambda x: convs[0](x) + norm(convs[1](x)), lambda x: norm(convs[1](x)) + x)
    for forward in (lambda x, add=add: add(x).relu() for add in sums):
        traced, call = trace(forward, x, torch.bfloat16)
        exact = forward(x)
        apart = [(found["y"] - exact).mean((0, 2, 3)).abs().mean() for found in (traced(x), call(x))]
        assert apart[0] <= 1.5 * apart[1]


@pytest.mark.parametrize(("dtype", "fused"), [(torch.bfloat16, 9), (torch.float16, 17)])
def test_in_half_precision_a_residual_network_is_no_further_off(dtype, fused):
    """In bfloat16 the convolutions before a residual stay apart, because their biases would be rounded."""
    net, x = with_random_norms(torchvision.models.resnet18()), torch.rand(4, 3, 64, 64)
    exact = net(x)
    assert exact.std() > 0.01
    traced, call = trace(net, x, dtype)
    assert len(nodes(traced, FUSED)) == fused
    apart = [(found["y"].float() - exact).norm() for found in (traced(x), call(x))]
    assert apart[0] <= 1.2 * apart[1]


@pytest.mark.parametrize(("bias", "fused"), [(1.0, 1), (1e5, 0)])
def test_what_float16_cannot_hold_is_not_folded(bias, fused):
    net = with_random_norms(nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()))
    net[1].bias[0] = bias
    traced, _ = trace(net, torch.rand(2, 8, 16, 16), torch.float16)
    assert len(nodes(traced, FUSED)) == fused


def test_a_shortcut_that_float16_cannot_hold_is_not_folded():
    net, x = Residual(torch.add, downsample=True), torch.rand(2, 5, 9, 9)
    net = with_random_norms(net)
    for weight, norms in ((1.0, 0), (1e6, 1)):
        net.down[1].weight[0] = weight
        traced, _ = trace(net, x, torch.float16)
        assert len(nodes(traced, FUSED)) == 1
        assert len(nodes(traced, torch.ops.aten.native_batch_norm.default)) == norms


def test_channels_first_stays_as_it_is():
    net = with_random_norms(torchvision.models.vgg11().double()).to(memory_format=torch.contiguous_format)
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    assert_same(net, x, fused=0, memory_format=torch.contiguous_format)


def small_net():
    return with_random_norms(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))


def test_without_cudnn_nothing_is_fused(monkeypatch):
    monkeypatch.undo()
    assert_same(small_net(), torch.rand(2, 3, 16, 16), fused=0)


def test_a_kernel_that_fails_is_not_used(monkeypatch):
    monkeypatch.setattr(fused_convolutions, "_convolution_relu", Mock(side_effect=RuntimeError("no engine")))
    fused_convolutions._has_kernel.cache_clear()
    assert_same(small_net(), torch.rand(2, 3, 21, 17), fused=0)
    fused_convolutions._has_kernel.cache_clear()


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "kernel"), [(1, 0, 1, 3), (2, 1, 1, 3), (2, 2, 2, 3), (1, 1, 1, 1)]
)
def test_the_shape_is_known_before_it_runs(stride, padding, dilation, kernel):
    x, weight, bias = torch.rand(2, 4, 11, 8), torch.rand(6, 4, kernel, kernel), torch.rand(6)
    given = (x, weight, bias, None, [stride] * 2, [padding] * 2, [dilation] * 2)
    torch.library.opcheck(FUSED, given, test_utils=("test_schema", "test_faketensor"))
    found = FUSED(*given)
    torch.testing.assert_close(found, nn.functional.conv2d(x, weight, bias, stride, padding, dilation).relu())
