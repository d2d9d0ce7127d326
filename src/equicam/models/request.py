"""The options of one `load` call, passed to the library that builds the model."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from equicam.errors import EquicamError
from equicam.models.wrap import wrap
from equicam.readers.layout import Layout
from equicam.readers.model import Model
from equicam.readers.names import RANDOM, Task, weights_file


@dataclass(frozen=True)
class Request:
    """The model a caller wants: its name within the library, its weights and the overrides."""

    name: str
    weights: str | Path | None
    classes: Sequence[str] | None
    templates: Sequence[str]
    layer: str | None
    layout: Layout | None
    rectify_weights: bool | None
    task: Task | None = None

    @property
    def file(self) -> Path | None:
        """The weights file, if `weights` is one and not the name of published weights."""
        return weights_file(self.weights)

    @property
    def random(self) -> bool:
        """Whether the weights stay random."""
        return self.weights == RANDOM

    @property
    def published(self) -> str | None:
        """The name of published weights, if `weights` is one."""
        return None if self.weights is None or self.random or self.file else str(self.weights)

    def refuse_published(self) -> None:
        """Refuse the name of published weights where a library offers only one set."""
        if self.published is not None:
            raise EquicamError(
                f"weights of {self.name!r}",
                needs='an existing file or "random"',
                got=repr(self.weights),
                fix="its full path",
            )

    def wrap(self, module: nn.Module, *, layer: str | None = None, **defaults: Any) -> Model:
        """The module with the library's defaults and the caller's overrides."""
        model = wrap(
            module.eval(),
            self.layer or layer,
            layout=self.layout,
            rectify_weights=self.rectify_weights,
            task=self.task,
            **defaults,
        )
        return model if self.classes is None else replace(model, classes=tuple(self.classes))


def unknown_name(kind: str, name: str, known: Sequence[str]) -> EquicamError:
    """The error for a name that is not known, with the closest known ones."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
    return EquicamError(
        kind, needs="a known name", got=repr(name), fix=" or ".join(map(repr, close)) or "another file"
    )
