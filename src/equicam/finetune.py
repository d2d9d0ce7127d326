"""A classifier for a domain of yours: the paper's standard recipe, with and without turned pictures.

AdamW, a cosine schedule with a short warm-up, random resized crops and mirrors, early stopping on the balanced accuracy
of a tenth of the training pictures. Every epoch is a checkpoint: what is cut off goes on, to the same end on a CPU.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from equicam import __version__
from equicam.core.views import rotate_each
from equicam.data.items import Item, digest_items, open_item
from equicam.data.sources import find_items
from equicam.errors import EquicamError
from equicam.models.heads import head_name, resize_head
from equicam.models.images import preprocess_image, training_transform
from equicam.models.load import load
from equicam.models.weights import read_state_dict
from equicam.readers.model import Model
from equicam.shards import differences, plain, write_atomic

HELD_OUT = 0.10


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which weights come out."""

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
    pictures: str  # digest of the training pictures
    version: str = __version__


@dataclass(frozen=True)
class Measured:
    """How good a classifier is, classes counting alike whatever their size."""

    accuracy: float
    balanced: float  # mean recall over classes
    recall: dict[str, float]
    pictures: int


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
) -> tuple[Path, Measured]:
    """Fine-tune on a source's training split and measure on its test split; returns the weights file and the measure."""
    folder = Path(out)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    learn, held, names = _split(find_items(data, split=train), seed)
    model = started(arch, weights, len(names))
    size = preprocess_image(model, open_item(learn[0])).shape[-1]
    recipe = Recipe(
        arch=str(arch), start=None if weights is None else Path(weights).name, data=Path(data).name, train=train, test=test,
        epochs=epochs, batch=batch, rate=rate, patience=patience, seed=seed, rotation_augment=rotation_augment, size=size,
        precision="bfloat16" if where.type == "cuda" else "float32", classes=names, pictures=digest_items([*learn, *held]),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    run = Training(model, recipe, folder, where, workers)
    for line in run.train(learn, held):
        progress(line)
    tests = [i for i in find_items(data, split=test) if str(i.label) in names] if test else held
    found = measured(run.module, _loader(Pictures(tests, names, model, None), recipe, workers), names, where)
    path = folder / "weights.safetensors"
    facts = {
        "classes": json.dumps(list(names)),
        "recipe": json.dumps(asdict(recipe)),
        "measured": json.dumps(asdict(found)),
    }
    tensors = {key: value.cpu().contiguous() for key, value in run.module.state_dict().items()}
    write_atomic(path, save(tensors, metadata=facts))
    write_atomic(folder / "card.md", card(recipe, found, run.history).encode())
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return path, found


def started(arch: str, weights: str | Path | None, classes: int) -> Model:
    """The architecture with pretrained weights and a fresh head; a weights file may lack the head, or have another."""
    if weights is None or not Path(weights).is_file():
        model = load(arch, weights=weights)
        resize_head(model.module, classes)
        return model
    model = load(arch, weights=None if ".py" in str(arch) else "random")
    resize_head(model.module, classes)
    given, own = read_state_dict(Path(weights)), model.module.state_dict()
    fitting = {key: value for key, value in given.items() if key in own and own[key].shape == value.shape}
    head = head_name(model.module)
    strange = [key for key in given if key not in fitting and not key.startswith(head.split(".")[0])]
    if strange or len(fitting) < len(given) / 2:
        raise EquicamError(
            f"weights {Path(weights).name!r}", needs=f"tensors of {arch}, the head apart", got=f"others: {strange[:3]}",
            fix="the architecture they were trained with",
        )  # fmt: skip
    model.module.load_state_dict(fitting, strict=False)
    return model


class Pictures(Dataset[tuple[Tensor, int]]):
    """Labelled pictures, opened as asked for."""

    def __init__(self, items: Sequence[Item], names: Sequence[str], model: Model, steps: Any) -> None:
        self.items, self.model, self.steps = list(items), model, steps
        self.place = {name: i for i, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        item = self.items[i]
        picture = open_item(item)
        x = preprocess_image(self.model, picture) if self.steps is None else self.steps(picture)
        return x, self.place[str(item.label)]


class Training:
    """Epochs over the pictures, with a checkpoint after each and the best weights at the end."""

    def __init__(
        self, model: Model, recipe: Recipe, folder: Path, device: torch.device, workers: int
    ) -> None:
        self.model, self.recipe, self.folder, self.device, self.workers = (
            model,
            recipe,
            folder,
            device,
            workers,
        )
        torch.manual_seed(recipe.seed)
        self._fresh_head()
        self.module: nn.Module = model.module.to(device)
        self.optimiser = torch.optim.AdamW(self.module.parameters(), lr=recipe.rate, weight_decay=0.01)
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Tensor] = {}

    def _fresh_head(self) -> None:
        head = self.model.module.get_submodule(head_name(self.model.module))
        head.reset_parameters()  # type: ignore[operator]  # drawn with the seed

    def train(self, learn: Sequence[Item], held: Sequence[Item]) -> Iterator[str]:
        """Until the held-out tenth stops getting better."""
        r = self.recipe
        if any(p.numel() == 0 for p in self.module.parameters()) or not learn:
            raise EquicamError(
                "training", needs="pictures and a network", got=f"{len(learn)} pictures", fix="another split"
            )
        self._resume()
        data = Pictures(learn, r.classes, self.model, training_transform(self.model, r.size))
        steps = math.ceil(len(data) / r.batch)
        checks = _loader(Pictures(held, r.classes, self.model, None), r, self.workers)
        for epoch in range(len(self.history), r.epochs):
            if self._stale():
                break
            torch.manual_seed(r.seed * 1000 + epoch)
            random.seed(r.seed * 1000 + epoch)
            loss = self._epoch(_loader(data, r, self.workers, seed=r.seed * 1000 + epoch), epoch, steps)
            found = measured(self.module, checks, r.classes, self.device)
            self.history.append(
                {
                    "epoch": float(epoch + 1),
                    "loss": loss,
                    "balanced": found.balanced,
                    "accuracy": found.accuracy,
                }
            )
            if found.balanced >= max(h["balanced"] for h in self.history):
                self.best = {k: v.detach().cpu().clone() for k, v in self.module.state_dict().items()}
            self._keep()
            yield f"epoch {epoch + 1} of {r.epochs}: loss {loss:.3f}, held-out balanced accuracy {found.balanced:.3f}"
        self.module.load_state_dict(self.best)

    def _epoch(self, loader: DataLoader[Any], epoch: int, steps: int) -> float:
        self.module.train()
        total, seen = 0.0, 0
        warm = max(1, steps // 2)
        for step, (x, y) in enumerate(loader):
            at = epoch * steps + step
            share = (
                min(1.0, (at + 1) / warm) * 0.5 * (1 + math.cos(math.pi * at / (self.recipe.epochs * steps)))
            )
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.rate * share
            x, y = x.to(self.device, non_blocking=True), y.to(self.device)
            if self.recipe.rotation_augment:
                x = rotate_each(x, torch.rand(len(x)) * 360 - 180)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bfloat16"
            ):
                loss = cross_entropy(self.module(x), y)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total, seen = total + float(loss.detach()) * len(x), seen + len(x)
        return total / max(1, seen)

    def _stale(self) -> bool:
        scores = [h["balanced"] for h in self.history]
        return len(scores) > self.recipe.patience and max(scores[-self.recipe.patience :]) <= max(
            scores[: -self.recipe.patience]
        )

    def _keep(self) -> None:
        import io

        data = io.BytesIO()
        state = {
            "module": self.module.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "best": self.best,
        }
        torch.save(state | {"history": self.history, "recipe": json.dumps(plain(asdict(self.recipe)))}, data)
        write_atomic(self.folder / "checkpoint.pt", data.getvalue())

    def _resume(self) -> None:
        there = self.folder / "checkpoint.pt"
        if not there.is_file():
            return
        state = torch.load(there, map_location=self.device, weights_only=True)
        if found := differences(json.loads(state["recipe"]), plain(asdict(self.recipe))):
            raise EquicamError(
                f"resuming {self.folder}",
                needs="the recipe it was begun with",
                got="; ".join(found),
                fix="another --out",
            )
        self.module.load_state_dict(state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.history, self.best = state["history"], {k: v.cpu() for k, v in state["best"].items()}


@torch.no_grad()
def measured(
    module: nn.Module, loader: DataLoader[Any], names: Sequence[str], device: torch.device
) -> Measured:
    """Accuracy, and the mean recall over classes."""
    module.eval()
    right, all_ = np.zeros(len(names)), np.zeros(len(names))
    for x, y in loader:
        said = module(x.to(device)).argmax(1).cpu()
        for label, hit in zip(y.tolist(), (said == y).tolist(), strict=True):
            all_[label] += 1
            right[label] += hit
    recall = {name: float(right[i] / all_[i]) for i, name in enumerate(names) if all_[i]}
    balanced = sum(recall.values()) / max(1, len(recall))
    return Measured(float(right.sum() / max(1, all_.sum())), balanced, recall, int(all_.sum()))


def card(recipe: Recipe, found: Measured, history: Sequence[dict[str, float]]) -> str:
    """What anybody who is handed the weights should know."""
    worst = min(found.recall, key=lambda name: found.recall[name], default="none")
    rows = "\n".join(f"| {h['epoch']:.0f} | {h['loss']:.3f} | {h['balanced']:.3f} |" for h in history)
    turned = "pictures turned by a uniform angle" if recipe.rotation_augment else "no turned pictures"
    return f"""# {recipe.arch} on {recipe.data}

Fine-tuned with equicam {recipe.version} from {recipe.start or "published weights"}; {turned}.

- classes: {", ".join(recipe.classes)}
- test pictures: {found.pictures}; accuracy {found.accuracy:.3f}; balanced accuracy {found.balanced:.3f}
- worst recall: {worst} ({found.recall.get(worst, float("nan")):.3f})
- recipe: AdamW {recipe.rate:g}, batch {recipe.batch}, at most {recipe.epochs} epochs, patience {recipe.patience}, seed {recipe.seed}, {recipe.precision}, random resized crop {recipe.size} and mirror
- training pictures, SHA-256 of their list: {recipe.pictures}

| epoch | loss | held-out balanced accuracy |
|---|---|---|
{rows}

Load with `equicam.load("{recipe.arch}", weights="weights.safetensors")`. Measured on this data only: not a statement about
any other, and not a medical device.
"""


def _split(items: Sequence[Item], seed: int) -> tuple[list[Item], list[Item], tuple[str, ...]]:
    """Training pictures, a held-out tenth of every class, and the classes in order of name."""
    labelled = sorted((i for i in items if i.label is not None), key=lambda i: i.id)
    names = tuple(sorted({str(i.label) for i in labelled}))
    if len(names) < 2:
        raise EquicamError(
            "finetune", needs="pictures of two classes or more", got=f"{len(names)}", fix="a labelled source"
        )
    rng = np.random.default_rng(seed)
    learn: list[Item] = []
    held: list[Item] = []
    for name in names:
        mine = [i for i in labelled if str(i.label) == name]
        away = set(rng.permutation(len(mine))[: max(1, round(HELD_OUT * len(mine)))].tolist())
        for place, item in enumerate(mine):
            (held if place in away else learn).append(item)
    return learn, held, names


def _loader(data: Pictures, recipe: Recipe, workers: int, *, seed: int | None = None) -> DataLoader[Any]:
    order = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        data, recipe.batch, shuffle=seed is not None, num_workers=workers, generator=order,
        pin_memory=torch.cuda.is_available(), persistent_workers=False,
    )  # fmt: skip
