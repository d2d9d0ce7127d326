"""Evaluate methods on images: every method on the same images and views, one row per metric.

The unit of work is a shard, a fixed slice of the shuffled sample: floors compare images of one shard, and an interrupted
evaluation resumes at the first shard that is missing.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import torch
from torch import Tensor, nn

from equicam.core.transforms import Degrees, Transform
from equicam.core.views import Views
from equicam.engines.devices import Devices
from equicam.engines.worker import ModelCopy, Shard, SharedFolder
from equicam.errors import EquicamError
from equicam.evaluate.equivariance import GROUPS
from equicam.evaluate.loading import Sample, load_ahead, make_sample, refuse_duplicates
from equicam.evaluate.maps import MapComputer
from equicam.evaluate.metrics import METRICS
from equicam.evaluate.output import (
    Done,
    evaluation_fingerprint,
    explainer_digests,
    in_order_of,
    resume,
    stamp,
)
from equicam.evaluate.spec import (
    IMAGES_PER_SHARD,
    REGION_METRICS,
    EvaluationSpec,
    MapSpec,
    Methods,
)
from equicam.images.items import Item
from equicam.models.images import Images, as_batch, read_arrays
from equicam.models.layers import wrap
from equicam.models.surround import surround_bytes
from equicam.models.weights import fingerprint
from equicam.progress import progress_bar
from equicam.protocol import find_protocol
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam.runtime.pending import finish_in_order
from equicam.shards import FINGERPRINT, Shards

if TYPE_CHECKING:
    from equicam.engines.ray import Cluster
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from jaxtyping import Float

from equicam.engines.worker import (
    ModelSource,
    load_checked,
    load_preprocessing,
)
from equicam.evaluate.batch import EvaluatedBatch, GroundTruth
from equicam.evaluate.loading import Load, LoadedImage, load_image, load_or_reason
from equicam.evaluate.metrics import prediction_rows
from equicam.evaluate.table import start_table, unreadable_rows, with_groups
from equicam.models.images import require_one_size, stack_images
from equicam.readers.failures import finite_images, not_finite
from equicam.runtime.pending import send_to_host, to_device
from equicam.shards import shard_path, write_table


def evaluate(
    model: Model | nn.Module,
    images: Images | Sequence[Item],
    *,
    recipe: Recipe | None = None,
    methods: Methods | None = None,
    scores: Sequence[str] = ("eq",),
    n: int | None = None,
    split: str | None = None,
    group_by: str | None = None,
    views: int | Views | None = None,
    group: str = "rotation",
    angles: Sequence[Degrees] | None = None,
    context: str | None = None,
    dtype: torch.dtype | None = None,
    compiled: bool | None = None,
    max_views_per_forward: int | None = None,
    out: str | Path | None = None,
    engine: "Devices | Cluster | None" = None,
    progress: bool = False,
) -> pa.Table:
    """Compute metrics of methods on images: one row per image, method, metric, presentation and region.

    Rows are in the order of the images, as given or as the folder is listed.
    `images` is a folder or manifest, PIL images, paths, items or a preprocessed batch; `n` takes a class-spread sample
    of them; `group_by` names the column of a manifest that holds the group of each image (its patient, slide or scene; a
    column `group` needs no naming), by which intervals are then computed. `recipe` holds every option that decides a map or
    its metrics (fill, protocol, seed … too); the keywords `views`, `context`, `dtype` and `compiled` win. `methods` are names, or
    a dict of names and methods, fusions or explainers `(x, target) → map` of yours; unless given, Grad-CAM and the recipe's method.
    `group` is how images are presented: rotation (by seven angles, or by `angles`), dihedral (mirrored, then rotated by
    0° and the seven, or by `angles`), scale or shift. `context="auto"` cuts presentations and views from what the
    model's preprocessing crops away.
    With `out` (a Parquet file) an interrupted evaluation resumes where it stopped, and `engine` may be several devices
    or a Ray cluster. `progress` shows how far it is, on stderr.
    """
    images = read_arrays(images)
    if not isinstance(model, Model):
        model = wrap(model, example=as_batch(None, images) if isinstance(images, Tensor) else None)
    recipe = Recipe.of(recipe, views=views, context=context, dtype=dtype, compiled=compiled)
    recipe = replace(recipe, context=recipe.context or "none", compiled=bool(recipe.compiled))
    if methods is None:
        own = recipe.method
        methods = {"grad-cam": "grad-cam", own if isinstance(own, str) else "recipe": own}
    protocol = find_protocol(recipe.protocol)
    presentations = _presentations(group, angles, rotations_only=protocol.rotations_only)
    regions = bool(REGION_METRICS & set(scores))
    given = make_sample(
        model, images, n, split, with_regions=regions, context=recipe.context, group_by=group_by
    )
    sample = given.shuffled(recipe.seed)
    spec = EvaluationSpec(
        recipe, methods, tuple(scores), presentations, sample.label_names, max_views_per_forward, group
    )
    map_specs = spec.map_specs()
    _check(scores, map_specs, group, recipe.context)
    identity = evaluation_fingerprint(model, sample, spec, map_specs)
    shards = _split_evenly(sample.items)
    with progress_bar("evaluating", len(sample.items), shown=progress) as bar:
        done = bar.advance
        if out is not None:
            identity["explainers"] = explainer_digests(model, sample, map_specs)
            compute = partial(_write_shards, model, sample, spec)
            if engine is not None:
                compute = partial(_send_shards, engine, model, sample, spec)
            return resume(Path(out), shards, given.items, identity, compute, done)
        if engine is not None:
            raise EquicamError("an engine", "a file for the rows", "out=None", "--out rows.parquet")
        tables = [rows for _, rows in _compute_shards(model, sample, spec, list(enumerate(shards)), done)]
        return stamp(in_order_of(given.items, pa.concat_tables(tables)), identity)


def _compute_shards(
    model: Model, sample: Sample, spec: EvaluationSpec, shards: Sequence[Shard], done: Done
) -> Iterator[tuple[int, pa.Table]]:
    """Compute shards in this process, while the images of the next one are loaded.

    A GPU that runs compiled calls gets the next shard before the rows of this one are made.
    """
    computer = MapComputer.of(model, spec)
    loaded = load_ahead([items for _, items in shards], sample.load)
    started = (
        (number, start_shard(computer, images, done))
        for (number, _), images in zip(shards, loaded, strict=True)
    )
    return finish_in_order(started, computer.executors["plain"].ahead)


def _write_shards(
    model: Model, sample: Sample, spec: EvaluationSpec, store: Shards, pending: Sequence[Shard], done: Done
) -> None:
    for number, rows in _compute_shards(model, sample, spec, pending, done):
        store.write(number, rows)


def _send_shards(
    engine: "Devices | Cluster",
    model: Model,
    sample: Sample,
    spec: EvaluationSpec,
    store: Shards,
    pending: Sequence[Shard],
    done: Done,
) -> None:
    """Let the engine's workers compute and write the shards."""
    if len(sample.in_memory):
        raise EquicamError(
            "an engine", "images in files", "images in memory", "a folder, a list or their paths"
        )
    made = engine.model_source or ModelCopy.copy_of(model)
    job = EvaluationJob(
        folder=SharedFolder.at(store.folder / FINGERPRINT),
        model_source=made,
        preprocessing=made.preprocessing_only(model),
        weights=fingerprint(model.module),
        spec=spec,
        shard_bytes=IMAGES_PER_SHARD * surround_bytes(model, spec.recipe.context),
    )
    sizes = {number: len(items) for number, items in pending}
    with closing(engine.work(job, pending)) as written:  # type: ignore[type-var]
        for number, _ in written:
            done(sizes[number])


