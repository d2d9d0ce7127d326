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
ROWS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("arm", pa.string(), nullable=False),  # queue or control
        pa.field("rank", pa.int32(), nullable=False),  # among all ok images; 1 is the least trustworthy
        pa.field("place", pa.int32(), nullable=False),  # order of review, in which the arms are mixed
        pa.field("represents_rest", pa.bool_()),  # a random draw from the images outside the queue
        pa.field("by", pa.string()),  # the signal it is ranked by
        pa.field("stability", pa.float64()),
        pa.field("peum_score", pa.float64()),
        pa.field("disagreement", pa.float64()),
        pa.field("doubt", pa.float64()),
        pa.field("risk", pa.float64()),
        pa.field("peum_above", pa.float64()),  # share of the run's images with a lower PEUM
        pa.field("target", pa.int32()),
        pa.field("class", pa.string()),
        pa.field("confidence", pa.float32()),
        pa.field("output", pa.float32()),
        pa.field("flags", pa.list_(pa.string())),
        pa.field("reasons", pa.list_(pa.struct([("code", pa.string()), ("values", pa.string())]))),
        pa.field("x", pa.float64()),  # of a window
        pa.field("y", pa.float64()),
        pa.field("side", pa.float64()),
    ]
)
"""The triage table: a row for every image under review."""
OF_CONFIDENCE = ("doubt", "risk")
"""Signals made of the confidence of a class."""
ALWAYS_REVEALING = frozenset({"signal-percentile", "signal-undefined", "text"})
REVEALING = {
    "stability": ALWAYS_REVEALING | {"map-moves", "peak-jumps"},
    "peum": ALWAYS_REVEALING | {"views-disagree", "one-kept", "none-kept"},
    "disagreement": ALWAYS_REVEALING | {"views-disagree"},
    "doubt": ALWAYS_REVEALING | {"low-confidence", "prediction-changes"},
    "risk": ALWAYS_REVEALING | {"map-moves", "peak-jumps", "low-confidence", "prediction-changes"},
}
"""Codes of reasons that tell a blinded reviewer how an image ranks, or may, as those of another version do ("text")."""
FLAT = {"blank", "constant"}


def refuse_unknown(by: str, items: pa.Table) -> None:
    """Refuse a signal that does not exist, or that the rows do not hold."""
    if by not in COLUMNS:
        raise EquicamError("by", needs=f"one of {', '.join(COLUMNS)}", got=repr(by), fix="stability")
    if by in OF_CONFIDENCE and items.num_rows and not np.isfinite(signal_values(items, "doubt")).any():
        others = [name for name in COLUMNS if name not in OF_CONFIDENCE]
        raise EquicamError(
            f"by={by!r}", needs="the confidence of classes", got="none in this run: a value has no confidence",
            fix=f"by={others[0]}, or {' or '.join(others[1:])}",
        )  # fmt: skip


def ranked_by(rows: pa.Table) -> str:
    """The signal a triage table is ranked by; an empty one does not name it."""
    return str(rows["by"][0]) if rows.num_rows else "stability"


def queue_arm(rows: pa.Table) -> pa.Table:
    """The rows of the queue in a triage table, by rank."""
    return rows.filter(pc.equal(rows["arm"], "queue")).sort_by("rank")


def reduce_views(items: pa.Table) -> pa.Table:
    """The items with their doubt instead of the confidence of each view."""
    doubt = pa.array(signal_values(items, "doubt"))
    return items.drop_columns("view_confidence").append_column("doubt", doubt)


def signal_values(items: pa.Table, by: str) -> Floats:
    """The signal of every row, NaN where it is undefined; for `stability` it is instability, 1 − stability."""
    if by == "peum":
        return _numbers(items["peum_score"])
    if by == "doubt":
        stored = "doubt" in items.column_names
        return _numbers(items["doubt"]) if stored else 1 - _means(items["view_confidence"])
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
