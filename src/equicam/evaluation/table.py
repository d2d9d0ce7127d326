"""Scores as rows: one table for all of them, readable by pandas, polars and DuckDB."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.core.views import Degrees
from equicam.errors import EquicamError

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("method", pa.string()),  # null: said of the model or the picture alone
        pa.field("score", pa.string()),  # null: the picture could not be read
        pa.field("angle", pa.float64()),  # null: of all angles, or of none
        pa.field("region", pa.string()),
        pa.field("value", pa.float64()),  # NaN: undefined, see the reason
        pa.field(
            "floor", pa.float64()
        ),  # what an unrelated picture or a trivial map gets; null: no such thing
        pa.field("reason", pa.string()),
    ]
)


@dataclass(frozen=True)
class Scored:
    """One number for each picture, or for each angle and picture; `why` says where something is to be remarked."""

    score: str
    method: str | None
    value: Float[Tensor, "*a b"]
    floor: Float[Tensor, "*a b"] | None = None
    region: str | None = None
    angles: Sequence[Degrees] = ()  # of the first axis; without any, the value is one a picture
    # each picture's value and floor over all angles, where they are not their means
    whole: Float[Tensor, " b"] | None = None
    whole_floor: Float[Tensor, " b"] | None = None
    why: tuple[tuple[str, Bool[Tensor, "*a b"]], ...] = ()


def table(ids: Sequence[str], scored: Iterable[Scored]) -> pa.Table:
    """Rows of a batch of pictures, by score, method, angle and picture."""
    return pa.concat_tables(
        [_by_picture(ids, _checked(ids, one)) for one in scored] or [SCHEMA.empty_table()]
    )


def _checked(ids: Sequence[str], one: Any) -> Scored:
    """What a score has yielded, which may be somebody's own."""
    if not isinstance(one, Scored):
        got = f"{type(one).__name__}: {str(one)[:60]}"
    elif not isinstance(one.value, Tensor) or one.value.numel() != max(1, len(one.angles)) * len(ids):
        got = f"{one.score!r} with {tuple(one.value.shape) if isinstance(one.value, Tensor) else type(one.value).__name__}"
    else:
        return one
    pictures = f"[{len(ids)}] values, or [angles, {len(ids)}] with angles="
    raise EquicamError(
        "a score",
        needs=f"to yield Scored with {pictures}",
        got=got,
        fix="Scored(name, method, values, angles=found.angles)",
    )


def unread(reasons: Sequence[tuple[str, str]]) -> pa.Table:
    """A row for each picture that could not be read: (id, reason)."""
    nothing: list[Any] = [None] * len(reasons)
    columns: dict[str, list[Any]] = {"id": [i for i, _ in reasons], "reason": [r for _, r in reasons]}
    columns |= dict.fromkeys(("method", "score", "angle", "region", "floor"), nothing)
    return pa.table(columns | {"value": [float("nan")] * len(reasons)}, schema=SCHEMA)


def _by_picture(ids: Sequence[str], one: Scored) -> pa.Table:
    rows = max(1, len(one.angles))
    value = one.value.double().reshape(rows, len(ids)).cpu()
    floor = None if one.floor is None else one.floor.double().reshape(rows, len(ids)).cpu()
    marks = [(text, where.reshape(rows, len(ids)).cpu()) for text, where in one.why]
    why = [(text, where.numpy()) for text, where in marks if where.any()]
    angles: list[float | None] = [float(a) for a in one.angles] or [None]
    reasons = [
        [next((text for text, where in why if where[a, i]), None) for i in range(len(ids))]
        for a in range(rows)
    ]
    values, floors = value.tolist(), [[None] * len(ids)] * rows if floor is None else floor.tolist()
    if one.angles:  # each picture's mean over the angles as well
        whole = value.mean(0) if one.whole is None else one.whole.double().cpu()
        values.append(whole.tolist())
        over = floor if one.whole_floor is None else one.whole_floor.double().cpu()[None]
        floors.append([None] * len(ids) if over is None else over.mean(0).tolist())
        reasons.append([_at_some(why, i, rows) for i in range(len(ids))])
        angles.append(None)
    count = len(ids) * len(angles)
    columns = {
        "id": [i for _ in angles for i in ids],
        "method": [one.method] * count,
        "score": [one.score] * count,
        "angle": [a for a in angles for _ in ids],
        "region": [one.region] * count,
        "value": [v for row in values for v in row],
        "floor": [v for row in floors for v in row],
        "reason": [v for row in reasons for v in row],
    }
    return pa.table(columns, schema=SCHEMA)


def _at_some(why: Sequence[tuple[str, Bool[np.ndarray, "a b"]]], i: int, rows: int) -> str | None:
    for text, where in why:
        if hit := int(where[:, i].sum()):
            return f"{text} at {hit} of {rows} angles"
    return None
