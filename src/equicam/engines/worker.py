"""The contract between a job and the engine that runs it: shards are decoded on a CPU and computed on a device."""

import copy
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from equicam.errors import EquicamError
from equicam.images.files import file_digest
from equicam.images.items import Item, valid_utf8
from equicam.models.load import load
from equicam.models.preprocessing import Preprocessing
from equicam.models.weights import fingerprint
from equicam.readers.model import Model

Shard = tuple[int, Sequence[Item]]  # its number, and its images


@runtime_checkable
class Job(Protocol):
    """Work on shards, pickled whole to every worker. Computing a shard twice gives the same shard."""

    @property
    def shard_bytes(self) -> int:
        """Approximate memory of the decoded images of a shard."""

    def decode(self, shard: Shard) -> Any:
        """The images of a shard as model inputs; needs no device."""

    def decode_ahead(self, shards: Sequence[Shard]) -> Iterator[Any]:
        """The same for many shards in order, decoding the next ones while the caller computes one."""

    def prepare(self, device: str) -> Callable[[int, Any], Any]:
        """Load the model; return the function that computes and writes a decoded shard, and returns plain values."""


@dataclass(frozen=True)
class ModelFromName:
    """A model that each worker loads by name, so every worker must find the same weights."""

    name: str
    weights: str | None = None
    classes: tuple[str, ...] | None = None
    layer: str | None = None
    compiled: bool = False
    preprocessing: Preprocessing | None = None  # None: the model's own

    def __call__(self, device: str) -> Model:
        """Load it; a network to be compiled gets the memory format in which convolutions are fastest."""
        model = load(self.name, weights=self.weights, classes=self.classes, layer=self.layer, device=device)
        if self.preprocessing is not None:
            model = self.preprocessing.of(model)
        if self.compiled:
            model.module.to(memory_format=torch.channels_last)
        return model

    def preprocessing_only(self, model: Model) -> Model | None:
        """The model without weights; None if it cannot be pickled, because a factory's file is not importable."""
        return None if ".py" in self.name else replace(model, module=nn.Identity())


@dataclass(frozen=True)
class ModelCopy:
    """A model that is pickled to each worker."""

    model: Model

    @staticmethod
    def copy_of(model: Model) -> "ModelCopy":
        """A copy on the CPU, because not every worker has a GPU."""
        module = model.module
        tensors: dict[int, Any] = {id(b): b.detach().to("cpu", copy=True) for b in module.buffers()}
        for p in module.parameters():
            tensors[id(p)] = nn.Parameter(p.detach().to("cpu", copy=True), p.requires_grad)
        # tensors are copied straight to the CPU, so that a full GPU need not hold them twice
        return ModelCopy(replace(model, module=copy.deepcopy(module, tensors).cpu()))

    def __call__(self, device: str) -> Model:
        """Move it to the device."""
        self.model.module.to(device)
        return self.model

    def preprocessing_only(self, model: Model) -> Model:
        """The model without weights."""
        return replace(model, module=nn.Identity())


ModelSource = ModelFromName | ModelCopy  # how a worker gets its model


@lru_cache(maxsize=1)
def load_preprocessing(source: ModelSource) -> Model:
    """The model without weights, loaded here; the last one is kept."""
    return replace(source("cpu"), module=nn.Identity())


@dataclass(frozen=True)
class SharedFolder:
    """A folder that every worker must see, recognised by the digest of one file in it."""

    folder: str
    file: str
    sha256: str

    @staticmethod
    def at(path: Path) -> "SharedFolder":
        """The folder of an existing file."""
        path = path.absolute()
        return SharedFolder(str(path.parent), path.name, file_digest(path))

    def enter(self) -> Path:
        """The folder, or an error that names this machine."""
        path = Path(self.folder) / self.file
        try:
            found = "another one" if file_digest(path) != self.sha256 else ""
        except OSError as error:
            found = f"none ({error.strerror})"
        if found:
            raise EquicamError(
                f"a worker on {socket.gethostname()}", f"the run's own {valid_utf8(str(path))}", found,
                "a folder that all machines share, by the same name",
            )  # fmt: skip
        return path.parent


def load_checked(source: ModelSource, device: str, weights: str) -> Model:
    """The model on a device of this worker; refused if its weights are not the run's."""
    model = source(device)
    if (found := fingerprint(model.module)) != weights:
        raise EquicamError(
            f"a worker on {socket.gethostname()}", f"the run's weights ({weights[:12]}…)", f"{found[:12]}…",
            "the same weights file on all machines",
        )  # fmt: skip
    return model
