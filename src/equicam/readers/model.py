"""A network and the layer that a reader reads."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor, nn

from equicam.data.rasters.options import Input
from equicam.errors import EquicamError
from equicam.readers.layout import Layout

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Model:
    """A module, the layer its explanations are read from, and the preprocessing of its images."""

    module: nn.Module
    layer: str
    layout: Layout | None = None  # None: inferred from the layer's output
    rectify_weights: bool | None = None  # None: yes on tokens behind a class token, as the paper's authors do
    preprocess: Callable[[Image.Image], Tensor] | None = None  # None: ImageNet's
    mean: tuple[float, ...] = IMAGENET_MEAN  # of the normalisation, to display preprocessed images
    std: tuple[float, ...] = IMAGENET_STD
    classes: tuple[str, ...] | None = None
    input: Input | None = None  # of rasters: bands, scale, resolution
    name: str | None = None  # as given to `load`

    @property
    def device(self) -> torch.device:
        """Where the module's tensors are."""
        return next((t.device for t in _tensors(self.module)), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The module's floating type, which its input gets too."""
        return next((t.dtype for t in _tensors(self.module) if t.is_floating_point()), torch.float32)


def original(module: nn.Module) -> nn.Module:
    """The eager module behind `torch.compile` and the parallel wrappers: hooks fire only there."""
    while True:
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]
        elif isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        else:
            return module


def layer_name(module: nn.Module, layer: str | nn.Module) -> str:
    """The name of a layer given by name or as the submodule itself."""
    names: dict[str, nn.Module] = {name: child for name, child in module.named_modules() if name}
    if isinstance(layer, nn.Module):
        wanted = original(layer)
        found = [name for name, child in names.items() if child is wanted]
        if not found:
            raise EquicamError(
                "layer",
                needs="a submodule of the model",
                got=f"another {type(layer).__name__}",
                fix="its name",
            )
        return found[0]
    if layer not in names:
        close = difflib.get_close_matches(str(layer), names, n=3, cutoff=0.5) or list(names)[-3:]
        raise EquicamError(
            "layer", needs="the name of a submodule", got=repr(layer), fix=" or ".join(repr(n) for n in close)
        )
    return layer


def as_layout(layout: Layout | str | None) -> Layout | None:
    """A layout given by its kind or whole; None leaves it to the layer's output."""
    if layout is None or isinstance(layout, Layout):
        return layout
    if layout in ("nchw", "nhwc", "tokens"):
        return Layout(layout)  # type: ignore[arg-type]
    raise EquicamError(
        "layout", needs="nchw, nhwc, tokens or a Layout", got=repr(layout), fix='layout="nchw"'
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    # not `parameters()`, which is slow to yield its first, and this runs at every call
    for own in ("_parameters", "_buffers"):
        for part in module.modules():
            yield from (t for t in getattr(part, own).values() if t is not None)
