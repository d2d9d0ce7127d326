"""Is a run what it claims to be: files against their digests, the log's chain, and a sample computed again.

Model, recipe and images of a finished run are loaded again, and refused if they are not the same.
"""

import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from equicam.audit.audit import list_items, resolve_recipe
from equicam.audit.compute import AuditContext, compute_shard, preprocess_to_array
from equicam.core.views import crop_centre
from equicam.errors import EquicamError, NotNamedError
from equicam.images.decoding import preprocess_loaded
from equicam.images.item_table import Items
from equicam.images.items import Item, LoadedItem, load_item
from equicam.models.images import VisibleBoxes, preprocess_image
from equicam.models.load import load
from equicam.models.preprocessing import Preprocessing
from equicam.models.surround import preprocess_window
from equicam.models.weights import fingerprint
from equicam.rasters.windows import WindowPixels
from equicam.readers.model import Model
from equicam.readers.names import is_library_model, weights_file
from equicam.reasons import Reason, describe
from equicam.runs.log import Event, Log, check_files, logged_digests
from equicam.runs.store import RunStore, StoredMaps
from equicam.shards import map_concurrently


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
    manifest, where = store.manifest, f"the run {store.shown}"
    if not isinstance(model, Model):
        model = _load_model(store, model or _library_model(store), weights, device)
    if (model.classes or ()) != (manifest.classes or ()):
        raise EquicamError(where, "the model's own class names", "others in manifest.json", "restoring it")
    if model.task != manifest.task:
        raise EquicamError(
            where, f"a model with task={manifest.task!r}", repr(model.task), "the model as it was audited"
        )
    if fingerprint(model.module) != manifest.weights:
        raise EquicamError(where, "the weights it was computed with", "others", "restoring them")
    found, _ = list_items(
        source or manifest.source, manifest.split, manifest.tiling, manifest.recipe.context, manifest.voi,
        from_user=source is not None,
    )  # fmt: skip
    sample = store.sample()
    items = replace(found, table=found.table.filter(pc.is_in(found.ids, sample["id"]))).in_scan_order()
    if items.digest() != manifest.data:
        raise EquicamError(
            where, "the images it was computed from", f"others in {source or manifest.source}",
            "--source with their present place",
        )  # fmt: skip
    recipe, description = resolve_recipe(model, replace(manifest.recipe, dtype=manifest.dtype))
    if description != manifest.method_description:
        raise EquicamError(
            where, f"the method it was computed with ({manifest.method_description})", "another of that name",
            "the equicam version that wrote it",
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


def _library_model(store: RunStore) -> str:
    """The model a run names, if it is one that a library we know publishes under that name."""
    name = store.manifest.model
    if name is None:
        raise NotNamedError(
            f"the run {store.shown}", "its model", "a module of the caller's", "model=… in Python, with that module",
        )  # fmt: skip
    if not is_library_model(name):
        raise NotNamedError(
            f"the run {store.shown}", "--model, because a run may name any code and is not obeyed",
            f"no --model; the run names {name!r}", f"--model {shlex.quote(name)} if you trust it",
        )  # fmt: skip
    return name


def _load_model(store: RunStore, name: str, weights: str | None, device: str | None) -> Model:
    import torch

    manifest = store.manifest
    if weights is None and (file := weights_file(manifest.weights_from)):
        raise NotNamedError(
            f"the run {store.shown}", "--weights: its weights are of a file, and a run could name any, so you name it",
            "no --weights", f"--weights {shlex.quote(str(file))}",
        )  # fmt: skip
    zero_shot = name.startswith(("open_clip:", "hf:"))
    model = load(
        name, weights=weights or manifest.weights_from, layer=manifest.layer,
        classes=manifest.classes if zero_shot else None, task=manifest.task,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
    )  # fmt: skip
    given = manifest.given_preprocessing
    return model if given is None else Preprocessing.from_json(given).of(model)


TOLERANCES = {"confidence": 2e-3, "peum_score": 2e-4, "eq": 5e-3, "map": 0.999}
"""Largest difference of confidence, PEUM and Eq, and least Pearson of maps, that other batches or libraries may cause."""


@dataclass(frozen=True)
class Verification:
    """What was checked, and everything that differs."""

    files: int
    events: int
    recomputed: int
    problems: tuple[str, ...]
    worst: Mapping[str, float] = field(default_factory=dict)  # largest differences, and least Pearson of maps
    notes: tuple[str, ...] = ()  # what is no difference, but good to know
    last_hash: str | None = None  # of the log, to be kept elsewhere; None where something differs
    log_error: str | None = None  # why the result is not in the log; an archived run may be read-only
    left_out: int = (
        0  # maps of the sample that were not recomputed, because their model or source was not named
    )
    left_out_reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing differs, and the sample was recomputed."""
        return not self.problems and not self.left_out


def verify_run(
    store: RunStore,
    reload: Callable[[], Reloaded],
    *,
    sample: int,
    seed: int | None = None,
    noted_hash: str | None = None,
    tick: Callable[[int], None] = lambda _count: None,
) -> Verification:
    """Check files, log and rows, then recompute a sample; the result goes into the log.

    `reload` is called only if nothing differs by then: a run that was tampered with names nothing that is loaded.
    Without a `seed` the sample is another each time, so that nobody can know which images to leave as they were.
    """
    seed = secrets.randbelow(2**32) if seed is None else seed
    files, problems = check_files(store)
    events, chain, notes = check_log(store, noted_hash)
    problems = [*problems, *chain]
    if not problems:
        problems = _check_rows(store)
    recomputed, worst, left_out, why = 0, dict[str, float](), 0, None
    if sample and problems:
        notes.append("nothing was computed again, because of these differences")
    elif sample:
        try:
            recomputed, problems, worst = recompute(store, reload(), count=sample, seed=seed, tick=tick)
        except NotNamedError as error:
            left_out, why = min(sample, _explained_count(store)), str(error)
        except EquicamError as error:
            problems = [f"nothing could be computed again: {error}"]
    found = Verification(
        files, len(events), recomputed, tuple(problems), worst, tuple(notes), left_out=left_out, left_out_reason=why,
        last_hash=None if problems else events[-1].hash,
    )  # fmt: skip
    try:
        last = Log(store.folder).add(
            "verified", {"problems": len(found.problems), "recomputed": recomputed, "seed": seed}
        )
    except OSError as error:
        return replace(found, log_error=str(error))
    return found if problems else replace(found, last_hash=last.hash)


def _explained_count(store: RunStore) -> int:
    status = store.read_items(["status"])["status"]
    return int(pc.sum(pc.equal(status, "ok")).as_py() or 0)


def _check_rows(store: RunStore) -> list[str]:
    """Whether the rows are those of the sample, and every explained image has its map."""
    problems: list[str] = []
    try:
        sample = store.sample()
        if sample.num_rows != store.manifest.images:
            problems.append(
                f"sample.parquet has {sample.num_rows} images, manifest.json {store.manifest.images}"
            )
        ids, size = sample["id"], store.manifest.shard_size
        if not sample["shard"].equals(
            pa.chunked_array([np.arange(sample.num_rows) // size]).cast(pa.int32())
        ):
            problems.append("sample.parquet has images in other shards than their place says")

        def check(number: int) -> list[str]:
            for kind in ("items", "maps"):
                store.refuse_other_columns(kind, number)
            items, maps = (
                store.read_shard("items", number, ["id", "status"]),
                store.read_shard("maps", number, ["id"]),
            )
            found = []
            if not items["id"].equals(ids.slice(number * size, size)):
                found.append(f"{store.name('items', number)} has other images than the sample")
            if not maps["id"].equals(items["id"].filter(pc.equal(items["status"], "ok"))):
                found.append(f"{store.name('maps', number)} has other maps than images explained")
            return found

        for some in map_concurrently(check, range(store.shard_count)):
            problems += some
    except (EquicamError, KeyError, pa.ArrowException) as error:
        problems.append(f"rows: {error}")
    return problems


def check_log(store: RunStore, noted_hash: str | None = None) -> tuple[list[Event], list[str], list[str]]:
    """The events, what is wrong with their chain and with a hash noted elsewhere, and what is only good to know."""
    log = Log(store.folder)
    try:
        events, problems, notes = log.events(), log.problems(), log.clock_jumps()
    except (OSError, ValueError) as error:
        return [], [f"log: {error}"], []
    if not events:
        problems.append("events.sqlite holds no event")
    problems = [f"log: {problem}" for problem in problems]
    if noted_hash is not None:
        changed, covered = _check_noted_hash(store, log, noted_hash.strip().lower())
        problems, notes = problems + changed, notes + covered
    return events, problems, notes


def _check_noted_hash(store: RunStore, log: Log, noted_hash: str) -> tuple[list[str], list[str]]:
    """Whether the log still holds the event with this hash, and every file as that event knew it; what came after is noted."""
    event = next((event for event in log.events() if event.hash == noted_hash), None)
    if event is None:
        return [
            f"log: the event with hash {noted_hash[:12]}… is not there: the log was cut off or rewritten"
        ], []
    before, now = logged_digests(store, log, until=event.number), logged_digests(store, log)
    changed = [name for name in before if now[name] != before[name]]
    later = Counter(one.kind for one in log.events(after=event.number))
    kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(later.items()))
    after = f"what came after it is not covered: {kinds}" if later else "no event came after it"
    problems = [f"{name} was written again after the noted event" for name in changed]
    return problems, [f"the log holds event {event.number}, whose hash was noted; {after}"]


def recompute(
    store: RunStore, reloaded: Reloaded, *, count: int, seed: int = 0,
    tick: Callable[[int], None] = lambda _count: None,
) -> tuple[int, list[str], dict[str, float]]:  # fmt: skip
    """Explain random finished images again and compare, within the stated tolerances."""
    context, model = reloaded.context, reloaded.context.model
    if fingerprint(model.module) != store.manifest.weights:
        return 0, ["the model's weights are not those of the run"], {}
    try:
        statuses = store.read_items(["id", "status"])
        ok = set(statuses.filter(pc.equal(statuses["status"], "ok"))["id"].to_pylist())
        candidates = [item for item in reloaded.items if item.id in ok]
        order = np.random.default_rng(seed).permutation(len(candidates))[:count]
        chosen = [candidates[i] for i in sorted(order)]
        rows, before = store.rows(item.id for item in chosen), store.maps(item.id for item in chosen)
    except EquicamError as error:
        return 0, [f"nothing could be computed again: {error}"], {}
    if not chosen and ok:
        return 0, ["nothing could be computed again: none of its images is there"], {}
    recomputed = 0
    problems: list[str] = []
    worst = {"map": 1.0}
    preprocess = partial(preprocess_to_array, model, context=store.manifest.recipe.context)
    visible_box = VisibleBoxes(model)
    for item in chosen:
        row = rows[item.id]
        decoded = preprocess_loaded(item, partial(load_item, item), preprocess, visible_box)
        if decoded.sha256 != row["sha256"]:
            problems.append(f"{item.id!r}: the image is not the one that was explained")
            continue
        now_rows, now_maps = compute_shard(context, [decoded])
        recomputed += 1
        problems += _compare(item.id, row, now_rows, before.get(item.id), now_maps, worst)
        tick(1)
    return recomputed, problems, worst


def _compare(
    name: str,
    row: dict[str, Any],
    now_rows: pa.Table,
    before: StoredMaps | None,
    now_maps: pa.Table,
    worst: dict[str, float],
) -> list[str]:
    (now,) = now_rows.to_pylist()
    if now["status"] != "ok":
        return [
            f"{name!r}: {describe(Reason.from_row({'code': now['reason'], 'values': now['reason_values']}))}"
        ]
    if before is None:
        return [f"{name!r}: its map is missing"]
    problems = []
    if now["target"] != row["target"]:
        problems.append(f"{name!r}: explained class {row['target']}, now {now['target']}")
    changed = [key for key in ("flags", "views_kept") if now[key] != row[key]]
    problems += [f"{name!r}: {key} {row[key]}, now {now[key]}" for key in changed]
    for key in ("confidence", "peum_score", "eq"):
        if row[key] is None or now[key] is None:
            if row[key] is not now[key]:
                problems.append(f"{name!r}: {key} {row[key]}, now {now[key]}")
            continue
        difference = abs(now[key] - row[key])
        worst[key] = max(worst.get(key, 0.0), difference)
        if not difference <= TOLERANCES[key]:
            problems.append(
                f"{name!r}: {key} {row[key]:.5f}, now {now[key]:.5f} (tolerance {TOLERANCES[key]})"
            )
    r = _correlation(before.map, StoredMaps.from_row(now_maps.to_pylist()[0]).map)
    worst["map"] = min(worst["map"], r)
    if not r >= TOLERANCES["map"]:
        problems.append(
            f"{name!r}: map correlates {r:.4f} with the stored one (at least {TOLERANCES['map']})"
        )
    return problems


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's r; 0 for maps of different sizes or with values that are no numbers."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 1.0 if np.ptp(a) == np.ptp(b) else 0.0
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
