"""The target layer, chosen by running the module once and looking at what each part puts out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.readers.gradients import undisturbed
from equicam.readers.layout import channels_of, infer, is_block_norm

_PASS_ON = ("Identity", "Permute", "Dropout")  # what they put out, something before them made


@dataclass(frozen=True)
class _Ran:
    """A submodule that put out something spatial, and of how many dimensions."""

    name: str
    ndim: int


def choose_layer(module: nn.Module, example: Tensor | None = None) -> str:
    """The last spatial layer before pooling; on tokens, the first norm of the last block.

    After the last attention the class score depends on the class token alone, so later token layers have a
    gradient of exactly zero at every patch.
    """
    zeros = _zeros(module)
    ran = _run(module, zeros if example is None else example[:1].to(zeros))
    if not ran:
        raise EquicamError(
            f"{type(module).__name__}", needs="a layer with a spatial output to choose", got="none of 2×2 or more",
            fix='wrap(module, layer="NAME")',
        )  # fmt: skip
    if ran[-1].ndim == 4:
        return ran[-1].name
    norms = [r.name for r in ran if r.ndim == 3 and is_block_norm(module, r.name)]
    if not norms:
        return ran[-1].name
    block = norms[-1].rpartition(".")[0]
    return next(name for name in norms if name.rpartition(".")[0] == block)


def _run(module: nn.Module, example: Tensor) -> list[_Ran]:
    """Submodules with a spatial, unpooled output, in the order they finished."""
    ran: list[_Ran] = []
    pooled: list[Tensor] = []
    size = (example.shape[-2], example.shape[-1])

    def note(name: str, child: nn.Module, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor) or not first.is_floating_point() or type(child).__name__ in _PASS_ON:
            return
        # a container that ends in a pool returns the pool's own tensor
        if "Pool" in type(child).__name__ or any(first is p for p in pooled):
            pooled.append(first)
        elif _spatial(first, size, child):
            ran.append(_Ran(name, first.ndim))

    def watch(name: str) -> Any:
        return lambda child, _inputs, output: note(name, child, output)

    handles = [child.register_forward_hook(watch(name)) for name, child in module.named_modules() if name]
    try:
        with undisturbed(module), torch.no_grad():
            module(example)
    except Exception as error:
        raise EquicamError(
            "choosing a layer", needs=f"a forward pass on an input {tuple(example.shape)}", got=f"{type(error).__name__}: {error}",
            fix='naming it: wrap(module, layer="NAME")',
        ) from error  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    return ran


def _spatial(output: Tensor, size: tuple[int, int], child: nn.Module) -> bool:
    shape = tuple(output.shape)
    if shape[0] != 1:  # windows or pixels folded into the batch
        return False
    try:
        layout = infer(shape, size, channels=channels_of(child))
    except EquicamError:
        return False
    return min(layout.planes(output).shape[-2:]) >= 2


def _zeros(module: nn.Module) -> Tensor:
    """Zeros of the size the module names, else 224×224."""
    weight = next(module.parameters(), torch.empty(0))
    conv = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    size: Any = None
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            size = size or getattr(holder, "image_size", None) or getattr(holder, "img_size", None)
    height, width = (size, size) if isinstance(size, int) else tuple(size or (224, 224))[-2:]
    return torch.zeros(
        1, conv.in_channels if conv else 3, height, width, dtype=weight.dtype, device=weight.device
    )
