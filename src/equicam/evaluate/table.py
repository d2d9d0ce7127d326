"""Metrics as rows: one table for all of them, readable by pandas, polars and DuckDB."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


def start_table(ids: Sequence[str], metrics: Iterable[MetricRows]) -> Callable[[], pa.Table]:
    """Start copying metrics from the device; the function returned waits for them and makes the rows of a batch.

    Rows are ordered by metric, method, presentation and image.
    """
    # copied as they come: a metric may fill the same tensor again
    checked = [(one, _copies(one)) for one in (_check(ids, each) for each in metrics)]
    parts = {f"{i}.{name}": part for i, (_, tensors) in enumerate(checked) for name, part in tensors.items()}
    arrive = send_packed_to_host(parts)

    def finish() -> pa.Table:
        host = arrive()
        values = [
            _values(ids, one, {name: host[f"{i}.{name}"] for name in tensors})
            for i, (one, tensors) in enumerate(checked)
        ]
        return _table(ids, values) if values else SCHEMA.empty_table()

    return finish


def _table(ids: Sequence[str], found: Sequence["_Values"]) -> pa.Table:
    sizes = [one.value.size for one in found]
    rows = sum(sizes)

    def of_metrics(texts: list[str | None]) -> pa.Array:
        return pa.array(texts, pa.string()).take(np.repeat(np.arange(len(found)), sizes))

    def of_presentations(values: list[list[Any]], kind: pa.DataType) -> pa.Array:
        flat = [v for one, some in zip(found, values, strict=True) for v in some[-len(one.value) :]]
        return pa.array(flat, kind).take(np.repeat(np.arange(len(flat)), len(ids)))

    has_floor = np.repeat([one.floor is not None for one in found], sizes)
    floors = [one.value if one.floor is None else one.floor for one in found]
    columns = {
        "id": pa.array(ids, pa.string()).take(np.tile(np.arange(len(ids)), rows // len(ids))),
        "method": of_metrics([one.of.method for one in found]),
        "score": of_metrics([one.of.score for one in found]),
        "angle": of_presentations([one.angles for one in found], pa.float64()),
        "presentation": of_presentations([one.labels for one in found], pa.string()),
        "region": of_metrics([one.of.region for one in found]),
        "value": np.concatenate([one.value.ravel() for one in found]),
        "floor": pa.array(np.concatenate([one.ravel() for one in floors]), mask=~has_floor),
        "reason": pa.array(np.concatenate([one.reason.ravel() for one in found]), pa.string()),
        "group": pa.nulls(rows, pa.string()),
    }
    return pa.table(columns, schema=SCHEMA)


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
    elif one.floor is None and one.floor_over_angles is not None:
        got = f"{one.score!r} with floor_over_angles and no floor"
    else:
        return one
    shapes = f"[{len(ids)}] values, or [presentations, {len(ids)}] with presentations="
    raise EquicamError(
        "a metric",
        f"to yield MetricRows with {shapes}",
        got,
        "MetricRows(name, method, values, presentations=batch.presentations)",
    )


@dataclass(frozen=True)
class _Values:
    """One metric on the host: rows are presentations, then all of them together; columns are images."""

    of: MetricRows
    value: Float[np.ndarray, "r b"]
    floor: Float[np.ndarray, "r b"] | None
    reason: np.ndarray

    @property
    def angles(self) -> list[float | None]:
        return [*_angles(self.of.presentations), None]

    @property
    def labels(self) -> list[str | None]:
        return [*(each.label for each in self.of.presentations), None]


def _copies(one: MetricRows) -> dict[str, Tensor]:
    """What the host needs of a metric, in float64."""
    named = {
        "value": one.value,
        "floor": one.floor,
        "over": one.over_angles,
        "floor-over": one.floor_over_angles,
    }
    found = {name: part for name, part in named.items() if part is not None}
    found |= {f"reason{i}": where for i, (_, where) in enumerate(one.reasons)}
    return {name: part.detach().to(torch.float64, copy=True) for name, part in found.items()}


def _values(ids: Sequence[str], one: MetricRows, host: Mapping[str, Float[Tensor, "..."]]) -> _Values:
    shape = (max(1, len(one.presentations)), len(ids))
    value = host["value"].reshape(shape)
    floor = host["floor"].reshape(shape) if "floor" in host else None
    marks = [
        (str(text), host[f"reason{i}"].reshape(shape).bool().numpy())
        for i, (text, _) in enumerate(one.reasons)
    ]
    remarks = [(text, where) for text, where in marks if where.any()]
    reasons = np.full(shape, None, dtype=object)
    for text, where in reversed(remarks):
        reasons[where] = text
    if one.presentations:  # one more row per image: its mean over the presentations
        value = _add_mean(value, host.get("over"))
        floor = None if floor is None else _add_mean(floor, host.get("floor-over"))
        reasons = np.concatenate((reasons, _over_angles(remarks, one.presentations, len(ids))[None]))
    return _Values(one, value.numpy(), None if floor is None else floor.numpy(), reasons)


def _add_mean(values: Float[Tensor, "a b"], given: Float[Tensor, " b"] | None) -> Float[Tensor, "r b"]:
    """One more row: the mean of the others, or what is given instead."""
    return torch.cat((values, (values.mean(0) if given is None else given)[None]))


def _angles(presentations: Sequence[Transform]) -> list[float]:
    """Column `angle`: degrees of rotations and reflections, factors of scalings, otherwise the index."""
    if all(one.is_rigid for one in presentations):
        return [float(one.degrees) for one in presentations]
    if all(Transform(scale=one.scale) == one for one in presentations):
        return [float(one.scale) for one in presentations]
    return [float(i) for i in range(len(presentations))]


def _over_angles(
    remarks: Sequence[tuple[str, Bool[np.ndarray, "a b"]]], presentations: Sequence[Transform], images: int
) -> np.ndarray:
    """The first remark on each image in any presentation, and in how many it applies."""
    of = "angles" if all(one.is_rigid for one in presentations) else "presentations"
    place = "at" if of == "angles" else "in"
    found = np.full(images, None, dtype=object)
    for text, where in reversed(remarks):
        for i, hits in enumerate(where.sum(0).tolist()):
            if hits:
                found[i] = f"{text} {place} {hits} of {len(presentations)} {of}"
    return found
