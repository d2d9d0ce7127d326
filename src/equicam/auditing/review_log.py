"""What reviewers said of a run's pictures: events of its log, read and added.

A verdict is never changed: a reviewer's next one on the same picture stands, and the one before stays. The first is the
reviewer's own, given before anything told them what the model predicted or what others said; `blind` says so.
"""

import threading
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from equicam.auditing.log import Event, Log
from equicam.errors import EquicamError

VERDICTS = {
    "supports": "Supports",
    "shortcut": "Shortcut or artefact",
    "wrong-region": "Wrong region",
    "unsure": "Unsure",
    "second-reader": "Needs a second reader",
}
COLUMNS = (
    "number", "time", "reviewer", "item", "verdict", "reason", "blind", "changes", "first", "stands", "previous", "hash",
)  # fmt: skip
TOLD = ("arm", "rank", "by", "peum", "disagreement", "class", "prob")  # of the triage
MOST_TEXT, MOST_NAME = 2000, 60  # characters of a reason or note, and of a reviewer's name


class StaleError(EquicamError):
    """Somebody else's answer, or one of another window, came first."""


@dataclass(frozen=True)
class Verdict:
    """One verdict as it was given."""

    number: int  # of its event
    time: str  # UTC
    reviewer: str
    item: str
    verdict: str
    reason: str
    blind: bool  # given before the prediction was shown
    changes: int | None  # the event it takes the place of
    previous: str
    hash: str


@dataclass(frozen=True)
class Note:
    """A remark on a picture."""

    number: int
    time: str
    reviewer: str
    item: str
    text: str


class Readings:
    """All verdicts and notes of a run, kept up with the log as others write to it."""

    def __init__(self, folder: Path) -> None:
        self.log = Log(folder)
        self.seen = 0  # the last event read
        self._lock = threading.RLock()
        self._verdicts: dict[str, list[Verdict]] = {}
        self._notes: dict[str, list[Note]] = {}
        self._standing: dict[str, dict[str, Verdict]] = {}
        self._marks: dict[str, Verdict | Note] = {}
        self._asked: set[str] = set()

    def refresh(self) -> int:
        """Read what was added since; the number of the last event."""
        with self._lock:
            for event in self.log.events(after=self.seen):
                self._take(event)
                self.seen = event.number
            return self.seen

    def verdicts(self, item: str | None = None) -> tuple[Verdict, ...]:
        """Those on a picture, or all, in the order they were given."""
        with self._lock:
            if item is not None:
                return tuple(self._verdicts.get(item, ()))
            return tuple(
                sorted((v for some in self._verdicts.values() for v in some), key=lambda v: v.number)
            )

    def notes(self, item: str | None = None) -> tuple[Note, ...]:
        """Those on a picture, or all, in the order they were written."""
        with self._lock:
            if item is not None:
                return tuple(self._notes.get(item, ()))
            return tuple(sorted((n for some in self._notes.values() for n in some), key=lambda n: n.number))

    def standing(self, reviewer: str) -> dict[str, Verdict]:
        """A reviewer's last verdict by picture."""
        with self._lock:
            return dict(self._standing.get(reviewer, {}))

    def asked(self) -> set[str]:
        """Pictures for which somebody ever asked for a second reader."""
        with self._lock:
            return set(self._asked)

    def readers(self, item: str) -> dict[str, Verdict]:
        """Each reviewer's last verdict on a picture."""
        return {v.reviewer: v for v in self.verdicts(item)}

    def decide(
        self, item: str, reviewer: str, verdict: str, *, reason: str = "", blind: bool, seen: int, mark: str
    ) -> Verdict:
        """Add a verdict. `seen` is the reviewer's verdict before (0: none), `mark` lets it be sent twice and count once."""
        if verdict not in VERDICTS:
            raise EquicamError(
                "a verdict", needs=f"one of {', '.join(VERDICTS)}", got=repr(verdict)[:40], fix="one of them"
            )
        reason = text("a reason", reason)
        with self._lock:
            self.refresh()
            before = self._standing.get(reviewer, {}).get(item)
            if known := self._known(mark, reviewer, item, verdict, reason):
                return known
            last = before.number if before else 0
            if last != seen:
                raise StaleError(
                    "this verdict", needs="the last one you gave here to be what you saw", got=f"event {last}, not {seen}",
                    fix="reading the picture again",
                )  # fmt: skip
            if before and not reason:
                raise EquicamError(
                    "a changed verdict", needs="a reason", got="none", fix="a word on why it changes"
                )
            told = {"item": item, "verdict": verdict, "reason": reason, "mark": mark}
            self.log.add(
                "verdict", told | {"blind": blind and not before, "changes": last or None}, who=reviewer
            )
            self.refresh()
            if added := self._known(mark, reviewer, item, verdict, reason):
                return added
        raise OSError(f"{self.log.path}: a verdict was written and cannot be read back")

    def remark(self, item: str, reviewer: str, said: str, *, mark: str) -> Note:
        """Add a note."""
        said = text("a note", said)
        if not said:
            raise EquicamError("a note", needs="words", got="none", fix="writing some")
        with self._lock:
            self.log.add("note", {"item": item, "text": said, "mark": mark}, who=reviewer)
            self.refresh()
            added = self._marks.get(mark)
        if not isinstance(added, Note) or (added.item, added.reviewer, added.text) != (item, reviewer, said):
            raise StaleError(
                "this note", needs="a mark of its own", got="one used before", fix="sending it anew"
            )
        return added

    def _known(self, mark: str, reviewer: str, item: str, verdict: str, reason: str) -> Verdict | None:
        known = self._marks.get(mark)
        if known is None:
            return None
        asked = (reviewer, item, verdict, reason)
        if (
            not isinstance(known, Verdict)
            or (known.reviewer, known.item, known.verdict, known.reason) != asked
        ):
            raise StaleError(
                "this verdict", needs="a mark of its own", got="one used before", fix="sending it anew"
            )
        return known

    def _take(self, event: Event) -> None:
        told, item = event.payload, event.payload.get("item")
        if not isinstance(item, str):
            return
        made: Verdict | Note
        if event.kind == "verdict" and told.get("verdict") in VERDICTS:
            made = Verdict(
                event.number, event.time, event.who, item, told["verdict"], str(told.get("reason") or ""),
                bool(told.get("blind")), told.get("changes"), event.previous, event.hash,
            )  # fmt: skip
            self._verdicts.setdefault(item, []).append(made)
            self._standing.setdefault(event.who, {})[item] = made
            if made.verdict == "second-reader":
                self._asked.add(item)
        elif event.kind == "note":
            made = Note(event.number, event.time, event.who, item, str(told.get("text") or ""))
            self._notes.setdefault(item, []).append(made)
        else:
            return
        if isinstance(told.get("mark"), str):
            self._marks[told["mark"]] = made


