"""Forward passes of a network: its logits, its target layer's features, and the gradient between them.

For the call the parameters require no gradient, and a hook replaces the layer's output by a detached leaf that does,
so autograd records only what comes after the layer. Toggling `requires_grad` is not thread-safe: explain one module
from one thread at a time.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.readers.failures import Check, module_failure, raise_failed
from equicam.readers.layout import Layout, channels_of, infer
from equicam.readers.logits import Logits, at_least_float32, read_output
from equicam.readers.model import Model


class LayerRun(NamedTuple):
    """A module's output, its target layer's features, and the tensor with respect to which to differentiate."""

    output: Any
    features: Tensor
    differentiable: Tensor


@dataclass(frozen=True)
class Network:
    """A model and how its forward pass runs."""

    model: Model
    autocast: torch.dtype | None = None
    run: "Callable[[Network, Tensor], LayerRun] | None" = None  # with the layer's features; None: eagerly
    predict: "Callable[[Network, Tensor], Logits] | None" = None  # without them; None: eagerly

    def frozen(self) -> AbstractContextManager[None]:
        """The module in evaluation mode, put back afterwards."""
        return frozen(self.model.module, eager=self.run is None)


Captured = tuple[Tensor, ...]
Gradient = Callable[[Float[Tensor, "n y"]], tuple[Captured, tuple[Check, ...]]]
"""direction → ∂(direction · logits)/∂captured, and the checks those gradients must pass."""


def no_gradient(_direction: Float[Tensor, "n y"]) -> tuple[Captured, tuple[Check, ...]]:
    """The gradient of a pass that recorded none."""
    raise EquicamError(
        "a reader of gradients", "a pass that records them", "read_layer", "forward=capture_layer"
    )


@dataclass(frozen=True)
class Forward:
    """One forward pass of n views."""

    network: Network
    x: Float[Tensor, "n c H W"]
    captured: Captured  # (features [n, k, h, w],), or the attention of every block
    logits: Float[Tensor, "n y"]
    probabilities: Float[Tensor, "n y"] | None  # None: outputs are values
    gradient: Gradient = no_gradient
    rectify_weights: bool = False
    checks: tuple[Check, ...] = ()

    @property
    def features(self) -> Float[Tensor, "n k h w"]:
        """The target layer's activations."""
        return self.captured[0]


def capture_layer(network: Network, x: Float[Tensor, "n c H W"]) -> Forward:
    """Logits, the target layer's features, and the gradient of the logits with respect to the features."""
    model, count, shape = network.model, len(x), tuple(x.shape)
    with network.frozen(), torch.enable_grad():
        output, features, differentiable = (network.run or _run_eagerly)(network, x)
        features = _first(features, count)
        layout = layer_layout(model, features, (x.shape[-2], x.shape[-1]))
        found = read_output(model, output, count=len(differentiable))
        logits = _first(found.logits, count)

    def gradient(direction: Float[Tensor, "n y"]) -> tuple[Captured, tuple[Check, ...]]:
        if not logits.requires_grad:
            raise EquicamError(
                f"layer {model.layer!r}", "the class logits to depend on it with gradient", "logits cut off from it",
                "a layer outside the model's own no_grad or detach",
            )  # fmt: skip
        with module_failure(model.module, shape, model.name):
            (grad,) = torch.autograd.grad(logits, differentiable, direction, materialize_grads=True)
        grad = _first(grad, count)
        return (at_least_float32(layout.planes(grad)),), _check_patches(model, grad, layout)

    return Forward(
        network=network,
        x=x,
        captured=(at_least_float32(layout.planes(features.detach())),),
        logits=logits.detach(),
        probabilities=None if found.probabilities is None else _first(found.probabilities, count).detach(),
        gradient=gradient,
        rectify_weights=layout.prefixed if model.rectify_weights is None else model.rectify_weights,
        checks=found.checks,
    )


def read_layer(network: Network, x: Float[Tensor, "n c H W"]) -> Forward:
    """Logits and features of an eager pass, without their gradient."""
    found = capture_layer(Network(network.model, network.autocast), x)
    return replace(found, network=network, gradient=no_gradient, rectify_weights=False)


def predict(network: Network, x: Float[Tensor, "n c H W"]) -> Logits:
    """Logits and probabilities of a batch, checked."""
    if network.predict is not None:
        return network.predict(network, x)
    with frozen(network.model.module), torch.no_grad():
        found = read_output(network.model, run_module(network, x), count=len(x))
    raise_failed(found.checks)
    return found


def run_module(network: Network, x: Float[Tensor, "n c H W"]) -> Any:
    """The module's output, in the memory format of its weights."""
    if prefers_channels_last(network.model.module):
        x = x.contiguous(memory_format=torch.channels_last)
    autocast = torch.autocast(x.device.type, dtype=network.autocast) if network.autocast else nullcontext()
    with module_failure(network.model.module, tuple(x.shape), network.model.name), autocast:
        return network.model.module(x)


