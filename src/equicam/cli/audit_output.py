"""Results of an audit as lines and tables on the console."""

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equicam.cli.shared import console, plain, say

if TYPE_CHECKING:
    from equicam.auditing.triage import Triage
    from equicam.auditing.verify import Verification
    from equicam.run import Run

ROWS = 10
REASONS_COLUMN_WIDTH = 110
"""Terminal columns from which reasons get a column of their own."""


def print_audit(run: "Run") -> None:
    """Print how many images were explained."""
    status = run.read_items(["status"])["status"].to_pylist()
    bad = status.count("bad")
    say(
        f"{len(status) - bad:,} images explained, {bad:,} could not be; layer {run.manifest.layer}; run {run.folder}"
    )


def print_triage(run: "Run", ranked: "Triage") -> None:
    """Print how much of the run was ranked, and the queue."""
    if missing := len(run.store.pending()):
        say(
            f"the run is not finished: {ranked.ok + ranked.bad:,} of {run.manifest.images:,} images so far "
            f"({missing} shards to go); these come first by name, not at random"
        )
    print_queue(ranked)
    if ranked.no_evidence:
        say(f"no evidence on the head of the queue: {ranked.no_evidence}")
    if skipped := len(ranked.without_evidence):
        say(f"no evidence on {skipped} images, which are not the ones that were explained")


def print_queue(ranked: "Triage") -> None:
    """Print the head of the queue with its reasons, and how well the ranking finds unstable maps."""
    from equicam.reasons import SIGNALS, describe, from_rows

    queue, signal = ranked.queue(), SIGNALS[ranked.by]
    if not queue:
        say("nothing to rank: no image was explained")
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


def print_verification(found: "Verification") -> None:
    """Print the differences, if there are any, and the extent of the checks."""
    for problem in found.problems:
        console.print(f"[red]differs[/red] {escape(plain(problem))}", soft_wrap=True)
    count = len(found.problems)
    result = f"{count} difference{'s' if count > 1 else ''}" if count else "no differences"
    say(
        f"{found.files} files, {found.events} events and {found.recomputed} recomputed images{_largest(found)}: {result}"
    )
    for note in found.notes:
        say(f"note: {note}")
    if found.log_error:
        say(f"note: this result is not in the log, which could not be written: {found.log_error}")


def _largest(found: "Verification") -> str:
    if not found.recomputed:
        return ""
    from equicam.auditing.verify import TOLERANCES

    keys = ("confidence", "peum_score", "eq")
    parts = [f"{key} within {found.worst[key]:.1e} of ±{TOLERANCES[key]:g}" for key in keys]
    return f" ({', '.join(parts)}, maps at least {found.worst['map']:.5f} alike)"
