"""Facts derived from rows of a run."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.runs.signals import ranking_scores

PEUM_UNDEFINED_FLAGS = {"blank", "constant", "none-kept"}


def peum_undefined(row: Mapping[str, Any], *, views: int) -> bool:
    """Whether PEUM is undefined here: a flat map, or too few views, or views kept, to have a variance."""
    if views <= 1 or PEUM_UNDEFINED_FLAGS & {*(row["flags"] or ())}:
        return True
    return row["views_kept"] is not None and row["views_kept"] <= 1


def peum_scores(items: pa.Table) -> NDArray[np.float64]:
    """The PEUM of all images that have one, sorted."""
    ok = items.select(["peum_score", "flags", "views_kept"]).filter(pc.equal(items["status"], "ok"))
    scores = ranking_scores(ok, "peum")
    return np.sort(scores[np.isfinite(scores)])


def share_below(scores: NDArray[np.float64], value: float | None) -> float | None:
    """The share of the sorted scores below a value; None without either."""
    return None if value is None or not len(scores) else float(np.searchsorted(scores, value) / len(scores))
