"""The files of a run against its log: digests enter it as files are written, and are compared on resuming, completing and verifying.

    started, resumed   digests of manifest.json, sample.parquet and rasters.parquet
    shard              digests of a shard's items and maps
    completed          digest of digests.json, which lists all of them

A file that the log does not know, or knows otherwise, is never taken over: a shard is computed again, the sample is
written again, and anything else is refused.
"""

import hashlib
import json
from collections.abc import Callable
from typing import Any

from equicam.errors import EquicamError
from equicam.images.files import file_digest
from equicam.images.items import valid_utf8
from equicam.runs.log import Log
from equicam.runs.queue_files import logged_files
from equicam.runs.store import RunStore
from equicam.shards import TEMPORARY_SUFFIX, map_concurrently, read_json, write_atomic

Notice = Callable[[str], None]
"""Called with a sentence for the user."""


def log_start(store: RunStore, log: Log, pending: int) -> None:
    """Note that computing starts or goes on, and the digests of what it starts from."""
    kind = "resumed" if log.events() else "started"
    digests = {name: file_digest(store.folder / name) for name in store.heads()}
    log.add(kind, {"pending": pending, "shards": store.shard_count, "files": digests})


def log_shard(log: Log, number: int, digests: dict[str, str]) -> None:
    """Note the digests of a shard's files."""
    log.add("shard", {"shard": number, **digests})


def logged_digests(store: RunStore, log: Log, *, until: int | None = None) -> dict[str, str]:
    """The last digest that the log, up to an event, holds of each file of the run, by name."""
    found: dict[str, str] = {}
    for event in log.events()[:until]:
        digests: Any = {}
        if event.kind in ("started", "resumed"):
            digests = event.payload.get("files")
        elif event.kind == "shard" and isinstance(number := event.payload.get("shard"), int):
            digests = {
                store.name(kind, number): event.payload[kind]
                for kind in ("items", "maps")
                if kind in event.payload
            }
        if isinstance(digests, dict):
            found |= {str(name): str(digest) for name, digest in digests.items()}
    return found


def refuse_lost_log(store: RunStore, log: Log) -> None:
    """Refuse to continue a run whose log is gone or broken: nothing could tell whether its shards are its own."""
    if not store.started():
        return
    problems = log.problems()
    if not problems and not set(store.heads()) <= set(logged_digests(store, log)):
        problems.append(f"{log.path.name} does not say what the run was started with")
    if problems:
        raise EquicamError(
            f"resuming {valid_utf8(str(store.folder))}", needs="its log, events.sqlite, as it was written",
            got=f"none: {log.path.name} is not there" if not log.path.is_file() else "; ".join(problems),
            fix="restoring that file, or another --out",
        )  # fmt: skip


def heal(store: RunStore, log: Log, write_head: Callable[[], None], notice: Notice) -> None:
    """Remove shards that are not as the log has them, and write manifest and sample again if they are damaged.

    `write_head` writes both as this call would; if the log knows them otherwise, resuming is refused.
    """
    logged = logged_digests(store, log)
    damaged = [name for name in store.heads() if _digest(store, name) != logged.get(name)]
    if damaged:
        write_head()
        if still := [name for name in store.heads() if _digest(store, name) != logged.get(name)]:
            raise EquicamError(
                f"resuming {valid_utf8(str(store.folder))}", needs=f"{still[0]} as it was written", got="another file",
                fix="restoring it, or another --out",
            )  # fmt: skip
        notice(f"{' and '.join(damaged)} was not as it was written, and is written again")
    written = list(filter(store.has_shard, range(store.shard_count)))
    checked = map_concurrently(lambda n: _as_logged(store, n, logged), written)
    shards = [n for n, as_logged in zip(written, checked, strict=True) if not as_logged]
    for number in shards:
        for kind in ("items", "maps"):
            store.path(kind, number).unlink()
        notice(f"shard {number} was not as the log has it, and is computed again")
    if damaged or shards:
        log.add("damaged", {"files": damaged, "shards": shards})


def remove_temporary(store: RunStore) -> None:
    """Remove what a killed writer left."""
    for folder in (store.folder, store.folder / "items", store.folder / "maps"):
        for path in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)


def complete(store: RunStore, log: Log) -> None:
    """Write digests.json, and an event with its digest; refused if a file is not as the log has it."""
    logged, now = logged_digests(store, log), store.digests()
    if changed := [name for name, digest in now.items() if logged.get(name) != digest]:
        raise EquicamError(
            valid_utf8(str(store.folder)), needs="the files it wrote, as it wrote them",
            got=f"{len(changed)} changed while it was computed ({', '.join(changed[:3])})",
            fix="the same command again, which computes them again",
        )  # fmt: skip
    text = json.dumps(now, indent=1).encode()
    write_atomic(store.folder / "digests.json", text)
    log.add("completed", {"digests": hashlib.sha256(text).hexdigest()})


def is_complete(store: RunStore, log: Log) -> bool:
    """Whether digests.json is the file whose digest the log holds."""
    path, events = store.folder / "digests.json", log.events("completed")
    return path.is_file() and bool(events) and events[-1].payload.get("digests") == file_digest(path)


def check_files(store: RunStore) -> tuple[int, list[str]]:
    """Every file of a run against the digests in its log and in digests.json; returns how many were read."""
    path = store.folder / "digests.json"
    problems: list[str] = []
    known: dict[str, Any] = {}
    if missing := len(store.pending()):
        problems.append(
            f"the run is not finished: {missing} of {store.shard_count} shards are missing; equicam audit goes on"
        )
    elif not path.is_file():
        problems.append("digests.json is missing; equicam audit writes it again")
    try:
        log = Log(store.folder)
        finished = path.is_file()
        known = read_json(path) if finished else {}
        if finished and not is_complete(store, log):
            problems.append("digests.json is not the one whose digest the log holds")
        logged = logged_digests(store, log)
        queued = logged_files(log)
    except (EquicamError, OSError) as error:
        return 0, [*problems, str(error)]
    names = store.names()
    wanted = {name: logged.get(name) for name in names if finished or (store.folder / name).is_file()}
    if finished and known != wanted:
        odd = [name for name in sorted({*known, *wanted}) if known.get(name) != wanted.get(name)]
        problems.append(f"digests.json and the log do not agree on {', '.join(map(repr, odd[:3]))}")
    wanted |= queued

    def problem(name: str) -> str | None:
        digest = wanted[name]
        try:
            now = file_digest(store.folder / name)
        except (EquicamError, OSError) as error:
            return (
                f"{name} cannot be read: {error.got if isinstance(error, EquicamError) else error.strerror}"
            )
        if now == digest:
            return None
        before = f"SHA-256 {str(digest)[:12]}…" if digest else "which the log does not know"
        return f"{name} is not as it was written ({before}, now {now[:12]}…)"

    return len(wanted), [*problems, *filter(None, map_concurrently(problem, wanted))]


def _as_logged(store: RunStore, number: int, logged: dict[str, str]) -> bool:
    names = [store.name(kind, number) for kind in ("items", "maps")]
    return all(_digest(store, name) == logged.get(name) for name in names)


def _digest(store: RunStore, name: str) -> str | None:
    try:
        return file_digest(store.folder / name)
    except (EquicamError, OSError):
        return ""
