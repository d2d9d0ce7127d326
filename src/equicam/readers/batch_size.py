"""How many images fit one forward pass."""

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.readers.forward import Network, frozen, run_module

WIDEST_LAYERS = 64
"""A CNN's widest layers hold about this many times its input."""
SHARE_OF_FREE_MEMORY = 0.8
"""Of a GPU's free memory; a batch that does not fit after all is halved."""
VGG_BYTES = 2 * 64 * 224**2 * 4
"""The widest layer of VGG-16 for one image of 224², input and output: few networks need more."""
CUDA_BYTES_PER_FORWARD = 144 * VGG_BYTES
"""Of a network's widest layer. It keeps a large GPU busy; more takes more memory and hardly less time."""
CPU_BYTES_PER_FORWARD = 512 * 2**20
"""More gains a CPU nothing where freed memory is kept, and costs time where it is not (runtime/memory.py)."""


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
