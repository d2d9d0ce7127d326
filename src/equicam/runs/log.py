"""The log of a run: events are only ever added, and each holds the SHA-256 of the one before.

hash = SHA-256 of the canonical JSON of [number, time, actor, kind, payload, hash before]. A chain that was cut off or
rewritten as a whole by someone with write access shows only against a hash noted elsewhere (`verify --hash`).

Digests of the run's files enter it as they are written ("started" and "resumed": of the heads; "shard"; "completed": of
digests.json) and are compared on resuming, completing and verifying. A file that the log does not know, or knows otherwise,
is never taken over: a shard is computed again, the sample is written again, and anything else is refused.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.images.files import file_digest
from equicam.runs.store import KINDS, RunStore
from equicam.shards import map_concurrently, parse_object, read_json, write_atomic

FIRST = "0" * 64
QUEUE_FILES = ("triage.parquet", "triage.json", "queue.csv")
CAUSAL = "causal.json"
LOGGED = {"triaged": QUEUE_FILES, "causal": (CAUSAL,)}
"""Files whose digests an event holds, by its kind."""
_MARK = "CASE WHEN json_valid(payload) THEN json_extract(payload, '$.mark') END"
_TABLE = f"""
CREATE TABLE IF NOT EXISTS events (
  number INTEGER PRIMARY KEY, time TEXT NOT NULL, who TEXT NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL,
  previous TEXT NOT NULL, hash TEXT NOT NULL);
CREATE UNIQUE INDEX IF NOT EXISTS marks ON events ({_MARK});
CREATE TRIGGER IF NOT EXISTS no_change BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are only added'); END;
CREATE TRIGGER IF NOT EXISTS no_removal BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are only added'); END;
"""
_ALL = "SELECT number, time, who, kind, payload, previous, hash FROM events"


@dataclass(frozen=True)
class Event:
    """One event."""

    number: int
    time: str  # UTC, ISO 8601
    actor: str
    kind: str
    payload: dict[str, Any]
    previous: str
    hash: str


_OBJECTS = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL"


class Log:
    """The events of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "events.sqlite"

    def add(self, kind: str, payload: Mapping[str, Any], *, actor: str = "equicam") -> Event:
        """Append an event; it is on disk when this returns, and concurrent writers are ordered.

        A payload with a `mark` is added once: a resend returns the first event.
        """
        with self._open() as database:
            database.execute("BEGIN IMMEDIATE")
            if before := _marked(database, payload.get("mark")):
                database.execute("ROLLBACK")
                return before
            last = database.execute("SELECT number, hash FROM events ORDER BY number DESC LIMIT 1").fetchone()
            if last:
                _refuse_odd((last[0], last[1]))
            number, previous = (last[0] + 1, last[1]) if last else (1, FIRST)
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            text = json.dumps(payload, sort_keys=True, ensure_ascii=True)
            row = (number, time, actor, kind, text, previous)
            event = (*row, _hash(row))
            database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", event)
            if database.execute(f"{_ALL} WHERE number = ?", (number,)).fetchall() != [event]:
                raise OSError(f"{self.path}: an event was not written as it was added")
            database.execute("COMMIT")
        return Event(number, time, actor, kind, json.loads(text), previous, event[-1])

    def events(self, kind: str | None = None, *, after: int = 0) -> list[Event]:
        """All events in order, or those of one kind, or those after a number."""
        return [_event(row) for row in self._rows(after) if kind in (None, row[3])]

    def last(self) -> str:
        """The hash of the last event."""
        rows = self._rows()
        return str(rows[-1][6]) if rows else FIRST

    def problems(self) -> list[str]:
        """Everything wrong with the chain, one sentence per problem."""
        problems, previous = [], FIRST
        for place, row in enumerate(self._rows(), start=1):
            if row[0] != place:
                problems.append(f"event {place} is missing (the next one is {row[0]})")
                break
            if row[5] != previous:
                problems.append(f"event {place} does not follow the one before it")
            if row[6] != _hash(row[:6]):
                problems.append(f"event {place} was changed")
            previous = row[6]
        return problems

    def clock_jumps(self) -> list[str]:
        """Every event that the clock puts before the one before it, one sentence per event."""
        jumps: list[str] = []
        latest: tuple[int, datetime] | None = None
        for event in self.events():
            now = _clock(event.time)
            if now is None:
                jumps.append(f"event {event.number} has no time")
                continue
            if latest and latest[1] > now:
                back = f"the clock went back by {latest[1] - now}"
                jumps.append(f"{back} between event {latest[0]} and event {event.number}")
            latest = event.number, now
        return jumps

    def _rows(self, after: int = 0) -> list[tuple[Any, ...]]:
        if not self.path.is_file():
            return []
        with self._open() as database:
            rows = database.execute(f"{_ALL} WHERE number > ? ORDER BY number", (after,)).fetchall()
        for row in rows:
            _refuse_odd(row)
        return rows

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = FULL")
                database.executescript(_TABLE)
                if odd := set(database.execute(_OBJECTS)) ^ _schema():  # others could drop or change events
                    raise EquicamError(
                        "events.sqlite", "the table, index and triggers of a log alone", f"another {min(odd)[1][:80]!r}",
                        "restoring it",
                    )  # fmt: skip
                yield database
        except sqlite3.DatabaseError as error:  # a full disk, a stuck lock, or a file that is not a database
            raise OSError(f"{self.path}: {error}") from error


