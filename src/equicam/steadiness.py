"""Steady, unsteady or cannot say: whether a network's own map follows the image, in a word and with its main reason.

A map is judged by its stability, the mean correlation of the presented view's own map with every other view's, aligned.
Two standard errors over the views either side of the mean are its uncertainty. The average over views, which users look at,
follows the image by construction: it is not what is judged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from equicam.reasons import Reason, describe

Word = Literal["steady", "unsteady", "cannot say"]
WORDS: tuple[Word, ...] = ("unsteady", "cannot say", "steady")
STEADY_FROM = 0.7  # stability: half of the map's variance is the same in every view (0.7² ≈ 0.5)
LOW_CORRELATION = 0.5  # of a view with the presented one, or with the mean of the others
STANDARD_ERRORS = 2
MIN_OTHER_VIEWS = 5
MAX_FLIPPED = 0.5  # share of the other views that change the prediction
UNJUDGED_FLAGS = ("blank", "constant", "none-kept")


@dataclass(frozen=True)
class Steadiness:
    """The word for one map, and the reason that matters most."""

    word: Word
    reason: Reason

    def __str__(self) -> str:
        return f"{self.word}: {describe(self.reason)}"


def judge(
    stability_by_view: Sequence[float | None],
    view_top1: Sequence[int],
    labels: Sequence[str],
    flags: Iterable[str],
    presented: int | None,
) -> Steadiness:
    """Judge one map by its views; a correlation that is NaN or None does not count.

    `presented` is the index of the presented view, with which the others are compared.
    """
    for flag in UNJUDGED_FLAGS:
        if flag in flags:
            return Steadiness("cannot say", Reason(flag))
    others = [
        (float(r), label)
        for i, (r, label) in enumerate(zip(stability_by_view, labels, strict=False))
        if i != presented and r is not None and not math.isnan(r)
    ]
    if len(others) < MIN_OTHER_VIEWS:
        few = {"views": len(others), "needed": MIN_OTHER_VIEWS}
        return Steadiness("cannot say", Reason("too-few-views", few))
    changed, views = [], len(view_top1)
    if presented is not None and view_top1:
        of_views = zip(view_top1, labels, strict=True)
        changed = [label for top, label in of_views if top != view_top1[presented]]
        if len(changed) > MAX_FLIPPED * (views - 1):
            return Steadiness("unsteady", Reason("prediction-changes", {"views": changed, "of": views}))
    values = [r for r, _ in others]
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in values) / (len(values) - 1))
    uncertainty = STANDARD_ERRORS * spread / math.sqrt(len(values))
    lowest, view = min(others)
    facts: dict[str, Any] = {"stability": mean, "uncertainty": uncertainty, "limit": STEADY_FROM}
    facts |= {"lowest": lowest, "view": view, "changed": len(changed), "of": views}
    if mean - uncertainty >= STEADY_FROM:
        return Steadiness("steady", Reason("follows", facts))
    if mean + uncertainty < STEADY_FROM:
        return Steadiness("unsteady", Reason("moves", facts))
    return Steadiness("cannot say", Reason("too-close", facts))


def judge_row(row: Mapping[str, Any], labels: Sequence[str], presented: int | None) -> Steadiness:
    """Judge a row of a run."""
    values, top1, flags = (row[name] or () for name in ("stability_by_view", "view_top1", "flags"))
    return judge(values, top1, labels, flags, presented)


def count_words(items: pa.Table) -> dict[Word, int]:
    """How many of the explained images of a run have each word."""
    found = pc.value_counts(items["steadiness"].filter(pc.equal(items["status"], "ok"))).to_pylist()
    counts = {one["values"]: one["counts"] for one in found}
    return {word: counts.get(word, 0) for word in WORDS}
