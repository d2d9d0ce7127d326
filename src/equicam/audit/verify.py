"""Is a run what it claims to be: files against their digests, the log's chain, and a sample computed again.

Model, recipe and images of a finished run are loaded again, and refused if they are not the same.
"""

import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equicam.audit.audit import list_items, resolve_recipe
from equicam.audit.compute import AuditContext, Tables, compute_shard, preprocess_to_array
from equicam.errors import EquicamError, NotNamedError
from equicam.images.decoding import preprocess_loaded
from equicam.images.item_table import Items
from equicam.images.items import load_item
from equicam.models.images import VisibleBoxes
from equicam.models.load import load
from equicam.models.preprocessing import Preprocessing
from equicam.models.weights import fingerprint
from equicam.readers.model import Model
from equicam.readers.names import is_library_model, weights_file
from equicam.reasons import Reason, describe
from equicam.runs.log import Event, Log, check_files, logged_digests
from equicam.runs.store import KINDS, RunStore, StoredMaps
from equicam.shards import map_concurrently

Reloaded = tuple[AuditContext, Items]
"""What computes the rows of a run again, and its images."""


def reload_run(
    store: RunStore,
    *,
    model: Model | str | None = None,
    source: str | None = None,
    weights: str | None = None,
    device: str | None = None,
) -> Reloaded:
    """The model, by the caller or one of a library that the manifest names, and the images; refuse others than the run's."""
    manifest = store.manifest
    if not isinstance(model, Model):
        model = _load_model(store, model or _library_model(store), weights, device)

    def require(same: bool, needs: str, got: str, fix: str) -> None:
        if not same:
            raise EquicamError(f"the run {store.shown}", needs, got, fix)

    classes = (model.classes or ()) == (manifest.classes or ())
    require(classes, "the model's own class names", "others in manifest.json", "restoring it")
    task = f"a model with task={manifest.task!r}"
    require(model.task == manifest.task, task, repr(model.task), "the model as it was audited")
    same_weights = fingerprint(model.module) == manifest.weights
    require(same_weights, "the weights it was computed with", "others", "restoring them")
    listed, _ = list_items(
        source or manifest.source, manifest.split, manifest.tiling, manifest.recipe.context, manifest.voi,
        from_user=source is not None,
    )  # fmt: skip
    sample = store.sample()
    items = replace(listed, table=listed.table.filter(pc.is_in(listed.ids, sample["id"]))).in_scan_order()
    others = f"others in {source or manifest.source}"
    fix = "--source with their present place"
    require(items.digest() == manifest.data, "the images it was computed from", others, fix)
    recipe, description = resolve_recipe(model, replace(manifest.recipe, dtype=manifest.dtype))
    method, fix = (
        f"the method it was computed with ({manifest.method_description})",
        "the equicam version that wrote it",
    )
    require(description == manifest.method_description, method, "another of that name", fix)
    calibration = frozenset(sample.filter(sample["calibration"])["id"].to_pylist())
    return AuditContext(model, recipe, calibration, manifest.tile, manifest.target), items


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
    plain = manifest.given_preprocessing
    return model if plain is None else Preprocessing.from_json(plain).of(model)


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
    left_out: int = 0  # maps of the sample not recomputed, because their model or source was not named
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
            recomputed, problems, worst = _recompute(store, reload(), sample, seed, tick)
        except NotNamedError as error:
            left_out, why = min(sample, len(store.explained())), str(error)
        except EquicamError as error:
            problems = [f"nothing could be computed again: {error}"]
    verification = Verification(
        files, len(events), recomputed, tuple(problems), worst, tuple(notes), left_out=left_out, left_out_reason=why,
        last_hash=None if problems else events[-1].hash,
    )  # fmt: skip
    payload = {"problems": len(problems), "recomputed": recomputed, "seed": seed}
    try:
        last = Log(store.folder).add("verified", payload)
    except OSError as error:
        return replace(verification, log_error=str(error))
    return verification if problems else replace(verification, last_hash=last.hash)


