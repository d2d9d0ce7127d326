"""Rows as small JSON files: one experiment each, with its provenance, a line per row."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.evaluate.statistics import Estimate
from equicam.shards import json_ready, read_json, write_atomic
from equicam_paper.claims import claims
from equicam_paper.rows import VERDICTS, Remark, Row, judge_again, only_of_the_papers

DIGITS = 6
"""Significant digits that a kept number has."""


@dataclass(frozen=True)
class KeptRows:
    """The rows of an experiment, and where they come from."""

    experiment: str
    backbone: str
    domain: str
    provenance: dict[str, Any]
    rows: tuple[Row, ...]

    @property
    def ran(self) -> tuple[Row, ...]:
        """The rows that were run."""
        return tuple(row for row in self.rows if row.verdict != "not run")


def write_rows(path: Path, kept: KeptRows) -> None:
    """Write the rows; those that were not run as claim and reason."""
    about = {"experiment": kept.experiment, "backbone": kept.backbone, "domain": kept.domain}
    lines = ",\n".join(_dump(_plain(row)) for row in kept.rows)
    text = f'{_dump(about)[:-1]},\n"provenance":{_dump(kept.provenance)},\n"rows":[\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode())


def read_rows(path: Path) -> KeptRows:
    """Rows that `write_rows` wrote, judged by the present rule."""
    found = read_json(path)
    try:
        backbone, domain = found["backbone"], found["domain"]
        rows = tuple(row for one in found["rows"] for row in only_of_the_papers(_row(one), backbone, domain))
        return KeptRows(found["experiment"], backbone, domain, found["provenance"], rows)
    except (KeyError, TypeError, ValueError) as error:
        raise EquicamError(
            str(path), "rows with provenance, as `equicam-paper reproduce` writes them", repr(error), "running it again",
        ) from error  # fmt: skip


def _plain(row: Row) -> dict[str, Any]:
    every = row.as_json()
    if row.verdict == "not run":
        return {name: every[name] for name in ("claim", "verdict", "reason")}
    return {name: value for name, value in every.items() if value not in (None, "") and name != "note"}


def _row(found: dict[str, Any]) -> Row:
    if found["verdict"] not in VERDICTS:
        raise ValueError(found["verdict"])
    known = claims().get(found.get("claim", ""))
    clean, theirs = (_estimate(found.get(name)) for name in ("clean", "as_published"))
    within = found.get("within")
    row = Row(
        claim=found.get("claim", ""),
        label=found.get("label", known.label if known else ""),
        published=found.get("published", known.text if known else ""),
        clean=clean,
        as_published=theirs,
        verdict=found["verdict"],
        reason=_remark(found.get("reason")),
        why=_remark(found.get("why")),
        margin=found.get("margin"),
        within=None if within is None else (float(within[0]), float(within[1])),
    )
    return judge_again(row)


def _remark(found: dict[str, Any] | None) -> Remark | None:
    return None if found is None else Remark(found["code"], _numbers(found["values"]))


def _estimate(found: dict[str, Any] | None) -> Estimate | None:
    if found is None:
        return None
    value, low, high = (
        float("nan") if found[name] is None else float(found[name]) for name in ("value", "low", "high")
    )
    return Estimate(
        value, low, high, **{name: one for name, one in found.items() if name not in ("value", "low", "high")}
    )


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    """NaN for null, also in a list."""
    if isinstance(value, list):
        return [_number(one) for one in value]
    return float("nan") if value is None else value


def _dump(value: Any) -> str:
    return json.dumps(_rounded(json_ready(value)), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return (
        [_rounded(one) for one in value]
        if isinstance(value, Iterable) and not isinstance(value, str)
        else value
    )
