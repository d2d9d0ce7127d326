"""Signals that rank a queue, each read from a run's rows alone; a high value stands for a map that deserves less trust.

Instability is measured: 1 − stability, the rotation test of the presented view's own map. PEUM and disagreement are of
all views, doubt is of the prediction, and risk is the mean of the ranks of instability and doubt.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
COLUMNS = {
    "stability": "stability",
    "peum": "peum_score",
    "disagreement": "disagreement",
    "doubt": "doubt",
    "risk": "risk",
}
"""The column of the triage table, by the name of the signal."""
STORED = ("stability", "disagreement")
"""Signals of all views that runs of equicam 0.1.0 did not store."""
ALWAYS_REVEALING = frozenset({"signal-percentile", "signal-undefined", "text"})
REVEALING = {
    "stability": ALWAYS_REVEALING | {"map-moves", "peak-jumps"},
    "peum": ALWAYS_REVEALING | {"views-disagree", "one-kept", "none-kept"},
    "disagreement": ALWAYS_REVEALING | {"views-disagree"},
    "doubt": ALWAYS_REVEALING | {"low-confidence", "prediction-changes"},
    "risk": ALWAYS_REVEALING | {"map-moves", "peak-jumps", "low-confidence", "prediction-changes"},
}
"""Codes of reasons that tell a blinded reviewer how an image ranks; a 0.1.0 sentence ("text") may."""
FLAT = {"blank", "constant"}


def refuse_unknown(by: str, items: pa.Table) -> None:
    """Refuse a signal that does not exist, or that the rows do not hold."""
    if by not in COLUMNS:
        raise EquicamError("by", needs=f"one of {', '.join(COLUMNS)}", got=repr(by), fix="stability")
    several = pc.max(pc.list_value_length(items["view_top1"])).as_py() or 0
    needed = "stability" if by == "risk" else by
    if needed in STORED and several > 1 and items[needed].null_count == items.num_rows > 0:
        raise EquicamError(
            f"by={by!r}", needs="a run that stores it", got="none, as in runs of equicam 0.1.0",
            fix=f"equicam triage --by {'peum' if needed == 'stability' else 'stability'}, or equicam audit with another --out",
        )  # fmt: skip


def ranked_by(rows: pa.Table) -> str:
    """The signal a triage table is ranked by; the first 0.1.0 tables had only PEUM and do not name it."""
    return str(rows["by"][0]) if "by" in rows.column_names and rows.num_rows else "peum"


def signal_values(items: pa.Table, by: str) -> Floats:
    """The signal of every row, NaN where it is undefined; for `stability` it is instability, 1 − stability."""
    if by == "peum":
        return _numbers(items["peum_score"])
    if by == "doubt":
        return 1 - _means(items["view_confidence"])
    if by == "risk":
        instability, doubt = signal_values(items, "stability"), signal_values(items, "doubt")
        return (_rank_shares(instability) + _rank_shares(doubt)) / 2
    if by == "stability":
        return 1 - column_values(items, by)
    return _correlations(items, by)


def column_values(items: pa.Table, by: str) -> Floats:
    """The signal as the triage table holds it: its column has stability itself."""
    return _correlations(items, by) if by == "stability" else signal_values(items, by)


def _correlations(items: pa.Table, column: str) -> Floats:
    """A column made of correlations, which mean nothing with a flat map."""
    return np.where(flagged(items, FLAT), np.nan, _numbers(items[column]))


def ranking_scores(items: pa.Table, by: str) -> Floats:
    """The signal for ranking: ∞ where it says nothing, because an image nothing is known of is not certain."""
    values = signal_values(items, by)
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
    found = np.zeros(items.num_rows, dtype=bool)
    found[rows[hit.to_numpy(zero_copy_only=False)]] = True
    return found


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