def _check_rows(store: RunStore) -> list[str]:
    """Whether the rows are those of the sample, and every explained image has its map."""
    problems: list[str] = []
    try:
        sample, size = store.sample(), store.manifest.shard_size
        ids, count = sample["id"], sample.num_rows
        if count != store.manifest.images:
            problems.append(f"sample.parquet has {count} images, manifest.json {store.manifest.images}")
        if not sample["shard"].equals(pa.chunked_array([np.arange(count) // size]).cast(pa.int32())):
            problems.append("sample.parquet has images in other shards than their place says")

        def check(number: int) -> list[str]:
            for kind in KINDS:
                store.refuse_other_columns(kind, number)
            items = store.read_shard("items", number, ["id", "status"])
            explained = items["id"].filter(pc.equal(items["status"], "ok"))
            odd = []
            if not items["id"].equals(ids.slice(number * size, size)):
                odd.append(f"{store.name('items', number)} has other images than the sample")
            if not store.read_shard("maps", number, ["id"])["id"].equals(explained):
                odd.append(f"{store.name('maps', number)} has other maps than images explained")
            return odd

        for odd in map_concurrently(check, range(store.shard_count)):
            problems += odd
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
        gone = f"the event with hash {noted_hash[:12]}… is not there"
        return [f"log: {gone}: the log was cut off or rewritten"], []
    before, now = logged_digests(store, log, until=event.number), logged_digests(store, log)
    changed = [name for name in before if now[name] != before[name]]
    later = Counter(other.kind for other in log.events(after=event.number))
    kinds = ", ".join(f"{count} × {kind}" for kind, count in sorted(later.items()))
    after = f"what came after it is not covered: {kinds}" if later else "no event came after it"
    problems = [f"{name} was written again after the noted event" for name in changed]
    return problems, [f"the log holds event {event.number}, whose hash was noted; {after}"]


def _recompute(
    store: RunStore, reloaded: Reloaded, count: int, seed: int, tick: Callable[[int], None]
) -> tuple[int, list[str], dict[str, float]]:
    """Explain random finished images again and compare, within the stated tolerances."""
    context, items = reloaded
    try:
        ok = set(store.explained())
        candidates = [item for item in items if item.id in ok]
        order = np.random.default_rng(seed).permutation(len(candidates))[:count]
        chosen = [candidates[i] for i in sorted(order)]
        rows, before = store.rows(item.id for item in chosen), store.maps(item.id for item in chosen)
    except EquicamError as error:
        return 0, [f"nothing could be computed again: {error}"], {}
    if not chosen and ok:
        return 0, ["nothing could be computed again: none of its images is there"], {}
    recomputed, problems, worst = 0, list[str](), {"map": 1.0}
    preprocess = partial(preprocess_to_array, context.model, context=store.manifest.recipe.context)
    visible_box = VisibleBoxes(context.model)
    for item in chosen:
        row = rows[item.id]
        decoded = preprocess_loaded(item, partial(load_item, item), preprocess, visible_box)
        if decoded.sha256 != row["sha256"]:
            problems.append(f"{item.id!r}: the image is not the one that was explained")
            continue
        now = compute_shard(context, [decoded])
        recomputed += 1
        problems += [f"{item.id!r}: {text}" for text in _compare(row, before.get(item.id), now, worst)]
        tick(1)
    return recomputed, problems, worst


def _compare(
    row: dict[str, Any], before: StoredMaps | None, now: Tables, worst: dict[str, float]
) -> Iterator[str]:
    """What differs between an image's row and map and those computed again."""
    (again,) = now[0].to_pylist()
    if again["status"] != "ok":
        yield describe(Reason.from_row({"code": again["reason"], "values": again["reason_values"]}))
        return
    if before is None:
        yield "its map is missing"
        return
    if again["target"] != row["target"]:
        yield f"explained class {row['target']}, now {again['target']}"
    for key in ("flags", "views_kept"):
        if again[key] != row[key]:
            yield f"{key} {row[key]}, now {again[key]}"
    for key in ("confidence", "peum_score", "eq"):
        if row[key] is None or again[key] is None:
            if row[key] is not again[key]:
                yield f"{key} {row[key]}, now {again[key]}"
            continue
        difference = abs(again[key] - row[key])
        worst[key] = max(worst.get(key, 0.0), difference)
        if not difference <= TOLERANCES[key]:
            yield f"{key} {row[key]:.5f}, now {again[key]:.5f} (tolerance {TOLERANCES[key]})"
    r = _correlation(before.map, StoredMaps.from_table(now[1])[row["id"]].map)
    worst["map"] = min(worst["map"], r)
    if not r >= TOLERANCES["map"]:
        yield f"map correlates {r:.4f} with the stored one (at least {TOLERANCES['map']})"


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's r; 0 for maps of different sizes or with values that are no numbers."""
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 1.0 if np.ptp(a) == np.ptp(b) else 0.0
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])