def _split_evenly(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Shards of even size, so that no image is left without others to compare it with."""
    count = -(-len(items) // IMAGES_PER_SHARD)
    edges = [round(i * len(items) / count) for i in range(count + 1)]
    return [items[a:b] for a, b in itertools.pairwise(edges)]


def _presentations(
    group: str, angles: Sequence[Degrees] | None, *, rotations_only: bool
) -> tuple[Transform, ...]:
    """The presentations of a group; of rotations and reflections, at the angles given."""
    if group not in GROUPS:
        raise EquicamError("group", f"one of {', '.join(GROUPS)}", repr(group), 'group="rotation"')
    if rotations_only and group != "rotation":
        raise EquicamError("protocol paper", "group rotation, its only one", group, 'Recipe(protocol="ours")')
    if angles is None:
        return GROUPS[group]
    if group not in ("rotation", "dihedral"):
        raise EquicamError("angles", "group rotation or dihedral", group, "angles=None")
    found = tuple(
        Transform(float(angle), mirrored=group == "dihedral") for angle in angles if math.isfinite(angle)
    )
    if not found or len(found) < len(angles) or any(one.is_identity for one in found):
        needs = "rotations other than 0°" if group == "rotation" else "finite numbers of degrees"
        raise EquicamError("angles", needs, list(angles), "angles=[15, 45, 90]")
    refuse_duplicates("angles", [one.key[0] for one in found])
    return found


def _check(scores: Sequence[str], map_specs: Sequence[MapSpec], group: str, context: str) -> None:
    if isinstance(scores, str) or not scores or (unknown := [s for s in scores if s not in METRICS]):
        got = repr(scores) if isinstance(scores, str) or not scores else ", ".join(map(repr, unknown))
        raise EquicamError("scores", f"a list of {', '.join(METRICS)}", got, '["eq"]')
    refuse_duplicates("scores", scores)
    for name in scores:
        applies_to = METRICS[name].applies_to
        if applies_to == "one view" and not any(one.has_stages for one in map_specs):
            raise EquicamError(
                f"score {name!r}", "a method of one view that starts at features", "none", 'adding "grad-cam"'
            )
        if applies_to == "several views" and not any(one.has_several_views for one in map_specs):
            raise EquicamError(
                f"score {name!r}", "a method of several views", "none", 'adding "equigrad-cam"'
            )
        if METRICS[name].without_context and context != "none":
            raise EquicamError(
                f"score {name!r}", 'context="none": it makes rotated images of its own', repr(context),
                "an evaluation of its own",
            )  # fmt: skip
        if METRICS[name].rotations_only and group != "rotation":
            raise EquicamError(f"score {name!r}", "group rotation", group, 'group="rotation"')


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
                write_table(path, evaluate_shard(computer, images))

        return compute

    def _load(self) -> Load:
        return partial(
            load_image,
            self.preprocessing or load_preprocessing(self.model_source),
            with_regions=self.spec.needs_regions,
            context=self.spec.recipe.context,
        )


def evaluate_shard(
    computer: MapComputer, images: Sequence[LoadedImage], done: Done = lambda _images: None
) -> pa.Table:
    """The rows of a shard."""
    return start_shard(computer, images, done)()


def start_shard(
    computer: MapComputer, images: Sequence[LoadedImage], done: Done = lambda _images: None
) -> Callable[[], pa.Table]:
    """Give a device the work on a shard; the function returned waits for it and returns the rows."""
    groups = {one.item.id: one.item.group for one in images}
    unreadable = [(one.item.id, one.reason) for one in images if one.x is None]
    good = [(one.item, one.x, one.truth) for one in images if one.x is not None]
    done(len(unreadable))
    if not good:
        return lambda: with_groups(unreadable_rows(unreadable), groups)
    model, spec = computer.model, computer.spec
    with computer.context():
        x = _to_batch(model, [tensor for _, tensor, _ in good])
        require_finite = partial(_require_finite, send_to_host({"finite": finite_images(x)}))
        if x.device.type == "cpu":
            require_finite()
        checks: list[Callable[[], None]] = [require_finite]
        ids = [item.id for item, _, _ in good]
        truth = [_to_device(t, model.device) for _, _, t in good]
        try:
            batch, more = computer.start(ids, x, truth, lambda share: done(share * len(good)))
            checks += more
            batch = replace(batch, groups=[groups[i] for i in ids])
            batch = _add_labels(batch, [item for item, _, _ in good], model, spec.label_names)
            metrics = chain(prediction_rows(batch), *(METRICS[name].rows(batch) for name in spec.scores))
            arrive = start_table(ids, metrics)
        except Exception:
            for check in checks:  # one that failed explains what came after it
                check()
            raise

    def finish() -> pa.Table:
        for check in checks:
            check()
        return with_groups(pa.concat_tables([arrive(), unreadable_rows(unreadable)]), groups)

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
    boxes, region = truth.boxes, truth.region
    return replace(
        truth,
        boxes=None if boxes is None else boxes.to(device),
        region=None if region is None else region.to(device),
    )
