"""Why an image may deserve a review, as codes and values."""

from collections.abc import Mapping, Sequence
from typing import Any

from equicam.auditing.signals import COLUMNS
from equicam.errors import EquicamError
from equicam.reasons import Reason

LOW_AGREEMENT = 0.5  # Pearson of a view with the mean of the others
LOW_CONFIDENCE = 0.5


def triage_reasons(
    row: Mapping[str, Any], by: str, angles: Sequence[int | float], above_percent: int | None
) -> list[Reason]:
    """The reasons of one row; `above_percent` of the images have a lower score, None where it says nothing."""
    flags = row["flags"] or ()
    found = [Reason(flag) for flag in ("blank", "constant", "none-kept") if flag in flags]
    if not found and row["views_kept"] in (0, 1):
        found.append(Reason("one-kept" if row["views_kept"] else "none-kept"))
    if above_percent is not None:
        values = {"signal": by, "value": row[COLUMNS[by]], "above_percent": above_percent}
        found.append(Reason("signal-percentile", values))
    elif not found:
        found.append(Reason("signal-undefined", {"signal": by}))
    found += _view_reasons(row, angles)
    found += [Reason(flag) for flag in ("orientation-unread", "low-coverage", "odd-size") if flag in flags]
    if row["confidence"] is not None and row["confidence"] < LOW_CONFIDENCE:
        found.append(Reason("low-confidence", {"confidence": row["confidence"]}))
    return found


def _view_reasons(row: Mapping[str, Any], angles: Sequence[int | float]) -> list[Reason]:
    top1, agreement, n = row["view_top1"] or (), row["view_agreement"] or (), len(angles)
    if not {len(top1), len(agreement)} <= {0, n}:
        raise EquicamError(
            "angles", needs=f"those of {row['id']!r}", got=f"{n} for {len(top1)} views", fix="the run's"
        )
    found = []
    flips = [float(a) for a, top in zip(angles, top1, strict=False) if top != row["target"]]
    if flips:
        found.append(Reason("prediction-changes", {"angles": flips, "views": n}))
    known = zip(angles, agreement, strict=False)
    odd = sorted((r, float(a)) for a, r in known if r is not None and r < LOW_AGREEMENT)
    if odd:
        values = {"angles": [a for _, a in odd], "correlations": [r for r, _ in odd]}
        found.append(Reason("views-disagree", values))
    return found
