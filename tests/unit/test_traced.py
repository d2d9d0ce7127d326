"""A call as one graph gives what the call gives, with new inputs and changed weights."""

import sys
from functools import partial

import pytest
import torch
from torch import nn

import equicam
from equicam.explain import explain_group
from equicam.methods import resolve, resolve_fill
from equicam.recipe import Recipe
from equicam.runtime.compile.traced import REPLACEMENTS, TracedCall
from equicam.runtime.executor import Executor
from equicam.runtime.graphs import keep_constants
from tests.conftest import Cnn, assert_alive, pictures, seeded

aten = torch.ops.aten


def call_of(model, recipe):
    """A whole explanation as a function of tensors."""
    executor, method = Executor(model, recipe), resolve(recipe)
    work = partial(explain_group, method=method, fill=resolve_fill(recipe))

    def call(x):
        return work(executor.view_reader(method.reader, sys.maxsize), x, None)

    return executor.view_reader(method.reader, 1).network, call


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("method", ["equigrad-cam", "equigrad-cam-fine", "equigrad-cam+pcf", "layer-cam"])
def test_a_traced_explanation_is_the_explanation_of_new_images_and_of_changed_weights(method, dtype):
    model = equicam.wrap(seeded(Cnn).float(), layer="trunk")
    recipe = Recipe(method, views=6 if method.startswith("equi") else None, dtype=dtype)
    network, call = call_of(model, recipe)
    first, second = pictures(3).float(), pictures(3, seed=5).float()
    with torch.no_grad(), keep_constants(), network.frozen():
        traced = TracedCall(call, [first])
        same_within = 1e-5 if dtype is None else 2e-2
        for change in (lambda: None, lambda: model.module.trunk[0].weight.mul_(1.5)):
            change()
            traced.refresh()
            expected, found = call(second), traced(second)
            assert found.keys() == expected.keys()
            assert_alive(expected["map"])
            for name, value in expected.items():
                close = {"rtol": same_within, "atol": same_within, "equal_nan": True}
                torch.testing.assert_close(found[name].double(), value.double(), **close)
        assert bool(traced.derived) == (dtype is not None)
        # the inputs are not constants of the graph
        assert not torch.allclose(call(first)["map"], call(second)["map"], atol=0.05)


def test_a_traced_call_keeps_the_weights_it_was_traced_with_when_the_network_changes_its_type():
    linear, x = nn.Linear(3, 2), torch.rand(4, 3)
    traced = TracedCall(lambda x: {"y": linear(x)}, [x])
    before = traced(x)["y"]
    linear.double()
    torch.testing.assert_close(traced(x)["y"], before)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_traced_graph_holds_no_tensor(dtype):
    linear, x = nn.Linear(3, 2), torch.rand(4, 3)

    def call(x):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
            return {"y": linear(x) + torch.ones(2)}

    traced = TracedCall(call, [x])
    graph = traced.run
    assert len(traced.derived) == (0 if dtype is None else 2)
    held = [name for name, value in vars(graph).items() if isinstance(value, torch.Tensor)]
    assert held + list(dict(graph.named_parameters())) + list(dict(graph.named_buffers())) == []
    torch.testing.assert_close(traced(x)["y"], call(x)["y"])


def test_a_call_that_reads_values_is_refused_by_the_tracer():
    with pytest.raises(RuntimeError):
        TracedCall(lambda x: {"y": x * float(x.sum())}, [torch.rand(3)])


BLOCKS = [(3, (7, 7), 2, (3, 3)), (3, (3, 3), 2, (1, 1)), (1, (11, 11), 4, (2, 2)), (4, (5, 3), 2, (0, 2))]
BLOCKS += [(3, (7, 7), 4, (3, 3)), (2, (4, 4), 3, (5, 1))]
PATCHES = [((28, 28), 14, True), ((30, 23), 7, False), ((8, 8), 2, True)]


