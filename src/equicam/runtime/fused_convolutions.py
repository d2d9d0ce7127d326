"""Convolutions of a traced graph with the batch norm, addition and ReLU after them, each as one kernel of cuDNN.

In evaluation a batch norm multiplies and shifts every channel by constants, so it becomes part of the convolution:

    norm(conv(x; W)) = conv(x; s·W) + β − s·μ,  s = γ / √(σ² + ε)

cuDNN adds that bias and a residual, and rectifies, before it writes the result: activations are not read and written again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx

from equicam.readers.logits import at_least_float32

aten = torch.ops.aten
Node = Any
"""An `fx.Node`; its arguments have no types."""
Weight = Callable[[], Tensor]
"""Computes a tensor from a network's weights as they are now."""
RELUS = (aten.relu.default, aten.relu_.default)
ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)
NORMS = {aten.native_batch_norm.default: 5, aten.cudnn_batch_norm.default: 5}
"""Batch norms by the position of the argument that says whether they are training; ε is two further on."""
LAST = torch.channels_last
Residual = Literal["none", "channel", "image"]
"""What is added to a convolution: nothing, a value per channel, or a tensor of its result's shape."""
SAME_WITHIN = 0.02
"""The relative error of a kernel next to separate operations; in bf16 it is .002."""


@dataclass(frozen=True)
class Convolution:
    """A convolution with the batch norm after it, if there is one."""

    nodes: tuple[Node, ...]  # the last first
    x: Node
    weight: Weight
    bias: Weight
    settings: tuple[list[int], list[int], list[int]]  # stride, padding, dilation

    @property
    def result(self) -> Node:
        """The node that holds what it computes."""
        return self.nodes[0]

    @property
    def needs_exact_bias(self) -> bool:
        """Whether its bias, rounded once, would err more than the network does.

        A batch norm computes in full precision. In half precision a folded bias would be off in the same direction in every
        pixel and view, which no average removes. A bias of the convolution's own is rounded in the network too.
        """
        return len(self.nodes) > 1 and self.result.meta["val"].dtype.itemsize == 2


def fuse_convolutions(graph: fx.GraphModule) -> list[tuple[Weight, Tensor]]:
    """Replace convolutions that end in a ReLU; return the functions of the weights that it reads, and their values."""
    derived: list[tuple[Weight, Tensor]] = []

    def constant(value: Weight, dtype: torch.dtype) -> Node:
        kept = value().to(dtype)
        kept = kept.contiguous(memory_format=LAST) if kept.ndim == 4 else kept
        name = f"_derived{len(derived)}"
        graph.register_buffer(name, kept)
        derived.append((value, kept))
        node: Node = graph.graph.get_attr(name)
        return node

    with torch.no_grad():
        for relu in [node for node in graph.graph.nodes if node.target in RELUS]:
            found = _match(graph, relu.args[0])
            if found is None:
                continue
            one, residual, other, unused = found
            dtype = one.result.meta["val"].dtype
            with graph.graph.inserting_before(unused[0] if residual is not None else one.nodes[-1]):
                bias = one.bias
                if other is not None:  # its bias joins ours
                    bias = _sum(one.bias, other.bias)
                    weight = constant(other.weight, dtype)
                    residual = graph.graph.call_function(
                        aten.convolution.default,
                        (other.x, weight, None, *other.settings, False, [0, 0], 1),
                    )
                weight, shift = constant(one.weight, dtype), constant(bias, dtype)
                if one.needs_exact_bias:
                    residual = constant(_rounded_off(bias, dtype), dtype)
                fused = graph.graph.call_function(
                    torch.ops.equicam.convolution_relu.default,
                    (one.x, weight, shift, residual, *one.settings),
                )
                fused.meta["val"] = relu.meta["val"]
            relu.replace_all_uses_with(fused)
            # in-place operations are not removed as dead code
            for node in (relu, *unused, *one.nodes, *(other.nodes if other is not None else ())):
                graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return derived


