"""The files of a run's queue: ranked, written, and read back."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from equicam.auditing import schema1
from equicam.auditing.exports import write_csv, write_parquet
from equicam.auditing.log import Log
from equicam.auditing.review_key import ReviewKey, read_review_key
from equicam.auditing.store import RunStore
from equicam.data.digests import file_digest
from equicam.data.items import valid_utf8
from equicam.errors import EquicamError
from equicam.shards import json_ready, read_json, read_table, refuse_other_columns, write_atomic

if TYPE_CHECKING:
    from equicam.auditing.triage import Triage

OLDEST_COLUMNS = (
    "id",
    "arm",
    "rank",
    "place",
    "peum_score",
    "target",
    "class",
    "confidence",
    "flags",
    "reasons",
)
"""Every queue has these; later ones have more."""
FILES = (
    "triage.parquet",
    "triage.json",
    "queue.csv",
    "fiftyone/samples.json",  # of queues written before 0.2
    "stability.parquet",
)
EVIDENCE = "evidence.json"
REMOVED_OPTIONS = {"alpha"}


def rank_run(store: RunStore, options: Mapping[str, Any]) -> "Triage":
    """Rank the rows of a run: a function of the rows, the options and the run's key alone."""
    return _rank(store, options, read_review_key(store.folder))


def _rank(store: RunStore, options: Mapping[str, Any], key: ReviewKey | None) -> "Triage":
    from equicam.auditing.triage import triage  # loads SciPy, which reading a queue does not need

    manifest = store.manifest
    return triage(
        store.read_items(),
        transforms=manifest.transforms,
        classes=manifest.classes,
        key=key,
        read_maps=store.maps,
        **options,
    )


def _present_options(written: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a triage.json; queues made before there was a choice are by PEUM, and some options are gone."""
    return {"by": "peum"} | {k: v for k, v in written["options"].items() if k not in REMOVED_OPTIONS}


def extend_run(store: RunStore, more: int) -> tuple["Triage", dict[str, Any]]:
    """The queue that was written, with `more` reviews after it, and the options that rank it so."""
    refuse_unranked(store, "extend")
    before = rank_again(store)  # only a queue of the present rows can be extended
    options = _present_options(read_json(store.folder / "triage.json"))
    options["extended"] = [*options.get("extended", ()), more]
    return _rank(
        store, options, read_review_key(store.folder, create=False) if before.keyed else None
    ), options


def write_queue(store: RunStore, found: "Triage", options: Mapping[str, Any]) -> None:
    """Write the queue and its exports, and log their digests; evidence stays as it is."""
    write_parquet(found, store.folder / "triage.parquet")
    write_csv(found, store.folder / "queue.csv")
    text = json.dumps({"options": dict(options), **found.to_json()}, indent=1)
    write_atomic(store.folder / "triage.json", text.encode())
    files = {name: file_digest(store.folder / name) for name in FILES if (store.folder / name).is_file()}
    Log(store.folder).add("triaged", {"options": dict(options), "files": files})


def refuse_unranked(store: RunStore, purpose: str = "review", file: str = "triage.parquet") -> None:
    """Refuse a run without this file of a queue, and name the command that makes one."""
    if not (store.folder / file).is_file():
        raise EquicamError(
            valid_utf8(str(store.folder)),
            needs=f"a queue to {purpose}",
            got="none",
            fix="equicam triage first",
        )


def read_queue(store: RunStore) -> pa.Table:
    """triage.parquet as written; a queue of 0.1.0 gets present names."""
    refuse_unranked(store)
    return _translated(store, read_table(store.folder / "triage.parquet"))


def _translated(store: RunStore, written: pa.Table) -> pa.Table:
    from equicam.auditing.triage import ROWS

    found = schema1.translate_triage(written)
    refuse_other_columns(store.folder / "triage.parquet", found, ROWS, OLDEST_COLUMNS)
    return found


def rank_again(store: RunStore) -> "Triage":
    """The triage of the queue that was written, refused if the rows have changed since."""
    refuse_unranked(store, "report")
    refuse_unranked(store, "report", "triage.json")  # written last: a triage may have been killed before it
    before = read_json(store.folder / "triage.json")
    key = read_review_key(store.folder, create=False) if before.get("keyed") else None
    try:
        found = _rank(store, _present_options(before), key)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # anybody may have written the file
        raise EquicamError(
            valid_utf8(str(store.folder / "triage.json")), needs="the options of a triage", got=error, fix="equicam triage again"
        ) from error  # fmt: skip
    written = read_table(store.folder / "triage.parquet")
    rows = _translated(store, written)
    shared = [name for name in found.rows.column_names if name in rows.column_names]  # old queues have fewer
    if schema1.wrote_triage(written):
        shared.remove("reasons")  # sentences there
    # JSON has null for NaN, which does not equal itself
    if json_ready(found.rows.select(shared).to_pylist()) != json_ready(rows.select(shared).to_pylist()):
        raise EquicamError(
            valid_utf8(str(store.folder)), needs="the queue of the present rows", got="one made before the run went on",
            fix="equicam triage again",
        )  # fmt: skip
    return found


def write_evidence(store: RunStore, evidence: Mapping[str, Any]) -> None:
    """Write evidence.json, and log its digest."""
    write_atomic(store.folder / EVIDENCE, json.dumps(evidence, indent=1).encode())
    digest = file_digest(store.folder / EVIDENCE)
    Log(store.folder).add("evidence", {"images": len(evidence), "files": {EVIDENCE: digest}})


def logged_queue_files(log: Log) -> dict[str, Any]:
    """The digests that the log holds of the last queue's files and of the last evidence, by name."""
    queue: dict[str, Any] = {}
    evidence: dict[str, Any] = {}
    for event in log.events():
        files = event.payload.get("files")
        if event.kind not in ("triaged", "evidence") or not isinstance(files, dict):
            continue
        if event.kind == "triaged":
            queue = files
        if EVIDENCE in files:  # also in events of `triage`, which once computed it
            evidence = {EVIDENCE: files[EVIDENCE]}
    # a stranger may have written the log: only names that a queue has
    return {name: queue[name] for name in FILES if name in queue} | evidence


def logged_evidence(store: RunStore) -> dict[str, Any]:
    """The evidence by image id if it is as the log has it; otherwise empty, because it must be computed again."""
    path = store.folder / EVIDENCE
    if path.is_file() and logged_queue_files(Log(store.folder)).get(EVIDENCE) == file_digest(path):
        return read_evidence(store)
    return {}


def read_evidence(store: RunStore) -> dict[str, Any]:
    """The signal-or-noise evidence by image id; empty if none was computed."""
    path = store.folder / EVIDENCE
    found = read_json(path) if path.is_file() else {}
    for name, one in found.items():
        lines = one.get("lines") if isinstance(one, dict) else None
        if not isinstance(lines, list) or not all(
            isinstance(line, str) for line in (*lines, one.get("verdict"))
        ):
            raise EquicamError(
                valid_utf8(str(path)), needs="a verdict and lines for every image", got=f"none for {name!r}",
                fix="removing it, then equicam evidence",
            )  # fmt: skip
    return found
