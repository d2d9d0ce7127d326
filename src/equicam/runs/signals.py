"""Signals that rank a queue, each read from a run's rows alone, and why a row may deserve a review, as codes and values.

Stability is the rotation test of the presented view's own map: the lowest deserves least trust. PEUM is of all views.
Risk is the mean of two ranks, by low stability and by low mean confidence over the views. The highest of both deserves
least trust.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.reasons import Reason
from equicam.steadiness import LOW_CORRELATION

Floats = NDArray[np.float64]
COLUMNS = {"stability": "stability", "peum": "peum_score", "risk": "risk"}
"""The column of the triage table, by the name of the signal."""
ROWS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("arm", pa.string(), nullable=False),  # queue or control
        pa.field("rank", pa.int32(), nullable=False),  # among all ok images; 1 is the least trustworthy
        pa.field("place", pa.int32(), nullable=False),  # order of review, in which the arms are mixed
        ("represents_rest", pa.bool_()),  # a random draw from the images outside the queue
        ("by", pa.string()),  # the signal it is ranked by
        ("stability", pa.float64()),
        ("peum_score", pa.float64()),
        ("risk", pa.float64()),
        ("peum_above", pa.float64()),  # share of the run's images with a lower PEUM
        ("target", pa.int32()),
        ("class", pa.string()),
        ("confidence", pa.float32()),
        ("output", pa.float32()),
        ("flags", pa.list_(pa.string())),
        pa.field("reasons", pa.list_(pa.struct([("code", pa.string()), ("values", pa.string())]))),
        ("x", pa.float64()),  # of a window
        ("y", pa.float64()),
        ("side", pa.float64()),
    ]
)
"""The triage table: a row for every image under review."""
ALWAYS_REVEALING = frozenset({"signal-percentile", "signal-undefined", "text"})
REVEALING = {
    "stability": ALWAYS_REVEALING | {"map-moves"},
    "peum": ALWAYS_REVEALING | {"views-disagree", "one-kept", "none-kept"},
    "risk": ALWAYS_REVEALING | {"map-moves", "low-confidence", "prediction-changes"},
}
"""Codes of reasons that tell a blinded reviewer how an image ranks, or may, as those of another version do ("text")."""
FLAT = {"blank", "constant"}


def refuse_unknown(by: str, items: pa.Table) -> None:
    """Refuse a signal that does not exist, or that the rows do not hold."""
    if by not in COLUMNS:
        raise EquicamError("by", f"one of {', '.join(COLUMNS)}", repr(by), "stability")
    if by == "risk" and items.num_rows and not np.isfinite(_mean_confidence(items)).any():
        raise EquicamError(
            f"by={by!r}", "the confidence of classes", "none in this run: a value has no confidence",
            "by=stability, or peum",
        )  # fmt: skip


def ranked_by(rows: pa.Table) -> str:
    """The signal a triage table is ranked by; an empty one does not name it."""
    return str(rows["by"][0]) if rows.num_rows else "stability"


def queue_arm(rows: pa.Table) -> pa.Table:
    """The rows of the queue in a triage table, by rank."""
    return rows.filter(pc.equal(rows["arm"], "queue")).sort_by("rank")


def reduce_views(items: pa.Table) -> pa.Table:
    """The items with the mean confidence over the views instead of that of each view."""
    mean = pa.array(_mean_confidence(items))
    return items.drop_columns("view_confidence").append_column("mean_confidence", mean)


def signal_values(items: pa.Table, by: str) -> Floats:
    """The signal of every row, NaN where it is undefined."""
    if by == "peum":
        return _numbers(items["peum_score"])
    # correlations with a flat map mean nothing
    stability = np.where(flagged(items, FLAT), np.nan, _numbers(items["stability"]))
    if by == "stability":
        return stability
    return (_rank_shares(1 - stability) + _rank_shares(1 - _mean_confidence(items))) / 2


def ranking_scores(items: pa.Table, by: str) -> Floats:
    """The order of review, the highest first: the signal, 1 − stability; ∞ where it says nothing.

    An image nothing is known of is not certain.
    """
    values = signal_values(items, by)
    if by == "stability":
        values = 1 - values
    undefined = flagged(items, FLAT) | ~np.isfinite(values)
    if by == "peum":  # no variance without two kept views; the other signals use all views, kept or not
        kept = items["views_kept"].fill_null(2).to_numpy()
        undefined |= flagged(items, {"none-kept"}) | (kept <= 1)
    return np.where(undefined, np.inf, values)


def flagged(items: pa.Table, flags: set[str]) -> NDArray[np.bool_]:
    """Which rows have one of these flags."""
    lists = items["flags"].combine_chunks()
    rows = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    hit = pc.is_in(pc.list_flatten(lists), value_set=pa.array(sorted(flags)))
    has_one = np.zeros(items.num_rows, dtype=bool)
    has_one[rows[hit.to_numpy(zero_copy_only=False)]] = True
    return has_one


def _mean_confidence(items: pa.Table) -> Floats:
    """Over the views; the column that `reduce_views` makes, if it is there."""
    reduced = "mean_confidence" in items.column_names
    return _numbers(items["mean_confidence"]) if reduced else _means(items["view_confidence"])


def _numbers(column: pa.ChunkedArray) -> Floats:
    return np.asarray(column.cast(pa.float64()).fill_null(np.nan).to_numpy())


def _means(column: Any) -> Floats:
    """The mean of every list's finite values; NaN where there is none."""
    lists = column.combine_chunks()
    rows = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    values = pc.list_flatten(lists).cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    known = np.isfinite(values)
    total, count = (np.bincount(rows[known], w, len(lists)) for w in (values[known], None))
    return np.asarray(np.divide(total, count, out=np.full(len(lists), np.nan), where=count > 0))


