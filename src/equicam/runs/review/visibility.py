"""Which facts of an image a reviewer may see, and when: the blinding policy.

Under blinding, a reviewer sees an image, its map and the class that the map is of, and of a window its surroundings. Everything
that tells how the image ranks or what else the model made of it is visible after the reviewer's own first verdict: name
(which often contains the label), label, probabilities, signals, steadiness, flags, reasons, PEUM and the maps of single
views, and the verdicts and notes of others. With `blind_class` the class is one of them. Rank, arm
and the statement on the maps nobody opened are visible once that reviewer has given a verdict on every image.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from equicam.drawing.text import MAX_CHARACTERS, visible
from equicam.reasons import SIGNALS, describe, from_rows
from equicam.runs.manifest import Manifest
from equicam.runs.report.facts import peum_undefined
from equicam.runs.review.context import ReviewContext
from equicam.runs.review.queue import Queue, QueueItem
from equicam.runs.signals import FLAT
from equicam.runs.verdicts import VERDICTS, Verdict
from equicam.shards import json_ready
from equicam.steadiness import judge_row

MAX_NAME_IN_LIST = 80  # characters
BLIND_KINDS = frozenset({"input", "original", "surroundings", "map", "thumb", "thumb-plain", "scale"})
"""The kinds of images that a reviewer may see before the verdict."""


def list_entry(item: QueueItem, own: Mapping[str, Verdict], context: ReviewContext) -> dict[str, Any]:
    """An item as the list shows it; `own` holds this reviewer's verdicts by image."""
    verdict, name = own.get(item.id), item.id
    revealed = verdict is not None or not context.blind
    if len(name) > MAX_NAME_IN_LIST:  # the end of a long path, because files of one folder begin alike
        name = f"…{name[1 - MAX_NAME_IN_LIST :]}"
    return {
        "key": item.key,
        "position": item.position + 1,
        "verdict": verdict.verdict if verdict else None,
        "previous_event": verdict.number if verdict else 0,
        "flags": list(item.flags) if revealed else [],
        "awaits_second": verdict is None and context.awaits_second(item.id),
        "name": visible(name) if revealed else None,
        "class": _class(item, 60) if revealed or not context.blind_class else None,
        "flat": item.flat,
    }


def _class(item: QueueItem, most: int = MAX_CHARACTERS) -> str | None:
    """The class that the map is of."""
    return None if item.predicted is None else visible(item.predicted, most)


def progress(queue: Queue, context: ReviewContext, reviewer: str) -> dict[str, Any]:
    """How far this reviewer is, and the filters the list offers."""
    own = {name: v for name, v in context.log.standing(reviewer).items() if name in queue.position_by_id}
    counts = Counter(v.verdict for v in own.values())
    reviewed = [queue.items[queue.position_by_id[name]] for name in own]
    flags, classes = queue.counts["flags"], queue.counts["classes"]
    if context.blind:
        flags = Counter(flag for item in reviewed for flag in item.flags)
    if context.blind_class:
        classes = Counter(item.predicted for item in reviewed if item.predicted is not None)
    requested = context.log.second_requested() & queue.position_by_id.keys()
    reveals_arms = context.reveals_arms(queue, reviewer)
    return {
        "version": queue.version,
        "reviewer": reviewer,
        "total": len(queue.items),
        "reviewed": len(own),
        "verdicts": {name: counts[name] for name in VERDICTS},
        "flags": dict(sorted(flags.items())),
        "classes": dict(sorted(classes.items())),
        "awaiting_second": sum(name not in own and context.awaits_second(name) for name in requested),
        "arms": dict(sorted(queue.counts["arms"].items(), reverse=True)) if reveals_arms else None,
        # it counts the control arm: before, a change with a verdict would tell the arm of its image
        "remainder": context.remainder(queue) if reveals_arms else None,
        "ranked_by": SIGNALS[queue.ranked_by],
    }


