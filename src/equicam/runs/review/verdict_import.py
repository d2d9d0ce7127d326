"""Verdicts that reviewers gave in QuPath or QGIS, read from their GeoJSON into the review log.

A feature names its image by the UUID that `feature_id` gives it in this run, so that features of another run match none.
Its verdict is QuPath's classification or a property `verdict`. A file is taken whole or refused whole.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.files import read_file
from equicam.images.items import valid_utf8
from equicam.rasters.geojson import MAX_BYTES, read_features
from equicam.runs.feature_ids import feature_id
from equicam.runs.queue_files import read_queue
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog, Source, Verdict, clean_text, reviewer_name

MAX_LISTED = 5  # problems in one message
ID, BLIND = (
    "equicam id",
    "equicam blind",
)  # what an export may note in a feature; QuPath keeps no member of the collection


@dataclass(frozen=True)
class ImportedVerdicts:
    """What became of a file's features."""

    taken: int
    without: int  # features without a verdict
    already: int  # verdicts that the log has

    @property
    def sentence(self) -> str:
        """The counts for people."""
        return (
            f"{self.taken:,} verdict{'s' if self.taken != 1 else ''} taken, {self.without:,} feature{'s' if self.without != 1 else ''} "
            f"without one, {self.already:,} already there"
        )


@dataclass
class _Found:
    """What a file's features say, and what is wrong with them."""

    verdicts: dict[str, tuple[str, str]] = field(default_factory=dict)  # verdict and reason by image
    without: int = 0
    problems: list[str] = field(default_factory=list)
    blind: list[bool] = field(default_factory=list)  # of each feature that was taken: whether it says so


def import_verdicts(store: RunStore, path: Path, *, reviewer: str, replace: bool = False) -> ImportedVerdicts:
    """Add the verdicts in a GeoJSON file to a run's log under a reviewer's name; the same file again adds nothing.

    `replace` allows verdicts that differ from this reviewer's earlier ones.
    """
    reviewer = reviewer_name(reviewer)
    what = f"the import of {visible(valid_utf8(path.name), 120)!r}"
    images = _Images(store)
    data, _ = read_file(path, what=what, limit=MAX_BYTES)
    features, collection = limited.call(read_features, data, what)
    ours = collection.get("equicam")
    blind = isinstance(ours, dict) and ours.get("blind") is True
    found = _match(images, features)
    blind = blind or (bool(found.blind) and all(found.blind))
    _refuse(what, found.problems, fix="mending these features; nothing was imported")
    log = ReviewLog(store.folder)
    log.refresh()
    digest = hashlib.sha256(data).hexdigest()
    new, own = _new(log, found.verdicts, reviewer, digest)
    changes = [
        f"{visible(item, 80)!r}: {own[item].verdict} would become {new[item][0]}"
        for item in new
        if item in own
    ]
    if not replace:
        _refuse(
            what,
            changes,
            needs=f"no other verdict of {reviewer} on its images",
            fix="--replace, which keeps both in the log",
        )
    source = Source(clean_text("a file name", visible(valid_utf8(path.name), 200)), digest, blind)
    for item, (verdict, reason) in new.items():
        before = own.get(item)
        why = reason or (f"imported from {source.file}" if before else "")
        log.add_verdict(
            item, reviewer, verdict, reason=why, blind=blind, previous_event=before.number if before else 0,
            mark=_mark(digest, reviewer, item), source=source,
        )  # fmt: skip
    return ImportedVerdicts(len(new), found.without, len(found.verdicts) - len(new))


def _new(
    log: ReviewLog, verdicts: Mapping[str, tuple[str, str]], reviewer: str, digest: str
) -> tuple[dict[str, tuple[str, str]], dict[str, Verdict]]:
    """The verdicts that the log does not have, and this reviewer's standing ones."""
    own = log.standing(reviewer)
    new = {
        item: (verdict, reason)
        for item, (verdict, reason) in verdicts.items()
        if not log.has_mark(_mark(digest, reviewer, item))
        and not (item in own and own[item].verdict == verdict and reason in ("", own[item].reason))
    }
    return new, own


def _mark(digest: str, reviewer: str, item: str) -> str:
    """The mark of an imported verdict: the same for the same file, reviewer and image."""
    return "import-" + hashlib.sha256(f"{digest}\0{reviewer}\0{valid_utf8(item)}".encode()).hexdigest()[:40]


def _refuse(
    what: str,
    problems: Sequence[str],
    *,
    fix: str,
    needs: str = "features of this run's queue with one of our verdicts",
) -> None:
    if problems:
        more = len(problems) - MAX_LISTED
        got = "; ".join(problems[:MAX_LISTED]) + (f"; and {more:,} more" if more > 0 else "")
        raise EquicamError(what, needs=needs, got=got, fix=fix)


class _Images:
    """The images of a run by the ids of their features; those outside the queue are looked up only if they occur."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self.queued = {feature_id(store, item): item for item in read_queue(store)["id"].to_pylist()}

    @cached_property
    def all(self) -> Mapping[str, str]:
        """Every image of the run."""
        return {feature_id(self.store, item): item for item in self.store.sample()["id"].to_pylist()}

    @cached_property
    def predicted(self) -> Mapping[str, set[str]]:
        """The names of each image's explained and predicted class, which differ where one class is explained everywhere."""
        rows, name = (
            self.store.read_items(["id", "target", "top5"]).to_pylist(),
            self.store.manifest.output_name,
        )
        return {row["id"]: {name(one) for one in (row["target"], *(row["top5"] or ())[:1])} for row in rows}


def _match(images: _Images, features: Sequence[Any]) -> _Found:
    """The verdict of each image that the features name."""
    found = _Found()
    for number, feature in enumerate(features, start=1):
        properties = feature.get("properties") if isinstance(feature, dict) else 0
        if properties is not None and not isinstance(properties, dict):
            found.problems.append(f"feature {number} is no GeoJSON feature")
            continue
        try:
            written = _verdict_of(properties or {})
            if written is None or not _take(found, images, feature, properties or {}, written):
                found.without += 1
        except ValueError as error:
            found.problems.append(f"feature {number} {error}")
    return found


def _take(
    found: _Found,
    images: _Images,
    feature: Mapping[str, Any],
    properties: Mapping[str, Any],
    written: tuple[str, str],
) -> bool:
    """Keep the verdict of one feature; False if it is none of ours, a ValueError says what is wrong with it."""
    name, reason = written
    verdict, ids = _CODES.get(_plain(name)), set(_ids(feature, properties))
    items = {images.queued[one] for one in ids & images.queued.keys()}
    if len(items) > 1:
        raise ValueError("has the ids of two images")
    if not items:
        known = {images.all[one] for one in ids & images.all.keys()}
        if verdict is None and (not known or any(name in images.predicted.get(item, ()) for item in known)):
            return False  # another object of the slide, or a class that an export wrote
        raise ValueError("is not in the queue" if known else "has no id of this run")
    (item,) = items
    if verdict is None:
        if name in images.predicted.get(item, ()):
            return False
        raise ValueError(
            f"has the verdict {visible(name, 60)!r}, which is none of {', '.join(VERDICTS.values())}"
        )
    before, its_reason = found.verdicts.get(item, (verdict, ""))
    if before != verdict:
        raise ValueError(f"says {verdict} of an image of which another says {before}")
    found.verdicts[item] = (verdict, reason or its_reason)
    found.blind.append(_says(properties, BLIND) in (True, "true"))
    return True


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
