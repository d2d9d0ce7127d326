"""A run's parts as work for other processes and machines: everything a worker needs, in one thing that can be sent."""

import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from importlib import metadata

import numpy as np
import PIL
import torch

from equicam import __version__
from equicam.auditing.compute import Plans, computed, prepared
from equicam.auditing.store import Run
from equicam.core.views import Fill
from equicam.data.decoding import Decoders, Opened, opened
from equicam.engines.worker import Home, Part, Recipe, Sent, blinded, same_model
from equicam.errors import EquicamError
from equicam.evaluation.spec import ViewCount
from equicam.methods import find
from equicam.models.images import VisibleBoxes
from equicam.readers.model import Model
from equicam.shards import differences


@dataclass(frozen=True)
class Auditing:
    """How the parts of a run are computed, wherever that is."""

    home: Home
    made: Recipe | Sent
    blind: Model | None  # what opens pictures; None: to be loaded
    weights: str
    versions: tuple[tuple[str, str], ...]
    method: str
    views: ViewCount
    as_published: bool
    tau: float | None
    gamma: float | None
    fill: Fill
    dtype: torch.dtype | None
    calibrated: frozenset[str]
    workers: int
    part: int  # pictures in one
    picture_bytes: int  # of one prepared

    @property
    def part_bytes(self) -> int:
        """About how much memory the opened pictures of a part take."""
        return self.part * self.picture_bytes

    def opened(self, part: Part) -> list[Opened]:
        """The pictures of a part; one that killed a worker before is a row with a reason."""
        number, items = part
        note = self.home.enter() / f".opening-{number:06d}.part"
        if note.exists():  # whoever opened these last did not come back
            with closing(self._decoders()) as decoders:
                found = decoders.alone(items)
        else:
            note.touch()
            try:
                found = [opened(item, *self._eyes()) for item in items]
            except Exception:
                note.unlink(missing_ok=True)  # an error is no death
                raise
        note.unlink(missing_ok=True)
        return found

    def ahead(self, parts: Sequence[Part]) -> Iterator[list[Opened]]:
        """Parts opened in processes of this one's own."""
        with closing(self._decoders()) as decoders:
            yield from decoders.parts([items for _, items in parts])

    def ready(self, device: str) -> Callable[[int, list[Opened]], None]:
        """Load the model, refuse what would make other rows, and compute."""
        run = Run(self.home.enter())
        if found := differences(dict(self.versions), dict(versions())):
            raise EquicamError(
                "a worker", needs="the versions the run was begun with", got="; ".join(found), fix="the same everywhere"
            )  # fmt: skip
        model = same_model(self.made, device, self.weights)
        chosen = find(
            self.method, views=self.views, as_published=self.as_published, tau=self.tau, gamma=self.gamma
        )
        plans = Plans(model, chosen, self.fill, self.dtype, self.calibrated)

        def compute(number: int, found: list[Opened]) -> None:
            # a part that somebody given up for lost has written stays as it is
            if not run.has(number):
                rows, maps = computed(plans, found)
                if not run.has(number):
                    run.write_part(number, rows, maps)

        return compute

    def _eyes(self) -> tuple["partial[np.ndarray]", VisibleBoxes]:
        model = self.blind or blinded(self.made)
        return partial(prepared, model), VisibleBoxes(model)

    def _decoders(self) -> Decoders:
        return Decoders(*self._eyes(), workers=self.workers, size=self.picture_bytes, part=self.part)


def versions() -> tuple[tuple[str, str], ...]:
    """What computed the rows."""
    return (
        ("equicam", __version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torchvision", metadata.version("torchvision")),
        ("numpy", np.__version__),
        ("pillow", PIL.__version__),
    )
