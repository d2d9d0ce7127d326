"""Why an image may deserve a review, as codes and values."""

from collections.abc import Mapping, Sequence
from typing import Any

from equicam.errors import EquicamError
from equicam.reasons import Reason
from equicam.runs.signals import FLAT
from equicam.steadiness import LOW_CORRELATION

LOW_CONFIDENCE = 0.5
ViewNames = Sequence[tuple[str, bool]]
"""The label of every view, and whether it is the presented one."""


def triage_reasons(
    row: Mapping[str, Any],
    by: str,
    views: ViewNames,
    *,
    value: float,
    above_percent: int | None,
) -> list[Reason]:
    """The reasons of one row; it ranks above `above_percent` of the images, None where the signal says nothing."""
    flags = row["flags"] or ()
    flat = bool(FLAT & {*flags})
    found = [Reason(flag) for flag in ("blank", "constant", "none-kept") if flag in flags]
    if not found and row["views_kept"] in (0, 1):
        found.append(Reason("one-kept" if row["views_kept"] else "none-kept"))
    if above_percent is not None:
        values = {"signal": by, "value": value, "above_percent": above_percent}
        found.append(Reason("signal-percentile", values))
    elif not flat and not (found and by == "peum"):  # those say it themselves
        found.append(Reason("signal-undefined", {"signal": by}))
    found += _view_reasons(row, by, views, flat=flat)
    found += [
        Reason(flag) for flag in ("orientation-unread", "low-coverage", "odd-size", "edge") if flag in flags
    ]
    if row["confidence"] is not None and row["confidence"] < LOW_CONFIDENCE:
        found.append(Reason("low-confidence", {"confidence": row["confidence"]}))
    return found


def view_column(by: str) -> str:
    """The column with the correlations of views that explain this signal."""
    # PEUM compares all views; the other signals are about the presented view's own map
    return "view_agreement" if by == "peum" else "stability_by_view"


def _view_reasons(row: Mapping[str, Any], by: str, views: ViewNames, *, flat: bool) -> list[Reason]:
    column, n = view_column(by), len(views)
    top1, correlations = row["view_top1"] or (), row[column] or ()
    if not {len(top1), len(correlations)} <= {0, n}:
        raise EquicamError(
            "transforms", needs=f"those of {row['id']!r}", got=f"{n} for {len(top1)} views", fix="the run's"
        )
    found = []
    # a flip is a change against the presented view's prediction, whichever class is explained
    predicted = next((top for (_, shown), top in zip(views, top1, strict=False) if shown), row["target"])
    flips = [name for (name, _), top in zip(views, top1, strict=False) if top != predicted]
    if flips:
        # without the presented view among them, all views are other ones
        found.append(
            Reason("prediction-changes", {"views": flips, "of": n + (not any(shown for _, shown in views))})
        )
    moves, known = column == "stability_by_view", zip(views, () if flat else correlations, strict=False)
    odd = [
        (r, name)
        for (name, is_presented), r in known
        if r is not None and r < LOW_CORRELATION and not (moves and is_presented)
    ]
    if odd:
        odd.sort(key=lambda pair: pair[0])
        values = {"views": [name for _, name in odd], "correlations": [r for r, _ in odd], "of": n}
        found.append(Reason("map-moves" if moves else "views-disagree", values))
    return found
