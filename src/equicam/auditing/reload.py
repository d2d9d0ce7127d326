"""The model, recipe and images of a finished run, loaded again and checked to be the same."""

import shlex
from dataclasses import dataclass, replace

from equicam.auditing.audit import list_items, resolve_recipe
from equicam.auditing.compute import AuditContext
from equicam.auditing.store import RunStore
from equicam.data.items import Item, digest_items, scan_order, valid_utf8
from equicam.errors import EquicamError, NotNamedError
from equicam.models.load import load
from equicam.models.names import is_library_model, weights_file
from equicam.models.preprocessing import Preprocessing
from equicam.models.weights import fingerprint
from equicam.readers.model import Model


@dataclass(frozen=True)
class Reloaded:
    """What computes the rows of a run again."""

    context: AuditContext
    items: list[Item]


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
    ids = set(store.sample()["id"].to_pylist())
    found, _ = list_items(
        source or manifest.source, manifest.split, manifest.tiling, manifest.recipe.context, manifest.voi,
        from_user=source is not None,
    )  # fmt: skip
    items = sorted((item for item in found if item.id in ids), key=scan_order)
    if digest_items(items) != manifest.data:
        raise EquicamError(
            where, needs="the images it was computed from", got=f"others in {source or manifest.source}",
            fix="--source with their present place",
        )  # fmt: skip
    recipe, description = resolve_recipe(model, replace(manifest.recipe, dtype=manifest.dtype))
    # 0.1.0 described methods in other words; there, recomputing shows whether the method is the same
    if description != manifest.method_description and manifest.schema > 1:
        raise EquicamError(
            where, needs=f"the method it was computed with ({manifest.method_description})", got="another of that name",
            fix="the equicam version that wrote it",
        )  # fmt: skip
    sample = store.sample()
    calibration = frozenset(sample.filter(sample["calibration"])["id"].to_pylist())
    tile = manifest.tiling.tile if manifest.tiling else None
    return Reloaded(AuditContext(model, recipe, calibration, tile, manifest.target), items)


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
            f"the run {valid_utf8(str(store.folder))}", needs="--weights: it used a file, and a run could name any, so you name it",
            got="none", fix=f"--weights {shlex.quote(str(file))}",
        )  # fmt: skip
    zero_shot = name.startswith(("open_clip:", "hf:"))
    model = load(
        name, weights=weights or manifest.weights_from, layer=manifest.layer,
        classes=manifest.classes if zero_shot else None, task=manifest.task,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )  # fmt: skip
    # weights of a file had no class names in 0.1.0
    model = model if manifest.classes is not None else replace(model, classes=None)
    given = manifest.given_preprocessing
    return model if given is None else Preprocessing.from_json(given).of(model)
