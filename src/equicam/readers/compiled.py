"""The network under `torch.compile`, with the target layer tapped inside the compiled code.

A hook cannot cut a compiled graph in two, so zeros that require gradient are added to what the layer puts out: the
gradient by them is the gradient by the layer, and nothing before the layer is kept for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.models.model import Model

HOOK: Any = "equicam"
"""The key of our hook among a layer's: always the same, for another would be compiled anew."""
SHAPES = 64
"""Shapes of input that are compiled before torch gives up and runs eagerly."""


def compiled_pass(
    model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None
) -> tuple[Any, Tensor, Tensor]:
    """The module's output, what its layer put out, and the tensor to differentiate by for that.

    The batch is filled up to one of few sizes, each of which is compiled once: outputs may be longer than x.
    """
    if missing := _size(len(x)) - len(x):
        # in the order the network wants: torch.cat chooses one of its own, which would be compiled apart
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        x = torch.cat((x, x[:1].expand(missing, -1, -1, -1)))
        x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    layers = _compiled.setdefault(model.module, {})
    if model.layer not in layers:
        layers[model.layer] = Tapped(model.module, model.layer)
    with torch.autocast(x.device.type, dtype=autocast) if autocast else nullcontext():
        return layers[model.layer](x, autocast)


class Tapped:
    """A module and its layer as one function (pictures, zeros) → (output, features + zeros), compiled on first use."""

    def __init__(self, module: nn.Module, layer: str) -> None:
        self.module, self.layer = module, layer
        self.zeros: Tensor | None = None
        self.caught: Tensor | None = None
        self.calls = 0
        self.shapes: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {}  # of the features, by what is put in
        self.hook = self._add
        self.compiled = torch.compile(self._both, dynamic=False)

    def __call__(self, x: Float[Tensor, "n c H W"], precision: object) -> tuple[Any, Tensor, Tensor]:
        """The output, the features, and the zeros to differentiate by."""
        with self._hooked(), _patient():
            try:
                shape, dtype = self._features(x, precision)
                zeros = torch.zeros((len(x), *shape), dtype=dtype, device=x.device, requires_grad=True)
                output, caught = self.compiled(x, zeros)
            finally:
                self.zeros = self.caught = None
        return output, caught, zeros

    def _features(self, x: Tensor, precision: object) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of one picture's features, from an eager pass the first time."""
        key = (tuple(x.shape[1:]), x.dtype, x.device, precision)
        if key not in self.shapes:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                found, calls = self._eagerly(x[:1])
            if found is None or calls != 1 or len(found) != 1:
                raise EquicamError(
                    f"layer {self.layer!r}", needs="to run once in a forward pass, a row a picture, to be compiled",
                    got=f"{calls} calls of it", fix="compiled=False",
                )  # fmt: skip
            self.shapes[key] = (tuple(found.shape[1:]), found.dtype)
        return self.shapes[key]

    def _eagerly(self, x: Tensor) -> tuple[Tensor | None, int]:
        """What the layer put out last, and how often it ran."""
        self.calls, self.caught = 0, None
        self.module(x)
        return self.caught, self.calls

    def _both(self, x: Tensor, zeros: Tensor) -> tuple[Any, Tensor]:
        self.zeros = zeros
        output = self.module(x)
        return output, self.caught  # type: ignore[return-value]  # the layer has run: `_features` saw it

    def _add(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        if self.zeros is None:  # eagerly: compiled code must not count, or every number is code of its own
            self.calls += 1
        self.caught = first.clone() if self.zeros is None else first + self.zeros
        # a copy goes on, so that no in-place operation behind the layer reaches what was caught
        return (self.caught.clone(), *output[1:]) if isinstance(output, tuple) else self.caught.clone()

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        hooks = self.module.get_submodule(self.layer)._forward_hooks  # a handle has another key each time
        hooks[HOOK] = self.hook
        try:
            yield
        finally:
            del hooks[HOOK]


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
