"""Which maps of a run can be trusted, and why: the report's first lines and its table of images."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equicam.drawing.text import STEADINESS_REASONS
from equicam.reasons import describe
from equicam.runs.manifest import Manifest
from equicam.runs.signals import FLAT
from equicam.steadiness import STEADY_FROM, WORDS, count_words, judge_row

MAX_TABLE_ROWS = 500  # of the table of all images
COLUMNS = [
    "id", "target", "confidence", "output", "flip_rate", "stability", "stability_by_view", "view_top1", "flags", "status",
]  # fmt: skip


def steadiness_counts(items: pa.Table) -> dict[str, Any]:
    """How many maps have each word, and how many of them for which reason, the most frequent first."""
    ok = items.select(["steadiness", "steadiness_reason"]).filter(pc.equal(items["status"], "ok"))
    counted = ok.group_by(["steadiness", "steadiness_reason"], use_threads=False).aggregate(
        [([], "count_all")]
    )
    reasons = Counter[tuple[str, Any]]()
    for one in counted.to_pylist():
        reasons[one["steadiness"] or "cannot say", one["steadiness_reason"]] += one["count_all"]
    changing = pc.equal(items["steadiness_reason"], "prediction-changes")
    following = pc.and_(changing, pc.greater_equal(items["stability"], STEADY_FROM))
    return {
        "words": dict(count_words(items)),
        "changing_but_following": pc.sum(following, min_count=0).as_py(),
        "reasons": {
            word: [
                {
                    "code": code,
                    "count": count,
                    "text": STEADINESS_REASONS.get(code, "no stability is recorded"),
                }
                for (of, code), count in reasons.most_common()
                if of == word
            ]
            for word in WORDS
        },
    }


def image_table(items: pa.Table, manifest: Manifest) -> list[dict[str, Any]] | None:
    """Every explained image with its word and reason, the least trustworthy first; None where there are too many.

    It says nothing of queue, control arm or verdicts: every image of the run has the same columns.
    """
    ok = items.filter(pc.equal(items["status"], "ok"))
    if ok.num_rows > MAX_TABLE_ROWS:
        return None
    rows = [_table_row(row, manifest) for row in ok.select(COLUMNS).to_pylist()]
    order = {word: place for place, word in enumerate(WORDS)}
    return sorted(
        rows, key=lambda row: (order[row["steadiness"]], -1 if row["stability"] is None else row["stability"])
    )


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