def _match(
    graph: fx.GraphModule, before: Node
) -> tuple[Convolution, Node | None, Convolution | None, tuple[Node, ...]] | None:
    """What a ReLU rectifies: a convolution, the residual added to it, that as a convolution, and the addition."""
    if len(before.users) > 1:
        return None
    if (one := _convolution(graph, before)) is not None:
        return (
            (one, None, None, ()) if _is_fusable(one, "channel" if one.needs_exact_bias else "none") else None
        )
    if before.target not in ADDITIONS or before.kwargs:
        return None
    for own, residual in (before.args, before.args[::-1]):
        if not isinstance(own, fx.Node) or not isinstance(residual, fx.Node) or own is residual:
            continue
        one = _convolution(graph, own) if len(own.users) == 1 else None
        # the kernel takes one thing to add: the residual, or what a rounded bias lacks
        if one is None or one.needs_exact_bias or not _alike(own, residual) or not _is_fusable(one, "image"):
            continue
        other = _convolution(graph, residual) if len(residual.users) == 1 else None
        nodes = {before, *one.nodes, *(() if other is None else other.nodes)}
        first = min(nodes)
        # moved to the addition, it must not read what was changed in place since
        if any(_changes_tensors(node) for node in _between(first, before) if node not in nodes):
            continue
        return one, residual, other, (before,)
    return None


def _convolution(graph: fx.GraphModule, node: Node) -> Convolution | None:
    """The convolution that a node is the result of, with constant weights and one reader of every step."""
    nodes, norm = [node], None
    if node.target is getitem and node.args[1] == 0 and node.args[0].target in NORMS:
        norm = node.args[0]
        nodes += [norm, norm.args[0]]
        if norm.args[NORMS[norm.target]] or any(len(one.users) > 1 for one in nodes[1:]):
            return None
    conv = nodes[-1]
    if conv.target is not aten.convolution.default:
        return None
    x, weight_node, bias_node, stride, padding, dilation, transposed, _, groups = conv.args
    if transposed or groups != 1 or len(padding) != 2:
        return None
    weight = _constant(graph, weight_node)
    if weight is None:
        return None
    of_norm = (None,) * 4 if norm is None else norm.args[1:5]
    bias, gamma, beta, mean, variance = (
        _full(weight, missing) if one is None else _constant(graph, one)
        for one, missing in zip((bias_node, *of_norm), (0.0, 1.0, 0.0, 0.0, 1.0), strict=True)
    )
    if bias is None or gamma is None or beta is None or mean is None or variance is None:
        return None
    epsilon = 0.0 if norm is None else norm.args[NORMS[norm.target] + 2]

    def scale() -> Tensor:
        return gamma() * torch.rsqrt(variance() + epsilon)

    return Convolution(
        tuple(nodes),
        x,
        weight=lambda: weight() * scale()[:, None, None, None],
        bias=lambda: beta() + (bias() - mean()) * scale(),
        settings=(stride, padding, dilation),
    )


def _rounded_off(value: Weight, dtype: torch.dtype) -> Weight:
    """What a value loses when it is rounded, for all pixels."""
    return lambda: (value() - value().to(dtype))[None, :, None, None]


def _sum(one: Weight, other: Weight) -> Weight:
    return lambda: one() + other()


def _full(weight: Weight, value: float) -> Weight:
    """The same value for every channel that a convolution makes."""
    return lambda: weight().new_full((len(weight()),), value)


def _constant(graph: fx.GraphModule, node: Node) -> Weight | None:
    """A function that computes a node made of weights alone, in full precision; None where it is made of more.

    Casts are left out: the result is rounded once, after the batch norm is part of it.
    """
    if node.op == "get_attr":
        tensor: Tensor = getattr(graph, node.target).detach()
        return lambda: at_least_float32(tensor)
    if node.op != "call_function" or not node.all_input_nodes or _changes_tensors(node):
        return None
    if node.target is aten._to_copy.default:
        return _constant(graph, node.all_input_nodes[0])
    made_of = {one: _constant(graph, one) for one in node.all_input_nodes}
    if None in made_of.values():
        return None
    target: Any = node.target
    args, kwargs = node.args, node.kwargs

    def compute() -> Tensor:
        def value(one: Node) -> Any:
            return made_of[one]()  # type: ignore[misc]

        found: Tensor = target(*fx.node.map_arg(args, value), **fx.node.map_arg(kwargs, value))
        return found

    return compute


