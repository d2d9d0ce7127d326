"""The model, recipe and images of a finished run, loaded again and checked to be the same."""

from dataclasses import dataclass, replace

from equicam.auditing.audit import resolve_recipe
from equicam.auditing.compute import AuditContext
from equicam.auditing.store import RunStore
from equicam.data.items import Item, digest_items, valid_utf8
from equicam.data.sources import find_items
from equicam.errors import EquicamError
from equicam.models.load import load
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
    model: Model | None = None,
    source: str | None = None,
    weights: str | None = None,
    device: str | None = None,
) -> Reloaded:
    """Load what the manifest names, or take the caller's model; refuse other weights, images or methods."""
    manifest, where = store.manifest, f"the run {valid_utf8(str(store.folder))}"
    if model is None:
        model = _load_model(store, weights, device)
    if fingerprint(model.module) != manifest.weights:
        raise EquicamError(
            where, needs="the weights it was computed with", got="others", fix="restoring them"
        )
    ids = set(store.sample()["id"].to_pylist())
    found = find_items(source or manifest.source, split=manifest.split, from_user=source is not None)
    items = sorted((item for item in found if item.id in ids), key=lambda item: item.id)
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
    return Reloaded(AuditContext(model, recipe, calibration), items)


def _load_model(store: RunStore, weights: str | None, device: str | None) -> Model:
    import torch

    manifest = store.manifest
    if manifest.model is None:
        raise EquicamError(
            f"the run {valid_utf8(str(store.folder))}", needs="a model that can be loaded by name",
            got="one of a module of the caller's", fix="model=… in Python, with that module",
        )  # fmt: skip
    zero_shot = manifest.model.startswith(("open_clip:", "hf:"))
    return load(
        manifest.model, weights=weights or manifest.weights_from, layer=manifest.layer,
        classes=manifest.classes if zero_shot else None,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )  # fmt: skip
