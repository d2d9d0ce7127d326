"""Verdicts in files: a run's written as CSV or JSON, and those given in QuPath or QGIS read from their GeoJSON.

A feature names its image by the UUID that `feature_id` gives it in this run, so that features of another run match none.
Its verdict is QuPath's classification or a property `verdict`. A file is taken whole or refused whole.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.files import read_file
from equicam.images.items import valid_utf8
from equicam.rasters.geojson import MAX_BYTES, read_features
from equicam.runs.queue_files import as_csv, feature_id, read_queue
from equicam.runs.store import RunStore
from equicam.runs.verdicts import (
    COLUMNS,
    TRIAGE_COLUMNS,
    VERDICTS,
    ReviewLog,
    Source,
    clean_text,
    reviewer_name,
    verdict_rows,
)
from equicam.shards import json_ready, write_atomic

MAX_LISTED = 5  # problems in one message
ID, BLIND = "equicam id", "equicam blind"
"""What an export may note in a feature; QuPath keeps no member of the collection."""


def encode_verdicts(log: ReviewLog, triage: pa.Table, suffix: str, *, reviewer: str | None = None) -> bytes:
    """All verdicts with the columns of the triage; with `reviewer`, only theirs and without those columns.

    A reviewer's note on an image without their verdict does not name the image, because a name may hold the label.
    """
    complete = reviewer is None
    rows = verdict_rows(log, triage, reviewer=reviewer, with_triage=complete)
    if suffix == "csv":
        return as_csv([*COLUMNS, *(TRIAGE_COLUMNS if complete else ())], rows)
    revealed = {row["item"] for row in rows}
    notes = [
        asdict(note) | ({} if complete or note.item in revealed else {"item": None})
        for note in log.notes()
        if complete or note.reviewer == reviewer
    ]
    content = json_ready({"complete": complete, "verdicts": rows, "notes": notes})
    return json.dumps(content, indent=1, allow_nan=False).encode()


def write_verdicts(store: RunStore, path: Path) -> int:
    """Write all verdicts of a run to a .csv or .json file; returns how many there are."""
    suffix = path.suffix.lower().removeprefix(".")
    if suffix not in ("csv", "json"):
        raise EquicamError("--export", "a name that ends in .csv or .json", str(path), "verdicts.csv")
    queue, log = read_queue(store), ReviewLog(store.folder)
    log.refresh()
    write_atomic(path, encode_verdicts(log, queue, suffix))
    return len(verdict_rows(log, queue))


@dataclass(frozen=True)
class ImportedVerdicts:
    """What became of a file's features."""

    taken: int
    without: int  # features without a verdict
    already: int  # verdicts that the log has

    @property
    def sentence(self) -> str:
        """The counts for people."""
        verdicts = f"{self.taken:,} verdict{'s' if self.taken != 1 else ''}"
        features = f"{self.without:,} feature{'s' if self.without != 1 else ''}"
        return f"{verdicts} taken, {features} without one, {self.already:,} already there"


def import_verdicts(store: RunStore, path: Path, *, reviewer: str, replace: bool = False) -> ImportedVerdicts:
    """Add the verdicts in a GeoJSON file to a run's log under a reviewer's name; the same file again adds nothing.

    `replace` allows verdicts that differ from this reviewer's earlier ones.
    """
    reviewer, name = reviewer_name(reviewer), valid_utf8(path.name)
    what = f"the import of {visible(name, 120)!r}"
    found = _FileVerdicts(store)
    data, _ = read_file(path, what=what, limit=MAX_BYTES)
    features, collection = limited.call(read_features, data, what)
    for number, feature in enumerate(features, start=1):
        try:
            found.take(feature)
        except ValueError as error:
            found.problems.append(f"feature {number} {error}")
    needs = "features of this run's queue with one of our verdicts"
    _refuse(what, found.problems, needs, "mending these features; nothing was imported")
    ours = collection.get("equicam")
    noted = bool(found.blind) and all(found.blind)
    blind = noted or (isinstance(ours, dict) and ours.get("blind") is True)
    log = ReviewLog(store.folder)
    log.refresh()
    own, digest = log.standing(reviewer), hashlib.sha256(data).hexdigest()
    new = {
        item: (verdict, reason, mark)
        for item, (verdict, reason) in found.verdicts.items()
        if not log.has_mark(mark := _mark(digest, reviewer, item))
        and not (item in own and own[item].verdict == verdict and reason in ("", own[item].reason))
    }
    if not replace:
        changes = [f"{visible(i, 80)!r}: {own[i].verdict} would become {new[i][0]}" for i in new if i in own]
        needs = f"no other verdict of {reviewer} on its images"
        _refuse(what, changes, needs, "--replace, which keeps both in the log")
    source = Source(clean_text("a file name", visible(name, 200)), digest, blind)
    for item, (verdict, reason, mark) in new.items():
        before = own.get(item)
        log.add_verdict(
            item, reviewer, verdict, reason=reason or (f"imported from {source.file}" if before else ""), blind=blind,
            previous_event=before.number if before else 0, mark=mark, source=source,
        )  # fmt: skip
    return ImportedVerdicts(len(new), found.without, len(found.verdicts) - len(new))


