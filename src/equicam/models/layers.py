"""A model from any module: `wrap`, the choice of its target layer, and its last linear layer."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.rasters.options import Input
from equicam.readers.failures import input_channels, module_failure
from equicam.readers.forward import frozen
from equicam.readers.layout import Layout, channels_of, infer, is_block_norm
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD, Model, as_layout, layer_name, original
from equicam.readers.names import Task

LOG = logging.getLogger(__name__)


def wrap(
    module: nn.Module,
    layer: str | nn.Module | None = None,
    *,
    example: Tensor | None = None,
    layout: Layout | str | None = None,
    rectify_weights: bool | None = None,
    preprocess: Callable[[Image.Image], Tensor] | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    classes: Sequence[str] | None = None,
    input: Input | None = None,  # noqa: A002  # the word of the field
    task: Task | None = None,
) -> Model:
    """Your own module, ready to explain; the target layer is a name, a submodule, or chosen automatically.

    `task` says what its outputs are: "multiclass" (softmax), "binary" (one logit), "multilabel" (a sigmoid for each) or
    "regression" (values). Without it they are multiclass, or binary where there is one.
    `input` says what its channels are, for windows of rasters: bands, scale, resolution.
    Without `layer`, the module runs once, on the first image of `example` or on zeros of its stated input size.
    """
    if not isinstance(module, nn.Module):
        raise EquicamError(
            "wrap",
            "a torch.nn.Module",
            type(module).__name__,
            f"the network itself, or equicam.load({str(module)!r})",
        )
    require_names(classes)
    module = original(module)
    if layer is None:
        layer = choose_layer(module, example)
        LOG.info("layer %s chosen from %s", layer, type(module).__name__)
    return Model(
        module=module,
        layer=layer_name(module, layer),
        layout=as_layout(layout),
        rectify_weights=rectify_weights,
        preprocess=preprocess,
        mean=tuple(mean),
        std=tuple(std),
        classes=None if classes is None else tuple(classes),
        input=input,
        task=task,
    )


_TRANSPARENT = ("Identity", "Permute", "Dropout")  # an earlier layer computed their output
OTHER_SIZE = "example= of equicam.wrap, if the model takes inputs of another size"


def require_names(classes: Sequence[str] | None) -> None:
    """Refuse one name where a list of class names is meant."""
    if isinstance(classes, str):
        raise EquicamError("classes", "a list of names", repr(classes), f"classes=[{classes!r}, …]")


def choose_layer(module: nn.Module, example: Tensor | None = None) -> str:
    """The last spatial layer before pooling; on tokens, the first norm of the last block.

    After the last attention a class logit depends on the class token alone, so later token layers have a
    gradient of exactly zero at every patch.
    """
    outputs = _spatial_outputs(module, example)
    if not outputs:
        raise EquicamError(
            f"{type(module).__name__}", "a layer with a spatial output to choose", "none of 2×2 or more",
            'wrap(module, layer="NAME")',
        )  # fmt: skip
    last, dimensions = outputs[-1]
    norms = [name for name, ndim in outputs if ndim == 3 and is_block_norm(module, name)]
    if dimensions == 4 or not norms:
        return last
    block = norms[-1].rpartition(".")[0]
    return next(name for name in norms if name.rpartition(".")[0] == block)


def spatial_layers(module: nn.Module, example: Tensor | None = None) -> list[str]:
    """The names of all layers with a spatial output, in the order they are computed."""
    return [name for name, _ in _spatial_outputs(module, example)]


def _spatial_outputs(module: nn.Module, example: Tensor | None) -> list[tuple[str, int]]:
    """Submodules with a spatial output before pooling, in the order they finish, and the number of dimensions of each output.

    Without an example, the module runs on zeros.
    """
    outputs: list[tuple[str, int]] = []
    pooled: list[Tensor] = []
    zeros = _zeros(module)
    x = zeros if example is None else example[:1].to(zeros)
    size = (x.shape[-2], x.shape[-1])
    # the size of the zeros may be a guess
    or_else = OTHER_SIZE if example is None else ""

    def record(name: str, child: nn.Module, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        is_floating = isinstance(first, Tensor) and first.is_floating_point()
        if not is_floating or type(child).__name__ in _TRANSPARENT:
            return
        # a container that ends in a pool returns the pool's own tensor
        if "Pool" in type(child).__name__ or any(first is p for p in pooled):
            pooled.append(first)
        elif _is_spatial(first, size, child):
            outputs.append((name, first.ndim))

    def hook(name: str) -> Any:
        return lambda child, _inputs, output: record(name, child, output)

    handles = [child.register_forward_hook(hook(name)) for name, child in module.named_modules() if name]
    try:
        with frozen(module), torch.no_grad(), module_failure(module, tuple(x.shape), or_else=or_else):
            module(x)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _is_spatial(output: Tensor, size: tuple[int, int], child: nn.Module) -> bool:
    shape = tuple(output.shape)
    if shape[0] != 1:  # windows or pixels folded into the batch
        return False
    try:
        layout = infer(shape, size, channels=channels_of(child))
    except EquicamError:
        return False
    return min(layout.planes(output).shape[-2:]) >= 2


def _zeros(module: nn.Module) -> Tensor:
    """Zeros of the input size that the module or its config states, else 224×224."""
    weight = next(module.parameters(), torch.empty(0))
    size: Any = None
    for child in module.modules():
        for holder in (child, getattr(child, "config", None)):
            size = size or getattr(holder, "image_size", None) or getattr(holder, "img_size", None)
    height, width = (size, size) if isinstance(size, int) else tuple(size or (224, 224))[-2:]
    channels = input_channels(module) or 3
    return torch.zeros(1, channels, height, width, dtype=weight.dtype, device=weight.device)


def head_name(module: nn.Module) -> str:
    """The name of the last linear layer in the order of `named_modules`."""
    linear: list[str] = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    if not linear:
        raise EquicamError(
            type(module).__name__, "a linear layer at its end", "none", "a factory with its own head"
        )
    return linear[-1]


def resize_head(module: nn.Module, classes: int) -> nn.Module:
    """Replace the last layer, in place, unless it already has this number of classes."""
    name = head_name(module)
    old = module.get_submodule(name)
    assert isinstance(old, nn.Linear)  # noqa: S101  # head_name returns a linear layer
    if old.out_features != classes:
        parent, _, child = name.rpartition(".")
        like: dict[str, Any] = {"dtype": old.weight.dtype, "device": old.weight.device}
        replacement = nn.Linear(old.in_features, classes, bias=old.bias is not None, **like)
        setattr(module.get_submodule(parent), child, replacement)
    return module
