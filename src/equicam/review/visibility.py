"""What a reader is told of a picture, and when.

Blind, a picture is a picture: its name (which often holds the label), label, prediction, probabilities, scores and the
words of others come with the reader's own first verdict on it; rank, arm and evidence (there is some only for the head
of the queue) once that reader has read everything.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Any

from equicam.auditing.manifest import Manifest
from equicam.auditing.review_log import VERDICTS, ReviewLog, Verdict
from equicam.auditing.signals import REVEALING
from equicam.reasons import SIGNALS, describe, from_rows
from equicam.report.text import visible
from equicam.review.queue import Entry, Shelf, Sieve, wants_second
from equicam.shards import json_ready, read_json

SILENT = {"blank", "constant", "none-kept"}  # flags under which PEUM says nothing


def listed(
    shelf: Shelf, entry: Entry, mine: Mapping[str, Verdict], readings: ReviewLog, *, blind: bool
) -> dict[str, Any]:
    """An entry of the list."""
    own = mine.get(entry.id)
    told: dict[str, Any] = {
        "key": entry.key,
        "place": shelf.places[entry.key] + 1,
        "verdict": own.verdict if own else None,
        "seen": own.number if own else 0,
        "flags": list(entry.flags),
        "second": own is None and wants_second(readings, entry.id),
        "name": None,
        "class": None,
    }
    if own or not blind:
        told |= {"name": visible(_tail(entry.id)), "class": visible(entry.named, 60)}
    return told


def _tail(name: str, most: int = 80) -> str:
    """Of a long path the end, which tells more."""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def progress(shelf: Shelf, sieve: Sieve, reviewer: str) -> dict[str, Any]:
    """How far this reader is, and what is in the list."""
    readings, blind = sieve.readings, sieve.shelves.blind
    mine = {item: v for item, v in readings.standing(reviewer).items() if item in shelf.ids}
    given = Counter(v.verdict for v in mine.values())
    told = sieve.told(shelf, reviewer)
    known = (shelf.entries[shelf.ids[item]] for item in mine) if blind else shelf.entries
    classes = Counter(e.named for e in known if e.named is not None)
    asked = readings.second_requested() & shelf.ids.keys()
    return {
        "version": shelf.version,
        "reviewer": reviewer,
        "total": len(shelf.entries),
        "read": len(mine),
        "verdicts": {name: given[name] for name in VERDICTS},
        "flags": dict(shelf.flags),
        "classes": dict(sorted(classes.items())),
        "to_second": sum(item not in mine and wants_second(readings, item) for item in asked),
        "arms": dict(shelf.arms) if told else None,
        "by": SIGNALS[shelf.by],
    }


def around(shelf: Shelf, passing: Sequence[Entry], entry: Entry) -> dict[str, Any]:
    """The keys before and after an entry in a filtered list, which need not hold it any more."""
    at = shelf.places[entry.key]
    before = bisect_left(passing, at, key=lambda e: shelf.places[e.key]) - 1
    after = bisect_right(passing, at, key=lambda e: shelf.places[e.key])
    return {
        "index": before + 1,
        "previous": passing[before].key if before >= 0 else None,
        "next": passing[after].key if after < len(passing) else None,
    }


def unread(shelf: Shelf, passing: Sequence[Entry], entry: Entry, mine: Mapping[str, Verdict]) -> str | None:
    """The next picture of the list this reader has given no verdict on, from here on and then from the top."""
    start = bisect_right(passing, shelf.places[entry.key], key=lambda e: shelf.places[e.key])
    on = chain(islice(passing, start, None), islice(passing, start))
    return next((e.key for e in on if e.id not in mine and e.key != entry.key), None)


def facts(shelf: Shelf, entry: Entry, sieve: Sieve, reviewer: str, spec: Manifest) -> dict[str, Any]:
    """All that this reader may know of a picture now."""
    readings, row = sieve.readings, shelf.row(entry)
    given = readings.verdicts(entry.id)
    own = [v for v in given if v.reviewer == reviewer]
    hidden = sieve.shelves.blind and not own
    told = sieve.told(shelf, reviewer)
    ranked, arrays = shelf.ranked(entry), shelf.drawn(entry)
    held = {*REVEALING[shelf.by], "low-confidence"}  # codes of reasons that hold hidden numbers
    reasons = [r for r in from_rows(ranked["reasons"]) if not (hidden and r.code in held)]
    found: dict[str, Any] = {
        "key": entry.key,
        "place": shelf.places[entry.key] + 1,
        "total": len(shelf.entries),
        "hidden": hidden,
        "seen": own[-1].number if own else 0,
        "verdict": own[-1].verdict if own else None,
        "flags": list(entry.flags),
        "reasons": [visible(describe(r)) for r in reasons],
        "views": _views(row, spec, arrays is not None, hidden=hidden),
        "upright": next((i for i, angle in enumerate(spec.angles) if angle % 360 == 0), None),
        "has_map": arrays is not None,
        "verdicts": [asdict(v) for v in (own if hidden else given)],
        "notes": [asdict(n) for n in readings.notes(entry.id) if not hidden or n.reviewer == reviewer],
        "second": wants_second(readings, entry.id),
        "grid": None if arrays is None else f"{arrays.map.shape[1]} × {arrays.map.shape[0]}",
        "known": None,
        "arm": None,
        "rank": None,
        "evidence": None,
    }
    if not hidden:
        found["known"] = _known(row, entry, spec) | {"by": SIGNALS[shelf.by]}
        found["known"]["disagreement"] = ranked.get("disagreement")
    if told:
        found |= {"arm": entry.arm, "rank": ranked["rank"], "evidence": _evidence(shelf, entry)}
    return json_ready(found)  # type: ignore[no-any-return]


def _known(row: Mapping[str, Any], entry: Entry, spec: Manifest) -> dict[str, Any]:
    silent = bool(SILENT & {*entry.flags}) or (len(spec.angles) > 1 and row["views_kept"] is not None and row["views_kept"] <= 1)
    return {
        "name": visible(entry.id),
        "label": None if row["label"] is None else visible(row["label"]),
        "class": visible(entry.named),
        **{key: row[key] for key in ("flip_rate", "eq", "width", "height")},
        "prob": row["confidence"],
        "kept": row["views_kept"],
        "peum": None if silent else row["peum_score"],
        "silent": silent,
        "top5": [
            {"class": visible(_named(target, spec)), "prob": prob}
            for target, prob in zip(row["top5"] or (), row["top5_confidence"] or (), strict=False)
        ],
    }


def _views(row: Mapping[str, Any], spec: Manifest, drawn: bool, *, hidden: bool) -> list[dict[str, Any]]:
    """One for each angle; what was predicted there once that may be known."""
    if not drawn or len(spec.angles) < 2:
        return []
    nothing = [None] * len(spec.angles)
    probs, tops = (nothing if hidden else row[name] or nothing for name in ("view_confidence", "view_top1"))
    return [
        {
            "degrees": f"{angle:g}°",
            "prob": prob,
            "class": None if top is None else visible(_named(top, spec)),
            "flips": top is not None and top != row["target"],
        }
        for angle, prob, top in zip(spec.angles, probs, tops, strict=True)
    ]


def _named(target: int, spec: Manifest) -> str:
    return spec.classes[target] if spec.classes and 0 <= target < len(spec.classes) else f"class {target}"


def _evidence(shelf: Shelf, entry: Entry) -> dict[str, Any] | None:
    path = shelf.run.folder / "evidence.json"
    if not path.is_file():
        return None
    found = read_json(path).get(entry.id)
    return found and {
        "verdict": visible(found["verdict"], 600),
        "lines": [visible(line, 600) for line in found["lines"]],
    }