def _rank_shares(values: Floats) -> Floats:
    """Ranks from 0 for the lowest to 1 for the highest; ties share theirs, and NaN stays NaN."""
    known = np.isfinite(values)
    shares = np.full(values.shape, np.nan)
    _, which, count = np.unique(values[known], return_inverse=True, return_counts=True)
    average = np.cumsum(count) - (count + 1) / 2  # SciPy has it, but loads slowly
    shares[known] = average[which] / max(1, int(known.sum()) - 1)
    return shares


LOW_CONFIDENCE = 0.5
ViewNames = Sequence[tuple[str, bool]]
"""The label of every view, and whether it is the presented one."""


def triage_reasons(
    row: Mapping[str, Any], by: str, views: ViewNames, *, value: float, above_percent: int | None
) -> list[Reason]:
    """The reasons of one row; it ranks above `above_percent` of the images, None where the signal says nothing."""
    flags = row["flags"] or ()
    flat = bool(FLAT & {*flags})
    reasons = [Reason(flag) for flag in ("blank", "constant", "none-kept") if flag in flags]
    if not reasons and row["views_kept"] in (0, 1):
        reasons.append(Reason("one-kept" if row["views_kept"] else "none-kept"))
    if above_percent is not None:
        values = {"signal": by, "value": value, "above_percent": above_percent}
        reasons.append(Reason("signal-percentile", values))
    elif not flat and not (reasons and by == "peum"):  # those say it themselves
        reasons.append(Reason("signal-undefined", {"signal": by}))
    reasons += _view_reasons(row, by, views, flat=flat)
    reasons += map(
        Reason, (f for f in ("orientation-unread", "low-coverage", "odd-size", "edge") if f in flags)
    )
    if row["confidence"] is not None and row["confidence"] < LOW_CONFIDENCE:
        reasons.append(Reason("low-confidence", {"confidence": row["confidence"]}))
    return reasons


def view_column(by: str) -> str:
    """The column with the correlations of views that explain this signal."""
    # PEUM compares all views; the other signals are about the presented view's own map
    return "view_agreement" if by == "peum" else "stability_by_view"


def _view_reasons(row: Mapping[str, Any], by: str, views: ViewNames, *, flat: bool) -> list[Reason]:
    column, n = view_column(by), len(views)
    top1, correlations = row["view_top1"] or (), row[column] or ()
    if not {len(top1), len(correlations)} <= {0, n}:
        raise EquicamError("transforms", f"those of {row['id']!r}", f"{n} for {len(top1)} views", "the run's")
    reasons = []
    # a flip is a change against the presented view's prediction, whichever class is explained
    predicted = next((top for (_, shown), top in zip(views, top1, strict=False) if shown), row["target"])
    if flips := [name for (name, _), top in zip(views, top1, strict=False) if top != predicted]:
        # without the presented view among them, all views are other ones
        of = n + (not any(shown for _, shown in views))
        reasons.append(Reason("prediction-changes", {"views": flips, "of": of}))
    moves = column == "stability_by_view"
    odd = [
        (r, name)
        for (name, is_presented), r in zip(views, () if flat else correlations, strict=False)
        if r is not None and r < LOW_CORRELATION and not (moves and is_presented)
    ]
    if odd:
        lowest, names = zip(*sorted(odd, key=itemgetter(0)), strict=True)
        values = {"views": [*names], "correlations": [*lowest], "of": n}
        reasons.append(Reason("map-moves" if moves else "views-disagree", values))
    return reasons
