"""The model, recipe and images of a finished run, loaded again and checked to be the same."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.compute as pc
from torch import Tensor

from equicam.audit.audit import list_items, resolve_recipe
from equicam.audit.compute import AuditContext
from equicam.core.views import crop_centre
from equicam.errors import EquicamError, NotNamedError
from equicam.images.item_table import Items
from equicam.images.items import Item, LoadedItem, load_item, valid_utf8
from equicam.models.images import preprocess_image
from equicam.models.load import load
from equicam.models.preprocessing import Preprocessing
from equicam.models.surround import preprocess_window
from equicam.models.weights import fingerprint
from equicam.rasters.windows import WindowPixels
from equicam.readers.model import Model
from equicam.readers.names import is_library_model, weights_file
from equicam.runs.store import RunStore


@dataclass(frozen=True)
class Reloaded:
    """What computes the rows of a run again."""

    context: AuditContext
    items: Items


def reload_run(
    store: RunStore,
    *,
    model: Model | str | None = None,
    source: str | None = None,
    weights: str | None = None,
    device: str | None = None,
) -> Reloaded:
    """The model, by the caller or one of a library that the manifest names, and the images; refuse others than the run's."""
    manifest, where = store.manifest, f"the run {valid_utf8(str(store.folder))}"
    if not isinstance(model, Model):
        model = _load_model(store, model or library_model(store), weights, device)
    if (model.classes or ()) != (manifest.classes or ()):
        raise EquicamError(
            where, needs="the model's own class names", got="others in manifest.json", fix="restoring it"
        )
    if model.task != manifest.task:
        raise EquicamError(
            where,
            needs=f"a model with task={manifest.task!r}",
            got=repr(model.task),
            fix="the model as it was audited",
        )
    if fingerprint(model.module) != manifest.weights:
        raise EquicamError(
            where, needs="the weights it was computed with", got="others", fix="restoring them"
        )
    found, _ = list_items(
        source or manifest.source, manifest.split, manifest.tiling, manifest.recipe.context, manifest.voi,
        from_user=source is not None,
    )  # fmt: skip
    sample = store.sample()
    items = replace(found, table=found.table.filter(pc.is_in(found.ids, sample["id"]))).in_scan_order()
    if items.digest() != manifest.data:
        raise EquicamError(
            where, needs="the images it was computed from", got=f"others in {source or manifest.source}",
            fix="--source with their present place",
        )  # fmt: skip
    recipe, description = resolve_recipe(model, replace(manifest.recipe, dtype=manifest.dtype))
    if description != manifest.method_description:
        raise EquicamError(
            where, needs=f"the method it was computed with ({manifest.method_description})", got="another of that name",
            fix="the equicam version that wrote it",
        )  # fmt: skip
    calibration = frozenset(sample.filter(sample["calibration"])["id"].to_pylist())
    tile = manifest.tiling.tile if manifest.tiling else None
    return Reloaded(AuditContext(model, recipe, calibration, tile, manifest.target), items)


def unchanged_inputs(
    model: Model, items: Sequence[Item], rows: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], list[Tensor]]:
    """Ids and model inputs, without their surround, of the images that are as the run's rows have them and can be read."""
    ids, images = [], []
    for item in items:
        try:
            loaded = load_item(item)
            if item.id in rows and loaded.sha256 == rows[item.id].get("sha256"):
                images.append(_input(model, loaded))
                ids.append(item.id)
        except (EquicamError, OSError, ValueError):
            continue
    return ids, images


def _input(model: Model, loaded: LoadedItem) -> Tensor:
    if isinstance(loaded.content, WindowPixels):
        return crop_centre(preprocess_window(model, loaded.content), (loaded.content.tile,) * 2)
    return preprocess_image(model, loaded.content.image)


def library_model(store: RunStore) -> str:
    """The model a run names, if it is one that a library we know publishes under that name."""
    name = store.manifest.model
    if name is None:
        raise NotNamedError(
            f"the run {valid_utf8(str(store.folder))}", needs="its model", got="a module of the caller's",
            fix="model=… in Python, with that module",
        )  # fmt: skip
    if not is_library_model(name):
        raise NotNamedError(
            f"the run {valid_utf8(str(store.folder))}", needs="--model, because a run may name any code and is not obeyed",
            got=f"no --model; the run names {name!r}", fix=f"--model {shlex.quote(name)} if you trust it",
        )  # fmt: skip
    return name


def _load_model(store: RunStore, name: str, weights: str | None, device: str | None) -> Model:
    import torch

    manifest = store.manifest
    if weights is None and (file := weights_file(manifest.weights_from)):
        raise NotNamedError(
            f"the run {valid_utf8(str(store.folder))}", needs="--weights: its weights are of a file, and a run could name any, so you name it",
            got="no --weights", fix=f"--weights {shlex.quote(str(file))}",
        )  # fmt: skip
    zero_shot = name.startswith(("open_clip:", "hf:"))
    model = load(
        name, weights=weights or manifest.weights_from, layer=manifest.layer,
        classes=manifest.classes if zero_shot else None, task=manifest.task,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )  # fmt: skip
    given = manifest.given_preprocessing
    return model if given is None else Preprocessing.from_json(given).of(model)
