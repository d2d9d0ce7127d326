"""`load`: a model by name.

resnet50                         torchvision
timm:vit_small_patch16_224       timm
open_clip:ViT-B-16/openai        open_clip, zero-shot over classes=[…]
hf:google/vit-base-patch16-224   Hugging Face image classifiers, and CLIP models over classes=[…]
models.py:build                  your own function; it returns a module or the result of `wrap`
embedded                         the small synthetic model in the package
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from equicam.errors import EquicamError
from equicam.models.layers import head_name, require_names, resize_head
from equicam.models.libraries import (
    TEMPLATES,
    Request,
    from_hf,
    from_open_clip,
    from_package,
    from_timm,
    from_torchvision,
    unknown_name,
)
from equicam.models.weights import load_weights, read_state_dict, stored_classes
from equicam.readers.failures import named_failure
from equicam.readers.layout import Layout
from equicam.readers.model import Model, as_layout, layer_name
from equicam.readers.names import Task, absolute_weights, library_of


def load(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    classes: Sequence[str] | None = None,
    templates: Sequence[str] = TEMPLATES,
    layer: str | None = None,
    layout: Layout | str | None = None,
    rectify_weights: bool | None = None,
    device: str | torch.device | None = None,
    task: Task | None = None,
) -> Model:
    """A model with its target layer, preprocessing and class names, in eval mode.

    `weights` is a safetensors or state-dict file, the name of published weights ("IMAGENET1K_V2"), or "random";
    without it, published weights come from the usual caches or are downloaded. `task` says what the outputs are, as in
    `wrap`.
    """
    name = str(name)
    library, inner = library_of(name)
    if library not in (LIBRARIES if ":" not in name else ("file", *PREFIXES)):
        raise EquicamError(
            "a model's source", f"one of {', '.join(PREFIXES)}, a file.py:factory or none", repr(name),
            "a name that `equicam models` lists",
        )  # fmt: skip
    require_names(classes)
    request = Request(
        inner, weights, classes, tuple(templates), layer, as_layout(layout), rectify_weights, task
    )
    if request.published is not None and library != "torchvision":
        raise EquicamError(
            f"weights of {inner!r}", 'an existing file or "random"', repr(weights), "its full path"
        )
    if classes is None and request.file and library not in ("open_clip", "hf"):
        request = replace(request, classes=stored_classes(request.file))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # random weights are the same in every call
        model = LIBRARIES[library](request)
    if device is not None:
        try:
            model.module.to(device)
        except (RuntimeError, AssertionError) as error:
            got = f"{device!r}: {str(error).splitlines()[0]}"
            raise EquicamError("device", "a device torch can use here", got, "cpu") from error
    return replace(model, name=name, weights_from=absolute_weights(weights))


def list_names() -> list[str]:
    """The embedded model and every torchvision and timm model, by the names that `load` takes."""
    import timm
    from torchvision import models

    return ["embedded", *models.list_models(module=models), *(f"timm:{name}" for name in timm.list_models())]


def _from_factory(request: Request) -> Model:
    """The result of a function in a Python file of the caller's."""
    function, built = _call_factory(request.name)
    if not isinstance(built, Model | nn.Module):
        raise EquicamError(
            f"the factory {function!r}", "to return a module or the result of equicam.wrap", type(built).__name__,
            "return equicam.wrap(module)",
        )  # fmt: skip
    module = built.module if isinstance(built, Model) else built
    if request.file:
        weights = read_state_dict(request.file)
        has_head = any(isinstance(m, nn.Linear) for m in module.modules())
        head = f"{head_name(module)}.weight" if has_head else ""
        if head in weights:
            resize_head(module, weights[head].shape[0])
        load_weights(module, weights, request.file)
    if isinstance(built, nn.Module):
        return request.wrap(module.to(memory_format=torch.channels_last))
    overrides: dict[str, Any] = {
        "layer": request.layer and layer_name(module, request.layer),
        "layout": request.layout,
        "rectify_weights": request.rectify_weights,
        "classes": request.classes and tuple(request.classes),
        "task": request.task,
    }
    module.eval()
    return replace(built, **{key: value for key, value in overrides.items() if value is not None})


def _call_factory(name: str) -> tuple[str, Any]:
    """Run FILE.py and call the function in it."""
    path, _, function = name.rpartition(":") if ".py:" in name else (name, "", "")
    file = Path(path)
    if not function or not file.is_file():
        raise EquicamError(
            "a factory", "an existing file.py and a function in it", repr(name), "models.py:build"
        )
    spec = importlib.util.spec_from_file_location(f"equicam_factory_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise EquicamError("a factory", "a Python file", repr(path), "models.py:build")
    code = importlib.util.module_from_spec(spec)
    with named_failure(f"the file {file.name}", needs="to be imported"):
        spec.loader.exec_module(code)
    build = getattr(code, function, None)
    if not callable(build):
        offered = [n for n, v in vars(code).items() if callable(v) and not n.startswith("_")]
        raise unknown_name(f"factory in {file.name}", function, offered)
    with named_failure(f"the factory {function!r}", needs="to return a model"):
        return function, build()


LIBRARIES = {
    "file": _from_factory,
    "embedded": from_package,
    "torchvision": from_torchvision,
    "timm": from_timm,
    "open_clip": from_open_clip,
    "hf": from_hf,
}
PREFIXES = ("timm", "open_clip", "hf")
"""Libraries whose name stands before a colon."""