def _run_eagerly(network: Network, x: Float[Tensor, "n c H W"]) -> LayerRun:
    """One eager pass with the layer's output replaced by a leaf."""
    with layer_outputs(network.model) as outputs:
        output = run_module(network, x)
    leaf = last_output(network.model, outputs, x)
    return LayerRun(output, leaf, leaf)


@contextmanager
def layer_outputs(model: Model) -> Iterator[list[Tensor]]:
    """Replaces the layer's output by a leaf that requires gradient; the list has one for each call of the layer."""
    leaves: list[Tensor] = []

    def cut(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not first.is_floating_point():
            needs, got = "a floating-point tensor as output", type(first).__name__
            raise EquicamError(f"layer {model.layer!r}", needs, got, "a layer that returns its features")
        # clone before and after, so that no in-place operation on the layer's input or output reaches the leaf
        leaf = first.detach().clone().requires_grad_()
        leaves.append(leaf)
        return (leaf.clone(), *output[1:]) if isinstance(output, tuple) else leaf.clone()

    handle = model.module.get_submodule(model.layer).register_forward_hook(cut)
    try:
        yield leaves
    finally:
        handle.remove()


def last_output(model: Model, outputs: list[Tensor], x: Float[Tensor, "n c H W"]) -> Tensor:
    """The layer's output in its last call, checked to have one row per image."""
    if not outputs:
        raise EquicamError(
            f"layer {model.layer!r}", "to run when the model does", "no call of it",
            "a layer the forward pass calls (scripted modules do not fire hooks)",
        )  # fmt: skip
    if len(outputs[-1]) != len(x):
        raise EquicamError(
            f"layer {model.layer!r}", f"one row per image, {len(x)} in all", f"shape {tuple(outputs[-1].shape)}",
            "a layer that does not fold windows into the batch",
        )  # fmt: skip
    return outputs[-1]


def layer_layout(model: Model, features: Tensor, size: tuple[int, int]) -> Layout:
    """The layout of the layer's output, checked; inferred where the model does not name it."""
    shape = tuple(features.shape)
    try:
        if model.layout is None:
            layout = infer(shape, size, channels=channels_of(model.module.get_submodule(model.layer)))
        else:
            layout = model.layout.resolve(shape, size)
            if layout.kind != "tokens" and len(shape) != 4:
                raise EquicamError(
                    f"layout {layout.kind!r}", "a 4-D output", f"shape {shape}", 'layout="tokens"'
                )
    except EquicamError as error:
        error.add_note(f"while reading layer {model.layer!r}")
        raise
    grid = layout.planes(features).shape[-2:]
    if min(grid) < 2:
        raise EquicamError(
            f"layer {model.layer!r}", "a feature grid of 2×2 or more", f"{grid[0]}×{grid[1]}",
            "an earlier layer or a larger image",
        )  # fmt: skip
    return layout


@contextmanager
def frozen(module: nn.Module, *, eager: bool = True) -> Iterator[None]:
    """Evaluation mode, no parameter gradients, eager, RNG kept; everything is put back, also after an exception.

    Inside itself it does nothing, so that several passes may share one.
    """
    if id(module) in _frozen:
        yield
        return
    modes = [(m, m.training) for m in module.modules()]
    trainable = [p for p in module.parameters() if p.requires_grad]
    devices = sorted({p.device.index or 0 for p in module.parameters() if p.is_cuda})
    # only a process that compiled something can have compiled modules, whose code would skip our hook
    compiles = "torch._dynamo" in sys.modules
    stance = torch.compiler.set_stance("force_eager") if eager and compiles else nullcontext()
    with stance, torch.random.fork_rng(devices):
        _frozen.add(id(module))
        try:
            for m, _ in modes:
                m.training = False  # not .eval(): modules may override it with side effects
            for p in trainable:
                p.requires_grad_(False)
            yield
        finally:
            _frozen.discard(id(module))
            for m, mode in modes:
                m.training = mode
            for p in trainable:
                p.requires_grad_(True)


_frozen: set[int] = set()
"""Modules that are frozen now."""


def prefers_channels_last(module: nn.Module) -> bool:
    """Whether the caller keeps the weights channels-last. We follow: a `view` in a model may need the plain order."""
    weights = (p for p in module.parameters() if p.ndim == 4 and not p.is_contiguous())
    return any(p.is_contiguous(memory_format=torch.channels_last) for p in weights)


def _first(rows: Tensor, count: int) -> Tensor:
    """Rows without a compiled batch's padding; the tensor itself where there is none, because a slice costs a copy."""
    return rows if len(rows) == count else rows[:count]


def _check_patches(model: Model, grad: Tensor, layout: Layout) -> tuple[Check, ...]:
    """Behind a class token, patches must still reach the logits."""
    if not layout.prefixed:
        return ()
    # booleans and texts: a check outlives the pass, and must keep neither its gradients nor the network alive
    any_token, any_patch, layer = grad.any(), grad[:, layout.prefix :].any(), model.layer

    def dead_head() -> EquicamError:  # a new one for each failure: a traceback would keep its frames
        return EquicamError(
            "the model's head", "weights that are not all zero", "a gradient of exactly zero at every token",
            "trained or re-initialised head weights",
        )  # fmt: skip

    def dead_patches() -> EquicamError:
        return EquicamError(
            f"layer {layer!r}", "patch tokens that still reach the class logits",
            "a gradient of exactly zero at every patch (after the last attention only the class token does)",
            "the last block's first LayerNorm",
        )  # fmt: skip

    return Check(lambda: any_token, dead_head), Check(lambda: any_patch, dead_patches)


WIDEST_LAYERS = 64
"""A CNN's widest layers hold about this many times its input."""
SHARE_OF_FREE_MEMORY = 0.8
"""Of a GPU's free memory; a batch that does not fit after all is halved."""
VGG_BYTES = 2 * 64 * 224**2 * 4
"""The widest layer of VGG-16 for one image of 224², input and output: few networks need more."""
CUDA_BYTES_PER_FORWARD = 144 * VGG_BYTES
"""Of a network's widest layer. It keeps a large GPU busy; more takes more memory and hardly less time."""
CPU_BYTES_PER_FORWARD = 512 * 2**20
"""More gains a CPU nothing where freed memory is kept, and costs time where it is not (runtime/executor.py)."""


def views_that_fit(x: Float[Tensor, "b c H W"], *, with_kept: bool = False) -> int:
    """The number of images of this size in one forward pass, by memory; `with_kept` as `free_bytes` has it."""
    image_bytes = WIDEST_LAYERS * x[0].numel() * 4
    if x.is_cuda:
        free = free_bytes(x.device, with_kept=with_kept)
        return max(1, int(SHARE_OF_FREE_MEMORY * free) // image_bytes)
    return max(1, CPU_BYTES_PER_FORWARD // image_bytes)


def free_bytes(device: torch.device, *, with_kept: bool) -> int:
    """The free memory of a GPU; `with_kept`, also what torch keeps for reuse.

    A compiled call must not be planned otherwise when it comes again, so what it left counts for it. Part of that belongs to
    captured graphs, which nothing else can use.
    """
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) if with_kept else 0
    return free + kept


def views_per_forward(network: Network | None, x: Float[Tensor, "b c H W"], wanted: int) -> int:
    """The number of images of this size in one forward pass by default: what fits, and no more than helps.

    Where so few are wanted that they fit with layers four times as wide as VGG-16's, nothing is measured.
    """
    fit = views_that_fit(x)
    if not x.is_cuda or wanted <= CUDA_BYTES_PER_FORWARD // (4 * _usual_bytes(x)):
        return fit
    return min(fit, max(1, CUDA_BYTES_PER_FORWARD // widest_layer_bytes(network, x)))


def widest_layer_bytes(network: Network | None, x: Float[Tensor, "b c H W"]) -> int:
    """The bytes of the widest layer's input and output for one image, found once by a forward pass of it."""
    usual = _usual_bytes(x)
    if network is None:
        return usual
    key = (tuple(x.shape[1:]), network.autocast)
    known = _widest.setdefault(network.model.module, {})
    if key not in known:
        known[key] = usual
        with suppress(EquicamError, RuntimeError):  # the views' own pass says what is wrong
            known[key] = _measure(network, x[:1].to(network.model.dtype)) or usual
    return known[key]


def _usual_bytes(x: Float[Tensor, "b c H W"]) -> int:
    return VGG_BYTES * x[0, 0].numel() // 224**2


def _measure(network: Network, x: Float[Tensor, "one c H W"]) -> int:
    module, widest = network.model.module, 0

    def record(_module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal widest
        # by storage: an operation in place has one
        held = {t.untyped_storage().data_ptr(): t.nbytes for t in _tensors_in((inputs, output))}
        widest = max(widest, sum(held.values()))

    # scripted modules take no hooks
    scripted = torch.jit.ScriptModule
    leaves = [
        part for part in module.modules() if not any(part.children()) and not isinstance(part, scripted)
    ]
    with ExitStack() as hooks, frozen(module), torch.no_grad():
        for part in leaves:
            hooks.callback(part.register_forward_hook(record).remove)
        run_module(network, x)
    return widest


def _tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


_widest: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()
"""Bytes by the size of the images and the type of an autocast."""