CASES = [(3, (kernel, kernel), kernel, (0, 0), size, bias) for size, kernel, bias in PATCHES]
CASES += [
    (*one, size, bias) for one in BLOCKS for size in ((32, 32), (31, 45), (24, 37)) for bias in (True, False)
]


@pytest.mark.parametrize(("channels", "kernel", "stride", "padding", "size", "bias"), CASES)
def test_patches_and_blocks_are_the_convolution(channels, kernel, stride, padding, size, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 5, kernel, stride=stride, padding=padding, bias=bias).double()
    x = torch.rand(2, channels, *size, dtype=torch.float64)
    settings = ([stride] * 2, list(padding), [1, 1], False, [0, 0], 1)
    found = REPLACEMENTS[aten.convolution.default](x, conv.weight, conv.bias, *settings)
    assert found.std() > 0.01
    torch.testing.assert_close(found, conv(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("channels", "kernel", "padding"), [(3, (3, 3), (1, 1)), (1, (5, 3), (0, 2)), (4, (1, 1), (0, 0))]
)
def test_a_convolution_with_channels_filled_up_is_the_convolution(channels, kernel, padding, bias):
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 5, kernel, padding=padding, bias=bias).double()
    x = torch.rand(2, channels, 12, 9, dtype=torch.float64)
    traced = TracedCall(lambda x: {"y": conv(x)}, [x])
    (inner,) = (node for node in traced.run.graph.nodes if node.target is aten.convolution.default)
    assert inner.args[0].meta["val"].shape[1] == 8
    found = traced(x)["y"]
    assert found.std() > 0.01
    torch.testing.assert_close(found, conv(x))


def test_a_traced_network_has_its_first_convolution_on_blocks():
    conv, x = nn.Conv2d(3, 8, 7, stride=2, padding=3), torch.rand(2, 3, 32, 32)
    traced = TracedCall(lambda x: {"y": conv(x)}, [x])
    inner = [node for node in traced.run.graph.nodes if node.target is aten.convolution.default]
    assert [node.args[3] for node in inner] == [[1, 1]]
    torch.testing.assert_close(traced(x)["y"], conv(x))


@pytest.mark.parametrize(
    ("channels", "stride", "padding", "dilation", "transposed", "groups"),
    [(3, 2, 1, 1, False, 1), (3, 1, 0, 2, False, 1), (3, 2, 0, 2, False, 1), (3, 3, 0, 1, False, 1), (3, 2, 0, 1, True, 1),
     (3, 2, 0, 1, False, 3), (5, 1, 0, 1, False, 1)],
)  # fmt: skip
def test_other_convolutions_stay(channels, stride, padding, dilation, transposed, groups):
    x, weight = torch.rand(1, channels, 8, 8), torch.rand(3, channels // groups, 2, 2)
    settings = ([stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], groups)
    assert REPLACEMENTS[aten.convolution.default](x, weight, None, *settings) is NotImplemented


def test_products_with_a_vector_are_sums_and_pooling_to_the_same_size_is_none():
    torch.manual_seed(0)
    bmm = REPLACEMENTS[aten.bmm.default]
    a, b, c = torch.rand(2, 1, 5), torch.rand(2, 5, 3), torch.rand(2, 4, 5)
    torch.testing.assert_close(bmm(a, b), a @ b)
    torch.testing.assert_close(bmm(c, b[..., :1]), c @ b[..., :1])
    assert bmm(c, b) is NotImplemented
    x = torch.rand(2, 3, 7, 7)
    pool = REPLACEMENTS[aten._adaptive_avg_pool2d.default]
    back = REPLACEMENTS[aten._adaptive_avg_pool2d_backward.default]
    torch.testing.assert_close(pool(x, [7, 7]), nn.AdaptiveAvgPool2d(7)(x))
    torch.testing.assert_close(back(x, x), x)
    assert pool(x, [1, 1]) is NotImplemented
    assert back(x[..., :1, :1], x) is NotImplemented
