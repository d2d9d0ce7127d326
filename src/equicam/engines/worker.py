"""What an engine does: open a part's pictures on a CPU, compute and write the part on a device, in any order."""

import copy
import ctypes
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from equicam.data.items import Item, valid_utf8
from equicam.errors import EquicamError
from equicam.models.load import load
from equicam.models.weights import fingerprint
from equicam.readers.model import Model

Part = tuple[int, Sequence[Item]]
"""Its number, and the pictures in it."""
Load = Callable[[str], Model]
"""The model on a device, made anew where it is called."""


@runtime_checkable
class Job(Protocol):
    """Work on parts, sent to every worker whole. A part that is written twice is the same part."""

    @property
    def part_bytes(self) -> int:
        """About how much memory the opened pictures of a part take."""

    def opened(self, part: Part) -> Any:
        """The pictures of a part, opened; needs no device."""

    def ahead(self, parts: Sequence[Part]) -> Iterator[Any]:
        """The same for many parts in their order, the next ones while this one is worked on."""

    def ready(self, device: str) -> Callable[[int, Any], None]:
        """Load the model; what comes back computes and writes a part."""


@dataclass(frozen=True)
class Recipe:
    """A model as `load` makes it: only its name travels, so every worker must find the same weights."""

    name: str
    weights: str | None = None
    classes: tuple[str, ...] | None = None
    layer: str | None = None
    compiled: bool = False

    def __call__(self, device: str) -> Model:
        """Load it; a network that will be compiled has the memory order convolutions are fastest in."""
        model = load(self.name, weights=self.weights, classes=self.classes, layer=self.layer, device=device)
        if not self.compiled:
            return model
        model.module.to(memory_format=torch.channels_last)
        return replace(model, compiled=True)

    def blind(self, model: Model) -> Model | None:
        """What opening pictures needs of it; None where that cannot travel, for a factory's file is no package."""
        return None if ".py" in self.name else _without_weights(model)


@dataclass(frozen=True)
class Sent:
    """A model that travels whole."""

    model: Model

    @staticmethod
    def copy_of(model: Model) -> "Sent":
        """Of a model that stays where it is; the copy is on the CPU, for not every worker has a GPU."""
        module = model.module
        there: dict[int, Any] = {id(b): b.detach().to("cpu", copy=True) for b in module.buffers()}
        for p in module.parameters():
            there[id(p)] = nn.Parameter(p.detach().to("cpu", copy=True), p.requires_grad)
        # what is large is copied to where it goes, so that a full GPU need not hold it twice
        return Sent(replace(model, module=copy.deepcopy(module, there).cpu()))

    def __call__(self, device: str) -> Model:
        """Put it on the device."""
        self.model.module.to(device)
        return self.model

    def blind(self, model: Model) -> Model:
        """What opening pictures needs of it."""
        return _without_weights(model)


@cache
def blinded(made: Recipe | Sent) -> Model:
    """The same, where it could not travel: loaded, and its weights let go."""
    return _without_weights(made("cpu"))


def _without_weights(model: Model) -> Model:
    return replace(model, module=nn.Identity())


@dataclass(frozen=True)
class Home:
    """A folder that every worker must see, known by what one file in it says."""

    folder: str
    file: str
    sha256: str

    @staticmethod
    def at(path: Path) -> "Home":
        """The folder of a file that is there."""
        path = path.absolute()
        return Home(str(path.parent), path.name, _digest(path))

    def enter(self) -> Path:
        """The folder, or a refusal that names this machine."""
        path = Path(self.folder) / self.file
        try:
            found = "another one" if _digest(path) != self.sha256 else ""
        except OSError as error:
            found = f"none ({error.strerror})"
        if found:
            raise EquicamError(
                f"a worker on {socket.gethostname()}", needs=f"the run's own {valid_utf8(str(path))}", got=found,
                fix="a folder that all machines share, by the same name",
            )  # fmt: skip
        return path.parent


def same_model(made: Recipe | Sent, device: str, weights: str) -> Model:
    """The model on a device of this worker, refused if its weights are not the run's."""
    model = made(device)
    if (found := fingerprint(model.module)) != weights:
        raise EquicamError(
            f"a worker on {socket.gethostname()}", needs=f"the run's weights ({weights[:12]}…)", got=f"{found[:12]}…",
            fix="the same weights file on all machines",
        )  # fmt: skip
    return model


def die_with(parent: int) -> None:
    """End when the process that started this one does, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
