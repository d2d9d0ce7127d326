"""The review log: verdicts and notes of reviewers on a run's images, stored as events of the run's log.

A verdict is never changed: a reviewer's next one on the same image replaces it and both stay in the log. Each browser has a
mark in the log and the names it used: names that share a browser are taken for one person.

The run has a secret, `review.key`: keys, order and tags that reviewers see, the draw of the control arm and the order of
the exports come from it, so that nobody can compute an image's arm, name or label from them.
"""

import hmac
import os
import secrets
import threading
import unicodedata
from dataclasses import asdict, dataclass
from json.encoder import encode_basestring_ascii as quote
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from equicam.errors import EquicamError, not_one_of
from equicam.runs.log import Event, Log
from equicam.shards import temporary_file

VERDICTS = {
    "supports": "Supports",
    "shortcut": "Shortcut or artefact",
    "wrong-region": "Wrong region",
    "unsure": "Unsure",
    "second-reviewer": "Needs a second reviewer",
}
COLUMNS = (
    "number", "time", "reviewer", "item", "verdict", "reason", "blind", "blind_class", "changes", "first", "stands",
    "source", "previous", "hash",
)  # fmt: skip
TRIAGE_COLUMNS = ("arm", "rank", "by", "stability", "peum_score", "risk", "class", "confidence")
MAX_TEXT_CHARS, MAX_NAME_CHARS = 2000, 60
KEY_FILE, KEY_BYTES = "review.key", 32


class StaleError(EquicamError):
    """Another verdict, from another window or reviewer, came first."""


@dataclass(frozen=True)
class Verdict:
    """One verdict."""

    number: int  # of its event
    time: str  # UTC
    reviewer: str
    item: str
    verdict: str
    reason: str
    blind: bool  # given before confidence, label and signals were shown
    changes: int | None  # the event it replaces
    previous: str  # the hash of the log's event before this one
    hash: str
    source: str | None = None  # the file it was imported from
    blind_class: bool = False  # given before the class was shown, too


@dataclass(frozen=True)
class Source:
    """The file that a verdict was imported from."""

    file: str  # its name
    sha256: str
    blind: bool  # whether it was exported without what blinding hides


@dataclass(frozen=True)
class Note:
    """A note on an image."""

    number: int
    time: str
    reviewer: str
    item: str
    text: str


Entry = TypeVar("Entry", Verdict, Note)
TEXTS = ("verdict", "reason", "text")
"""Fields of either that a reviewer wrote."""


