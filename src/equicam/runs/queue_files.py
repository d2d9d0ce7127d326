"""The files of a run's queue: ranked, written (a blinded CSV for reviewers next to the whole table), and read back.

The CSV is safe to open in a spreadsheet.
"""

import contextlib
import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, UUID, uuid5

import pyarrow as pa

from equicam.errors import EquicamError
from equicam.images.files import file_digest
from equicam.images.items import valid_utf8
from equicam.reasons import describe, from_rows
from equicam.runs.log import QUEUE_FILES, Log
from equicam.runs.manifest import Manifest
from equicam.runs.signals import REVEALING, ROWS, reduce_views
from equicam.runs.store import RunStore
from equicam.runs.verdicts import ReviewKey, read_review_key
from equicam.shards import finite_table, parse_object, read_json, read_table, write_atomic, write_table

if TYPE_CHECKING:
    from equicam.runs.triage import Triage

ORDER = ("id", "arm", "rank", "by", "class", "flags")
RANKED = (
    "id", "status", "target", "confidence", "output", "peum_score", "stability", "view_confidence", "views_kept", "flags",
    "eq",
)  # fmt: skip
PLACES = ("x", "y", "side")  # of windows in their raster
SHA256 = "triage.parquet"
"""The key of triage.json with the SHA-256 of that file."""
MAX_HEAD_BYTES = 2**20  # of triage.json without its rows
_ROWS_BEGIN = '\n "rows": [\n'


def rank_run(store: RunStore, options: Mapping[str, Any]) -> "Triage":
    """Rank the rows of a run: a function of the rows, the options and the run's key alone."""
    return _rank(store, options, read_review_key(store.folder))


def _rank(
    store: RunStore,
    options: Mapping[str, Any],
    key: ReviewKey | None,
    *,
    top: int | None = None,
    items: pa.Table | None = None,
) -> "Triage":
    from equicam.runs.triage import triage  # loads SciPy, which reading a queue does not need

    manifest = store.manifest
    return triage(
        store.read_items(ranked_columns(manifest), reduce=reduce_views) if items is None else items,
        transforms=manifest.transforms,
        classes=manifest.classes,
        name_output=manifest.output_name if manifest.has_values else None,
        key=key,
        read_rows=store.select,
        top=top,
        **options,
    )


def extend_run(store: RunStore, more: int) -> tuple["Triage", dict[str, Any]]:
    """The queue that was written, with `more` reviews after it, and the options that rank it so."""
    refuse_unranked(store, "extend")
    before = rank_again(store, 0)  # only a queue of the present rows can be extended
    options = read_options(store)["options"]
    options["extended"] = [*options.get("extended", ()), more]
    key = read_review_key(store.folder, create=False) if before.keyed else None
    return _rank(store, options, key), options


def write_queue(store: RunStore, ranked: "Triage", options: Mapping[str, Any]) -> None:
    """Write the queue and its exports, and log their digests."""
    paths = {name: store.folder / name for name in QUEUE_FILES}
    write_table(paths["triage.parquet"], ranked.rows)
    write_csv(ranked, paths["queue.csv"])
    # a line for each row after everything else, so that this can be read alone
    plain = ranked.to_json()
    rows = ",\n".join(f"  {json.dumps(row)}" for row in plain.pop("rows"))
    head = {"options": dict(options), **plain, SHA256: file_digest(paths["triage.parquet"])}
    text = f"{json.dumps(head, indent=1)[:-2]},{_ROWS_BEGIN}{rows}\n ]\n}}"
    write_atomic(paths["triage.json"], text.encode())
    files = {name: file_digest(path) for name, path in paths.items()}
    Log(store.folder).add("triaged", {"options": dict(options), "files": files})


def read_options(store: RunStore) -> dict[str, Any]:
    """triage.json, without the rows where they come last."""
    path = store.folder / "triage.json"
    with path.open("rb") as file:
        head, rows, _ = file.read(MAX_HEAD_BYTES).partition(_ROWS_BEGIN.encode())
    if rows:
        with contextlib.suppress(ValueError):
            return parse_object(head.rstrip(b",") + b"}")
    return read_json(path)


def refuse_unranked(store: RunStore, purpose: str = "review", file: str = "triage.parquet") -> None:
    """Refuse a run without this file of a queue, and name the command that makes one."""
    if not (store.folder / file).is_file():
        if len(store.manifest.transforms) < 2:
            raise EquicamError(
                store.shown, "several views of each image: one has no stability to rank by", "a run of one view",
                "equicam audit --views 6 with another --out",
            )  # fmt: skip
        raise EquicamError(store.shown, f"a queue to {purpose}", "none", "equicam triage first")


