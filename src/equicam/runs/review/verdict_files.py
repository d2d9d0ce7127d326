"""The verdicts of a run as CSV or JSON, for downloads and for the command line."""

import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from equicam.errors import EquicamError
from equicam.runs.csv_export import as_csv
from equicam.runs.queue_files import read_queue
from equicam.runs.store import RunStore
from equicam.runs.verdicts import COLUMNS, TRIAGE_COLUMNS, ReviewLog, verdict_rows
from equicam.shards import json_ready, write_atomic

SUFFIXES = ("csv", "json")


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
    if suffix not in SUFFIXES:
        raise EquicamError(
            "--export", needs="a name that ends in .csv or .json", got=str(path), fix="verdicts.csv"
        )
    queue, log = read_queue(store), ReviewLog(store.folder)
    log.refresh()
    write_atomic(path, encode_verdicts(log, queue, suffix))
    return len(verdict_rows(log, queue))
