"""A network and the layer that a reader reads."""

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from PIL import Image
from torch import Tensor, nn

from equicam.errors import EquicamError, not_one_of
from equicam.rasters.options import Input
from equicam.readers.layout import Kind, Layout
from equicam.readers.names import Task

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OutputFunction = Callable[[Any], Tensor]
"""A module's output, as it returns it → one value per image."""


@dataclass(frozen=True, repr=False)
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
    weights_from: str | None = None  # as given to `load`; a file by its absolute path
    task: Task | None = None  # None: multiclass, or binary where there is one output
    value: OutputFunction | None = None  # explained instead of an output: `explain(…, target=function)`

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in get_args(Task):
            close = difflib.get_close_matches(str(self.task), get_args(Task), n=1, cutoff=0.0)
            raise not_one_of("task", get_args(Task), self.task, f'task="{close[0]}"')

    def __repr__(self) -> str:
        named = type(self.module).__name__ if self.name is None else f"{self.name!r}"
        facts = [named, f"layer {self.layer!r}"]
        if self.classes is not None:
            facts.append(f"{len(self.classes):,} classes")
        if self.task is not None:
            facts.append(self.task)
        return f"Model({', '.join(facts)}, {str(self.dtype).removeprefix('torch.')} on {self.device})"

    @property
    def has_probabilities(self) -> bool:
        """Whether its outputs are of classes."""
        return self.task != "regression"

    @property
    def is_multilabel(self) -> bool:
        """Whether its labels do not exclude each other."""
        return self.task == "multilabel"

    def explaining(self, value: OutputFunction) -> "Model":
        """The same model with a value of its output in the place of classes."""
        return replace(self, value=value, task="regression", classes=None)

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
                "layer", "a submodule of the model", f"another {type(layer).__name__}", "its name"
            )
        return found[0]
    if layer not in names:
        close = difflib.get_close_matches(str(layer), names, n=3, cutoff=0.5) or list(names)[-3:]
        raise EquicamError("layer", "the name of a submodule", repr(layer), " or ".join(map(repr, close)))
    return layer


def as_layout(layout: Layout | str | None) -> Layout | None:
    """A layout given by its kind or whole; None leaves it to the layer's output."""
    if layout is None or isinstance(layout, Layout):
        return layout
    if layout in get_args(Kind):
        return Layout(layout)  # type: ignore[arg-type]
    raise EquicamError("layout", "nchw, nhwc, tokens or a Layout", repr(layout), 'layout="nchw"')


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    # not `parameters()`, which is slow to yield its first, and this runs at every call
    for own in ("_parameters", "_buffers"):
        for part in module.modules():
            yield from (t for t in getattr(part, own).values() if t is not None)
