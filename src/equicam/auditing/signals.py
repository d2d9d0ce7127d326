"""What a queue can be ranked by, each from a run's rows alone: PEUM, or the disagreement of the views."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
NAMES = {"peum": "PEUM", "disagreement": "disagreement"}
"""In sentences, by the names that `by` takes."""
GIVES_AWAY = {"peum": ("PEUM ",), "disagreement": ("disagreement ", "the view at ", "the views at ")}
"""How reasons begin that hold what the queue is ranked by."""
DULL = {"blank", "constant"}


def refuse_unknown(by: str, items: pa.Table) -> None:
    """Only the signals there are, and that the rows hold."""
    if by not in NAMES:
        raise EquicamError("by", needs=" or ".join(NAMES), got=repr(by), fix="disagreement")
    if by == "disagreement" and 0 < items.num_rows == _agreement(items).null_count:
        raise EquicamError(
            "by='disagreement'", needs="a run that holds how its views agree", got="no agree_by_view in it", fix="peum"
        )  # fmt: skip


def recorded(rows: pa.Table) -> str:
    """What a triage was ranked by; one that does not say so was made when there was only PEUM."""
    return str(rows["by"][0]) if "by" in rows.column_names and rows.num_rows else "peum"


def measured(items: pa.Table, by: str) -> Floats:
    """The signal of every row; NaN where there is none."""
    return _peum(items) if by == "peum" else _disagreement(items)


def scored(items: pa.Table, by: str) -> Floats:
    """The same, and ∞ where it says nothing: a picture of which nothing is known is not certain."""
    found = measured(items, by)
    silent = _flagged(items, DULL) | ~np.isfinite(found)
    if by == "peum":  # of no view or of one there is no variance; agreement is of all views, kept or not
        silent |= _flagged(items, {"none-kept"}) | (items["kept"].fill_null(2).to_numpy() <= 1)
    return np.where(silent, np.inf, found)


def _peum(items: pa.Table) -> Floats:
    return np.asarray(items["peum"].fill_null(np.nan).to_numpy())


def _disagreement(items: pa.Table) -> Floats:
    """1 − the mean of agree_by_view; NaN where none is defined, or the map is flat and agrees with nothing."""
    row, values = _flat(_agreement(items))
    agree = values.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    known = np.isfinite(agree)
    counts = np.bincount(row[known], minlength=items.num_rows)
    sums = np.bincount(row[known], agree[known], minlength=items.num_rows)
    nothing = (counts == 0) | _flagged(items, DULL)
    return np.where(nothing, np.nan, 1 - sums / np.maximum(counts, 1))


def _agreement(items: pa.Table) -> pa.ChunkedArray:
    """agree_by_view, or as many nulls where rows are without."""
    if "agree_by_view" in items.column_names:
        return items["agree_by_view"]
    return pa.chunked_array([pa.nulls(items.num_rows, pa.list_(pa.float64()))])


def _flagged(items: pa.Table, flags: set[str]) -> NDArray[np.bool_]:
    row, values = _flat(items["flags"])
    found = np.zeros(items.num_rows, dtype=bool)
    found[row[pc.is_in(values, value_set=pa.array(sorted(flags))).to_numpy(zero_copy_only=False)]] = True
    return found


def _flat(lists: pa.ChunkedArray) -> tuple[NDArray[np.intp], pa.Array]:
    """All entries of a column of lists, and the row each is of."""
    whole = lists.combine_chunks()
    return pc.list_parent_indices(whole).to_numpy(zero_copy_only=False), pc.list_flatten(whole)