def _changes_tensors(node: Node) -> bool:
    """Whether an operation writes into its inputs, or is of a kind that does not say so."""
    if node.op != "call_function" or node.target is getitem:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def _between(first: Node, last: Node) -> Iterator[Node]:
    while first is not last:
        yield first
        first = first.next


def _alike(one: Node, other: Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    return a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)


def _is_fusable(one: Convolution, residual: Residual) -> bool:
    """Whether it is channels-last, as a `view` further on may need to know, and cuDNN has a kernel; tried on one image."""
    x, result = one.x.meta.get("val"), one.result.meta.get("val")
    if x is None or result is None or x.dtype != result.dtype or not _uses_cudnn(x):
        return False
    if not result.is_contiguous(memory_format=LAST):
        return False
    weight = tuple(one.weight().shape)
    settings = tuple(tuple(each) for each in one.settings)
    return _has_kernel(x.device, x.dtype, tuple(x.shape[1:]), weight, settings, residual)


def _uses_cudnn(x: Tensor) -> bool:
    cudnn: Any = torch.backends.cudnn
    return x.is_cuda and torch.version.hip is None and cudnn.is_available() and cudnn.enabled


@lru_cache(maxsize=4096)
def _has_kernel(
    device: torch.device,
    dtype: torch.dtype,
    x: tuple[int, ...],
    weight: tuple[int, ...],
    settings: tuple[tuple[int, ...], ...],
    residual: Residual,
) -> bool:
    """Whether a kernel runs and computes what the separate operations do: some misread types that they do not refuse."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    image, kernel, bias = random(1, *x), random(*weight), random(weight[0])
    kernel = kernel.contiguous(memory_format=LAST)
    stride, padding, dilation = (list(each) for each in settings)
    alone = aten.convolution(image, kernel, None, stride, padding, dilation, False, [0, 0], 1)
    added = random(*alone.shape) if residual == "image" else random(1, weight[0], 1, 1)
    given = None if residual == "none" else added
    expected = (alone + bias[:, None, None] + (0 if given is None else given)).relu()
    try:
        found = _convolution_relu(image, kernel, bias, given, stride, padding, dilation)
    except RuntimeError:
        return False
    return bool((found - expected).norm() <= SAME_WITHIN * expected.norm())


@torch.library.custom_op("equicam::convolution_relu", mutates_args=())
def _convolution_relu(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
) -> Tensor:  # fmt: skip
    """relu(conv(x) + bias + residual), channels last; a residual may be the same for all images and pixels."""
    x = x.contiguous(memory_format=LAST)
    if residual is not None and len(residual) > 1:
        residual = residual.contiguous(memory_format=LAST)
    if not x.is_cuda:
        wide = map(at_least_float32, (x, weight))
        found: Tensor = aten.convolution(*wide, None, stride, padding, dilation, False, [0, 0], 1)
        found = found + bias[:, None, None] + (0 if residual is None else residual)
        return found.relu().to(x.dtype).contiguous(memory_format=LAST)
    if residual is None:
        fused: Tensor = aten.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, 1)
    else:
        fused = aten.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, stride, padding, dilation, 1)
    return fused


@_convolution_relu.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],  # noqa: ARG001
) -> Tensor:  # fmt: skip
    height, width = (
        (whole + 2 * around - apart * (kernel - 1) - 1) // step + 1
        for whole, kernel, step, around, apart in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    )
    return torch.empty(
        (len(x), len(weight), height, width), dtype=x.dtype, device=x.device, memory_format=LAST
    )
