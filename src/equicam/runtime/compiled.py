"""The network under `torch.compile`, with the target layer tapped inside the compiled code.

A hook cannot cut a compiled graph in two, so zeros that require gradient are added to what the layer puts out: the
gradient by them is the gradient by the layer, and nothing before the layer is kept for it. Features and gradients
leave the compiled code in full precision.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.readers.model import Model
from equicam.readers.reading import wide

HOOK: Any = "equicam"
"""The key of our hook among a layer's: always the same, for another would be compiled anew."""
SHAPES = 64
"""Shapes of input that are compiled before torch gives up and runs eagerly."""


def compiled_pass(
    model: Model,
    x: Float[Tensor, "n c H W"],
    autocast: torch.dtype | None,
    ask: Callable[[], Tensor],
    *,
    last: bool,
) -> tuple[Any, Tensor, Tensor]:
    """The module's output, what its layer put out, and the tensor to differentiate by for that.

    `ask` gives the features of one picture, read eagerly, where their shape is not known yet; `last`: the network
    wants channels last. The batch is filled up to one of few sizes, each of which is compiled once: outputs may be
    longer than x.
    """
    layers = _compiled.setdefault(model.module, {})
    if model.layer not in layers:
        layers[model.layer] = Tapped(model.layer)
    tapped = layers[model.layer]
    key = (tuple(x.shape[1:]), x.dtype, x.device, autocast, id(model.module.get_submodule(model.layer)))
    if key not in tapped.shapes:
        features = ask()
        tapped.shapes[key] = (tuple(features.shape[1:]), wide(features).dtype)
    if missing := _size(len(x)) - len(x):
        x = torch.cat((x, x[:1].expand(missing, -1, -1, -1)))
    # one order for all, for another would be compiled apart; out here, for compiled code takes longer to turn it
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    shape, dtype = tapped.shapes[key]
    zeros = torch.zeros((len(x), *shape), dtype=dtype, device=x.device, requires_grad=True)
    with torch.autocast(x.device.type, dtype=autocast) if autocast else nullcontext():
        return (*tapped(model.module, x, zeros), zeros)


class Tapped:
    """A module and its layer as one function (pictures, zeros) → (output, features), compiled on first use."""

    def __init__(self, layer: str) -> None:
        self.layer = layer
        self.zeros: Tensor | None = None
        self.caught: Tensor | None = None
        self.shapes: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}  # of the features, by what is put in
        self.hook = self._add
        self.compiled = torch.compile(self._both, dynamic=False)

    def __call__(self, module: nn.Module, x: Tensor, zeros: Tensor) -> tuple[Any, Tensor]:
        """The output, with the zeros added to the features on the way, and the features."""
        hooks = module.get_submodule(self.layer)._forward_hooks  # a handle has another key each time
        hooks[HOOK] = self.hook
        try:
            with _patient():
                found: tuple[Any, Tensor] = self.compiled(module, x, zeros)
        finally:
            del hooks[HOOK]
            self.zeros = self.caught = None
        return found

    def _both(self, module: nn.Module, x: Tensor, zeros: Tensor) -> tuple[Any, Any]:
        self.zeros = zeros
        output = module(x)
        return output, self.caught

    def _add(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        first, zeros = output[0] if isinstance(output, tuple) else output, self.zeros
        assert zeros is not None  # noqa: S101  # set by whoever runs the module
        # a copy is caught, so that no in-place operation reaches it, and from before the zeros, so that none is
        # made up for a gradient by it
        self.caught = first.to(zeros.dtype, copy=True)
        first = first + zeros.to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first


_compiled: WeakKeyDictionary[nn.Module, dict[str, Tapped]] = WeakKeyDictionary()


@contextmanager
def _patient() -> Iterator[None]:
    """Every size and network compiles the same function: more often than torch lets one."""
    import torch._dynamo.config as config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({name: SHAPES}):
        yield


def _size(count: int) -> int:
    """The batch that a count is filled up to: at most an eighth more, and eight sizes an octave."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step
