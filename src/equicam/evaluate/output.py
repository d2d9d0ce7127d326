"""The file of an evaluation's rows: finished shards are kept next to it until all are there, then the file is written."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equicam.engines.worker import Shard
from equicam.errors import EquicamError
from equicam.images.items import Item
from equicam.shards import Shards, plain, refuse_another, write_table

METADATA_KEY = b"equicam"
"""The key of the Parquet metadata that holds the fingerprint."""
Done = Callable[[float], None]
"""Receives the number of images finished since its last call; of compiled calls on a GPU, given to it."""
ComputeShards = Callable[[Shards, Sequence[Shard], Done], None]
"""Computes and writes the pending shards."""


def resume(
    out: Path,
    shards: Sequence[Sequence[Item]],
    items: Sequence[Item],
    fingerprint: dict[str, Any],
    compute: ComputeShards,
    done: Done,
) -> pa.Table:
    """The rows in `out`, in the order of the items, after computing the shards that are not there yet."""
    fix = f"another --out, or deleting {out} and {out}.shards"
    if out.is_file():
        refuse_another(str(out), _read_fingerprint(out), fingerprint, fix=fix)
        # a process killed right after writing the file left its shards
        shutil.rmtree(f"{out}.shards", ignore_errors=True)
        return pq.read_table(out)
    if out.exists() or not out.absolute().parent.is_dir():
        raise EquicamError(
            f"out {str(out)!r}", needs="a file in a folder that exists", got="a folder" if out.exists() else "no such folder",
            fix="rows.parquet",
        )  # fmt: skip
    store = Shards(Path(f"{out}.shards"), fingerprint, fix=fix)
    pending = [(number, shards[number]) for number in store.pending(len(shards))]
    done(sum(map(len, shards)) - sum(len(items) for _, items in pending))
    if pending:
        compute(store, pending, done)
    rows = stamp(in_order_of(items, store.read(len(shards))), fingerprint)
    write_table(out, rows)
    shutil.rmtree(store.folder)
    return rows


def in_order_of(items: Sequence[Item], rows: pa.Table) -> pa.Table:
    """The rows image by image; shards have them in another order."""
    place = pc.index_in(rows["id"], value_set=pa.array([item.id for item in items], pa.string()))
    return rows.take(np.argsort(place.to_numpy(), kind="stable"))


def stamp(rows: pa.Table, fingerprint: dict[str, Any]) -> pa.Table:
    """The rows with their fingerprint as metadata."""
    return rows.replace_schema_metadata({METADATA_KEY: json.dumps(plain(fingerprint))})


def _read_fingerprint(out: Path) -> dict[str, Any]:
    """The fingerprint of a file of rows; a file that is not one of ours has none."""
    try:
        found: dict[str, Any] = json.loads((pq.read_schema(out).metadata or {}).get(METADATA_KEY, b"{}"))
    except (pa.ArrowInvalid, ValueError):
        return {"file": "not one of ours"}
    return found
