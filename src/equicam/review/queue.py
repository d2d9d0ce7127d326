"""The pictures to review, in an order that gives nothing away, and their rows, read a part at a time."""

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equicam.auditing.queue_files import read_queue, refuse_unranked
from equicam.auditing.review_log import VERDICTS, ReviewLog
from equicam.auditing.signals import ranked_by
from equicam.auditing.store import RunStore
from equicam.auditing.stored_maps import StoredMaps
from equicam.errors import EquicamError

A_PAGE = 200  # the most entries of one answer
FILTERS = ("class", "flag", "verdict", "arm")


@dataclass(frozen=True, slots=True)
class Entry:
    """One picture to review; `key` stands for it in addresses, where no name of anybody's may be."""

    key: str
    id: str
    row: int  # in the triage
    part: int
    arm: str
    named: str | None  # the predicted class
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Shelf:
    """The queue as it was ranked at one moment."""

    run: RunStore
    version: str  # of triage.parquet: another one is another order
    triage: pa.Table
    by: str  # what it is ranked by
    entries: tuple[Entry, ...]  # in order of review
    places: Mapping[str, int]  # by key
    ids: Mapping[str, int]  # places by id
    flags: Mapping[str, int]  # how many have each
    arms: Mapping[str, int]

    def find(self, key: str) -> Entry | None:
        """The entry of a key."""
        place = self.places.get(key)
        return None if place is None else self.entries[place]

    def ranked(self, entry: Entry) -> dict[str, Any]:
        """What the triage says of it."""
        found: dict[str, Any] = self.triage.slice(entry.row, 1).to_pylist()[0]
        return found

    def row(self, entry: Entry) -> dict[str, Any]:
        """Its row in the run."""
        found = self._rows("items", entry)
        if self.run.moved:
            found["path"] = self.run.moved.get(entry.id, found["path"])
        return found

    def drawn(self, entry: Entry) -> StoredMaps | None:
        """Its maps."""
        if not self.run.path("maps", entry.part).is_file():
            return None
        return StoredMaps.from_row(self._rows("maps", entry))

    def _rows(self, kind: str, entry: Entry) -> dict[str, Any]:
        path = self.run.path(kind, entry.part)
        table = _part(self.run, kind, entry.part, path.stat().st_mtime_ns)
        rows = table.filter(pc.equal(table["id"], entry.id)).to_pylist()
        if not rows:
            raise EquicamError(
                f"the queue of {self.run.folder.name}", needs="pictures of this run", got="one that is not in it",
                fix="equicam triage again",
            )  # fmt: skip
        found: dict[str, Any] = rows[0]
        return found


@lru_cache(maxsize=16)
def _part(run: RunStore, kind: str, number: int, _written: int) -> pa.Table:
    return run.read_shard(kind, number)


class Shelves:
    """The newest shelf of a run: ranked again while it is reviewed, it is read again."""

    def __init__(self, run: RunStore, *, blind: bool) -> None:
        self.run, self.blind = run, blind
        self._lock = threading.Lock()
        self._last: tuple[tuple[int, int], Shelf] | None = None

    def newest(self) -> Shelf:
        """As triage.parquet has it now."""
        path = self.run.folder / "triage.parquet"
        refuse_unranked(self.run)
        with self._lock:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if self._last is None or self._last[0] != stamp:
                self._last = (stamp, _shelved(self.run, path, blind=self.blind))
            return self._last[1]


def _shelved(run: RunStore, path: Path, *, blind: bool) -> Shelf:
    data = path.read_bytes()
    triage = read_queue(run)
    version = hashlib.sha256(data).hexdigest()[:16]
    sample = run.sample()
    part = dict(zip(sample["id"].to_pylist(), sample["shard"].to_pylist(), strict=True))
    columns = [triage[name].to_pylist() for name in ("id", "arm", "class", "flags")]
    found = [
        Entry(key_of(name), name, row, part.get(name, 0), arm, named, tuple(flags or ()))
        for row, (name, arm, named, flags) in enumerate(zip(*columns, strict=True))
    ]
    rank = triage["rank"].to_pylist()
    found.sort(key=lambda e: rank[e.row])
    entries = _mixed(found, version) if blind else tuple(found)
    return Shelf(
        run, version, triage, ranked_by(triage), entries,
        places={e.key: place for place, e in enumerate(entries)},
        ids={e.id: place for place, e in enumerate(entries)},
        flags=dict(sorted(Counter(flag for e in entries for flag in e.flags).items())),
        arms=dict(sorted(Counter(e.arm for e in entries).items(), reverse=True)),
    )  # fmt: skip


