"""Facts derived from one row of a run."""

from collections.abc import Mapping, Sequence
from typing import Any

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
