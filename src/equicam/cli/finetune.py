"""`equicam finetune`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from equicam.cli import options
from equicam.cli.output import answer, note, say
from equicam.cli.shared import exit_on_error, resolve_device


def finetune(
    data: Annotated[str, typer.Argument(help="Labelled source with splits.", show_default=False)],
    out: Annotated[
        Path, typer.Option(help="Folder for weights, model card and checkpoint; resumed if it exists.")
    ],
    arch: Annotated[str, typer.Option(help="Name from `equicam models`, or FILE.py:FACTORY.")] = "resnet50",
    weights: Annotated[
        str | None, typer.Option(help="Weights file to start from.", show_default="published weights")
    ] = None,
    train: Annotated[str | None, typer.Option(help="Split to train on.")] = "train",
    test: Annotated[str | None, typer.Option(help="Split to measure accuracy on.")] = "test",
    epochs: Annotated[int, typer.Option(min=1, help="Largest number of epochs.")] = 10,
    batch: Annotated[int, typer.Option(min=1, help="Images per step.")] = 32,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-4,
    patience: Annotated[
        int, typer.Option(min=1, help="Epochs without improvement before training stops.")
    ] = 3,
    seed: options.Seed = 0,
    rotation_augment: Annotated[bool, typer.Option(help="Rotate training images by random angles.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = 2,
    device: options.Device = None,
) -> None:
    """Fine-tune a classifier on your domain: weights for `--weights`, and a model card next to them.

    Example: `equicam finetune tiles/ --arch resnet50 --rotation-augment --out models/rotated`
    """
    with exit_on_error():
        from equicam.finetune import finetune as train_classifier

        path, measured = train_classifier(
            data, arch, out, weights=weights, train=train, test=test, epochs=epochs, batch=batch, rate=rate,
            patience=patience, seed=seed, rotation_augment=rotation_augment, workers=workers,
            device=resolve_device(device), progress=note,
        )  # fmt: skip
    answer("finetune", {"weights": str(path)} | asdict(measured))
    say(
        f"accuracy {measured.accuracy:.3f}, balanced {measured.balanced:.3f} on {measured.images} test images"
    )
    say(f"weights and card: {path}")
