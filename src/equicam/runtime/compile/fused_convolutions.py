"""Convolutions of a traced graph with the batch norm, addition and ReLU after them, each as one kernel of cuDNN.

In evaluation a batch norm multiplies and shifts every channel by constants, so it becomes part of the convolution:

    norm(conv(x; W)) = conv(x; s·W) + β − s·μ,  s = γ / √(σ² + ε)

cuDNN adds that bias and a residual, and rectifies, before it writes the result: activations are not read and written again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx

from equicam.readers.logits import at_least_float32

Node = Any  # an `fx.Node`; its arguments have no types


def _changes_tensors(node: Node) -> bool:
    """Whether an operation writes into its inputs, or is of a kind that does not say so."""
    if node.op != "call_function" or node.target is getitem:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or schema.is_mutable


def is_written(graph: fx.GraphModule, node: Node) -> bool:
    """Whether an operation of the graph writes into a node's tensor, by itself or through a view of it.

    A weight may be read by several nodes: writing through one of them counts for all.
    """
    same = [node]
    if node.op == "get_attr":
        same = [one for one in graph.graph.nodes if (one.op, one.target) == ("get_attr", node.target)]
    users = [user for one in same for user in one.users]
    return any(_changes_tensors(user) or (_is_view(user) and is_written(graph, user)) for user in users)


def _is_view(node: Node) -> bool:
    """Whether a result may share the memory of an input."""
    if node.op != "call_function":
        return False
    return node.target is getitem or any(r.alias_info is not None for r in node.target._schema.returns)


aten = torch.ops.aten
Weight = Callable[[], Tensor]  # computes a tensor from a network's weights as they are now
RELUS = (aten.relu.default, aten.relu_.default)
ADDITIONS = (aten.add.Tensor, aten.add_.Tensor)
NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)
IS_TRAINING, EPSILON = 5, 7  # positions of a norm's arguments
RESHAPES = (
    aten._to_copy.default, aten.detach.default, aten.clone.default, aten.view.default, aten._unsafe_view.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.constant_pad_nd.default,
)  # fmt: skip
"""Operations of one tensor and numbers that change its type or shape, or fill it up with zeros."""
LAST = torch.channels_last
Added = Literal["nothing", "channel", "image"]
"""What is added to a convolution: nothing, a value per channel, or a tensor of its result's shape."""
SAME_WITHIN = 0.02  # the relative error of a kernel next to separate operations; in bf16 it is .002


@dataclass(frozen=True)
class _Convolution:
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

    def rounded_off(self, dtype: torch.dtype) -> Weight:
        """What its bias loses when it is rounded, for all pixels."""
        return lambda: (self.bias() - self.bias().to(dtype))[None, :, None, None]

    @property
    def needs_exact_bias(self) -> bool:
        """Whether its bias, rounded once, would err more than the network does.

        A batch norm computes in full precision. A folded bias in bfloat16 would be off in the same direction in every pixel and
        view, which no average removes; float16 has three more bits. A bias of the convolution's own is rounded in the network too.
        """
        return len(self.nodes) > 1 and self.result.meta["val"].dtype is torch.bfloat16


