"""Names of models, weights and classes. Whoever reads a run uses them too, so this imports no torch."""

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from equicam.errors import EquicamError

RANDOM = "random"


def weights_file(weights: str | Path | None) -> Path | None:
    """The file `weights` names; None for published weights, whose names have no separator and no suffix."""
    if weights is None or weights == RANDOM:
        return None
    path = Path(weights)
    is_path = isinstance(weights, Path) or path.suffix or "/" in weights or os.sep in weights
    return path if is_path else None


def absolute_weights(weights: str | Path | None) -> str | None:
    """The same weights by a name that holds in every working folder."""
    file = weights_file(weights)
    return str(file.absolute()) if file else None if weights is None else str(weights)


def library_of(name: str) -> tuple[str, str]:
    """The library that a model's name is of, and its name there: "file", "embedded", "torchvision" or what stands before a colon."""
    if ".py:" in name or name.endswith(".py"):
        return "file", name
    library, colon, inner = name.partition(":")
    return (library, inner) if colon else ("embedded" if name == "embedded" else "torchvision", name)


def is_library_model(name: str) -> bool:
    """Whether the name can only be one of a list that a library publishes: no file, no folder, no repository of a hub."""
    library, inner = library_of(name)
    if library == "open_clip":
        inner = inner.replace("/", "", 1)  # its names have a tag behind a slash
    listed = ":" not in name or library in ("timm", "open_clip")
    return listed and bool(inner) and ".py" not in name and not set(inner) & {"/", "\\", ":"}


def absolute_model(name: str) -> str:
    """The same model by a name that holds in every working folder: only FILE.py:FACTORY is a file."""
    path, colon, factory = name.partition(".py:")
    return f"{Path(path + '.py').absolute()}:{factory}" if colon else name


Task = Literal["multiclass", "binary", "multilabel", "regression"]
"""Logits of classes that exclude each other, of two classes in one output, of labels that do not exclude each other; or values."""


def output_name(
    target: int | None, classes: Sequence[str] | None, task: Task | None = None, *, is_only: bool = False
) -> str:
    """The name of a class or value; without one its number, and of a model's only value that it is the output."""
    if target is not None and classes and 0 <= target < len(classes):
        return classes[target]
    if task == "regression":
        return "the output" if is_only else f"output {target}"
    return f"class {target}"


def class_index(target: int | str | None, classes: Sequence[str] | None, what: str = "target") -> int | None:
    """A class by name or number; None for each image's own."""
    if target is None or isinstance(target, int):
        return target
    if not isinstance(target, str):
        raise EquicamError(what, "a class by name or number", type(target).__name__, f"{what}=3")
    known = list(enumerate(classes or ()))
    found = [index for index, name in known if name == target]
    found = found or [index for index, name in known if name.lower() == target.lower()]
    if len(found) > 1:  # ImageNet has two cranes
        raise EquicamError(
            what, "one class", f"{target!r}, the name of classes {', '.join(map(str, found))}",
            " or ".join(f"{what}={index}" for index in found),
        )  # fmt: skip
    if found:
        return found[0]
    if target.isdecimal():
        return int(target)
    # up to three names that have this one as a word or are like it, whatever the case of their letters
    lower = {name.lower(): name for name in classes or ()}
    having = [name for name in lower if target.lower() in name.replace("-", " ").split()]
    alike = [name for name in get_close_matches(target.lower(), lower, n=3, cutoff=0.3) if name not in having]
    close = [lower[name] for name in (having + alike)[:3]]
    needs = (
        "a class of the model, by name or number"
        if classes
        else "the number of a class: there are no class names"
    )
    fix = " or ".join(map(repr, close)) or "a number, or wrap(…, classes=[…])"
    raise EquicamError(what, needs, repr(target), fix)
