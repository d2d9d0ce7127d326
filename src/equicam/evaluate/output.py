"""The file of an evaluation's rows, what identifies it, and the finished shards kept next to it until all are there."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from PIL import Image

from equicam import __version__
from equicam.engines.worker import Shard
from equicam.errors import EquicamError
from equicam.evaluate.loading import Sample, load_or_reason
from equicam.evaluate.spec import EvaluationSpec, MapSpec, describe
from equicam.explain import equivariant
from equicam.images.items import Item, digest_groups, digest_items
from equicam.models.images import as_batch, preprocess_image
from equicam.models.weights import fingerprint
from equicam.readers.model import Model
from equicam.shards import Shards, plain, refuse_another, write_table

METADATA_KEY = b"equicam"
"""The key of the Parquet metadata that holds the fingerprint."""
Done = Callable[[float], None]
"""Receives the number of images finished since its last call; of compiled calls on a GPU, given to it."""
ComputeShards = Callable[[Shards, Sequence[Shard], Done], None]
"""Computes and writes the pending shards."""


def resume(
    out: Path,
    shards: Sequence[Sequence[Item]],
    items: Sequence[Item],
    fingerprint: dict[str, Any],
    compute: ComputeShards,
    done: Done,
) -> pa.Table:
    """The rows in `out`, in the order of the items, after computing the shards that are not there yet."""
    fix = f"another --out, or deleting {out} and {out}.shards"
    if out.is_file():
        refuse_another(str(out), _read_fingerprint(out), fingerprint, fix=fix)
        # a process killed right after writing the file left its shards
        shutil.rmtree(f"{out}.shards", ignore_errors=True)
        return pq.read_table(out)
    if out.exists() or not out.absolute().parent.is_dir():
        raise EquicamError(
            f"out {str(out)!r}", "a file in a folder that exists", "a folder" if out.exists() else "no such folder",
            "rows.parquet",
        )  # fmt: skip
    store = Shards(Path(f"{out}.shards"), fingerprint, fix=fix)
    pending = [(number, shards[number]) for number in store.pending(len(shards))]
    done(sum(map(len, shards)) - sum(len(items) for _, items in pending))
    if pending:
        compute(store, pending, done)
    rows = stamp(in_order_of(items, store.read(len(shards))), fingerprint)
    write_table(out, rows)
    shutil.rmtree(store.folder)
    return rows


def in_order_of(items: Sequence[Item], rows: pa.Table) -> pa.Table:
    """The rows image by image; shards have them in another order."""
    place = pc.index_in(rows["id"], value_set=pa.array([item.id for item in items], pa.string()))
    return rows.take(np.argsort(place.to_numpy(), kind="stable"))


def stamp(rows: pa.Table, fingerprint: dict[str, Any]) -> pa.Table:
    """The rows with their fingerprint as metadata."""
    return rows.replace_schema_metadata({METADATA_KEY: json.dumps(plain(fingerprint))})


def _read_fingerprint(out: Path) -> dict[str, Any]:
    """The fingerprint of a file of rows; a file that is not one of ours has none."""
    try:
        found: dict[str, Any] = json.loads((pq.read_schema(out).metadata or {}).get(METADATA_KEY, b"{}"))
    except (pa.ArrowInvalid, ValueError):
        return {"file": "not one of ours"}
    return found


def evaluation_fingerprint(
    model: Model, sample: Sample, spec: EvaluationSpec, map_specs: Sequence[MapSpec]
) -> dict[str, Any]:
    """Everything that decides the rows, by name, as JSON values."""
    options = {name: value for name, value in spec.recipe.to_json().items() if name != "method"}
    return {
        "model": model.name,
        "weights": fingerprint(model.module),
        "layer": model.layer,
        "preprocessing": _preprocessing_digest(model),
        "classes": model.classes,
        "methods": {one.name: describe(one) for one in map_specs},
        "scores": list(spec.scores),
        "angles": [one.to_plain() for one in spec.presentations],
        "group": spec.group,
        "task": model.task,
        **options,
        "fill": spec.fill,
        "images": len(sample.items),
        "sample": digest_items(sample.items),
        "content": sample.content_digest(),
        "groups": digest_groups(sample.items),
        "equicam": __version__,
        "torch": torch.__version__,
    }


def explainer_digests(model: Model, sample: Sample, map_specs: Sequence[MapSpec]) -> dict[str, str]:
    """Digests of the maps that the caller's explainers give for the first readable image.

    Nothing else distinguishes one function from another.
    """
    explainers = {one.name: one.explainer for one in map_specs if one.explainer is not None}
    if not explainers:
        return {}
    loaded = (load_or_reason(sample.load, item).x for item in sample.items)
    first = next((x for x in loaded if x is not None), None)
    if first is None:
        return dict.fromkeys(explainers, "no image")
    x = as_batch(model, first[None])
    maps = {name: equivariant(fn, views=1)(x, 0).map for name, fn in explainers.items()}
    return {name: hashlib.sha256(m.half().cpu().numpy().tobytes()).hexdigest() for name, m in maps.items()}


def _preprocessing_digest(model: Model) -> str:
    """Digest of a synthetic image after preprocessing, which changes with any of its steps."""
    ramp = np.add.outer(np.arange(300) * 3, np.arange(260) * 5)[..., None] + np.array([0, 80, 160])
    found = preprocess_image(model, Image.fromarray((ramp % 256).astype(np.uint8)))
    return hashlib.sha256(found.contiguous().float().numpy().tobytes()).hexdigest()
