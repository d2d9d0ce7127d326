"""Metrics as rows: one table for all of them, readable by pandas, polars and DuckDB."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.transforms import Transform
from equicam.errors import EquicamError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("method", pa.string()),  # null: a property of the model or the image alone
        pa.field("score", pa.string()),  # the metric; null: the image could not be read
        pa.field("angle", pa.float64()),  # of the presentation; null: over all of them, or none applies
        pa.field("presentation", pa.string()),  # the same in words; evaluations of 0.1.0 do not have it
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


def to_table(ids: Sequence[str], metrics: Iterable[MetricRows]) -> pa.Table:
    """Rows of a batch of images, ordered by metric, method, presentation and image."""
    return pa.concat_tables([_rows(ids, _check(ids, one)) for one in metrics] or [SCHEMA.empty_table()])


def with_groups(table: pa.Table, groups: Mapping[str, str | None]) -> pa.Table:
    """The rows with the group of each image, by id."""
    found = pa.array([groups.get(i) for i in table["id"].to_pylist()], pa.string())
    return table.set_column(table.column_names.index("group"), SCHEMA.field("group"), found)


def unreadable_rows(reasons: Sequence[tuple[str, str]]) -> pa.Table:
    """A row for each image that could not be read, from pairs of id and reason."""
    nothing: list[Any] = [None] * len(reasons)
    columns: dict[str, list[Any]] = {"id": [i for i, _ in reasons], "reason": [r for _, r in reasons]}
    columns |= dict.fromkeys(
        ("method", "score", "angle", "presentation", "region", "floor", "group"), nothing
    )
    return pa.table(columns | {"value": [float("nan")] * len(reasons)}, schema=SCHEMA)


def _check(ids: Sequence[str], one: Any) -> MetricRows:
    """Refuse anything else that a metric, possibly a user's own, has yielded."""
    if not isinstance(one, MetricRows):
        got = f"{type(one).__name__}: {str(one)[:60]}"
    elif not isinstance(one.value, Tensor) or one.value.numel() != max(1, len(one.presentations)) * len(ids):
        got = f"{one.score!r} with {tuple(one.value.shape) if isinstance(one.value, Tensor) else type(one.value).__name__}"
    else:
        return one
    shapes = f"[{len(ids)}] values, or [presentations, {len(ids)}] with presentations="
    raise EquicamError(
        "a metric",
        needs=f"to yield MetricRows with {shapes}",
        got=got,
        fix="MetricRows(name, method, values, presentations=batch.presentations)",
    )


def _rows(ids: Sequence[str], one: MetricRows) -> pa.Table:
    steps = max(1, len(one.presentations))
    value = one.value.double().reshape(steps, len(ids)).cpu()
    floor = None if one.floor is None else one.floor.double().reshape(steps, len(ids)).cpu()
    marked = [(text, where.reshape(steps, len(ids)).cpu()) for text, where in one.reasons]
    remarks = [(text, where.numpy()) for text, where in marked if where.any()]
    angles: list[float | None] = [*_angles(one.presentations)] or [None]
    labels: list[str | None] = [each.label for each in one.presentations] or [None]
    reasons = [
        [next((str(text) for text, where in remarks if where[a, i]), None) for i in range(len(ids))]
        for a in range(steps)
    ]
    values, floors = value.tolist(), [[None] * len(ids)] * steps if floor is None else floor.tolist()
    if one.presentations:  # one more row per image: its mean over the presentations
        mean = value.mean(0) if one.over_angles is None else one.over_angles.double().cpu()
        values.append(mean.tolist())
        floor = floor if one.floor_over_angles is None else one.floor_over_angles.double().cpu()[None]
        floors.append([None] * len(ids) if floor is None else floor.mean(0).tolist())
        reasons.append([_over_angles(remarks, i, one.presentations) for i in range(len(ids))])
        angles.append(None)
        labels.append(None)
    count = len(ids) * len(angles)
    columns = {
        "id": [i for _ in angles for i in ids],
        "method": [one.method] * count,
        "score": [one.score] * count,
        "angle": [a for a in angles for _ in ids],
        "presentation": [label for label in labels for _ in ids],
        "region": [one.region] * count,
        "value": [v for row in values for v in row],
        "floor": [v for row in floors for v in row],
        "reason": [v for row in reasons for v in row],
        "group": [None] * count,
    }
    return pa.table(columns, schema=SCHEMA)


def _angles(presentations: Sequence[Transform]) -> list[float]:
    """Column `angle`: degrees of rotations and reflections, factors of scalings, otherwise the index."""
    if all(one.is_rigid for one in presentations):
        return [float(one.degrees) for one in presentations]
    if all(Transform(scale=one.scale) == one for one in presentations):
        return [float(one.scale) for one in presentations]
    return [float(i) for i in range(len(presentations))]


def _over_angles(
    remarks: Sequence[tuple[str, Bool[np.ndarray, "a b"]]], i: int, presentations: Sequence[Transform]
) -> str | None:
    """The first remark on an image in any presentation, and in how many it applies."""
    where_of = (
        "at {} of {} angles" if all(one.is_rigid for one in presentations) else "in {} of {} presentations"
    )
    for text, where in remarks:
        if hits := int(where[:, i].sum()):
            return f"{text} {where_of.format(hits, len(presentations))}"
    return None
