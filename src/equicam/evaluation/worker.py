"""One part of an evaluation: pictures opened, rows computed; here, on other devices or on other machines."""

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.views import Degrees, Fill
from equicam.data.items import Item, open_item, prefetch, upright_box
from equicam.engines.worker import Home, Part, Recipe, Sent, blinded, same_model
from equicam.errors import EquicamError
from equicam.evaluation.controls import randomised
from equicam.evaluation.maps import Plan, look
from equicam.evaluation.metrics import SCORES, Found, Truth, predictions
from equicam.evaluation.spec import Asked, Count, Methods, World, asked
from equicam.evaluation.table import table, unread
from equicam.models.images import as_batch, box_mask, preprocess_image, stack_images
from equicam.readers.model import Model
from equicam.shards import part_path, write_table

PLACED = {"energy", "pointing", "box-iou"}
"""Scores that ask where the object is."""
Loaded = tuple[Item, Tensor | None, Truth, str]
"""A picture as the model's input and what is known of it, or the reason why there is none."""


@dataclass(frozen=True)
class Scoring:
    """What is asked of an evaluation's parts."""

    methods: Methods
    scores: tuple[str, ...]
    views: Count
    angles: tuple[Degrees, ...]
    fill: Fill
    as_published: bool
    dtype: torch.dtype | None
    chunk: int | None
    seed: int
    compiled: bool
    names: tuple[str, ...]  # the labels of the whole source, where they are words

    def asked(self) -> tuple[Asked, ...]:
        """Every row asked for."""
        return asked(self.methods, views=self.views, as_published=self.as_published)

    def plan(self, model: Model) -> Plan:
        """What is looked at, with a model on its device."""
        wanted = self.asked()
        model = replace(model, compiled=self.compiled)
        models: dict[World, Model] = {"plain": model, "shuffled": model}
        if any(one.world == "random-weights" for one in wanted):
            models["random-weights"] = randomised(model, seed=self.seed)
        return Plan(
            models=models,
            asked=wanted,
            angles=self.angles,
            fill=self.fill,
            as_published=self.as_published,
            traced="stages" in self.scores,
            several=bool({"peum", "disagreement", "calibration"} & set(self.scores)),
            dtype=self.dtype,
            chunk=self.chunk,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Evaluating:
    """An evaluation's parts as work for other processes and machines."""

    home: Home
    made: Recipe | Sent
    blind: Model | None  # what opens pictures; None: to be loaded
    weights: str
    scoring: Scoring
    part_bytes: int

    def opened(self, part: Part) -> list[Loaded]:
        """The pictures of a part."""
        return [tried(self._load(), item) for item in part[1]]

    def ahead(self, parts: Sequence[Part]) -> Iterator[list[Loaded]]:
        """Parts opened by threads, the next one while this one is worked on."""
        with ThreadPoolExecutor(8) as pool:
            yield from ahead(pool, [items for _, items in parts], self._load())

    def ready(self, device: str) -> Callable[[int, list[Loaded]], None]:
        """Load the model, refuse another than the evaluation's, and compute."""
        folder = self.home.enter()
        model = same_model(self.made, device, self.weights)
        plan = self.scoring.plan(model)

        def compute(number: int, loaded: list[Loaded]) -> None:
            path = part_path(folder, number)
            if not path.is_file():
                rows = scored(
                    plan, model, self.scoring.names, self.scoring.scores, loaded, lambda _share: None
                )
                write_table(path, rows)

        return compute

    def _load(self) -> Callable[[Item], tuple[Tensor, Truth]]:
        return partial(
            opened, self.blind or blinded(self.made), placed=bool(PLACED & set(self.scoring.scores))
        )


@torch.no_grad()
def scored(
    plan: Plan,
    model: Model,
    names: Sequence[str],
    scores: Sequence[str],
    loaded: Sequence[Loaded],
    done: Callable[[float], None],
) -> pa.Table:
    """The rows of a part; `names` are the labels of the whole source, where they are words."""
    bad = [(item.id, reason) for item, tensor, _, reason in loaded if tensor is None]
    good = [(item, tensor, truth) for item, tensor, truth, _ in loaded if tensor is not None]
    done(len(bad))
    if not good:
        return unread(bad)
    device = model.device
    # inference tensors cannot join a backward pass, and our own algebra is never autocast
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        x = as_batch(model, stack_images([tensor for _, tensor, _ in good]))
        ids = [item.id for item, _, _ in good]
        truth = [_on(t, device) for _, _, t in good]
        found = look(plan, ids, x, truth, lambda share: done(share * len(good)))
        found = replace(found, truth=_labelled(found, [item for item, _, _ in good], model, names))
        tables = [table(ids, predictions(found))]
        tables += [table(ids, SCORES[name].rows(found)) for name in scores]
    return pa.concat_tables([*tables, unread(bad)])


def opened(model: Model, item: Item, *, placed: bool = True) -> tuple[Float[Tensor, "c H W"], Truth]:
    """A picture as the model's input, and its boxes and label region in the same frame where a score asks for them."""
    item = prefetch(item)
    picture = open_item(item)
    if not placed:
        return preprocess_image(model, picture), Truth()
    size = (picture.width, picture.height)
    by_area = sorted(item.boxes, key=lambda b: -(b[2] - b[0]) * (b[3] - b[1]))
    marked = [box_mask(model, size, upright_box(item, size, b)) for b in by_area]
    boxes = [mask for mask in (m >= 0.5 for m in marked) if mask.any()]
    region = None if item.region is None else box_mask(model, size, upright_box(item, size, item.region))
    if region is not None and region.sum() < 1:
        region = None
    cropped = (bool(item.boxes) and not boxes) or (item.region is not None and region is None)
    truth = Truth(boxes=torch.stack(boxes) if boxes else None, region=region, cropped=cropped)
    return preprocess_image(model, picture), truth


def tried(load: Callable[[Item], tuple[Tensor, Truth]], item: Item) -> Loaded:
    """A picture opened, or the reason why it could not be."""
    try:
        return (item, *load(item), "")
    except (
        EquicamError,
        OSError,
        ValueError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
        SystemError,
    ) as error:
        return item, None, Truth(), str(error) or type(error).__name__


def ahead(
    pool: ThreadPoolExecutor, parts: Sequence[Sequence[Item]], load: Callable[[Item], tuple[Tensor, Truth]]
) -> Iterator[list[Loaded]]:
    """Parts with their pictures opened, the next one while this one is worked on; a bad picture has a reason."""
    waiting: list[list[Future[Loaded]]] = []
    for part in parts:
        waiting.append([pool.submit(tried, load, item) for item in part])
        if len(waiting) > 1:
            yield [one.result() for one in waiting.pop(0)]
    for rest in waiting:
        yield [one.result() for one in rest]


def _labelled(found: Found, items: Sequence[Item], model: Model, sources: Sequence[str]) -> list[Truth]:
    """Labels as class numbers: numbers themselves, the model's own names, or names in order where it has none.

    In order of name is how folders of classes are trained on; it is used for ImageNet's synsets too, and only where
    there are as many names as classes.
    """
    outputs = found.said.probs.shape[-1]
    names = tuple(sources) if len(sources) == outputs else ()
    synsets = bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)
    order = names if synsets or not model.classes else model.classes
    made = []
    for item, truth in zip(items, found.truth, strict=True):
        label = item.label
        if isinstance(label, str):
            label = order.index(label) if label in order else int(label) if label.isdecimal() else label
        if isinstance(label, int) and 0 <= label < outputs:
            made.append(replace(truth, label=label))
        elif label is not None:
            made.append(
                replace(truth, unknown=f"label {item.label!r} is none of the model's {outputs} classes")
            )
        else:
            made.append(truth)
    return made


def _on(truth: Truth, device: torch.device) -> Truth:
    boxes, region = truth.boxes, truth.region
    return replace(
        truth,
        boxes=None if boxes is None else boxes.to(device),
        region=None if region is None else region.to(device),
    )
