"""A classifier for a domain of yours: the paper's standard recipe, with or without rotated training images.

AdamW, a cosine schedule with a short warm-up, random resized crops and flips, early stopping on the balanced accuracy of
a held-out tenth of the training images. An epoch ends with a checkpoint, at most once a minute: an interrupted run resumes
from it, computes up to a minute and an epoch again, and on a CPU ends with the same weights.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from equicam.errors import EquicamError
from equicam.images.items import Item, digest_items, open_item
from equicam.models.images import preprocess_image
from equicam.models.layers import head_name, resize_head
from equicam.models.load import load
from equicam.models.weights import read_state_dict
from equicam.readers.model import Model
from equicam.readers.names import weights_file
from equicam.shards import write_atomic
from equicam_paper.benchmarks import find_items
from equicam_paper.training import Accuracy, Training, TrainingRecipe, seed_locally

HELD_OUT = 0.10
"""The share of every class's training images that early stopping measures on."""


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
    recipe = TrainingRecipe(
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
    write_atomic(folder / "card.md", model_card(recipe, found, training.history).encode())
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
        raise EquicamError(
            f"weights {file.name!r}", f"tensors of {arch}, except the head", f"others: {unknown[:3]}",
            "the architecture they were trained with",
        )  # fmt: skip
    model.module.load_state_dict(fitting, strict=False)
    return model


def model_card(recipe: TrainingRecipe, found: Accuracy, history: Sequence[dict[str, float]]) -> str:
    """What a user of the weights should know."""
    worst = min(found.recall, key=lambda name: found.recall[name], default="none")
    epochs = "\n".join(f"| {h['epoch']:.0f} | {h['loss']:.3f} | {h['balanced']:.3f} |" for h in history)
    rotated = (
        "training images rotated by a uniform angle"
        if recipe.rotation_augment
        else "no rotated training images"
    )
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
        raise EquicamError(
            "finetune", "images of two classes or more", f"{len(classes)}", "a labelled source"
        )
    rng = np.random.default_rng(seed)
    learn: list[Item] = []
    held_out: list[Item] = []
    for name in classes:
        of_class = [i for i in labelled if str(i.label) == name]
        chosen = set(rng.permutation(len(of_class))[: max(1, round(HELD_OUT * len(of_class)))].tolist())
        for place, item in enumerate(of_class):
            (held_out if place in chosen else learn).append(item)
    return learn, held_out, classes
