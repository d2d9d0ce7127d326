"""A classifier for a domain of yours: the paper's standard recipe, with or without rotated training images.

AdamW, a cosine schedule with a short warm-up, random resized crops and flips, early stopping on the balanced accuracy of
a held-out tenth of the training images. An epoch ends with a checkpoint, at most once a minute: an interrupted run resumes
from it, computes up to a minute and an epoch again, and on a CPU ends with the same weights.
"""

import io
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from equicam import __version__
from equicam.core.views import rotate_each
from equicam.errors import EquicamError
from equicam.images.items import Item, digest_items, open_item
from equicam.models.images import preprocess_image, training_transform
from equicam.models.layers import head_name, resize_head
from equicam.models.load import load
from equicam.models.weights import read_state_dict
from equicam.readers.model import Model
from equicam.readers.names import weights_file
from equicam.shards import differences, plain, write_atomic
from equicam_paper.benchmarks import find_items

HELD_OUT = 0.10  # of every class's training images, which early stopping measures on
CHECKPOINT_SECONDS = 60.0  # between two checkpoints at least: each is four times as large as the weights


@dataclass(frozen=True)
class _Recipe:
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


class _LabelledImages(Dataset[tuple[Tensor, int]]):
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
        self, model: Model, recipe: _Recipe, folder: Path, device: torch.device, workers: int
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
            data = _LabelledImages(learn, r.classes, training_transform(self.model, r.size), seed)
            with seed_locally(seed, self.device):
                loss = self._epoch(self._loader(data, seed=seed, shuffle=True), epoch)
            found = self.measure(held_out)
            measured = {"balanced": found.balanced, "accuracy": found.accuracy}
            self.history.append({"epoch": epoch + 1.0, "loss": loss} | measured)
            if found.balanced >= max(h["balanced"] for h in self.history):
                self.best = {k: v.detach().cpu().clone() for k, v in self.module.state_dict().items()}
            if monotonic() - self.saved >= CHECKPOINT_SECONDS:
                self._save()
            right = f"held-out balanced accuracy {found.balanced:.3f}"
            yield f"epoch {epoch + 1} of {r.epochs}: loss {loss:.3f}, {right}"
        self.module.load_state_dict(self.best)

    @torch.no_grad()
    def measure(self, items: Sequence[Item]) -> Accuracy:
        """Accuracy, and the mean recall over classes."""
        self.module.eval()
        classes = self.recipe.classes
        data = _LabelledImages(items, classes, partial(preprocess_image, self.model))
        correct, total = torch.zeros(2, len(classes), dtype=torch.float64)
        for x, y in self._loader(data):
            hit = self.module(x.to(self.device)).argmax(1).cpu() == y
            correct += torch.bincount(y[hit], minlength=len(classes))
            total += torch.bincount(y, minlength=len(classes))
        recall = {name: float(correct[i] / total[i]) for i, name in enumerate(classes) if total[i]}
        balanced = sum(recall.values()) / max(1, len(recall))
        images = int(total.sum())
        return Accuracy(float(correct.sum()) / max(1, images), balanced, recall, images)

    def _loader(self, data: _LabelledImages, *, seed: int = 0, shuffle: bool = False) -> DataLoader[Any]:
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
        torch.save(state, data := io.BytesIO())
        write_atomic(self.checkpoint, data.getvalue())
        self.saved = monotonic()

    def _resume(self) -> None:
        if not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        if found := differences(json.loads(state["recipe"]), plain(asdict(self.recipe))):
            what, needs = f"resuming {self.checkpoint.parent}", "the recipe it was begun with"
            raise EquicamError(what, needs, "; ".join(found), "another --out")
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.history, self.best = state["history"], {k: v.cpu() for k, v in state["best"].items()}


