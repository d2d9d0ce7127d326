"""Which names of models and weights are files: one rule, whatever files the working folder holds."""

import os
from pathlib import Path

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


def is_library_model(name: str) -> bool:
    """Whether the name can only be one of a list that a library publishes: no file, no folder, no repository of a hub."""
    library, colon, rest = name.partition(":")
    inner = rest if colon else name
    if library == "open_clip":
        inner = inner.replace("/", "", 1)  # its names have a tag behind a slash
    listed = not colon or library in ("timm", "open_clip")
    return listed and bool(inner) and ".py" not in name and not set(inner) & {"/", "\\", ":"}


def absolute_model(name: str) -> str:
    """The same model by a name that holds in every working folder: only FILE.py:FACTORY is a file."""
    path, colon, factory = name.partition(".py:")
    return f"{Path(path + '.py').absolute()}:{factory}" if colon else name
