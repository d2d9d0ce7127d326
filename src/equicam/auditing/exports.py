"""The reviews of a triage in other tools' files: blind ones for reviewers, and all of it for the analysis."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equicam.auditing.csv_export import as_csv
from equicam.auditing.signals import GIVES_AWAY
from equicam.auditing.triage import Triage
from equicam.data.remote import as_path
from equicam.shards import write_table, write_whole

BLIND = ("place", "id", "class", "target", "prob", "flags", "reasons")
"""What a reviewer may see: neither arm nor rank, nor what ranks, which would give them away."""


def write_csv(triage: Triage, path: Path) -> None:
    """For reviewers, in order of place; text that a spreadsheet would run as a formula gets a leading apostrophe."""
    write_whole(path, as_csv(BLIND, _by_place(triage)))


def write_parquet(triage: Triage, path: Path) -> None:
    """Every column, arms and ranks too."""
    write_table(path, triage.rows)


def write_fiftyone(triage: Triage, items: pa.Table, folder: Path) -> None:
    """For reviewers: `fiftyone.Dataset.from_dir(folder, dataset_type=fiftyone.types.FiftyOneDataset)` reads it.

    A samples.json {"samples": [...]} of what `Sample.to_dict` gives, and a metadata.json without a "version", for which
    FiftyOneDatasetImporter uses its importer of unversioned folders. Followed from its documentation and source; not
    run against an installed FiftyOne. Pictures stay where they are.
    """
    ids = pa.array(triage.rows["id"].to_pylist(), pa.string())
    known = items.filter(pc.is_in(items["id"], value_set=ids)).select(["id", "path", "label"])
    by_id = {row["id"]: row for row in known.to_pylist()}
    samples = [_sample(row, by_id[row["id"]]) for row in _by_place(triage)]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "samples.json", _json({"samples": samples}))
    write_whole(folder / "metadata.json", _json({"media_type": "image", "info": {"written_by": "equicam"}}))


def _by_place(triage: Triage) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = triage.rows.select(BLIND).sort_by("place").to_pylist()
    held = GIVES_AWAY[triage.by]
    return [row | {"reasons": [r for r in row["reasons"] if not r.startswith(held)]} for row in rows]


def _sample(row: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    sample = {
        "filepath": str(as_path(item["path"] or row["id"]).absolute()),
        "tags": row["flags"],
        "prediction": {"_cls": "Classification", "label": row["class"], "confidence": row["prob"]},
        "picture": row["id"],
        "place": row["place"],
        "reasons": row["reasons"],
    }
    if item["label"] is not None:
        sample["ground_truth"] = {"_cls": "Classification", "label": item["label"]}
    return sample


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
