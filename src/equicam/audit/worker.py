"""The shards of a run as work for other processes and machines: one frozen object that is pickled to each."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata

import numpy as np
import PIL
import torch

from equicam import __version__
from equicam.audit.compute import AuditContext, compact_preprocessing, compute_shard
from equicam.engines.worker import ModelSource, Shard, SharedFolder, load_checked, load_preprocessing
from equicam.errors import EquicamError
from equicam.images.decoding import DecodedImage, DecoderPool, need_network
from equicam.images.files import file_digest
from equicam.models.images import VisibleBoxes
from equicam.readers.model import Model
from equicam.runs.manifest import Manifest
from equicam.runs.store import RunStore
from equicam.shards import differences


@dataclass(frozen=True)
class AuditJob:
    """The recipe of a run and everything a worker needs to compute shards of it."""

    folder: SharedFolder
    manifest: Manifest
    calibration: frozenset[str]
    model_source: ModelSource
    preprocessing: Model | None  # the model without weights; None: each worker loads it
    workers: int  # decoding processes
    image_bytes: int  # of one preprocessed image

    @property
    def shard_bytes(self) -> int:
        """Approximate memory of the decoded images of a shard."""
        return self.manifest.shard_size * self.image_bytes

    def decode(self, shard: Shard) -> list[DecodedImage]:
        """The images of a shard, decoded by a child process: its limits and its death are not this process's."""
        _, items = shard
        network = need_network([items])
        if network not in self._lone_decoders:
            self._lone_decoders[network] = self._decoders(1, network=network)
        (found,) = self._lone_decoders[network].decode_shards([items])
        # copied, because the next shard's pixels take their place
        return [one if one.x is None else replace(one, x=one.x.copy()) for one in found]

    def decode_ahead(self, shards: Sequence[Shard]) -> Iterator[list[DecodedImage]]:
        """Shards decoded by child processes, ahead of the caller."""
        network = need_network(items for _, items in shards)
        with closing(self._decoders(self.workers, network=network)) as decoders:
            yield from decoders.decode_shards([items for _, items in shards])

    def prepare(self, device: str) -> Callable[[int, list[DecodedImage]], dict[str, str]]:
        """Load the model, refuse versions or weights that would give other rows, and return the computation."""
        store = RunStore(self.folder.enter())
        recorded, rasters = dict(self.manifest.versions), self.manifest.tiling is not None
        if found := differences(recorded, dict(versions(rasters=rasters, dicom="pydicom" in recorded))):
            raise EquicamError(
                "a worker", needs="the versions the run was started with", got="; ".join(found), fix="the same everywhere"
            )  # fmt: skip
        model = load_checked(self.model_source, device, self.manifest.weights)
        model = replace(model, task=self.manifest.task)  # a name alone does not say it
        tiling, target = self.manifest.tiling, self.manifest.target
        context = AuditContext(
            model, self.manifest.recipe, self.calibration, tiling.tile if tiling else None, target,
            self.manifest.shard_size,
        )  # fmt: skip

        def compute(number: int, decoded: list[DecodedImage]) -> dict[str, str]:
            # another worker may have written this shard after being presumed dead; keep it
            if not store.has_shard(number):
                items, maps = compute_shard(context, decoded)
                if not store.has_shard(number):
                    return store.write_shard(number, items, maps)
            return {kind: file_digest(store.path(kind, number)) for kind in ("items", "maps")}

        return compute

    @cached_property
    def _lone_decoders(self) -> dict[bool, DecoderPool]:
        """One child process for all shards that this process decodes, and one for those at URLs; they end with this process."""
        return {}

    def _decoders(self, workers: int, *, network: bool) -> DecoderPool:
        model = self.preprocessing or load_preprocessing(self.model_source)
        return DecoderPool(
            compact_preprocessing(model, self.manifest.recipe.context),
            VisibleBoxes(model),
            workers=workers,
            image_bytes=self.image_bytes,
            shard_size=self.manifest.shard_size,
            network=network,
        )


READERS = ("openslide-python", "openslide-bin", "tifffile", "imagecodecs", "rasterio")
"""The libraries that read rasters."""


def versions(*, rasters: bool = False, dicom: bool = False) -> tuple[tuple[str, str], ...]:
    """The versions that decide rows; those of readers only where there are rasters or DICOM images."""
    readers = (*(READERS if rasters else ()), *(("pydicom",) if dicom else ()))
    return (
        *((name, _version(name)) for name in readers),
        ("equicam", __version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torchvision", metadata.version("torchvision")),
        ("numpy", np.__version__),
        ("pillow", PIL.__version__),
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