def text(what: str, given: str, *, most: int = MOST_TEXT) -> str:
    """Somebody's words as they are kept: trimmed, of bounded length, and such that every file can hold them."""
    said = given.strip()
    if len(said) > most:
        raise EquicamError(what, needs=f"at most {most:,} characters", got=f"{len(said):,}", fix="fewer")
    if any(c == "\x00" or unicodedata.category(c) == "Cs" for c in said):
        raise EquicamError(what, needs="text", got="characters that are none", fix="typing it anew")
    return said


def reviewer_name(given: str) -> str:
    """A name that can stand in a log and a table: one line, nothing hidden in it."""
    said = unicodedata.normalize("NFC", text("a reviewer's name", given, most=MOST_NAME))
    if not said or not said.isprintable():
        raise EquicamError(
            "a reviewer's name", needs="letters on one line", got=repr(given)[:40], fix="initials or a name"
        )
    return said


def exported(
    readings: Readings, triage: pa.Table, *, of: str | None = None, told: bool = True
) -> list[dict[str, Any]]:
    """Verdicts as rows, those of one reviewer or all; `told` adds what the triage says of each picture."""
    given = [v for v in readings.verdicts() if of in (None, v.reviewer)]
    last = {(v.reviewer, v.item): v.number for v in given}
    first = {(v.reviewer, v.item): v.number for v in reversed(given)}
    names = [name for name in TOLD if told and name in triage.column_names]
    known = {row["id"]: row for row in triage.select(["id", *names]).to_pylist()} if told else {}
    rows = []
    for v in given:
        about, facts = (v.reviewer, v.item), known.get(v.item, {})
        row = asdict(v) | {"first": first[about] == v.number, "stands": last[about] == v.number}
        row |= {name: facts.get(name) for name in (TOLD if told else ())}
        rows.append({name: row[name] for name in (*COLUMNS, *(TOLD if told else ()))})
    return rows
