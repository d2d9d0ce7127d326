"""Is a run what it says: files against their digests, the log's chain, and a sample computed again."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from equicam.auditing.audit import content, sealed
from equicam.auditing.compute import Plans, computed, prepared
from equicam.auditing.log import Log
from equicam.auditing.store import Drawn, Run, file_digest
from equicam.data.decoding import opened
from equicam.data.items import Item
from equicam.errors import EquicamError
from equicam.models.images import VisibleBoxes
from equicam.models.weights import fingerprint
from equicam.readers.model import Model
from equicam.shards import read_json

TOLERANCES = {"prob": 2e-3, "peum": 2e-4, "eq": 5e-3, "map": 0.999}
"""Largest difference of probability, PEUM and Eq, least Pearson of maps: what other batches and libraries may change."""


def check_files(run: Run) -> tuple[int, list[str]]:
    """Every file of a finished run against its digest, and the digests and the queue against the log."""
    there = run.folder / "digests.json"
    problems: list[str] = []
    known: dict[str, str] = {}
    if missing := len(run.pending()):
        problems.append(
            f"the run is not finished: {missing} of {run.parts} parts are missing; equicam audit goes on"
        )
    elif not there.is_file():
        problems.append("digests.json is missing; equicam audit seals the run again")
    try:
        log = Log(run.folder)
        known = read_json(there) if there.is_file() else {}
        if known and not sealed(run, log):
            problems.append("digests.json is not the one the log was sealed with")
        triaged = log.events("triaged")
        queued: dict[str, str] = triaged[-1].payload.get("files", {}) if triaged else {}
    except (EquicamError, OSError) as error:
        return 0, [*problems, str(error)]
    for name, digest in (known | queued).items():
        try:
            now = file_digest(run.folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if now != digest:
            problems.append(f"{name} is not as it was written (SHA-256 {digest[:12]}…, now {now[:12]}…)")
    return len(known) + len(queued), problems


def check_log(run: Run, noted: str | None = None) -> tuple[int, list[str]]:
    """The chain of events, and that it still holds a hash noted elsewhere."""
    log = Log(run.folder)
    try:
        events, problems = log.events(), log.problems()
    except (OSError, ValueError) as error:
        return 0, [f"log: {error}"]
    if noted and noted not in {event.hash for event in events}:
        problems.append(
            f"the event with hash {noted[:12]}… is not there: the log was cut off or written anew"
        )
    return len(events), [f"log: {problem}" for problem in problems]


def recompute(
    run: Run, model: Model, plans: Plans, items: Sequence[Item], *, count: int, seed: int = 0,
    tick: Callable[[int], None] = lambda _count: None,
) -> tuple[int, list[str], dict[str, float]]:  # fmt: skip
    """Random finished pictures explained again and compared, within stated tolerances."""
    spec = run.spec
    if fingerprint(model.module) != spec.weights:
        return 0, ["the model's weights are not those of the run"], {}
    try:
        fine = run.items(["id", "status"])
        ok = set(fine.filter(pc.equal(fine["status"], "ok"))["id"].to_pylist())
        there = [item for item in items if item.id in ok]
        chosen = np.random.default_rng(seed).permutation(len(there))[:count]
        picked = [there[i] for i in sorted(chosen)]
        rows, before = run.rows(item.id for item in picked), run.maps(item.id for item in picked)
    except EquicamError as error:
        return 0, [f"nothing could be computed again: {error}"], {}
    again = 0
    problems: list[str] = []
    worst = {"prob": 0.0, "peum": 0.0, "eq": 0.0, "map": 1.0}
    visible = VisibleBoxes(model)
    for item in picked:
        row = rows[item.id]
        if content(item) != row["sha256"]:
            problems.append(f"{item.id!r}: the picture is not the one that was explained")
            continue
        found = opened(item, lambda picture: prepared(model, picture), visible)
        now_rows, now_maps = computed(plans, [found])
        again += 1
        problems += _compared(item.id, row, now_rows, before.get(item.id), now_maps, worst)
        tick(1)
    return again, problems, worst


def _compared(
    name: str,
    row: dict[str, Any],
    now_rows: pa.Table,
    before: Drawn | None,
    now_maps: pa.Table,
    worst: dict[str, float],
) -> list[str]:
    (now,) = now_rows.to_pylist()
    if now["status"] != "ok" or before is None:
        return [f"{name!r}: {now['reason'] or 'its map is missing'}"]
    problems = []
    if now["target"] != row["target"]:
        problems.append(f"{name!r}: explained class {row['target']}, now {now['target']}")
    same = [key for key in ("flags", "kept") if now[key] != row[key]]
    problems += [f"{name!r}: {key} {row[key]}, now {now[key]}" for key in same]
    for key in ("prob", "peum", "eq"):
        if row[key] is None or now[key] is None:
            if row[key] is not now[key]:
                problems.append(f"{name!r}: {key} {row[key]}, now {now[key]}")
            continue
        apart = abs(now[key] - row[key])
        worst[key] = max(worst[key], apart)
        if not apart <= TOLERANCES[key]:
            problems.append(
                f"{name!r}: {key} {row[key]:.5f}, now {now[key]:.5f} (tolerance {TOLERANCES[key]})"
            )
    alike = _correlation(before.map, Drawn.of(now_maps.to_pylist()[0]).map)
    worst["map"] = min(worst["map"], alike)
    if alike < TOLERANCES["map"]:
        problems.append(
            f"{name!r}: map correlates {alike:.4f} with what was stored (at least {TOLERANCES['map']})"
        )
    return problems


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 1.0 if np.ptp(a) == np.ptp(b) else 0.0
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1])


def refuse_unloadable(run: Run) -> None:
    """A run of a caller's own module can be checked from Python only, with that module."""
    if run.spec.model is None:
        raise EquicamError(
            "this command", needs="a model it can load", got="a run of a module of the caller's",
            fix="equicam.auditing.verify.recompute with the module",
        )  # fmt: skip