def finetune(
    data: str | Path,
    arch: str,
    out: str | Path,
    *,
    weights: str | Path | None = None,
    train: str | None = "train",
    test: str | None = "test",
    epochs: int = 10,
    batch: int = 32,
    rate: float = 1e-4,
    patience: int = 3,
    seed: int = 0,
    rotation_augment: bool = False,
    workers: int = 2,
    device: str | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> tuple[Path, Accuracy]:
    """Fine-tune on the training split and measure on the test split; returns the weights file and the accuracy."""
    folder = Path(out)
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    learn, held_out, classes = _split(find_items(data, split=train), seed)
    with seed_locally(seed, on):
        model = initial_model(arch, weights, len(classes))
    size = preprocess_image(model, open_item(learn[0])).shape[-1]
    recipe = _Recipe(
        arch=str(arch), start=None if weights is None else Path(weights).name, data=Path(data).name, train=train, test=test,
        epochs=epochs, batch=batch, rate=rate, patience=patience, seed=seed, rotation_augment=rotation_augment, size=size,
        precision="bfloat16" if on.type == "cuda" else "float32", classes=classes, images=digest_items([*learn, *held_out]),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(model, recipe, folder, on, workers)
    for line in training.train(learn, held_out):
        progress(line)
    tests = [i for i in find_items(data, split=test) if str(i.label) in classes] if test else held_out
    found = training.measure(tests)
    facts = {"classes": list(classes), "recipe": asdict(recipe), "measured": asdict(found)}
    tensors = {key: value.cpu().contiguous() for key, value in training.module.state_dict().items()}
    path = folder / "weights.safetensors"
    write_atomic(path, save(tensors, metadata={key: json.dumps(value) for key, value in facts.items()}))
    write_atomic(folder / "card.md", _model_card(recipe, found, training.history).encode())
    training.checkpoint.unlink(missing_ok=True)
    return path, found


def initial_model(arch: str, weights: str | Path | None, classes: int) -> Model:
    """The architecture with pretrained weights and a fresh head; a weights file may lack the head or have another."""
    file = weights_file(weights)
    if file is None:
        model = load(arch, weights=weights)
        resize_head(model.module, classes)
        return model
    model = load(arch, weights=None if ".py" in str(arch) else "random")
    resize_head(model.module, classes)
    given, own = read_state_dict(file), model.module.state_dict()
    fitting = {key: value for key, value in given.items() if key in own and own[key].shape == value.shape}
    head = head_name(model.module).split(".")[0]
    unknown = [key for key in given if key not in fitting and not key.startswith(head)]
    if unknown or len(fitting) < len(given) / 2:
        needs, got = f"tensors of {arch}, except the head", f"others: {unknown[:3]}"
        raise EquicamError(f"weights {file.name!r}", needs, got, "the architecture of these")
    model.module.load_state_dict(fitting, strict=False)
    return model


def _model_card(recipe: _Recipe, found: Accuracy, history: Sequence[dict[str, float]]) -> str:
    """What a user of the weights should know."""
    worst = min(found.recall, key=lambda name: found.recall[name], default="none")
    epochs = "\n".join(f"| {h['epoch']:.0f} | {h['loss']:.3f} | {h['balanced']:.3f} |" for h in history)
    rotated = f"{'' if recipe.rotation_augment else 'no '}rotated training images"
    return f"""# {recipe.arch} on {recipe.data}

Fine-tuned with equicam {recipe.version} from {recipe.start or "published weights"}; {rotated}.

- classes: {", ".join(recipe.classes)}
- test images: {found.images}; accuracy {found.accuracy:.3f}; balanced accuracy {found.balanced:.3f}
- worst recall: {worst} ({found.recall.get(worst, float("nan")):.3f})
- recipe: AdamW {recipe.rate:g}, batch {recipe.batch}, at most {recipe.epochs} epochs, patience {recipe.patience}, seed {recipe.seed}, {recipe.precision}, random resized crop {recipe.size} and flip
- training images, SHA-256 of their list: {recipe.images}

| epoch | loss | held-out balanced accuracy |
|---|---|---|
{epochs}

Load with `equicam.load("{recipe.arch}", weights="weights.safetensors")`. Measured on this data only: not a statement about
any other, and not a medical device.
"""


def _split(items: Sequence[Item], seed: int) -> tuple[list[Item], list[Item], tuple[str, ...]]:
    """Training images, a held-out share of every class, and the classes sorted by name."""
    labelled = sorted((i for i in items if i.label is not None), key=lambda i: i.id)
    classes = tuple(sorted({str(i.label) for i in labelled}))
    if len(classes) < 2:
        raise EquicamError("finetune", "images of two classes or more", len(classes), "a labelled source")
    rng = np.random.default_rng(seed)
    learn: list[Item] = []
    held_out: list[Item] = []
    for name in classes:
        of_class = [i for i in labelled if str(i.label) == name]
        chosen = set(rng.permutation(len(of_class))[: max(1, round(HELD_OUT * len(of_class)))].tolist())
        for place, item in enumerate(of_class):
            (held_out if place in chosen else learn).append(item)
    return learn, held_out, classes
