"""Evaluate methods on images: every method on the same images and views, one row per metric.

The unit of work is a shard, a fixed slice of the shuffled sample: floors compare images of one shard, and an interrupted
evaluation resumes at the first shard that is missing.
"""

import itertools
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from equicam.core.transforms import Degrees, Transform
from equicam.core.views import Views
from equicam.engines.devices import Devices
from equicam.engines.worker import ModelCopy, Shard, SharedFolder
from equicam.errors import EquicamError, not_one_of
from equicam.evaluate.equivariance import GROUPS
from equicam.evaluate.fingerprint import digest_explainers, fingerprint_evaluation
from equicam.evaluate.loading import Sample, load_ahead, make_sample, refuse_duplicates
from equicam.evaluate.maps import Done, MapComputer
from equicam.evaluate.metrics import METRICS, needs_regions
from equicam.evaluate.shard import EvaluationJob, start_shard
from equicam.evaluate.spec import IMAGES_PER_SHARD, EvaluationSpec, MapSpec, Methods
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
from equicam.shards import FINGERPRINT, Shards, plain, refuse_another, write_table

if TYPE_CHECKING:
    from equicam.engines.ray import Cluster

METADATA_KEY = b"equicam"
"""The key of the Parquet metadata that holds the fingerprint."""


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
    regions = needs_regions(scores)
    given = make_sample(
        model, images, n, split, with_regions=regions, context=recipe.context, group_by=group_by
    )
    sample = given.shuffled(recipe.seed)
    spec = EvaluationSpec(
        recipe, methods, tuple(scores), presentations, sample.label_names, max_views_per_forward, group
    )
    map_specs = spec.map_specs()
    _check(scores, map_specs, group, recipe.context)
    identity = fingerprint_evaluation(model, sample, spec, map_specs)
    shards = _split_evenly(sample.items)
    with progress_bar("evaluating", len(sample.items), shown=progress) as bar:
        if out is not None:
            identity["explainers"] = digest_explainers(model, sample, map_specs)
            out = Path(out)
            if (rows := _read_finished(out, identity)) is not None:
                return rows
            store = Shards(Path(f"{out}.shards"), identity, fix=_another(out))
            pending = [(number, shards[number]) for number in store.pending(len(shards))]
            bar.advance(len(sample.items) - sum(len(items) for _, items in pending))
            if engine is not None and pending:
                _send_shards(engine, model, sample, spec, store, pending, bar.advance)
            elif pending:
                for number, rows in _compute_shards(model, sample, spec, pending, bar.advance):
                    store.write(number, rows)
            rows = _in_order_of(given.items, store.read(len(shards)), identity)
            write_table(out, rows)
            shutil.rmtree(store.folder)
            return rows
        if engine is not None:
            raise EquicamError("an engine", "a file for the rows", "out=None", "--out rows.parquet")
        computed = _compute_shards(model, sample, spec, list(enumerate(shards)), bar.advance)
        return _in_order_of(given.items, pa.concat_tables([rows for _, rows in computed]), identity)


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
        raise not_one_of("group", GROUPS, group, 'group="rotation"')
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
    """Refuse scores that do not exist, or that no method, this group or this context has."""
    if isinstance(scores, str) or not scores or (unknown := [s for s in scores if s not in METRICS]):
        got = repr(scores) if isinstance(scores, str) or not scores else ", ".join(map(repr, unknown))
        raise EquicamError("scores", f"a list of {', '.join(METRICS)}", got, '["eq"]')
    refuse_duplicates("scores", scores)
    kinds = {"any", *(one.kind for one in map_specs)}
    for name in scores:
        metric = METRICS[name]
        if metric.applies_to not in kinds and metric.applies_to == "one view":
            needs, got, fix = "a method of one view that starts at features", "none", 'adding "grad-cam"'
        elif metric.applies_to not in kinds:
            needs, got, fix = "a method of several views", "none", 'adding "equigrad-cam"'
        elif metric.without_context and context != "none":
            needs = 'context="none": it makes rotated images of its own'
            got, fix = repr(context), "an evaluation of its own"
        elif metric.rotations_only and group != "rotation":
            needs, got, fix = "group rotation", group, 'group="rotation"'
        else:
            continue
        raise EquicamError(f"score {name!r}", needs, got, fix)


def _read_finished(out: Path, identity: dict[str, Any]) -> pa.Table | None:
    """The rows of a finished evaluation; None where there are none yet, and may be."""
    if out.is_file():
        try:
            before = json.loads((pq.read_schema(out).metadata or {}).get(METADATA_KEY, b"{}"))
        except (pa.ArrowInvalid, ValueError):
            before = {"file": "not one of ours"}
        refuse_another(str(out), before, identity, fix=_another(out))
        # a process killed right after writing the file left its shards
        shutil.rmtree(f"{out}.shards", ignore_errors=True)
        return pq.read_table(out)
    if out.exists() or not out.absolute().parent.is_dir():
        got = "a folder" if out.exists() else "no such folder"
        raise EquicamError(f"out {str(out)!r}", "a file in a folder that exists", got, "rows.parquet")
    return None


def _another(out: Path) -> str:
    return f"another --out, or deleting {out} and {out}.shards"


def _in_order_of(items: Sequence[Item], rows: pa.Table, identity: dict[str, Any]) -> pa.Table:
    """The rows image by image, which shards have in another order, with their fingerprint as metadata."""
    place = pc.index_in(rows["id"], value_set=pa.array([item.id for item in items], pa.string()))
    rows = rows.take(np.argsort(place.to_numpy(), kind="stable"))
    return rows.replace_schema_metadata({METADATA_KEY: json.dumps(plain(identity))})