def _mark(digest: str, reviewer: str, item: str) -> str:
    """The mark of an imported verdict: the same for the same file, reviewer and image."""
    return "import-" + hashlib.sha256(f"{digest}\0{reviewer}\0{valid_utf8(item)}".encode()).hexdigest()[:40]


def _refuse(what: str, problems: Sequence[str], needs: str, fix: str) -> None:
    if problems:
        more = len(problems) - MAX_LISTED
        got = "; ".join(problems[:MAX_LISTED]) + (f"; and {more:,} more" if more > 0 else "")
        raise EquicamError(what, needs, got, fix)


class _FileVerdicts:
    """What a file's features say of a run's images, by the ids of features, and what is wrong with them."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.queued = {feature_id(store, item): item for item in read_queue(store)["id"].to_pylist()}
        self.verdicts: dict[str, tuple[str, str]] = {}  # verdict and reason by image
        self.without = 0  # features without a verdict
        self.problems: list[str] = []
        self.blind: list[bool] = []  # of each feature that was taken: whether it says so

    @cached_property
    def all(self) -> Mapping[str, str]:
        """Every image of the run, looked up only if a feature is of none in the queue."""
        return {feature_id(self.store, item): item for item in self.store.sample()["id"].to_pylist()}

    @cached_property
    def predicted(self) -> Mapping[str, set[str]]:
        """The names of each image's explained and predicted class, which differ where one class is explained everywhere."""
        rows, name = self.store.read_items(["id", "target", "top5"]), self.store.manifest.output_name
        return {
            row["id"]: {name(one) for one in (row["target"], *(row["top5"] or ())[:1])}
            for row in rows.to_pylist()
        }

    def take(self, feature: Any) -> None:
        """Keep the verdict of one feature; a ValueError says what is wrong with it."""
        properties = feature.get("properties") if isinstance(feature, dict) else 0
        if properties is not None and not isinstance(properties, dict):
            raise ValueError("is no GeoJSON feature")
        properties = properties or {}
        written = _verdict_of(properties)
        if written is None:
            self.without += 1
            return
        name, reason = written
        verdict, ids = _CODES.get(_plain(name)), set(_ids(feature, properties))
        queued = {self.queued[one] for one in ids & self.queued.keys()}
        if len(queued) > 1:
            raise ValueError("has the ids of two images")
        known = queued or {self.all[one] for one in ids & self.all.keys()}
        if verdict is None and (
            not known or any(name in self.predicted.get(item, ()) for item in known)
        ):  # another object of the slide, or a class that an export wrote
            self.without += 1
            return
        if not queued:
            raise ValueError("is not in the queue" if known else "has no id of this run")
        if verdict is None:
            allowed = ", ".join(VERDICTS.values())
            raise ValueError(f"has the verdict {visible(name, 60)!r}, which is none of {allowed}")
        (item,) = queued
        before, its_reason = self.verdicts.get(item, (verdict, ""))
        if before != verdict:
            raise ValueError(f"says {verdict} of an image of which another says {before}")
        self.verdicts[item] = (verdict, reason or its_reason)
        self.blind.append(_says(properties, BLIND) in (True, "true"))


def _verdict_of(properties: Mapping[str, Any]) -> tuple[str, str] | None:
    """The verdict as written and its reason; None where there is none, a ValueError for values of other types."""
    classification = properties.get("classification")
    if isinstance(classification, dict):
        names = classification.get("names")
        names = names if isinstance(names, list) else []
        if len(names) > 1 and any(isinstance(one, str) and _plain(one) in _CODES for one in names):
            raise ValueError("has a verdict among several classifications")
        single = names[0] if len(names) == 1 else None
        classification = classification.get("name", single)
    given = [one for one in (properties.get("verdict"), classification) if one not in (None, "")]
    if not given:
        return None
    if not all(isinstance(one, str) for one in given):
        raise ValueError("has a verdict that is no text")
    if len({_CODES.get(_plain(one), one) for one in given}) > 1 and _plain(given[1]) in _CODES:
        raise ValueError("has a verdict and a classification that disagree")
    reason = properties.get("reason")
    if reason is not None and not isinstance(reason, str):
        raise ValueError("has a reason that is no text")
    return given[0], clean_text("a reason", reason or "")


def _ids(feature: Mapping[str, Any], properties: Mapping[str, Any]) -> Iterator[str]:
    """Everything in a feature that may be its id; QuPath gives a copy of an object a new one and keeps its metadata."""
    for one in (feature.get("id"), properties.get("id"), _says(properties, ID)):
        if isinstance(one, str):
            yield one.strip().strip("{}").lower()


def _says(properties: Mapping[str, Any], name: str) -> Any:
    """What an export has noted in a feature: in QuPath's metadata, else in a property."""
    metadata = properties.get("metadata")
    return (metadata if isinstance(metadata, dict) and name in metadata else properties).get(name)


def _plain(text: str) -> str:
    """A verdict without case, hyphens and spaces."""
    return "".join(letter for letter in text.casefold() if letter.isalnum())


_CODES = {_plain(text): code for code, label in VERDICTS.items() for text in (code, label)}
