"""Which images an experiment runs on: the authors' draw, where their code publishes it, or a class-spread sample."""

from collections.abc import Sequence

import numpy as np

from equicam.errors import EquicamError
from equicam.images.items import Item, sample_by_class

AUTHORS_SEED = 42
FILES_PER_CLASS, TAKEN_PER_CLASS = 15, 10
"""The authors keep the first 15 validation images of every class and draw ten of them."""


def authors_slots(classes: int) -> list[list[int]]:
    """The positions that the authors' loader draws in the sorted files of each class, in the order drawn."""
    rng = np.random.RandomState(AUTHORS_SEED)
    return [rng.choice(FILES_PER_CLASS, TAKEN_PER_CLASS, replace=False).tolist() for _ in range(classes)]


def authors_draw(items: Sequence[Item]) -> list[Item]:
    """The authors' 10,000 images, first slot of every class first, from a source with 15 images of each class."""
    by_class: dict[int | str | None, list[Item]] = {}
    for item in items:
        by_class.setdefault(item.label, []).append(item)
    sizes = {len(files) for files in by_class.values()}
    if sizes != {FILES_PER_CLASS}:
        raise EquicamError(
            "--draw authors", needs=f"{FILES_PER_CLASS} images of every class, a folder each, as the authors' download keeps them",
            got=f"{len(by_class)} classes of {min(sizes, default=0)} to {max(sizes, default=0)}", fix="no --draw: a class-spread sample",
        )  # fmt: skip
    files = [
        sorted(by_class[name], key=lambda item: item.id)
        for name in sorted(by_class, key=lambda name: (str(type(name)), name))
    ]
    slots_of = [[of[i] for i in slots] for of, slots in zip(files, authors_slots(len(files)), strict=True)]
    return [item for slot in zip(*slots_of, strict=True) for item in slot]


def draw_sample(items: Sequence[Item], n: int | None, draw: str = "") -> list[Item]:
    """`n` images in the order of the draw; `draw` is `authors`, or empty for a class-spread sample."""
    if draw == "authors":
        chosen, classes = authors_draw(items), len(items) // FILES_PER_CLASS
        if n is not None and n < classes:  # the first slot of evenly spaced classes
            return [chosen[round(k * classes / n)] for k in range(n)]
        return chosen[:n]
    if draw:
        raise EquicamError("--draw", needs="authors", got=repr(draw), fix="--draw authors, or none")
    return sample_by_class(items, n)


def describe_draw(items: Sequence[Item], sample: Sequence[Item], draw: str = "") -> str:
    """How the sample was drawn, in words."""
    if draw == "authors":
        return f"the authors' draw: {len(sample):,} of the {TAKEN_PER_CLASS} per class that their loader takes with seed {AUTHORS_SEED}"
    if len(sample) == len(items):
        return f"all {len(items):,} images of the source; not the authors' draw"
    how = "evenly" if all(item.label is None for item in items) else "spread over classes, by name"
    return f"{len(sample):,} of {len(items):,} images, {how}; not the authors' draw"
