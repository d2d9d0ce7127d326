"""The network under `torch.compile`, with the target layer's features taken out of the compiled code.

A hook cannot cut a compiled graph in two, so zeros that require gradient are added to the layer's output: the gradient
with respect to them is the gradient with respect to the layer, and nothing before the layer is kept for it. Features
and gradients leave the compiled code in full precision.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.readers.failures import module_failure, raise_failed
from equicam.readers.forward import (
    LayerRun,
    Network,
    last_output,
    layer_outputs,
    predict,
    prefers_channels_last,
    run_module,
)
from equicam.readers.logits import Logits, at_least_float32, read_output
from equicam.runtime.graphs import replay
from equicam.runtime.pending import DeferredChecks, Tensors

LOG = logging.getLogger(__name__)
HOOK_KEY: Any = "equicam"  # of our hook among a layer's; a new key would compile again
MAX_COMPILED_SHAPES = 64  # before torch gives up and runs eagerly


def run_compiled(network: Network, x: Float[Tensor, "n c H W"]) -> LayerRun:
    """One compiled pass. The batch is padded to one of few sizes, each compiled once: outputs may be longer than x."""
    module, layer = network.model.module, network.model.layer
    layers = _compiled.setdefault(module, {})
    if layer not in layers:
        layers[layer] = _CompiledLayer(layer)
    compiled = layers[layer]
    key = (tuple(x.shape[1:]), x.dtype, x.device, network.autocast, id(module.get_submodule(layer)))
    if key not in compiled.shapes:
        LOG.info("compiling the network for inputs %s", tuple(x.shape[1:]))
        features = _probe(network, x)
        compiled.shapes[key] = (tuple(features.shape[1:]), at_least_float32(features).dtype)
    if missing := _padded_size(len(x)) - len(x):
        x = torch.cat((x, x[:1].expand(missing, -1, -1, -1)))
    # one memory format for all, because each is compiled separately; done here, because compiled code takes longer
    last = prefers_channels_last(module)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    shape, dtype = compiled.shapes[key]
    zeros = torch.zeros((len(x), *shape), dtype=dtype, device=x.device, requires_grad=True)
    autocast = torch.autocast(x.device.type, dtype=network.autocast) if network.autocast else nullcontext()
    with module_failure(network.model.module, tuple(x.shape), network.model.name), autocast:
        output, features = compiled(module, x, zeros)
    return LayerRun(output, features, zeros)


def _probe(network: Network, x: Float[Tensor, "n c H W"]) -> Tensor:
    """The features of one image read eagerly: some mistakes show only in an eager pass."""
    model = network.model
    with torch.compiler.set_stance("force_eager"), layer_outputs(model) as outputs:
        output = run_module(network, x[:1])
    features = last_output(model, outputs, x[:1])
    if len(outputs) != 1:
        raise EquicamError(
            f"layer {model.layer!r}", "to run once in a forward pass, to be compiled", f"{len(outputs)} calls of it",
            "Recipe(compiled=False)",
        )  # fmt: skip
    raise_failed(read_output(model, output, count=1).checks)
    return features


class _CompiledLayer:
    """A module and its layer as one function (images, zeros) → (output, features), compiled on first use."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.zeros: Tensor | None = None
        self.features: Tensor | None = None
        self.shapes: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}  # of the features, by input
        self.hook = self._add_zeros
        self.compiled = torch.compile(self._run, dynamic=False)

    def __call__(self, module: nn.Module, x: Tensor, zeros: Tensor) -> tuple[Any, Tensor]:
        """The output, with the zeros added to the features on the way, and the features."""
        import torch._dynamo.config as config

        # every size and network compiles the same function: more often than torch allows one by default
        limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        hooks = module.get_submodule(self.layer)._forward_hooks  # a handle has another key each time
        hooks[HOOK_KEY] = self.hook
        try:
            with config.patch({limit: MAX_COMPILED_SHAPES}):
                found: tuple[Any, Tensor] = self.compiled(module, x, zeros)
        finally:
            del hooks[HOOK_KEY]
            self.zeros = self.features = None
        return found

    def _run(self, module: nn.Module, x: Tensor, zeros: Tensor) -> tuple[Any, Any]:
        self.zeros = zeros
        output = module(x)
        return output, self.features

    def _add_zeros(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        first, zeros = output[0] if isinstance(output, tuple) else output, self.zeros
        assert zeros is not None  # noqa: S101  # set by _run
        # Copy, so that no in-place operation reaches the features, and before adding the zeros, so that autograd
        # allocates no gradient for the copy.
        self.features = first.to(zeros.dtype, copy=True)
        first = first + zeros.to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first


_compiled: WeakKeyDictionary[nn.Module, dict[str, _CompiledLayer]] = WeakKeyDictionary()


def _padded_size(count: int) -> int:
    """The batch size a count is padded to: at most an eighth more, and eight sizes per octave."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def predict_compiled(network: Network, x: Float[Tensor, "n c H W"]) -> Logits:
    """Logits and probabilities by a compiled call, one for each batch size; eagerly where memory does not suffice."""
    model, eager = network.model, replace(network, predict=None)

    def work(images: Tensor, _target: Tensor | None) -> tuple[Tensors, DeferredChecks]:
        found, checks = read_output(model, run_module(eager, images), count=len(images)), DeferredChecks()
        checks.add(found.checks)
        known = {"logits": found.logits, "probabilities": found.probabilities}
        return {name: value for name, value in known.items() if value is not None}, checks

    key = ("predict", model.task, model.classes, model.value, network.autocast)
    with torch.no_grad():
        replayed = replay(eager, key, work, work, (x, None), presented=x, views=len(x))
        if replayed is None:
            return predict(eager, x)
        found = replayed.finish()
    return Logits(found["logits"], found.get("probabilities"), ())