@cache
def _schema() -> frozenset[tuple[str, str, str, str]]:
    """The objects of a log's database, as SQLite keeps them."""
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(_TABLE)
        return frozenset(database.execute(_OBJECTS))


def _hash(row: tuple[Any, ...]) -> str:
    return hashlib.sha256(json.dumps(list(row), ensure_ascii=True).encode()).hexdigest()


def _refuse_odd(row: tuple[Any, ...]) -> None:
    """SQLite keeps values of any type in any column, and a stranger may have made the table."""
    if not isinstance(row[0], int) or not all(isinstance(value, str) for value in row[1:]):
        raise EquicamError(
            "events.sqlite", "a number and texts in every event", "values of other types", "restoring it"
        )


def _marked(database: sqlite3.Connection, mark: object) -> Event | None:
    if mark is None:
        return None
    row = database.execute(f"{_ALL} WHERE {_MARK} = ?", (mark,)).fetchone()
    return row and _event(row)


def _event(row: tuple[Any, ...]) -> Event:
    try:
        payload = parse_object(row[4])
    except (TypeError, ValueError) as error:
        raise EquicamError(
            f"event {row[0]} of the log", "a JSON object", error, "restoring events.sqlite"
        ) from error
    number, time, actor, kind, _, previous, digest = row
    return Event(number, time, actor, kind, payload, previous, digest)


def _clock(text: str) -> datetime | None:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


Notice = Callable[[str], None]
"""Called with a sentence for the user."""


def log_start(store: RunStore, log: Log, pending: int) -> None:
    """Note that computing starts or goes on, and the digests of what it starts from."""
    digests = {name: file_digest(store.folder / name) for name in store.heads()}
    kind = "resumed" if log.events() else "started"
    log.add(kind, {"pending": pending, "shards": store.shard_count, "files": digests})


def log_shard(log: Log, number: int, digests: dict[str, str]) -> None:
    """Note the digests of a shard's files."""
    log.add("shard", {"shard": number, **digests})


def logged_digests(store: RunStore, log: Log, *, until: int | None = None) -> dict[str, str]:
    """The last digest that the log, up to an event, holds of each file of the run, by name."""
    known: dict[str, str] = {}
    for event in log.events()[:until]:
        digests: Any = {}
        if event.kind in ("started", "resumed"):
            digests = event.payload.get("files")
        elif event.kind == "shard" and isinstance(number := event.payload.get("shard"), int):
            digests = {
                store.name(kind, number): event.payload[kind] for kind in KINDS if kind in event.payload
            }
        if isinstance(digests, dict):
            known |= {str(name): str(digest) for name, digest in digests.items()}
    return known


def logged_files(log: Log) -> dict[str, Any]:
    """The digests that the log holds of the last queue's files and of the last causal test's, by name."""
    by_kind: dict[str, Any] = {}
    for event in log.events():
        files = event.payload.get("files")
        if event.kind in LOGGED and isinstance(files, dict):
            by_kind[event.kind] = files
    # a stranger may have written the log: only names that such an event has
    return {name: files[name] for kind, files in by_kind.items() for name in LOGGED[kind] if name in files}