@dataclass(frozen=True)
class _Fusable:
    """A convolution and what is added to it before a ReLU."""

    convolution: _Convolution
    residual: Node = None
    shortcut: _Convolution | None = None  # the residual, if it is a convolution that nobody else reads
    addition: Node = None

    def bias(self) -> Tensor:
        """That of the convolution, which a shortcut's joins."""
        own = self.convolution.bias()
        return own if self.shortcut is None else own + self.shortcut.bias()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that one kernel replaces, each before those it reads."""
        addition = () if self.addition is None else (self.addition,)
        shortcut = () if self.shortcut is None else self.shortcut.nodes
        return (*addition, *self.convolution.nodes, *shortcut)


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
            found = _match(graph, relu)
            if found is None:
                continue
            convolution, dtype = found.convolution, relu.meta["val"].dtype
            with graph.graph.inserting_before(found.addition or convolution.nodes[-1]):
                added = found.residual
                if found.shortcut is not None:
                    weight = constant(found.shortcut.weight, dtype)
                    added = graph.graph.call_function(
                        aten.convolution.default,
                        (found.shortcut.x, weight, None, *found.shortcut.settings, False, [0, 0], 1),
                    )
                elif convolution.needs_exact_bias:
                    added = constant(convolution.rounded_off(dtype), dtype)
                weight, shift = constant(convolution.weight, dtype), constant(found.bias, dtype)
                fused = graph.graph.call_function(
                    torch.ops.equicam.convolution_relu.default,
                    (convolution.x, weight, shift, added, *convolution.settings),
                )
                fused.meta["val"] = relu.meta["val"]
            relu.replace_all_uses_with(fused)
            for node in (relu, *found.nodes):  # in-place operations are not removed as dead code
                graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    return derived


def _match(graph: fx.GraphModule, relu: Node) -> _Fusable | None:
    """What a ReLU rectifies, if one kernel computes it."""
    before, result = relu.args[0], relu.meta.get("val")
    # a `view` further on may need the result channels-last, or must not find it so
    if result is None or not result.is_contiguous(memory_format=LAST) or len(before.users) > 1:
        return None
    if (alone := _find_convolution(graph, before)) is not None:
        added: Added = "channel" if alone.needs_exact_bias else "nothing"
        return _Fusable(alone) if _has_kernel_for(alone, added) else None
    if before.target not in ADDITIONS or before.kwargs:
        return None
    sides = [before.args, before.args[::-1]]
    if before.target is aten.add_.Tensor:  # it writes into its first operand, which must be nobody else's
        sides = sides[:1]
    for own, residual in sides:
        if not isinstance(own, fx.Node) or not isinstance(residual, fx.Node) or own is residual:
            continue
        convolution = _find_convolution(graph, own) if len(own.users) == 1 else None
        # the kernel adds one thing: the residual, or what a rounded bias lacks
        if convolution is None or convolution.needs_exact_bias or not _alike(own, residual):
            continue
        shortcut = _find_convolution(graph, residual) if len(residual.users) == 1 else None
        if shortcut is not None and shortcut.needs_exact_bias:
            shortcut = None
        found = _Fusable(convolution, residual, shortcut, before)
        # moved to the addition, it must not read what was changed in place since
        first = min(found.nodes)
        since = [one for one in graph.graph.nodes if first <= one < before and one not in found.nodes]
        if any(map(_changes_tensors, since)):
            continue
        if _has_kernel_for(convolution, "image"):
            return found
    return None


def _find_convolution(graph: fx.GraphModule, node: Node) -> _Convolution | None:
    """The convolution that a node is the result of, with constant weights that its type can hold and one reader of every step."""
    nodes, norm = [node], None
    if node.target is getitem and node.args[1] == 0 and node.args[0].target in NORMS:
        norm = node.args[0]
        nodes += [norm, norm.args[0]]
        if norm.args[IS_TRAINING] or any(len(one.users) > 1 for one in nodes[1:]):
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
    epsilon = 0.0 if norm is None else norm.args[EPSILON]

    def scale() -> Tensor:
        return gamma() * torch.rsqrt(variance() + epsilon)

    found = _Convolution(
        tuple(nodes),
        x,
        weight=lambda: weight() * scale()[:, None, None, None],
        bias=lambda: beta() + (bias() - mean()) * scale(),
        settings=(stride, padding, dilation),
    )
    dtype = found.result.meta["val"].dtype  # float16 may be too narrow for what a batch norm is folded into
    return found if all(one.to(dtype).isfinite().all() for one in (found.weight(), found.bias())) else None


def _full(weight: Weight, value: float) -> Weight:
    """The same value for every channel that a convolution makes."""
    return lambda: weight().new_full((len(weight()),), value)


def _constant(graph: fx.GraphModule, node: Node) -> Weight | None:
    """A function that computes a node made of a weight by casts and changes of shape, in full precision; None for others.

    Casts are left out: the result is rounded once, after the batch norm is part of it.
    """
    kind = node.meta.get("val")
    if kind is None or not kind.is_floating_point() or is_written(graph, node):
        return None
    if node.op == "get_attr":
        tensor: Tensor = getattr(graph, node.target).detach()
        return lambda: at_least_float32(tensor)
    if node.target not in RESHAPES:
        return None
    source = _constant(graph, node.args[0])
    if source is None or node.target is aten._to_copy.default:
        return source
    target, args, kwargs = node.target, node.args[1:], node.kwargs

    def compute() -> Any:
        return target(source(), *args, **kwargs)

    return compute


def _alike(one: Node, other: Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    return a is not None and b is not None and (a.shape, a.dtype) == (b.shape, b.dtype)


def _has_kernel_for(convolution: _Convolution, added: Added) -> bool:
    """Whether cuDNN has a kernel for a convolution with something added to it."""
    x, result = convolution.x.meta.get("val"), convolution.result.meta.get("val")
    if x is None or result is None or x.dtype != result.dtype or not _uses_cudnn(x):
        return False
    settings, weight = tuple(tuple(each) for each in convolution.settings), tuple(convolution.weight().shape)
    return _has_kernel(x.device, x.dtype, tuple(x.shape[1:]), weight, settings, added)


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
    added: Added,
) -> bool:
    """Whether a kernel runs and computes what the separate operations do: some misread types that they do not refuse."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(dtype)

    images, kernel, bias = random(2, *x), random(*weight), random(weight[0])
    kernel = kernel.contiguous(memory_format=LAST)
    stride, padding, dilation = (list(each) for each in settings)
    alone = aten.convolution(images, kernel, None, stride, padding, dilation, False, [0, 0], 1)
    residual = {"nothing": None, "channel": random(1, weight[0], 1, 1), "image": random(*alone.shape)}[added]
    expected = (alone + bias[:, None, None] + (0 if residual is None else residual)).relu()
    try:
        found = _convolution_relu(images, kernel, bias, residual, stride, padding, dilation)
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except RuntimeError:
        return False
    return bool((found - expected).norm() <= SAME_WITHIN * expected.norm())


@torch.library.custom_op("equicam::convolution_relu", mutates_args=())
def _convolution_relu(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
) -> Tensor:  # fmt: skip
    """relu(conv(x) + bias + residual), channels last; a residual may be the same for all images and pixels."""
    x = x.contiguous(memory_format=LAST)
    if residual is not None and residual.shape[2:] != (1, 1):
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
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    size = ((whole + 2 * p - apart * (kernel - 1) - 1) // step + 1 for whole, kernel, step, p, apart in sides)
    shape = (len(x), len(weight), *size)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=LAST)