class ReviewLog:
    """All verdicts and notes of a run; `refresh` reads what other processes have added to the log."""

    def __init__(self, folder: Path) -> None:
        self.log = Log(folder)
        self.last_event = 0  # the number of the last event read
        self._lock = threading.RLock()
        self._verdicts: dict[str | None, list[Verdict]] = {}  # by image; all of them by None
        self._notes: dict[str | None, list[Note]] = {}
        self._standing: dict[str, dict[str, Verdict]] = {}
        self._marks: dict[str, Verdict | Note] = {}  # by the mark of the request that added it
        self._second_requested: set[str] = set()
        self._names: dict[str, list[str]] = {}  # by the mark of the browser, in order of use
        self._unblinded: set[str] = set()  # names that opened the run without blinding
        self._class_shown: set[str] = set()  # names that reviewed with the class shown

    def refresh(self) -> int:
        """Read new events; returns the number of the last one."""
        with self._lock:
            for event in self.log.events(after=self.last_event):
                self._take(event)
                self.last_event = event.number
            return self.last_event

    def verdicts(self, item: str | None = None) -> tuple[Verdict, ...]:
        """Those on an image, or all, in the order they were given."""
        with self._lock:
            return tuple(self._verdicts.get(item, ()))

    def notes(self, item: str | None = None) -> tuple[Note, ...]:
        """Those on an image, or all, in the order they were written."""
        with self._lock:
            return tuple(self._notes.get(item, ()))

    def standing(self, reviewer: str) -> dict[str, Verdict]:
        """A reviewer's last verdict by image."""
        with self._lock:
            return dict(self._standing.get(reviewer, {}))

    def second_requested(self) -> set[str]:
        """Images for which any reviewer ever requested a second reviewer."""
        with self._lock:
            return set(self._second_requested)

    def by_reviewer(self, item: str) -> dict[str, Verdict]:
        """Each reviewer's last verdict on an image."""
        return {v.reviewer: v for v in self.verdicts(item)}

    def names(self, browser: str) -> tuple[str, ...]:
        """The names a browser used, the last one last."""
        with self._lock:
            return tuple(self._names.get(browser, ()))

    def is_registered(self, reviewer: str) -> bool:
        """Whether any browser used this name."""
        with self._lock:
            return any(reviewer in names for names in self._names.values())

    def same_person(self, reviewer: str) -> frozenset[str]:
        """The name itself, and every name that shares a browser with it or with one of them."""
        with self._lock:
            person, before = {reviewer}, 0
            while len(person) > before:
                before = len(person)
                person.update(*(names for names in self._names.values() if not person.isdisjoint(names)))
            return frozenset(person)

    def has_mark(self, mark: str) -> bool:
        """Whether a verdict or note with this mark was added."""
        with self._lock:
            return mark in self._marks

    def register(self, reviewer: str, browser: str, *, blind: bool, blind_class: bool) -> None:
        """Log that a browser uses this name from now on; nothing if it does already."""
        mode = {"blind": blind, "blind_class": blind and blind_class}
        with self._lock:
            for _ in range(2):
                if self._is_current(reviewer, browser, **mode):
                    return
                self.refresh()  # another server may have registered it
            also = [name for name in self._names.get(browser, ()) if name != reviewer]
            payload = {"browser": browser, **mode, "also": also}
            self.log.add("also known as" if also else "reviewer registered", payload, actor=reviewer)
            self.refresh()

    def add_verdict(
        self,
        item: str,
        reviewer: str,
        verdict: str,
        *,
        reason: str = "",
        blind: bool,
        blind_class: bool = True,
        previous_event: int,
        mark: str,
        source: Source | None = None,
    ) -> Verdict:
        """Add a verdict; `previous_event` is the number of the reviewer's last one on this image (0: none).

        `mark` is a random string of the request: a repeated request adds nothing and returns the first verdict.
        """
        if verdict not in VERDICTS:
            raise not_one_of("a verdict", VERDICTS, verdict[:38], "one of them")
        reason = clean_text("a reason", reason)
        payload: dict[str, Any] = {"item": item, "verdict": verdict, "reason": reason, "mark": mark}
        with self._lock:
            self.refresh()
            before = self._standing.get(reviewer, {}).get(item)
            if known := self._known(Verdict, reviewer, payload):
                return known
            last = before.number if before else 0
            if last != previous_event:
                raise StaleError(
                    "this verdict", needs="your last one here to be the one you saw", got=f"event {last}, not {previous_event}",
                    fix="reloading the image",
                )  # fmt: skip
            if before and not reason:
                raise EquicamError("a changed verdict", "a reason", "none", "a word on why it changes")
            if source is not None:
                payload["source"] = asdict(source)
            blind = blind and not self._revealed(reviewer, item)
            blind_class = blind and blind_class and self.same_person(reviewer).isdisjoint(self._class_shown)
            payload |= {"blind": blind, "blind_class": blind_class, "changes": last or None}
            return self._add(Verdict, reviewer, payload)

    def add_note(self, item: str, reviewer: str, text: str, *, mark: str) -> Note:
        """Add a note."""
        text = clean_text("a note", text)
        if not text:
            raise EquicamError("a note", "words", "none", "writing some")
        with self._lock:
            return self._add(Note, reviewer, {"item": item, "text": text, "mark": mark})

    def _add(self, kind: type[Entry], reviewer: str, payload: dict[str, Any]) -> Entry:
        self.log.add(kind.__name__.lower(), payload, actor=reviewer)
        self.refresh()
        if added := self._known(kind, reviewer, payload):
            return added
        raise OSError(f"{self.log.path}: what was added cannot be read back")

    def _known(self, kind: type[Entry], reviewer: str, payload: dict[str, Any]) -> Entry | None:
        """What an earlier request with this mark added; refused if it was another."""
        known = self._marks.get(payload["mark"])
        if known is None:
            return None
        facts = {"reviewer": reviewer} | payload
        same = (getattr(known, name, None) == facts.get(name) for name in ("reviewer", "item", *TEXTS))
        if not isinstance(known, kind) or not all(same):
            raise StaleError(
                f"this {kind.__name__.lower()}", "a mark of its own", "one used before", "sending it again"
            )
        return known

    def _is_current(self, reviewer: str, browser: str, *, blind: bool, blind_class: bool) -> bool:
        last = self._names.get(browser, [])[-1:]
        shown = (blind or reviewer in self._unblinded) and (blind_class or reviewer in self._class_shown)
        return last == [reviewer] and shown

    def _revealed(self, reviewer: str, item: str) -> bool:
        """Whether this person has seen what blinding hides of an image: after a verdict, or without blinding."""
        names = self.same_person(reviewer)
        return not names.isdisjoint(self._unblinded) or any(item in self._standing.get(n, {}) for n in names)

    def _take(self, event: Event) -> None:
        payload, item = event.payload, event.payload.get("item")
        browser = payload.get("browser")
        if event.kind in ("reviewer registered", "also known as") and isinstance(browser, str):
            names = self._names.setdefault(browser, [])
            names[:] = [*(name for name in names if name != event.actor), event.actor]
            if not payload.get("blind"):
                self._unblinded.add(event.actor)
            if not _blind_class(payload):
                self._class_shown.add(event.actor)
            return
        if not isinstance(item, str):
            return
        added: Verdict | Note
        verdict, source = payload.get("verdict"), payload.get("source")
        source = source if isinstance(source, dict) else None
        if event.kind == "verdict" and isinstance(verdict, str) and verdict in VERDICTS:
            added = Verdict(
                event.number, event.time, event.actor, item, verdict, str(payload.get("reason") or ""),
                bool(payload.get("blind")), payload.get("changes"), event.previous, event.hash,
                None if source is None else str(source.get("file")), _blind_class(payload),
            )  # fmt: skip
            if source is not None and source.get("blind") is not True:
                self._unblinded.add(event.actor)  # such an export shows every image's signals
            for key in (item, None):
                self._verdicts.setdefault(key, []).append(added)
            self._standing.setdefault(event.actor, {})[item] = added
            if added.verdict == "second-reviewer":
                self._second_requested.add(item)
        elif event.kind == "note":
            added = Note(event.number, event.time, event.actor, item, str(payload.get("text") or ""))
            for key in (item, None):
                self._notes.setdefault(key, []).append(added)
        else:
            return
        if isinstance(payload.get("mark"), str):
            self._marks[payload["mark"]] = added


