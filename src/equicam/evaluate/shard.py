"""One shard of an evaluation: loaded images become rows, in this process or on a worker of an engine."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.engines.worker import ModelSource, Shard, SharedFolder, load_checked, load_preprocessing
from equicam.evaluate.batch import EvaluatedBatch, GroundTruth
from equicam.evaluate.loading import Load, LoadedImage, load_ahead, load_image, load_or_reason
from equicam.evaluate.maps import Checks, Done, MapComputer
from equicam.evaluate.metrics import METRICS, needs_regions, prediction_rows
from equicam.evaluate.spec import EvaluationSpec
from equicam.evaluate.table import start_table, unreadable_rows
from equicam.images.items import Item
from equicam.models.images import as_batch, require_one_size, stack_images
from equicam.readers.failures import finite_images, not_finite
from equicam.readers.model import Model
from equicam.runtime.pending import send_to_host, to_device
from equicam.shards import shard_path, write_table


@dataclass(frozen=True)
class EvaluationJob:
    """The shards of an evaluation as work for other processes and machines."""

    folder: SharedFolder
    model_source: ModelSource
    preprocessing: Model | None  # the model without weights, which preprocesses images; None: to be loaded
    weights: str
    spec: EvaluationSpec
    shard_bytes: int

    def decode(self, shard: Shard) -> list[LoadedImage]:
        """The loaded images of a shard."""
        return [load_or_reason(self._load(), item) for item in shard[1]]

    def decode_ahead(self, shards: Sequence[Shard]) -> Iterator[list[LoadedImage]]:
        """The loaded images of many shards, the next shard while this one is computed."""
        yield from load_ahead([items for _, items in shards], self._load())

    def prepare(self, device: str) -> Callable[[int, list[LoadedImage]], None]:
        """Load the model, refuse one with other weights, and return the function that computes a shard."""
        folder = self.folder.enter()
        model = load_checked(self.model_source, device, self.weights)
        computer = MapComputer.of(model, self.spec)

        def compute(number: int, images: list[LoadedImage]) -> None:
            path = shard_path(folder, number)
            if not path.is_file():
                write_table(path, start_shard(computer, images)())

        return compute

    def _load(self) -> Load:
        model, spec = self.preprocessing or load_preprocessing(self.model_source), self.spec
        return partial(
            load_image, model, with_regions=needs_regions(spec.scores), context=spec.recipe.context
        )


def start_shard(
    computer: MapComputer, images: Sequence[LoadedImage], done: Done = lambda _images: None
) -> Callable[[], pa.Table]:
    """Give a device the work on a shard; the function returned waits for it and returns the rows.

    `done` receives how many images were finished since its last call; of compiled calls on a GPU, given to it.
    """
    unreadable = unreadable_rows((one.item.id, one.item.group, one.reason) for one in images if one.x is None)
    done(len(unreadable))
    good = [(one.item, one.x, one.truth) for one in images if one.x is not None]
    if not good:
        return lambda: unreadable
    items = [item for item, _, _ in good]
    ids, groups = [item.id for item in items], [item.group for item in items]
    model, spec = computer.model, computer.spec
    with computer.context():
        x = _to_batch(model, [tensor for _, tensor, _ in good])
        require_finite = partial(_require_finite, send_to_host({"finite": finite_images(x)}))
        if x.device.type == "cpu":
            require_finite()
        checks: Checks = [require_finite]
        truth = [_to_device(t, model.device) for _, _, t in good]
        try:
            batch, more = computer.start(ids, x, truth, groups, lambda share: done(share * len(good)))
            checks += more
            batch = _add_labels(batch, items, model, spec.label_names)
            metrics = chain(prediction_rows(batch), *(METRICS[name].rows(batch) for name in spec.scores))
            arrive = start_table(ids, groups, metrics)
        except Exception:
            for check in checks:  # one that failed explains what came after it
                check()
            raise

    def finish() -> pa.Table:
        for check in checks:
            check()
        return pa.concat_tables([arrive(), unreadable])

    return finish


def _to_batch(model: Model, tensors: Sequence[Float[Tensor, "c H W"]]) -> Float[Tensor, "b c H W"]:
    """Images as a batch on the model's device, not yet checked."""
    if any(one.device.type != "cpu" or one.dtype != torch.float32 for one in tensors):
        return as_batch(model, stack_images(tensors), check=False)
    require_one_size(tensors)
    return as_batch(model, to_device([one.numpy() for one in tensors], model.device), check=False)


def _require_finite(arrive: Callable[[], Mapping[str, Tensor]]) -> None:
    finite = arrive()["finite"]
    if not finite.all():
        raise not_finite(finite)


def _add_labels(
    batch: EvaluatedBatch, items: Sequence[Item], model: Model, label_names: Sequence[str]
) -> EvaluatedBatch:
    """Labels as class numbers: numbers themselves, the model's own names, or names in order where it has none.

    Alphabetical order is the order that networks trained on folders of classes use. It applies to ImageNet's synsets
    too, and only where there are as many names as classes.
    """
    outputs = batch.predictions.probs.shape[-1]
    names = tuple(label_names) if len(label_names) == outputs else ()
    synsets = bool(names) and all(re.fullmatch(r"n\d{8}", name) for name in names)
    order = names if synsets or not model.classes else model.classes
    truths = []
    for item, truth in zip(items, batch.truth, strict=True):
        label = item.label
        if isinstance(label, str):
            label = order.index(label) if label in order else int(label) if label.isdecimal() else label
        if isinstance(label, int) and 0 <= label < outputs:
            truth = replace(truth, label=label)
        elif label is not None:
            reason = f"label {item.label!r} is none of the model's {outputs} classes"
            truth = replace(truth, no_label=reason)
        truths.append(truth)
    return replace(batch, truth=truths)


def _to_device(truth: GroundTruth, device: torch.device) -> GroundTruth:
    boxes, region = (None if one is None else one.to(device) for one in (truth.boxes, truth.region))
    return replace(truth, boxes=boxes, region=region)
