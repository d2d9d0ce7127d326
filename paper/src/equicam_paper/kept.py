"""Rows as small JSON files: one experiment each, with its provenance, a line per row."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.evaluate.statistics import Estimate
from equicam.shards import json_ready, read_json, write_atomic
from equicam_paper import EXPERIMENTS
from equicam_paper.claims import NETWORKS, claims
from equicam_paper.rows import VERDICTS, Remark, Row, judge_again, only_of_the_papers

DIGITS = 6  # significant digits that a kept number has
ROTATED_SEEDS = "seeds-rotated"
"""The seeds of the networks trained with rotated images: the same experiment on other weights."""
_OTHER_FILES = ("section.json", "evaluations.json")


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


Kept = dict[str, dict[str, KeptRows]]  # rows by folder and experiment


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
        needs = "rows with provenance, as `equicam-paper reproduce` writes them"
        raise EquicamError(str(path), needs, repr(error), "running it again") from error


def read_kept(rows: Path) -> Kept:
    """Every file of rows, FOLDER/NAME.json, in the order of the experiments."""
    order = [*EXPERIMENTS, ROTATED_SEEDS]
    kept: Kept = {}
    for folder in sorted(path for path in rows.iterdir() if path.is_dir()) if rows.is_dir() else ():
        files = [path for path in folder.glob("*.json") if path.name not in _OTHER_FILES]
        if unknown := [path.stem for path in files if path.stem not in order]:
            raise EquicamError(str(folder), "files named as experiments", ", ".join(unknown), "removing them")
        files.sort(key=lambda path: order.index(path.stem))
        kept[folder.name] = {path.stem: read_rows(path) for path in files}
    if not any(kept.values()):
        fix = "equicam-paper reproduce all --rows FOLDER/NETWORK"
        raise EquicamError(f"rows {str(rows)!r}", "files NETWORK/NAME.json", "none", fix)
    return dict(sorted(kept.items(), key=lambda pair: _place(pair[0], [*pair[1].values()])))


def _place(folder: str, experiments: list[KeptRows]) -> tuple[bool, int, str]:
    """Networks on ImageNet stand before those of domains, and the paper's, in its order, before others."""
    backbone = experiments[0].backbone if experiments else ""
    rank = NETWORKS.index(backbone) if backbone in NETWORKS else len(NETWORKS)
    return any(kept.domain for kept in experiments), rank, folder


def _plain(row: Row) -> dict[str, Any]:
    every = row.as_json()
    if row.verdict == "not run":
        return {name: every[name] for name in ("claim", "verdict", "reason")}
    return {name: value for name, value in every.items() if value not in (None, "") and name != "note"}


def _row(found: dict[str, Any]) -> Row:
    if found["verdict"] not in VERDICTS:
        raise ValueError(found["verdict"])
    known = claims().get(found.get("claim", ""))
    label, published = (known.label, known.text) if known else ("", "")
    given = {"claim": "", "label": label, "published": published} | found
    for name in ("clean", "as_published"):
        given[name] = (of := found.get(name)) and Estimate(**of | _numbers({end: of[end] for end in ENDS}))
    for name in ("reason", "why"):
        given[name] = (of := found.get(name)) and Remark(of["code"], _numbers(of["values"]))
    within = found.get("within")
    return judge_again(Row(**given | {"within": within and (float(within[0]), float(within[1]))}))


ENDS = ("value", "low", "high")


def _numbers(value: Any) -> Any:
    """NaN for null, also in a list or a dict."""
    if isinstance(value, dict):
        return {name: _numbers(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_numbers(one) for one in value]
    return math.nan if value is None else value


def _dump(value: Any) -> str:
    return json.dumps(_rounded(json_ready(value)), ensure_ascii=False, separators=(",", ":"))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
