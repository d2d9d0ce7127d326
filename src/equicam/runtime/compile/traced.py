"""A whole call as one graph of tensor operations, compiled by TorchInductor.

The call runs once under a tracer: views, network, gradients, alignment and uncertainty become one graph, in which the
compiler fuses across all of them. A call that reads values on the way is refused. Weights enter the graph as inputs; what
is computed from weights alone (casts, convolutions with their batch norm) is computed once, and by `refresh` when they change.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

from equicam.runtime.compile.fused_convolutions import Weight, fuse_convolutions, is_written
from equicam.runtime.pending import Tensors

aten = torch.ops.aten
FEW_CHANNELS = 4  # images have as many at most; the layers of a network have more
CHANNEL_MULTIPLE = 8  # tensor cores read as many; a kernel for fewer fills them up in a pass of its own


class TracedCall:
    """A function of tensors as a graph for the shapes of its first inputs; `compile` makes it fast."""

    def __init__(self, function: Callable[..., Tensors], inputs: Sequence[Tensor]) -> None:
        """The function must return new tensors, and runs twice on these inputs."""
        from torch.fx.experimental.proxy_tensor import make_fx

        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            function(*inputs)  # constants are made now, so that the graph reads them instead of making them
            graph = make_fx(function, decomposition_table=REPLACEMENTS, tracing_mode="real")(*inputs)
        graph.graph.eliminate_dead_code()
        self.derived = [*fuse_convolutions(graph), *_take_out_casts(graph)]
        # detached: what `net.half()` puts into a parameter is not for code compiled for another type
        self.weights = [tensor.detach() for tensor in _take_out_constants(graph)]
        graph.recompile()
        self.run: Callable[..., Tensors] = graph

    def compile(self, inputs: Sequence[Tensor]) -> None:
        """Compile the graph for inputs of these shapes."""
        from torch._inductor.compile_fx import compile_fx

        graph: Any = self.run
        with torch.no_grad():
            self.run = compile_fx(graph, [*inputs, *self.weights])  # type: ignore[assignment]

    def __call__(self, *inputs: Tensor) -> Tensors:
        """The results for inputs of the same shapes."""
        with torch.no_grad():
            return self.run(*inputs, *self.weights)

    def refresh(self) -> None:
        """Compute again what is derived from the weights, in place: a captured graph reads it where it is."""
        with torch.no_grad():
            for value, kept in self.derived:
                kept.copy_(value())


def _take_out_casts(graph: fx.GraphModule) -> list[tuple[Weight, Tensor]]:
    """Replace casts of weights by their results; return weights and casts."""
    found: list[tuple[Weight, Tensor]] = []
    for node in list(graph.graph.nodes):
        if node.target is not aten._to_copy.default or node.args[0].op != "get_attr":
            continue
        if is_written(graph, node) or is_written(graph, node.args[0]):
            continue
        source = getattr(graph, node.args[0].target)
        cast = aten._to_copy.default(source, **node.kwargs)
        name = f"_cast{len(found)}"
        graph.register_buffer(name, cast)
        with graph.graph.inserting_before(node):
            node.replace_all_uses_with(graph.graph.get_attr(name))
        graph.graph.erase_node(node)
        found.append((partial(Tensor.detach, source.detach()), cast))
    graph.graph.eliminate_dead_code()
    return found


def _take_out_constants(graph: fx.GraphModule) -> list[Tensor]:
    """Turn the tensors that a graph holds into inputs after its own; return them.

    None stays behind: the compiler passes on all that a graph holds, used or not, and checks its layout in every call.
    """
    nodes = list(graph.graph.nodes)
    first = next(node for node in nodes if node.op != "placeholder")
    found: dict[str, tuple[Tensor, fx.Node]] = {}
    for node in nodes:
        if node.op != "get_attr":
            continue
        if node.target not in found:
            with graph.graph.inserting_before(first):
                placeholder = graph.graph.placeholder(f"constant{len(found)}")
            found[node.target] = getattr(graph, node.target), placeholder
        node.replace_all_uses_with(found[node.target][1])
        if node is first:
            first = node.next
        graph.graph.erase_node(node)
    held = [name for name, value in vars(graph).items() if isinstance(value, Tensor)]
    for name in (*held, *dict(graph.named_parameters()), *dict(graph.named_buffers())):
        delattr(graph, name)
    return [tensor for tensor, _ in found.values()]


@torch.library.custom_op("equicam::sample", mutates_args=())
def _sample(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """`grid_sample` as it is: what the compiler makes of it computes every position again for every plane."""
    found: Tensor = aten.grid_sampler_2d(x.expand(len(grid), -1, -1, -1), grid, mode, padding, align_corners)
    return found


@_sample.register_fake
def _(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:  # noqa: ARG001
    return x.new_empty((len(grid), x.shape[1], grid.shape[1], grid.shape[2]))


def _sample_uncompiled(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    # one set of planes for all grids is not copied for each
    return _sample(x[:1] if x.stride(0) == 0 else x, grid, mode, padding, align_corners)


def _convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    transposed: bool, _output_padding: list[int], groups: int,
) -> Any:  # fmt: skip
    """Convolutions of patches as products, and those on few channels, as most networks' first is, on more."""
    plain = not transposed and groups == 1 and x.ndim == 4 and set(dilation) == {1}
    size = list(weight.shape[2:])
    if not plain:
        return NotImplemented
    if set(stride) == {1}:
        if x.shape[1] > FEW_CHANNELS:
            return NotImplemented
        return torch.conv2d(_fill_channels(x), _fill_channels(weight), bias, 1, padding)
    if list(stride) == size and not any(padding) and min(x.shape[2] - size[0], x.shape[3] - size[1]) >= 0:
        return _as_product(x, weight, bias)
    if x.shape[1] <= FEW_CHANNELS and stride[0] == stride[1] < min(size):
        return _on_blocks(x, weight, bias, stride[0], padding)
    return NotImplemented


