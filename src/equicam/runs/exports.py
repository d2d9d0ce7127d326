"""A triage in the formats of other tools: blinded for reviewers, complete for analysis."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from equicam.reasons import describe, from_rows
from equicam.runs.csv_export import as_csv
from equicam.runs.signals import REVEALING
from equicam.shards import write_atomic, write_table

if TYPE_CHECKING:
    from equicam.runs.triage import Triage

BLIND = ("place", "id", "class", "target", "confidence", "flags", "reasons")
"""Columns a reviewer may see: neither arm nor rank, nor the signal, which would reveal them."""


def write_csv(triage: "Triage", path: Path) -> None:
    """For reviewers, in order of place, which the run's key decides."""
    write_atomic(path, as_csv(BLIND, _by_place(triage)))


def write_parquet(triage: "Triage", path: Path) -> None:
    """Every column, arms and ranks too."""
    write_table(path, triage.rows)


def _by_place(triage: "Triage") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = triage.rows.select(BLIND).sort_by("place").to_pylist()
    hidden = REVEALING[triage.by]
    return [row | {"reasons": _visible(row["reasons"], hidden)} for row in rows]


def _visible(cell: list[dict[str, Any]], hidden: frozenset[str]) -> list[str]:
    return [describe(reason) for reason in from_rows(one for one in cell if one["code"] not in hidden)]
