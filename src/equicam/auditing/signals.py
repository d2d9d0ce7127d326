"""Signals that rank a queue, each read from a run's rows alone: PEUM, or the disagreement of the views."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
COLUMNS = {"peum": "peum_score", "disagreement": "disagreement"}
"""The column of the items table, by the name of the signal."""
REVEALING = {
    "peum": frozenset({"signal-percentile", "signal-undefined", "text"}),
    "disagreement": frozenset({"signal-percentile", "signal-undefined", "views-disagree", "text"}),
}
"""Codes of reasons that tell a blinded reviewer how an image ranks; a 0.1.0 sentence ("text") may."""
FLAT = {"blank", "constant"}


def refuse_unknown(by: str, items: pa.Table) -> None:
    """Refuse a signal that does not exist, or that the rows do not hold."""
    if by not in COLUMNS:
        raise EquicamError("by", needs=" or ".join(COLUMNS), got=repr(by), fix="disagreement")
    several = pc.max(pc.list_value_length(items["view_top1"])).as_py() or 0
    if by == "disagreement" and several > 1 and items["disagreement"].null_count == items.num_rows > 0:
        raise EquicamError(
            "by='disagreement'", needs="a run that stores it", got="none, as in runs of equicam 0.1.0",
            fix="equicam triage --by peum, or equicam audit with another --out",
        )  # fmt: skip


def ranked_by(rows: pa.Table) -> str:
    """The signal a triage table is ranked by; the first 0.1.0 tables had only PEUM and do not name it."""
    return str(rows["by"][0]) if "by" in rows.column_names and rows.num_rows else "peum"


def signal_values(items: pa.Table, by: str) -> Floats:
    """The signal of every row; NaN where it is undefined, which disagreement is for a flat map."""
    values = np.asarray(items[COLUMNS[by]].cast(pa.float64()).fill_null(np.nan).to_numpy())
    return values if by == "peum" else np.where(_flagged(items, FLAT), np.nan, values)


def ranking_scores(items: pa.Table, by: str) -> Floats:
    """The signal for ranking: ∞ where it says nothing, because an image nothing is known of is not certain."""
    values = signal_values(items, by)
    undefined = _flagged(items, FLAT) | ~np.isfinite(values)
    if by == "peum":  # no variance without two kept views; disagreement uses all views, kept or not
        kept = items["views_kept"].fill_null(2).to_numpy()
        undefined |= _flagged(items, {"none-kept"}) | (kept <= 1)
    return np.where(undefined, np.inf, values)


def _flagged(items: pa.Table, flags: set[str]) -> NDArray[np.bool_]:
    lists = items["flags"].combine_chunks()
    rows = pc.list_parent_indices(lists).to_numpy(zero_copy_only=False)
    hit = pc.is_in(pc.list_flatten(lists), value_set=pa.array(sorted(flags)))
    found = np.zeros(items.num_rows, dtype=bool)
    found[rows[hit.to_numpy(zero_copy_only=False)]] = True
    return found
