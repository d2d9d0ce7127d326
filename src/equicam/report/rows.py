"""Facts derived from rows of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.auditing.signals import ranking_scores

PEUM_UNDEFINED_FLAGS = {"blank", "constant", "none-kept"}


def class_name(target: int | None, classes: Sequence[str] | None) -> str:
    """The name of a class, or its number where the run has no names."""
    if target is not None and classes and 0 <= target < len(classes):
        return classes[target]
    return f"class {target}"


def peum_undefined(row: Mapping[str, Any], *, views: int) -> bool:
    """Whether PEUM is undefined here: a flat map, or too few views kept to have a variance."""
    if PEUM_UNDEFINED_FLAGS & {*(row["flags"] or ())}:
        return True
    return views > 1 and row["views_kept"] is not None and row["views_kept"] <= 1


def peum_scores(items: pa.Table) -> NDArray[np.float64]:
    """The PEUM of all images that have one, sorted."""
    scores = ranking_scores(items.filter(pc.equal(items["status"], "ok")), "peum")
    return np.sort(scores[np.isfinite(scores)])


def share_below(scores: NDArray[np.float64], value: float | None) -> float | None:
    """The share of the sorted scores below a value; None without either."""
    return None if value is None or not len(scores) else float(np.searchsorted(scores, value) / len(scores))
