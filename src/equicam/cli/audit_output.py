"""Results of an audit as lines and tables on the console."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli.gates import Gate, check_gates
from equicam.console import console, note, plain, plural, say

if TYPE_CHECKING:
    from equicam.audit.run import Run
    from equicam.audit.verify import Verification
    from equicam.runs.triage import Triage

ROWS = 10
REASONS_COLUMN_WIDTH = 110
"""Terminal columns from which reasons get a column of their own."""
LAST_HASH = "last hash of the log, for verify --hash: {}"


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
        "first_bad": _first_bad(run) if bad else None,
        "layer": run.manifest.layer,
        "gates": check_gates(gates, counts),
    }


def _first_bad(run: "Run") -> dict[str, str]:
    """The first image that could not be explained, and why."""
    from equicam.reasons import Reason, describe

    rows = run.read_items(["id", "status", "reason", "reason_values"])
    row = rows.slice(rows["status"].index("bad").as_py(), 1).to_pylist()[0]
    reason = Reason.from_row({"code": row["reason"], "values": row["reason_values"]})
    return {"id": row["id"], "reason": describe(reason)}


def print_audit(document: Mapping[str, Any]) -> None:
    """Print how many images were explained."""
    say(
        f"{plural(document['explained'], 'image')} explained, {document['bad']:,} could not be; layer {document['layer']}; "
        f"run {document['run']}"
    )
    if document["explained"]:
        say(
            f"maps: {document['steady']:,} steady, {document['unsteady']:,} unsteady, {document['cannot_say']:,} cannot be judged"
        )
    if document["reasons"]:
        reasons = ", ".join(f"{code} {count:,}" for code, count in document["reasons"].items())
        say(f"could not be explained, by reason: {reasons}")
    if first := document["first_bad"]:
        say(f"{'the first' if document['bad'] > 1 else 'that is'} {first['id']}: {first['reason']}")


def triage_document(run: "Run", ranked: "Triage") -> dict[str, Any]:
    """The queue, how many maps are unstable, and how well the signal finds them."""
    from equicam.reasons import describe, from_rows

    fields = (
        "rank",
        "id",
        "class",
        "confidence",
        "output",
        "stability",
        "peum_score",
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
    has_values = all(row["confidence"] is None for row in queue)
    explained = ("output", "value") if has_values else ("class", "p")
    table = Table("rank", Column("image", overflow="fold"), *explained, signal, box=SIMPLE_HEAD)
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
        p, output = row["confidence"], row.get("output")
        shown = f"{p:.2f}" if p is not None else f"{output:.4g}" if has_values and output is not None else "–"
        cells = (str(row["rank"]), name, label, shown, value)
        table.add_row(*cells, *([why] if wide else []))
        notes.add_row(cells[0], why)
    skipped = ranked.quotas and [row["rank"] for row in queue] != [*range(1, len(queue) + 1)]
    table.caption = (
        f"{min(ROWS, len(queue))} of {len(queue)} of the queue, by {signal}; queue.csv has all, mixed with "
        f"{plural(ranked.budget - len(queue), 'random control')}"
        + ("; ranks skipped belong to classes whose places are taken" if skipped else "")
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


def causal_command(run: "Run") -> str | None:
    """The command of the causal test, with the files it must name; None where it would be refused."""
    manifest = run.manifest
    named = manifest.reload_options()
    if named is None or manifest.task == "regression":
        return None
    model, weights = named.get("--model", ""), named.get("--weights")
    code = model.rpartition(":")[0] if ".py:" in model else None
    if any(file is not None and not Path(file).is_file() for file in (code, weights)):
        return None
    options = [text for pair in named.items() for text in pair]
    return shlex.join(["equicam", "causal", str(run.folder), *options])


def verification_document(found: "Verification") -> dict[str, Any]:
    """What was checked, and what differs."""
    fields = ("ok", "files", "events", "recomputed", "left_out", "left_out_reason", "last_hash", "log_error")
    lists = {name: list(getattr(found, name)) for name in ("problems", "notes")}
    return {name: getattr(found, name) for name in fields} | lists | {"worst": dict(found.worst)}


def print_verification(found: "Verification") -> None:
    """Print the differences, if there are any, and the extent of the checks."""
    for problem in found.problems:
        console.print(f"[red]differs[/red] {escape(plain(problem))}", soft_wrap=True)
    count = len(found.problems)
    result = plural(count, "difference") if count else "no differences"
    if found.left_out and not count:
        result = "no differences in the files"
    say(
        f"{plural(found.files, 'file')}, {plural(found.events, 'event')} and {plural(found.recomputed, 'recomputed image')}"
        f"{_largest(found)}: {result}"
    )
    if found.left_out:
        say(
            f"{plural(found.left_out, 'map')} {'was' if found.left_out == 1 else 'were'} NOT recomputed: {found.left_out_reason}"
        )
    for one in found.notes:
        note(f"note: {one}")
    if found.last_hash:
        say(LAST_HASH.format(found.last_hash))
    if found.log_error:
        note(f"note: this result is not in the log, which could not be written: {found.log_error}")


def _largest(found: "Verification") -> str:
    if not found.recomputed:
        return ""
    from equicam.audit.verify import TOLERANCES

    known = [key for key in ("confidence", "peum_score", "eq") if key in found.worst]
    parts = [
        f"{key} differs by at most {found.worst[key]:.1e}, of {TOLERANCES[key]:g} allowed" for key in known
    ]
    return f" ({'; '.join(parts)}; maps correlate at {found.worst['map']:.5f} or more)"