def read_queue(store: RunStore, data: bytes | None = None) -> pa.Table:
    """triage.parquet as written. `data` is the file, if it was read already."""
    refuse_unranked(store)
    return read_table(store.folder / "triage.parquet", schema=ROWS, data=data)


def read_order(store: RunStore, data: bytes) -> pa.Table:
    """The columns of triage.parquet that say what is under review, in which order; without reasons it is read sooner."""
    return read_table(store.folder / "triage.parquet", ORDER, schema=ROWS, data=data)


def ranked_columns(manifest: Manifest) -> list[str]:
    """The columns of the items that decide ranks and arms."""
    return [*RANKED, *(PLACES if manifest.tiling else ())]


def rank_again(store: RunStore, top: int | None = None, items: pa.Table | None = None) -> "Triage":
    """The triage of the queue that was written, refused if the rows have changed since.

    With `top`, only the queue's first images have reasons, so that few views and maps are read. `items` are the rows with
    these columns, if they were read already.
    """
    refuse_unranked(store, "report")
    refuse_unranked(store, "report", "triage.json")  # written last: a triage may have been killed before it
    before = read_options(store)
    key = read_review_key(store.folder, create=False) if before.get("keyed") else None
    try:
        ranked = _rank(store, before["options"], key, top=top, items=items)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # anybody may have written the file
        raise EquicamError(
            valid_utf8(str(store.folder / "triage.json")), "the options of a triage", error, "equicam triage again",
        ) from error  # fmt: skip
    if not _same(ranked.rows, read_queue(store)):
        raise EquicamError(
            store.shown, "the queue of the present rows", "one made before the run went on", "equicam triage again",
        )  # fmt: skip
    return ranked


def _same(now: pa.Table, before: pa.Table) -> bool:
    """Whether two queues are the same, of the reasons those that were computed."""
    if now.num_rows != before.num_rows:
        return False
    now, before = finite_table(now), finite_table(before)
    computed = now["reasons"].is_valid()
    if not now["reasons"].filter(computed).equals(before["reasons"].filter(computed)):
        return False
    return all(now[name].equals(before[name]) for name in now.column_names if name != "reasons")


_FORMULA = r"'*[=+\-@＝＋－＠]"
# A spreadsheet that expects another separator, or no quotes, splits a cell at these and runs what follows.
_FORMULA_AHEAD = re.compile(rf"((?:\A|[;|\t\r\n])[\s\"]*)(?={_FORMULA})")
_CONTROL_FIRST = re.compile(r"'*[\t\r\n]")


def as_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """These columns of the rows as CSV; an apostrophe precedes whatever a spreadsheet would run as a formula."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(names)
    for row in rows:
        cells = ("; ".join(v) if isinstance(v := row[name], list) else v for name in names)
        table.writerow([_guard_formulas(v) if isinstance(v, str) else v for v in cells])
    return text.getvalue().encode()


def _guard_formulas(text: str) -> str:
    """Text with an apostrophe before every formula: where the cell begins, and after what may separate cells.

    Apostrophes that are already there get one more, so no two texts become the same.
    """
    guarded = _FORMULA_AHEAD.sub(r"\1'", text)
    return f"'{guarded}" if _CONTROL_FIRST.match(guarded) else guarded


BLIND = ("place", "id", "class", "target", "confidence", "flags", "reasons")
"""Columns a reviewer may see: neither arm nor rank, nor the signal, which would reveal them."""


def write_csv(triage: "Triage", path: Path) -> None:
    """For reviewers, in order of place, which the run's key decides."""
    rows, hidden = triage.rows.select(BLIND).sort_by("place").to_pylist(), REVEALING[triage.by]
    for row in rows:
        row["reasons"] = [
            describe(reason) for reason in from_rows(row["reasons"]) if reason.code not in hidden
        ]
    write_atomic(path, as_csv(BLIND, rows))


def feature_id(store: RunStore, item_id: str) -> str:
    """The UUIDv5 of an image, from manifest.json and its id: features of another run match none of this one."""
    path = store.folder / "manifest.json"
    stat = path.stat()
    return str(uuid5(_namespace(path, stat.st_mtime_ns, stat.st_size), valid_utf8(item_id)))


@lru_cache(maxsize=8)
def _namespace(manifest: Path, _modified: int, _bytes: int) -> UUID:
    """The namespace of a run; the arguments after the path make a changed file another one."""
    return uuid5(NAMESPACE_URL, f"equicam:run:{file_digest(manifest)}")