def key_of(name: str) -> str:
    """A picture's name in addresses."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def _mixed(ranked: list[Entry], salt: str) -> tuple[Entry, ...]:
    """The queue by rank, with every random picture at a place drawn evenly: by the order alone nobody tells them apart."""
    queue = [e for e in ranked if e.arm == "queue"]
    at = {e.key: (i + 0.5) / len(queue) for i, e in enumerate(queue)}
    for e in ranked:
        if e.arm != "queue":
            at[e.key] = int(hashlib.sha256(f"{salt} {e.key}".encode()).hexdigest()[:13], 16) / 16**13
    return tuple(sorted(ranked, key=lambda e: at[e.key]))


class Sieve:
    """Which entries pass a reader's filters; the last few answers are kept."""

    def __init__(self, shelves: Shelves, readings: ReviewLog) -> None:
        self.shelves, self.readings = shelves, readings
        self._kept: dict[tuple[Any, ...], tuple[Entry, ...]] = {}

    def finished(self, shelf: Shelf, reviewer: str) -> bool:
        """Has this reader given a verdict on every picture?"""
        return self.read(shelf, reviewer) == len(shelf.entries)

    def read(self, shelf: Shelf, reviewer: str) -> int:
        """How many of the pictures to review this reader has."""
        return len(shelf.ids.keys() & self.readings.standing(reviewer).keys())

    def told(self, shelf: Shelf, reviewer: str) -> bool:
        """May arms be named to this reader? Only where nothing is blind, or nothing is left to be biased."""
        return not self.shelves.blind or self.finished(shelf, reviewer)

    def passing(self, shelf: Shelf, reviewer: str, wanted: Mapping[str, str]) -> tuple[Entry, ...]:
        """Entries in order; a class, blind, is only that of pictures this reader has given a verdict on."""
        wanted = {name: value for name, value in wanted.items() if value}
        if not wanted:
            return shelf.entries
        if "arm" in wanted and not self.told(shelf, reviewer):
            raise EquicamError(
                "the arm", needs="all verdicts given, or a review that is not blind", got="pictures still to read",
                fix="reading them first",
            )  # fmt: skip
        stamp = (shelf.version, reviewer, self.readings.last_event, *sorted(wanted.items()))
        found = self._kept.get(stamp)
        if found is None:
            mine = self.readings.standing(reviewer)
            found = tuple(e for e in shelf.entries if self._passes(e, wanted, mine))
            if len(self._kept) > 32:
                self._kept = {}
            self._kept[stamp] = found
        return found

    def _passes(self, e: Entry, wanted: Mapping[str, str], mine: Mapping[str, Any]) -> bool:
        for name, value in wanted.items():
            if name == "flag":
                fits = value in e.flags
            elif name == "class":
                fits = e.named == value and (not self.shelves.blind or e.id in mine)
            elif name == "arm":
                fits = e.arm == value
            elif value == "unread":
                fits = e.id not in mine
            elif value == "to-second":
                fits = e.id not in mine and wants_second(self.readings, e.id)
            elif value in VERDICTS:
                fits = e.id in mine and mine[e.id].verdict == value
            else:
                fits = value == "read" and e.id in mine
            if not fits:
                return False
        return True


def wants_second(readings: ReviewLog, item: str) -> bool:
    """One reader alone has asked for another."""
    found = readings.by_reviewer(item)
    return len(found) == 1 and next(iter(found.values())).verdict == "second-reviewer"
