"""A triage in the formats of other tools: blinded for reviewers, complete for analysis."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from equicam.auditing.csv_export import as_csv
from equicam.auditing.signals import REVEALING
from equicam.data.remote import as_path
from equicam.reasons import describe, from_rows
from equicam.shards import write_atomic, write_table

if TYPE_CHECKING:
    from equicam.auditing.triage import Triage

BLIND = ("place", "id", "class", "target", "confidence", "flags", "reasons")
"""Columns a reviewer may see: neither arm nor rank, nor the signal, which would reveal them."""


def write_csv(triage: "Triage", path: Path) -> None:
    """For reviewers, in order of place, which the run's key decides."""
    write_atomic(path, as_csv(BLIND, _by_place(triage)))


def write_parquet(triage: "Triage", path: Path) -> None:
    """Every column, arms and ranks too."""
    write_table(path, triage.rows)


def write_fiftyone(triage: "Triage", items: pa.Table, folder: Path) -> None:
    """For reviewers: `fiftyone.Dataset.from_dir(folder, dataset_type=fiftyone.types.FiftyOneDataset)` reads it.

    It is a samples.json {"samples": [...]} in the format of `Sample.to_dict`, and a metadata.json without a "version",
    which FiftyOneDatasetImporter reads with its importer of unversioned folders. Written from its documentation and
    source; not run against an installed FiftyOne. Images stay where they are.
    """
    ids = pa.array(triage.rows["id"].to_pylist(), pa.string())
    known = items.filter(pc.is_in(items["id"], value_set=ids)).select(["id", "path", "label"])
    by_id = {row["id"]: row for row in known.to_pylist()}
    samples = [_sample(row, by_id[row["id"]]) for row in _by_place(triage)]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "samples.json", _json({"samples": samples}))
    write_atomic(folder / "metadata.json", _json({"media_type": "image", "info": {"written_by": "equicam"}}))


def _by_place(triage: "Triage") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = triage.rows.select(BLIND).sort_by("place").to_pylist()
    hidden = REVEALING[triage.by]
    return [row | {"reasons": _visible(row["reasons"], hidden)} for row in rows]


def _visible(cell: list[dict[str, Any]], hidden: frozenset[str]) -> list[str]:
    return [describe(reason) for reason in from_rows(cell) if reason.code not in hidden]


def _sample(row: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    sample = {
        "filepath": str(as_path(item["path"] or row["id"]).absolute()),
        "tags": row["flags"],
        "prediction": {"_cls": "Classification", "label": row["class"], "confidence": row["confidence"]},
        "image": row["id"],
        "place": row["place"],
        "reasons": row["reasons"],
    }
    if item["label"] is not None:
        sample["ground_truth"] = {"_cls": "Classification", "label": item["label"]}
    return sample


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