def refuse_lost_log(store: RunStore, log: Log) -> None:
    """Refuse to continue a run whose log is gone or broken: nothing could tell whether its shards are its own."""
    if not store.started():
        return
    problems = log.problems()
    if not problems and not set(store.heads()) <= set(logged_digests(store, log)):
        problems.append(f"{log.path.name} does not say what the run was started with")
    if problems:
        raise EquicamError(
            f"resuming {store.shown}", "its log, events.sqlite, as it was written",
            f"none: {log.path.name} is not there" if not log.path.is_file() else "; ".join(problems),
            "restoring that file, or another --out",
        )  # fmt: skip


def heal(store: RunStore, log: Log, write_head: Callable[[], None], notice: Notice) -> None:
    """Remove shards that are not as the log has them, and write manifest and sample again if they are damaged.

    `write_head` writes both as this call would; if the log knows them otherwise, resuming is refused.
    """
    logged = logged_digests(store, log)

    def changed(names: Iterable[str]) -> list[str]:
        return [name for name in names if _digest(store, name) != logged.get(name)]

    damaged = changed(store.heads())
    if damaged:
        write_head()
        if still := changed(store.heads()):
            raise EquicamError(
                f"resuming {store.shown}", f"{still[0]} as it was written", "another file",
                "restoring it, or another --out",
            )  # fmt: skip
        notice(f"{' and '.join(damaged)} was not as it was written, and is written again")
    written = list(filter(store.has_shard, range(store.shard_count)))
    checked = map_concurrently(lambda n: changed(store.name(kind, n) for kind in KINDS), written)
    shards = [n for n, names in zip(written, checked, strict=True) if names]
    for number in shards:
        for kind in KINDS:
            store.path(kind, number).unlink()
        notice(f"shard {number} was not as the log has it, and is computed again")
    if damaged or shards:
        log.add("damaged", {"files": damaged, "shards": shards})


def complete(store: RunStore, log: Log) -> None:
    """Write digests.json, and an event with its digest; refused if a file is not as the log has it."""
    logged, names = logged_digests(store, log), store.names()
    digests = map_concurrently(lambda name: file_digest(store.folder / name), names)
    now = dict(zip(names, digests, strict=True))
    if changed := [name for name, digest in now.items() if logged.get(name) != digest]:
        raise EquicamError(
            store.shown, "the files it wrote, as it wrote them",
            f"{len(changed)} changed while it was computed ({', '.join(changed[:3])})",
            "the same command again, which computes them again",
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
    finished, problems = path.is_file(), list[str]()
    if missing := len(store.pending()):
        counts = f"{missing} of {store.shard_count} shards are missing"
        problems.append(f"the run is not finished: {counts}; equicam audit goes on")
    elif not finished:
        problems.append("digests.json is missing; equicam audit writes it again")
    try:
        log = Log(store.folder)
        listed = read_json(path) if finished else {}
        if finished and not is_complete(store, log):
            problems.append("digests.json is not the one whose digest the log holds")
        logged, queued = logged_digests(store, log), logged_files(log)
    except (EquicamError, OSError) as error:
        return 0, [*problems, str(error)]
    wanted = {name: logged.get(name) for name in store.names() if finished or (store.folder / name).is_file()}
    if finished and listed != wanted:
        odd = [name for name in sorted({*listed, *wanted}) if listed.get(name) != wanted.get(name)]
        problems.append(f"digests.json and the log do not agree on {', '.join(map(repr, odd[:3]))}")
    wanted |= queued

    def problem(name: str) -> str | None:
        digest = wanted[name]
        try:
            now = file_digest(store.folder / name)
        except (EquicamError, OSError) as error:
            why = error.got if isinstance(error, EquicamError) else error.strerror
            return f"{name} cannot be read: {why}"
        if now == digest:
            return None
        before = f"SHA-256 {str(digest)[:12]}…" if digest else "which the log does not know"
        return f"{name} is not as it was written ({before}, now {now[:12]}…)"

    return len(wanted), [*problems, *filter(None, map_concurrently(problem, wanted))]


def _digest(store: RunStore, name: str) -> str:
    """Of a file of the run; nothing where it cannot be read."""
    try:
        return file_digest(store.folder / name)
    except (EquicamError, OSError):
        return ""