def _blind_class(payload: dict[str, Any]) -> bool:
    """Whether the class was hidden."""
    return bool(payload.get("blind") and payload.get("blind_class"))


def clean_text(what: str, written: str, *, most: int = MAX_TEXT_CHARS) -> str:
    """A person's text, trimmed; refused if it is too long or no file format could hold it."""
    text = written.strip()
    if len(text) > most:
        raise EquicamError(what, f"at most {most:,} characters", f"{len(text):,}", "fewer")
    if any(c == "\x00" or unicodedata.category(c) == "Cs" for c in text):
        raise EquicamError(what, "text", "characters that are none", "typing it again")
    return text


def reviewer_name(written: str) -> str:
    """A name for logs and tables: one line of printable characters."""
    name = unicodedata.normalize("NFC", clean_text("a reviewer's name", written, most=MAX_NAME_CHARS))
    if not name or not name.isprintable():
        raise EquicamError(
            "a reviewer's name", "letters on one line", repr(written)[:40], "initials or a name"
        )
    return name


def verdict_rows(
    review_log: ReviewLog, triage: pa.Table, *, reviewer: str | None = None, with_triage: bool = True
) -> list[dict[str, Any]]:
    """Verdicts as rows, those of one reviewer or all; `with_triage` adds each image's columns of the triage."""
    verdicts = [v for v in review_log.verdicts() if reviewer in (None, v.reviewer)]
    last = {(v.reviewer, v.item): v.number for v in verdicts}
    first = {(v.reviewer, v.item): v.number for v in reversed(verdicts)}
    added = TRIAGE_COLUMNS if with_triage else ()
    triaged = {row["id"]: row for row in triage.select(["id", *added]).to_pylist()}
    rows = []
    for v in verdicts:
        about, facts = (v.reviewer, v.item), triaged.get(v.item, {})
        row = asdict(v) | {"first": first[about] == v.number, "stands": last[about] == v.number}
        rows.append({name: row[name] for name in COLUMNS} | {name: facts.get(name) for name in added})
    return rows


class ReviewKey:
    """HMAC-SHA256 with the run's secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def digest(self, purpose: str, *values: str) -> str:
        """64 hexadecimal digits for these values; those of one purpose say nothing about another's."""
        listed = ", ".join(map(quote, (purpose, *values)))  # as JSON; `json.dumps` takes longer
        return hmac.digest(self._secret, f"[{listed}]".encode(), "sha256").hex()


def read_review_key(folder: Path, *, create: bool = True) -> ReviewKey:
    """The run's secret, made where there is none yet; all servers of a run share it."""
    path = Path(folder) / KEY_FILE
    if create and not path.is_file():
        _create(path)
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise EquicamError(
            str(path), "to be readable", error.strerror, "the user who ranked the run, or equicam triage again",
        ) from error  # fmt: skip
    if len(secret) != KEY_BYTES:
        raise EquicamError(
            str(path), f"{KEY_BYTES} bytes", len(secret), "deleting it and equicam triage again"
        )
    return ReviewKey(secret)


def _create(path: Path) -> None:
    """Write a new secret that only this user can read, unless another process is first."""
    with temporary_file(path, secrets.token_bytes(KEY_BYTES)) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # no hard links here
            if not path.is_file():
                temporary.rename(path)
