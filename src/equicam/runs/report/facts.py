"""Facts about the images of a run, as pages and their JSON say them, and the templates that the pages are written with."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from equicam.drawing.text import STEADINESS_REASONS, visible
from equicam.drawing.view_curve import curve_order, view_curve
from equicam.reasons import describe
from equicam.runs.manifest import Manifest
from equicam.runs.signals import FLAT
from equicam.steadiness import STEADY_FROM, WORDS, count_words, judge_row

MAX_TABLE_ROWS = 500  # of the table of all images
COLUMNS = [
    "id", "target", "confidence", "output", "flip_rate", "stability", "stability_by_view", "view_top1", "flags", "status",
]  # fmt: skip
PEUM_UNDEFINED_FLAGS = {"blank", "constant", "none-kept"}


def peum_undefined(row: Mapping[str, Any], *, views: int) -> bool:
    """Whether PEUM is undefined here: a flat map, or too few views, or views kept, to have a variance."""
    if views <= 1 or PEUM_UNDEFINED_FLAGS & {*(row["flags"] or ())}:
        return True
    return row["views_kept"] is not None and row["views_kept"] <= 1


def steadiness_counts(items: pa.Table) -> dict[str, Any]:
    """How many maps have each word, and how many of them for which reason, the most frequent first."""
    ok = items.filter(pc.equal(items["status"], "ok"))
    words = pa.table({"word": ok["steadiness"].fill_null("cannot say"), "code": ok["steadiness_reason"]})
    counted = words.group_by(["word", "code"], use_threads=False).aggregate([([], "count_all")]).to_pylist()
    counted.sort(key=lambda one: -one["count_all"])
    changing = pc.equal(items["steadiness_reason"], "prediction-changes")
    following = pc.and_(changing, pc.greater_equal(items["stability"], STEADY_FROM))
    return {
        "words": dict(count_words(items)),
        "changing_but_following": pc.sum(following, min_count=0).as_py(),
        "reasons": {
            word: [
                {
                    "code": one["code"],
                    "count": one["count_all"],
                    "text": STEADINESS_REASONS.get(one["code"], "no stability is recorded"),
                }
                for one in counted
                if one["word"] == word
            ]
            for word in WORDS
        },
    }


def image_table(items: pa.Table, manifest: Manifest) -> list[dict[str, Any]]:
    """Every explained image with its word and reason, the least trustworthy first.

    It says nothing of queue, control arm or verdicts: every image of the run has the same columns.
    """
    ok = items.filter(pc.equal(items["status"], "ok"))
    rows = [_table_row(row, manifest) for row in ok.select(COLUMNS).to_pylist()]
    return sorted(
        rows, key=lambda row: (WORDS.index(row["steadiness"]), -1 if row["stability"] is None else row["stability"])
    )  # fmt: skip


def _table_row(row: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    judged = judge_row(row, manifest.labels, manifest.presented)
    return {
        "id": row["id"],
        "class": manifest.output_name(row["target"]),
        "confidence": row["confidence"],
        "output": row["output"],
        "flips": None if row["flip_rate"] is None else round(row["flip_rate"] * len(manifest.transforms)),
        "steadiness": judged.word,
        "reason": describe(judged.reason),
        "stability": None if FLAT & {*(row["flags"] or ())} else row["stability"],
    }


@cache
def load_templates(folder: Path) -> Environment:
    """The templates of a page, which escape what they are given and refuse what they are not."""
    found = Environment(
        loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )  # fmt: skip
    found.filters |= {
        "visible": visible,
        "number": _format_number,
        "view_curve": view_curve,
        "curve_order": curve_order,
    }
    return found


def _format_number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None or not np.isfinite(value) else f"{value:{form}}"
