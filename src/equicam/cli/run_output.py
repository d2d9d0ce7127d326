"""Results of the commands on a run, as documents and as lines and tables on the console."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from equicam.console import console, note, output, plain, plural, say

if TYPE_CHECKING:
    from equicam.audit.run import Run
    from equicam.audit.verify import Verification
    from equicam.evaluate.statistics import Estimate
    from equicam.runs.causal_result import CausalTest
    from equicam.runs.export.export import Exported
    from equicam.runs.triage import Triage

ROWS = 10
REASONS_COLUMN_WIDTH = 110
"""Terminal columns from which reasons get a column of their own."""
_MAX_REFUSED = 5  # reasons printed
_LINES = {
    "drift": "lost by blurring what drifts",
    "elsewhere": "lost by blurring as much elsewhere",
    "agreement": "lost by blurring what stays",
    "effect": "what drifts − as much elsewhere",
}
"""The numbers of `causal --verbose`, by their names in the result."""
LAST_HASH = "last hash of the log, for verify --hash: {}"


def triage_document(run: "Run", ranked: "Triage") -> dict[str, Any]:
    """The queue, how many maps are unstable, and how well the signal finds them."""
    from equicam.reasons import describe, from_rows

    fields = ("rank", "id", "class", "confidence", "output", "stability", "peum_score", "risk", "flags")
    queue = [
        {name: row[name] for name in fields} | {"reasons": [*map(describe, from_rows(row["reasons"]))]}
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
        shown = format_value(row["confidence"], row.get("output") if has_values else None)
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


def format_value(confidence: float | None, value: float | None) -> str:
    """The confidence of a class; of a model without classes the value that is explained, if it is known."""
    return f"{confidence:.2f}" if confidence is not None else "–" if value is None else f"{value:.4g}"


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
    checked = f"{plural(found.files, 'file')}, {plural(found.events, 'event')} and {plural(found.recomputed, 'recomputed image')}"
    say(f"{checked}{_largest(found)}: {result}")
    if found.left_out:
        were = "was" if found.left_out == 1 else "were"
        say(f"{plural(found.left_out, 'map')} {were} NOT recomputed: {found.left_out_reason}")
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

    parts = [
        f"{key} differs by at most {found.worst[key]:.1e}, of {TOLERANCES[key]:g} allowed"
        for key in ("confidence", "peum_score", "eq")
        if key in found.worst
    ]
    return f" ({'; '.join(parts)}; maps correlate at {found.worst['map']:.5f} or more)"


def print_causal(found: "CausalTest") -> None:
    """Print the answer, and with --verbose what both networks lose of the probability, a line for each number."""
    say(found.sentence)
    if output.verbose:
        _print_costs(found)
    if found.left_out:
        note(f"{plural(found.left_out, 'image')} left out: changed since the audit, or unreadable")


def _print_costs(found: "CausalTest") -> None:
    wide = max(map(len, _LINES.values()))
    say(f"{'probability':<{wide}}  {'trained weights':<23}  random weights")
    for name, words in _LINES.items():
        trained, random = (_interval(getattr(one, name)) for one in (found.trained, found.random))
        say(f"{words:<{wide}}  {trained:<23}  {random}")
    say(f"{'blank maps, counted 0':<{wide}}  {found.trained.blank:<23,}  {found.random.blank:,}")
    groups = found.trained.effect.groups
    where = f" from {plural(groups, 'group')}" if groups else ""
    images = f"{len(found.images):,} of {plural(found.explained, 'explained image')}"
    say(f"{images}{where}, seed {found.recipe['seed']}")


def _interval(one: "Estimate") -> str:
    return f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"


def print_export(found: "Exported", to: str, *, blind: bool) -> None:
    """Print the files written, and what is not in them."""
    for path in found.files:
        say(f"written: {path}")
    if found.left_out:
        images, why = "windows", "not under review" if blind else "explained for other classes"
        if to == "dicom":
            images, why = "images", "of other classes, other formats or several frames"
        note(f"{found.windows:,} {images}; {found.left_out:,} are {why} and left out")
    for why in found.refused[:_MAX_REFUSED]:
        note(f"left out: {why}")
    if len(found.refused) > _MAX_REFUSED:
        note(f"and {len(found.refused) - _MAX_REFUSED:,} more images without a file")
    if found.pending:
        note(f"{found.pending:,} shards of the run are not computed yet: the same audit command resumes it")
    if found.log_error:
        note(f"the run's log could not be written: {found.log_error}")
