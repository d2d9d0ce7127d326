"""Columns of numbers: checked, with incomplete rows left out, and divided without surprises."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError

Floats = NDArray[np.float64]
Column = NDArray[np.float64] | NDArray[np.bool_]
Indices = NDArray[np.intp]
Ids = NDArray[Any] | Sequence[str] | Sequence[int]
NAN = float("nan")


def stack_columns(*columns: Column) -> Floats:
    """The columns as rows of one array [columns, rows]."""
    shapes = [np.shape(c) for c in columns]
    if not columns or len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise EquicamError("columns", needs="1-D arrays of one length", got=shapes, fix="one entry per row")
    table = np.stack([np.asarray(c, dtype=np.float64) for c in columns])
    if np.isinf(table).any():
        raise EquicamError("columns", needs="finite numbers or NaN", got="inf", fix="NaN where undefined")
    return table


def is_complete(table: Floats) -> NDArray[np.bool_]:
    """Where a row has no NaN."""
    missing: NDArray[np.bool_] = np.logical_or.reduce(np.isnan(table))
    return ~missing


def complete_rows(*columns: Column) -> Floats:
    """The rows without a NaN, [columns, rows]."""
    table = stack_columns(*columns)
    return table[:, is_complete(table)]


def cluster_codes(cluster: Ids | None, kept: NDArray[np.bool_]) -> Indices:
    """0 … n − 1 for each kept row: the image it belongs to."""
    if cluster is None:
        return np.arange(np.count_nonzero(kept))
    ids = np.asarray(cluster)
    if ids.shape != kept.shape or ids.dtype.kind in "fc":  # NaN would be one big image
        got = f"{ids.dtype} of shape {ids.shape}"
        raise EquicamError(
            "cluster", needs=f"{kept.size} string or integer ids", got=got, fix="one id per row"
        )
    return np.unique(ids[kept], return_inverse=True)[1]


def group_ties(values: Floats) -> tuple[Indices, Indices, Indices]:
    """The order of the values, where each group of equal ones begins in it, and each row's group."""
    order = np.argsort(values, kind="stable")
    _, starts, group = np.unique(values[order], return_index=True, return_inverse=True)
    back = np.empty_like(order)
    back[order] = group
    return order, starts, back


def ratio(top: Any, bottom: Any) -> Floats:
    """Quotient, NaN where bottom is 0."""
    bottom = np.asarray(bottom, dtype=np.float64)
    return np.asarray(top / np.where(bottom == 0, NAN, bottom))


def share_above(value: Any, floor: Any) -> Floats:
    """(value − floor) / (1 − floor), NaN where the floor is 1 to rounding."""
    room = 1 - np.asarray(floor)
    return ratio(value - floor, np.where(np.abs(room) > 1e-12, room, 0))


def has_no_spread(x: Floats) -> bool:
    """Whether a column of numbers (not a map) has no spread beyond rounding, or fewer than two rows."""
    return x.size < 2 or bool(np.ptp(x) <= 1e-12 * np.abs(x).max())


def refuse_outside(name: str, share: float) -> None:
    """Raise an error unless the share lies between 0 and 1."""
    if not 0 < share < 1:
        raise EquicamError(name, needs="a share between 0 and 1", got=share, fix=f"{name}=0.90")