def item_facts(queue: Queue, item: QueueItem, context: ReviewContext, reviewer: str) -> dict[str, Any]:
    """Everything this reviewer may know about an image now."""
    log, row, maps = context.log, queue.row(item), queue.maps(item)
    verdicts = log.verdicts(item.id)
    own = [v for v in verdicts if v.reviewer == reviewer]
    blinded = context.blind and not own
    triage, reveals_arms = queue.triage_facts(item), context.reveals_arms(queue, reviewer)
    notes = [asdict(n) for n in log.notes(item.id) if not blinded or n.reviewer == reviewer]
    facts: dict[str, Any] = {
        "key": item.key,
        "position": item.position + 1,
        "total": len(queue.items),
        "blinded": blinded,
        "class": _class(item) if not blinded or not context.blind_class else None,
        "flat": item.flat,
        "previous_event": own[-1].number if own else 0,
        "verdict": own[-1].verdict if own else None,
        "flags": [] if blinded else list(item.flags),
        "reasons": [visible(describe(one)) for one in from_rows(triage["reasons"] if not blinded else ())],
        "views": [] if blinded or maps is None else _views(row, context.manifest),
        "presented_view": context.manifest.presented,
        "has_map": maps is not None,
        "verdicts": [asdict(v) for v in (own if blinded else verdicts)],
        # without the image's name, which may still be hidden
        "notes": [{name: value for name, value in note.items() if name != "item"} for note in notes],
        "awaits_second": context.awaits_second(item.id),
        "adjacent": queue.adjacent(item),
        "grid": None if maps is None else f"{maps.map.shape[1]} × {maps.map.shape[0]}",
        "revealed": None if blinded else _revealed(queue, item, row, triage),
        "arm": item.arm if reveals_arms else None,
        "rank": triage["rank"] if reveals_arms else None,
    }
    return json_ready(facts)  # type: ignore[no-any-return]


def _revealed(
    queue: Queue, item: QueueItem, row: Mapping[str, Any], triage: Mapping[str, Any]
) -> dict[str, Any]:
    """The facts that blinding hides until the first verdict."""
    manifest = queue.store.manifest
    undefined = peum_undefined(row, views=len(manifest.transforms))
    judged = judge_row(row, manifest.labels, manifest.presented)
    copied = ("confidence", "output", "flip_rate", "views_kept", "eq", "width", "height")
    top5 = zip(row["top5"] or (), row["top5_confidence"] or (), strict=False)
    return {
        "name": visible(item.id),
        "label": None if row["label"] is None else visible(row["label"]),
        "class": _class(item),
        **{name: row[name] for name in copied},
        "peum_score": None if undefined else row["peum_score"],
        "peum_undefined": undefined,
        "top5": [{"class": visible(manifest.output_name(t)), "confidence": p} for t, p in top5],
        "ranked_by": SIGNALS[queue.ranked_by],
        **{name: triage.get(name) for name in ("stability", "risk")},
        "steadiness": {"word": judged.word, "reason": visible(describe(judged.reason))},
        "peum_above": None if undefined else triage["peum_above"],
        # a flat map cannot move
        "stability_by_view": None if FLAT & {*(row["flags"] or ())} else row["stability_by_view"],
    }


def _views(row: Mapping[str, Any], manifest: Manifest) -> list[dict[str, Any]]:
    """One entry per view. A single view has no strip."""
    if len(manifest.transforms) < 2:
        return []
    empty = [None] * len(manifest.transforms)
    confidences, top1 = (row[name] or empty for name in ("view_confidence", "view_top1"))
    predicted = row["target"] if manifest.presented is None else top1[manifest.presented]
    return [
        {
            "label": label,
            "confidence": confidence,
            "class": None if top is None or manifest.has_values else visible(manifest.output_name(top)),
            "flips": top is not None and top != predicted,
        }
        for label, confidence, top in zip(manifest.labels, confidences, top1, strict=True)
    ]
