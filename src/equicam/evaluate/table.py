"""Metrics as rows: one table for all of them, readable by pandas, polars and DuckDB."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.transforms import Transform
from equicam.errors import EquicamError
from equicam.runtime.pending import send_packed_to_host

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("method", pa.string()),  # null: a property of the model or the image alone
        pa.field("score", pa.string()),  # the metric; null: the image could not be read
        pa.field("angle", pa.float64()),  # of the presentation; null: over all of them, or none applies
        pa.field("presentation", pa.string()),  # the same in words
        pa.field("region", pa.string()),
        pa.field("value", pa.float64()),  # NaN: undefined, see the reason
        pa.field("floor", pa.float64()),  # value of an unrelated image or a trivial map; null: none exists
        pa.field("reason", pa.string()),
        pa.field("group", pa.string()),  # of the image: its patient, slide or scene; null: none is known
    ]
)


@dataclass(frozen=True)
class MetricRows:
    """One value per image, or per presentation and image, of one metric of one method."""

    score: str
    method: str | None
    value: Float[Tensor, "*a b"]
    floor: Float[Tensor, "*a b"] | None = None
    region: str | None = None
    presentations: Sequence[Transform] = ()  # of the first axis; without them there is one value per image
    # each image's value and floor over all presentations, where they are not the means
    over_angles: Float[Tensor, " b"] | None = None
    floor_over_angles: Float[Tensor, " b"] | None = None
    # remarks and where they apply; the first that applies to a row is written
    reasons: tuple[tuple[str, Bool[Tensor, "*a b"]], ...] = ()


def start_table(
    ids: Sequence[str], groups: Sequence[str | None], metrics: Iterable[MetricRows]
) -> Callable[[], pa.Table]:
    """Start copying metrics from the device; the function returned waits for them and makes the rows of a batch.

    Rows are ordered by metric, method, presentation and image.
    """
    # copied as they come: a metric may fill the same tensor again
    checked = [(one, _copies(one)) for one in (_check(ids, each) for each in metrics)]
    parts = {f"{i}.{name}": part for i, (_, tensors) in enumerate(checked) for name, part in tensors.items()}
    arrive = send_packed_to_host(parts)

    def finish() -> pa.Table:
        host = arrive()
        columns = [
            _columns(ids, groups, one, {name: host[f"{i}.{name}"].numpy() for name in tensors})
            for i, (one, tensors) in enumerate(checked)
        ]
        joined = {name: list(chain.from_iterable(part[name] for part in columns)) for name in SCHEMA.names}
        return pa.table(joined, schema=SCHEMA)

    return finish


def unreadable_rows(images: Iterable[tuple[str, str | None, str]]) -> pa.Table:
    """A row for each image that could not be read: its id, its group and the reason."""
    rows = [{"id": i, "group": group, "reason": why, "value": float("nan")} for i, group, why in images]
    return pa.Table.from_pylist(rows, schema=SCHEMA)


def _check(ids: Sequence[str], one: Any) -> MetricRows:
    """Refuse anything else that a metric, possibly a user's own, has yielded."""
    if not isinstance(one, MetricRows):
        got = f"{type(one).__name__}: {str(one)[:60]}"
    elif not isinstance(one.value, Tensor) or one.value.numel() != max(1, len(one.presentations)) * len(ids):
        got = f"{one.score!r} with {tuple(one.value.shape) if isinstance(one.value, Tensor) else type(one.value).__name__}"
    elif one.floor is None and one.floor_over_angles is not None:
        got = f"{one.score!r} with floor_over_angles and no floor"
    else:
        return one
    needs = (
        f"to yield MetricRows with [{len(ids)}] values, or [presentations, {len(ids)}] with presentations="
    )
    fix = "MetricRows(name, method, values, presentations=batch.presentations)"
    raise EquicamError("a metric", needs, got, fix)


def _copies(one: MetricRows) -> dict[str, Tensor]:
    """What the host needs of a metric, in float64."""
    named = {
        "value": one.value,
        "floor": one.floor,
        "value over angles": one.over_angles,
        "floor over angles": one.floor_over_angles,
        **{f"reason {i}": where for i, (_, where) in enumerate(one.reasons)},
    }
    return {name: x.detach().to(torch.float64, copy=True) for name, x in named.items() if x is not None}


def _columns(
    ids: Sequence[str],
    groups: Sequence[str | None],
    one: MetricRows,
    host: Mapping[str, Float[np.ndarray, "..."]],
) -> dict[str, Sequence[Any]]:
    """One metric's columns: its presentations, each with all images, then the images over all presentations."""
    shape = (max(1, len(one.presentations)), len(ids))
    marks = [(str(text), host[f"reason {i}"].reshape(shape) > 0) for i, (text, _) in enumerate(one.reasons)]
    reason = np.full(shape, None, dtype=object)
    for text, where in reversed(marks):
        reason[where] = text
    numbers = {name: host[name].reshape(shape) for name in ("value", "floor") if name in host}
    if one.presentations:
        for name, values in numbers.items():
            over = host.get(f"{name} over angles", values.mean(0))
            numbers[name] = np.concatenate((values, over[None]))
        reason = np.concatenate((reason, _over_angles(marks, one.presentations, len(ids))[None]))
    rows, images = len(reason), len(ids)
    places = [*zip(_angles(one.presentations), one.presentations, strict=True), (None, None)][-rows:]
    return {
        "id": [*ids] * rows,
        "method": [one.method] * rows * images,
        "score": [one.score] * rows * images,
        "angle": [angle for angle, _ in places for _ in ids],
        "presentation": [None if each is None else each.label for _, each in places for _ in ids],
        "region": [one.region] * rows * images,
        "value": numbers["value"].ravel().tolist(),
        "floor": numbers["floor"].ravel().tolist() if "floor" in numbers else [None] * rows * images,
        "reason": reason.ravel().tolist(),
        "group": [*groups] * rows,
    }


def _angles(presentations: Sequence[Transform]) -> list[float]:
    """Column `angle`: degrees of rotations and reflections, factors of scalings, otherwise the index."""
    if all(one.is_rigid for one in presentations):
        return [float(one.degrees) for one in presentations]
    if all(Transform(scale=one.scale) == one for one in presentations):
        return [float(one.scale) for one in presentations]
    return [float(i) for i in range(len(presentations))]


def _over_angles(
    marks: Sequence[tuple[str, Bool[np.ndarray, "a b"]]], presentations: Sequence[Transform], images: int
) -> np.ndarray:
    """The first remark on each image in any presentation, and in how many it applies."""
    rigid = all(one.is_rigid for one in presentations)
    place, of = ("at", "angles") if rigid else ("in", "presentations")
    found = np.full(images, None, dtype=object)
    for text, where in reversed(marks):
        for i, hits in enumerate(where.sum(0).tolist()):
            if hits:
                found[i] = f"{text} {place} {hits} of {len(presentations)} {of}"
    return found
