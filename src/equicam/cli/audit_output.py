"""Results of an audit as lines and tables on the console."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli.gates import Gate, check_gates
from equicam.cli.output import console, note, plain, say

if TYPE_CHECKING:
    from equicam.auditing.triage import Triage
    from equicam.auditing.verify import Verification
    from equicam.run import Run

ROWS = 10
REASONS_COLUMN_WIDTH = 110
"""Terminal columns from which reasons get a column of their own."""


def audit_document(run: "Run", gates: Sequence[Gate]) -> dict[str, Any]:
    """How many images were explained, why others were not, and whether the gates hold."""
    from equicam.steadiness import count_words

    items = run.read_items(["status", "reason", "steadiness"])
    reasons = Counter(row["reason"] for row in items.to_pylist() if row["status"] != "ok")
    words = {word.replace(" ", "_"): count for word, count in count_words(items).items()}
    images, bad = items.num_rows, reasons.total()
    counts = {"images": images, "explained": images - bad, "bad": bad} | words
    return {
        "run": str(run.folder),
        **counts,
        "reasons": dict(reasons.most_common()),
        "layer": run.manifest.layer,
        "gates": check_gates(gates, counts),
    }


def print_audit(document: Mapping[str, Any]) -> None:
    """Print how many images were explained."""
    say(
        f"{document['explained']:,} images explained, {document['bad']:,} could not be; layer {document['layer']}; "
        f"run {document['run']}"
    )
    if document["explained"]:
        say(
            f"maps: {document['steady']:,} steady, {document['unsteady']:,} unsteady, {document['cannot_say']:,} cannot be judged"
        )
    if document["reasons"]:
        reasons = ", ".join(f"{code} {count:,}" for code, count in document["reasons"].items())
        say(f"could not be explained, by reason: {reasons}")


def triage_document(run: "Run", ranked: "Triage") -> dict[str, Any]:
    """The queue, how many maps are unstable, and how well the signal finds them."""
    from equicam.reasons import describe, from_rows

    fields = (
        "rank",
        "id",
        "class",
        "confidence",
        "stability",
        "peum_score",
        "disagreement",
        "doubt",
        "risk",
        "flags",
    )
    queue = [
        {name: row[name] for name in fields}
        | {"reasons": [describe(one) for one in from_rows(row["reasons"])]}
        for row in ranked.queue()
    ]
    quality = ranked.quality
    return {
        "run": str(run.folder),
        "by": ranked.by,
        "images": ranked.ok + ranked.bad,
        "explained": ranked.ok,
        "pending_shards": len(run.store.pending()),
        "budget": ranked.budget,
        "controls": ranked.budget - len(queue),
        "unstable": asdict(ranked.unstable),
        "quality": None if quality is None else {"images": quality.n, "auroc": asdict(quality.auroc), "sentence": quality.sentence},
        "queue": queue,
    }  # fmt: skip


def print_triage(run: "Run", ranked: "Triage") -> None:
    """Print how much of the run was ranked, and the queue."""
    if missing := len(run.store.pending()):
        note(
            f"the run is not finished: {ranked.ok + ranked.bad:,} of {run.manifest.images:,} images so far "
            f"({missing} shards to go); these come first by name, not at random"
        )
    print_queue(ranked)


def print_queue(ranked: "Triage") -> None:
    """Print the head of the queue with its reasons, and how well the ranking finds unstable maps."""
    from equicam.reasons import SIGNALS, describe, from_rows

    queue, signal = ranked.queue(), SIGNALS[ranked.by]
    if not queue:
        note("nothing to rank: no image was explained")
        return
    table = Table("rank", Column("image", overflow="fold"), "class", "p", signal, box=SIMPLE_HEAD)
    notes = Table.grid(Column(justify="right"), Column(overflow="fold"), padding=(0, 2))
    wide = console.width >= REASONS_COLUMN_WIDTH
    if wide:
        table.add_column("reasons", overflow="fold")
    for row in queue[:ROWS]:
        reasons = from_rows(row["reasons"])
        # the value has a column of its own; an image without the reason has no value to rank by
        others = [describe(reason) for reason in reasons if reason.code != "signal-percentile"]
        values = [r.values["value"] for r in reasons if r.code == "signal-percentile"]
        value = f"{values[0]:.4f}" if values else "–"
        name, label, why = (escape(plain(text)) for text in (row["id"], row["class"], "; ".join(others)))
        p = "–" if row["confidence"] is None else f"{row['confidence']:.2f}"
        cells = (str(row["rank"]), name, label, p, value)
        table.add_row(*cells, *([why] if wide else []))
        notes.add_row(cells[0], why)
    table.caption = (
        f"{min(ROWS, len(queue))} of {len(queue)} of the queue, by {signal}; queue.csv has all, "
        f"mixed with {ranked.budget - len(queue)} random controls"
        + ("; ranks skipped belong to classes whose places are taken" if ranked.quotas else "")
    )
    console.print(table)
    if not wide:
        console.print("reasons, by rank:", notes)
    say(ranked.unstable.sentence)
    if not ranked.quality:
        return
    say(ranked.quality.sentence)
    say(ranked.quality.comparison)
    for more in (ranked.quality.check and ranked.quality.check.sentence, ranked.quality.advice):
        if more:
            say(more)


def verification_document(found: "Verification") -> dict[str, Any]:
    """What was checked, and what differs."""
    fields = ("ok", "files", "events", "recomputed", "log_error")
    lists = {name: list(getattr(found, name)) for name in ("problems", "notes")}
    return {name: getattr(found, name) for name in fields} | lists | {"worst": dict(found.worst)}


def print_verification(found: "Verification") -> None:
    """Print the differences, if there are any, and the extent of the checks."""
    for problem in found.problems:
        console.print(f"[red]differs[/red] {escape(plain(problem))}", soft_wrap=True)
    count = len(found.problems)
    result = f"{count} difference{'s' if count > 1 else ''}" if count else "no differences"
    say(
        f"{found.files} files, {found.events} events and {found.recomputed} recomputed images{_largest(found)}: {result}"
    )
    for one in found.notes:
        note(f"note: {one}")
    if found.log_error:
        note(f"note: this result is not in the log, which could not be written: {found.log_error}")


def _largest(found: "Verification") -> str:
    if not found.recomputed:
        return ""
    from equicam.auditing.verify import TOLERANCES

    keys = ("confidence", "peum_score", "eq")
    parts = [f"{key} within {found.worst[key]:.1e} of ±{TOLERANCES[key]:g}" for key in keys]
    return f" ({', '.join(parts)}, maps at least {found.worst['map']:.5f} alike)"
