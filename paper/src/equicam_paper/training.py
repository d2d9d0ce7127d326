"""The training loop of `finetune`: seeded epochs, checkpoints between them, and the best weights at the end."""

import io
import json
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from equicam import __version__
from equicam.core.views import rotate_each
from equicam.errors import EquicamError
from equicam.images.items import Item, open_item
from equicam.models.images import preprocess_image, training_transform
from equicam.models.layers import head_name
from equicam.readers.model import Model
from equicam.shards import differences, plain, write_atomic

CHECKPOINT_SECONDS = 60.0
"""Between two checkpoints at least: each is four times as large as the weights, too much to write after every short epoch."""


@dataclass(frozen=True)
class TrainingRecipe:
    """Everything that decides the resulting weights."""

    arch: str
    start: str | None
    data: str
    train: str | None
    test: str | None
    epochs: int
    batch: int
    rate: float
    patience: int
    seed: int
    rotation_augment: bool
    size: int
    precision: str
    classes: tuple[str, ...]
    images: str  # digest of the training images
    version: str = __version__


@dataclass(frozen=True)
class Accuracy:
    """How good a classifier is; in `balanced`, the mean recall, every class counts alike."""

    accuracy: float
    balanced: float
    recall: dict[str, float]
    images: int


@contextmanager
def seed_locally(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch and random inside, and restore the caller's generators afterwards."""
    before = random.getstate()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before)


class LabelledImages(Dataset[tuple[Tensor, int]]):
    """Preprocessed images with the index of their class, decoded on access.

    Random transforms draw from a seed and the image's place, whichever process loads it.
    """

    def __init__(self, items: Sequence[Item], classes: Sequence[str], transform: Any, seed: int = 0) -> None:
        self.items, self.transform, self.seed = list(items), transform, seed
        self.index = {name: i for i, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        item = self.items[i]
        with seed_locally(self.seed * len(self.items) + i, torch.device("cpu")):
            return self.transform(open_item(item)), self.index[str(item.label)]


class Training:
    """A run of epochs over the training images that can be resumed."""

    def __init__(
        self, model: Model, recipe: TrainingRecipe, folder: Path, device: torch.device, workers: int
    ) -> None:
        self.model, self.recipe, self.device, self.workers = model, recipe, device, workers
        self.checkpoint = folder / "checkpoint.pt"
        with seed_locally(recipe.seed, device):
            head = model.module.get_submodule(head_name(model.module))
            head.reset_parameters()  # type: ignore[operator]  # a linear layer has it
        self.module = model.module.to(device)
        self.optimiser = torch.optim.AdamW(self.module.parameters(), lr=recipe.rate, weight_decay=0.01)
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Tensor] = {}
        self.saved = monotonic()

    def train(self, learn: Sequence[Item], held_out: Sequence[Item]) -> Iterator[str]:
        """Train until the held-out images improve no more; yields one line per epoch."""
        r = self.recipe
        if any(p.numel() == 0 for p in self.module.parameters()) or not learn:
            raise EquicamError("training", "images and a network", f"{len(learn)} images", "another split")
        self._resume()
        for epoch in range(len(self.history), r.epochs):
            if self._stale():
                break
            seed = r.seed * 1000 + epoch
            data = LabelledImages(learn, r.classes, training_transform(self.model, r.size), seed)
            with seed_locally(seed, self.device):
                loss = self._epoch(self._loader(data, seed=seed, shuffle=True), epoch)
            found = self.measure(held_out)
            self.history.append(
                {"epoch": epoch + 1.0, "loss": loss, "balanced": found.balanced, "accuracy": found.accuracy}
            )
            if found.balanced >= max(h["balanced"] for h in self.history):
                self.best = {k: v.detach().cpu().clone() for k, v in self.module.state_dict().items()}
            if monotonic() - self.saved >= CHECKPOINT_SECONDS:
                self._save()
            yield f"epoch {epoch + 1} of {r.epochs}: loss {loss:.3f}, held-out balanced accuracy {found.balanced:.3f}"
        self.module.load_state_dict(self.best)

    @torch.no_grad()
    def measure(self, items: Sequence[Item]) -> Accuracy:
        """Accuracy, and the mean recall over classes."""
        self.module.eval()
        classes = self.recipe.classes
        data = LabelledImages(items, classes, partial(preprocess_image, self.model))
        correct, total = torch.zeros(2, len(classes), dtype=torch.float64)
        for x, y in self._loader(data):
            hit = self.module(x.to(self.device)).argmax(1).cpu() == y
            correct += torch.bincount(y[hit], minlength=len(classes))
            total += torch.bincount(y, minlength=len(classes))
        recall = {name: float(correct[i] / total[i]) for i, name in enumerate(classes) if total[i]}
        balanced = sum(recall.values()) / max(1, len(recall))
        images = int(total.sum())
        return Accuracy(float(correct.sum()) / max(1, images), balanced, recall, images)

    def _loader(self, data: LabelledImages, *, seed: int = 0, shuffle: bool = False) -> DataLoader[Any]:
        # without a generator of its own a loader draws from the caller's
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(
            data, self.recipe.batch, shuffle=shuffle, num_workers=self.workers, generator=generator,
            pin_memory=torch.cuda.is_available(),
        )  # fmt: skip

    def _epoch(self, loader: DataLoader[Any], epoch: int) -> float:
        """One pass over the images; returns the mean loss."""
        self.module.train()
        total, count, steps = 0.0, 0, len(loader)
        mixed = self.recipe.precision == "bfloat16"
        for step, (x, y) in enumerate(loader):
            for group in self.optimiser.param_groups:
                group["lr"] = self._rate(epoch * steps + step, steps)
            x, y = x.to(self.device, non_blocking=True), y.to(self.device)
            if self.recipe.rotation_augment:
                x = rotate_each(x, torch.rand(len(x)) * 360 - 180)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=mixed):
                loss = cross_entropy(self.module(x), y)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total, count = total + float(loss.detach()) * len(x), count + len(x)
        return total / max(1, count)

    def _rate(self, step: int, steps_per_epoch: int) -> float:
        """A cosine from the highest rate to 0, after a warm-up of half an epoch."""
        warm_up = min(1.0, (step + 1) / max(1, steps_per_epoch // 2))
        cosine = math.cos(math.pi * step / (self.recipe.epochs * steps_per_epoch))
        return self.recipe.rate * (warm_up * 0.5 * (1 + cosine))

    def _stale(self) -> bool:
        """Whether the last `patience` epochs brought nothing better."""
        balanced, patience = [h["balanced"] for h in self.history], self.recipe.patience
        return len(balanced) > patience and max(balanced[-patience:]) <= max(balanced[:-patience])

    def _save(self) -> None:
        state = {
            "module": self.module.state_dict(), "optimiser": self.optimiser.state_dict(), "best": self.best,
            "history": self.history, "recipe": json.dumps(plain(asdict(self.recipe))),
        }  # fmt: skip
        data = io.BytesIO()
        torch.save(state, data)
        write_atomic(self.checkpoint, data.getvalue())
        self.saved = monotonic()

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if found := differences(json.loads(state["recipe"]), plain(asdict(self.recipe))):
            raise EquicamError(
                f"resuming {self.checkpoint.parent}", "the recipe it was begun with", "; ".join(found), "another --out",
            )  # fmt: skip
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.history, self.best = state["history"], {k: v.cpu() for k, v in state["best"].items()}