def _as_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A convolution whose stride is its kernel's size: a matrix product of patches."""
    size = weight.shape[2:]
    rows, columns = (whole // part for whole, part in zip(x.shape[2:], size, strict=True))
    x = x[..., : rows * size[0], : columns * size[1]]
    cut = x.reshape(len(x), x.shape[1], rows, size[0], columns, size[1]).permute(0, 2, 4, 1, 3, 5)
    flat = cut.reshape(len(x) * rows * columns, -1)
    matrix = weight.reshape(len(weight), -1).t()
    found = flat @ matrix if bias is None else torch.addmm(bias, flat, matrix)
    return found.view(len(x), rows, columns, -1).permute(0, 3, 1, 2)


def _on_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: list[int]) -> Tensor:
    """A convolution of stride s as one of stride 1 whose channels are the s × s pixels of a block: the same products, summed.

    Zeros in front of the kernel let it start where a block starts.
    """
    of_x: list[int] = []
    of_weight: list[int] = []
    for whole, kernel, before in zip(x.shape[2:], weight.shape[2:], padding, strict=True):
        results = (whole + 2 * before - kernel) // stride + 1
        blocks_before = -(-before // stride)
        in_front = blocks_before * stride - before
        blocks = -(-(kernel + in_front) // stride)
        padded = (results + blocks - 1) * stride
        of_x[:0] = [blocks_before * stride, padded - blocks_before * stride - whole]
        of_weight[:0] = [in_front, blocks * stride - kernel - in_front]
    return torch.conv2d(_blocks(x, of_x, stride), _blocks(weight, of_weight, stride), bias)


def _blocks(x: Tensor, padding: list[int], size: int) -> Tensor:
    """A padded image with the pixels of every block as channels, channels-last if the image is."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    x = pad(x, padding)
    cut = x.reshape(len(x), x.shape[1], x.shape[2] // size, size, x.shape[3] // size, size)
    found = cut.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    return _fill_channels(found.contiguous(memory_format=torch.channels_last) if last else found)


def _fill_channels(x: Tensor) -> Tensor:
    """Zeros after the channels, up to a number that tensor cores read."""
    return pad(x, [0, 0, 0, 0, 0, -x.shape[1] % CHANNEL_MULTIPLE])


def _by_a_vector(a: Tensor, b: Tensor) -> Any:
    """A product with a vector as a sum, which the compiler fuses with what comes before it."""
    if a.shape[1] == 1:
        return (a.transpose(1, 2) * b).sum(1, keepdim=True)
    if b.shape[2] == 1:
        return (a * b.transpose(1, 2)).sum(2, keepdim=True)
    return NotImplemented


def _pool_to_the_same_size(x: Tensor, size: list[int]) -> Any:
    return x.clone() if list(x.shape[-2:]) == list(size) else NotImplemented


def _gradient_of_that(gradient: Tensor, x: Tensor) -> Any:
    return gradient.clone() if gradient.shape == x.shape else NotImplemented


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten.grid_sampler_2d.default: _sample_uncompiled,
    aten.convolution.default: _convolution,
    aten.bmm.default: _by_a_vector,
    aten._adaptive_avg_pool2d.default: _pool_to_the_same_size,
    aten._adaptive_avg_pool2d_backward.default: _gradient_of_that,
}
"""Operations that the compiler would leave to slow kernels, written otherwise; each may decline."""
