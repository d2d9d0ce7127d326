"""Is a run what it says: files against their digests, the log's chain, and a sample computed again."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from equicam.audit.decode import opened
from equicam.audit.log import Log
from equicam.audit.run import Plans, _prepared, computed, content
from equicam.audit.store import Drawn, Run
from equicam.data.items import Item
from equicam.errors import EquicamError
from equicam.models.images import seen_box
from equicam.models.model import Model
from equicam.models.weights import fingerprint

TOLERANCES = {"prob": 2e-3, "peum": 2e-4, "map": 0.999}
"""Largest difference of probability and PEUM, least Pearson of maps: what other batches and libraries may change."""


@dataclass(frozen=True)
class Verified:
    """What was checked, and every difference found."""

    files: int
    events: int
    again: int
    problems: tuple[str, ...]
    worst: dict[str, float]  # largest difference of probability and PEUM, least map correlation


def check_files(run: Run) -> tuple[int, list[str]]:
    """Every file of a finished run against its digest, and the digests against the log."""
    sealed = run.folder / "digests.json"
    if not sealed.is_file():
        missing = len(run.pending())
        return 0, [
            f"the run is not finished: {missing} of {run.parts} parts are missing; equicam audit goes on"
        ]
    text = sealed.read_bytes()
    completed = Log(run.folder).events("completed")
    problems = []
    if not completed or completed[-1].payload.get("digests") != hashlib.sha256(text).hexdigest():
        problems.append("digests.json is not the one the log was sealed with")
    known: dict[str, str] = json.loads(text)
    for name, now in run.digests().items():
        if known.get(name) != now:
            problems.append(
                f"{name} is not as it was written (SHA-256 {known.get(name, 'unknown')[:12]}…, now {now[:12]}…)"
            )
    return len(known), problems


def check_log(run: Run) -> tuple[int, list[str]]:
    """The chain of events."""
    log = Log(run.folder)
    return len(log.events()), [f"log: {problem}" for problem in log.problems()]


def recompute(
    run: Run, model: Model, plans: Plans, items: Sequence[Item], *, count: int, seed: int = 0,
    tick: Callable[[int], None] = lambda _count: None,
) -> tuple[int, list[str], dict[str, float]]:  # fmt: skip
    """Random finished pictures explained again and compared, within stated tolerances."""
    spec = run.spec
    if fingerprint(model.module) != spec.weights:
        return 0, ["the model's weights are not those of the run"], {}
    rows = {row["id"]: row for row in run.items().to_pylist() if row["status"] == "ok"}
    there = [item for item in items if item.id in rows]
    chosen = np.random.default_rng(seed).permutation(len(there))[:count]
    picked = [there[i] for i in sorted(chosen)]
    before = run.maps([item.id for item in picked])
    problems: list[str] = []
    worst = {"prob": 0.0, "peum": 0.0, "map": 1.0}
    for item in picked:
        row = rows[item.id]
        if content(item) != row["sha256"]:
            problems.append(f"{item.id!r}: the picture is not the one that was explained")
            continue
        found = opened(item, lambda picture: _prepared(model, picture), lambda size: seen_box(model, size))
        now_rows, now_maps = computed(plans, [found])
        problems += _compared(item.id, row, now_rows, before.get(item.id), now_maps, worst)
        tick(1)
    return len(picked), problems, worst


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
    for key in ("prob", "peum"):
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
            fix="equicam.audit.verify.recompute with the module",
        )  # fmt: skip
