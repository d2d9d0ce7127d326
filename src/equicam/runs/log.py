"""The log of a run: events are only ever added, and each holds the SHA-256 of the one before.

hash = SHA-256 of the canonical JSON of [number, time, who, kind, payload, hash before]. Changing, dropping or
reordering an event breaks the chain from there on. A chain that was cut off or rewritten as a whole by
someone with write access shows only against a hash noted elsewhere: reports print the last one, `verify --hash` takes it.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.shards import parse_object

FIRST = "0" * 64
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
    who: str
    kind: str
    payload: dict[str, Any]
    previous: str
    hash: str


_OBJECTS = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL"


class Log:
    """The events of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "events.sqlite"

    def add(self, kind: str, payload: Mapping[str, Any], *, who: str = "equicam") -> Event:
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
            row = (number, time, who, kind, text, previous)
            event = (*row, _hash(row))
            database.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", event)
            if database.execute(f"{_ALL} WHERE number = ?", (number,)).fetchall() != [event]:
                raise OSError(f"{self.path}: an event was not written as it was added")
            database.execute("COMMIT")
        return Event(number, time, who, kind, json.loads(text), previous, event[-1])

    def events(self, kind: str | None = None, *, after: int = 0) -> list[Event]:
        """All events in order, or those of one kind, or those after a number."""
        return [_event(row) for row in self._rows(after) if kind in (None, row[3])]

    def last(self) -> str:
        """The hash of the last event."""
        rows = self._rows()
        return str(rows[-1][6]) if rows else FIRST

    def problems(self) -> list[str]:
        """Everything wrong with the chain, one sentence per problem."""
        found, previous = [], FIRST
        for place, row in enumerate(self._rows(), start=1):
            if row[0] != place:
                found.append(f"event {place} is missing (the next one is {row[0]})")
                break
            if row[5] != previous:
                found.append(f"event {place} does not follow the one before it")
            if row[6] != _hash(row[:6]):
                found.append(f"event {place} was changed")
            previous = row[6]
        return found

    def clock_jumps(self) -> list[str]:
        """Every event that the clock puts before the one before it, one sentence per event."""
        found: list[str] = []
        latest: Event | None = None
        for event in self.events():
            now, before = _clock(event.time), latest and _clock(latest.time)
            if now is None:
                found.append(f"event {event.number} has no time")
            elif before and latest and before > now:
                found.append(
                    f"the clock went back by {before - now} between event {latest.number} and event {event.number}"
                )
            latest = event if now else latest
        return found

    def _rows(self, after: int = 0) -> list[tuple[Any, ...]]:
        if not self.path.is_file():
            return []
        with self._open() as database:
            rows = database.execute(f"{_ALL} WHERE number > ? ORDER BY number", (after,)).fetchall()
        for row in rows:
            _refuse_odd(row)
        return rows

    def _refuse_foreign(self, database: sqlite3.Connection) -> None:
        """Refuse a database with anything but our table, index and triggers: others could drop or change events."""
        if odd := set(database.execute(_OBJECTS)) ^ _schema():
            raise EquicamError(
                "events.sqlite", needs="the table, index and triggers of a log alone", got=f"another {min(odd)[1][:80]!r}", fix="restoring it"
            )  # fmt: skip

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self.path, timeout=30, isolation_level=None)) as database:
                database.execute("PRAGMA synchronous = FULL")
                database.executescript(_TABLE)
                self._refuse_foreign(database)
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
            "events.sqlite",
            needs="a number and texts in every event",
            got="values of other types",
            fix="restoring it",
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
            f"event {row[0]} of the log", needs="a JSON object", got=error, fix="restoring events.sqlite"
        ) from error
    return Event(row[0], str(row[1]), str(row[2]), str(row[3]), payload, str(row[5]), str(row[6]))


def _clock(time: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(time)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
