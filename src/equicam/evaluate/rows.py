"""Rows of an evaluation without torch: codes of column `reason`, and the rows of one metric in the order of another's."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from operator import and_

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.evaluate.statistics import Floats


class ReasonCode(StrEnum):
    """Why a value is undefined or needs a remark. Column `reason` holds the code; programs compare codes only."""

    CONSTANT_MAP = "constant map"
    CONSTANT_AT_SOME_ANGLE = "a constant map at some angle"
    UNDEFINED_MAP = "undefined map"
    NO_OTHER_IMAGE = "no other image to compare with"
    NO_OTHER_CLASS = "no image of another class to compare with"
    NO_OTHER_REGION = "no other image with a region to borrow"
    TOP1_CHANGED = "top-1 changed"
    CONSTANT_GRADIENT = "the gradient is the same at every position: there is nothing to correlate"
    NO_VARYING_CHANNEL = "no channel varies"
    NO_LABEL = "no label"
    NO_LABEL_REGION = "no label region"
    LABEL_REGION_OUTSIDE = "label region outside the model's input"
    NO_BOXES = "no boxes"
    BOXES_OUTSIDE = "boxes outside the model's input"
    FLAT = "flat"


@dataclass(frozen=True)
class MetricColumn:
    """The rows of one metric of one method, ordered by image and angle."""

    ids: NDArray[np.object_]
    angles: Floats
    value: Floats
    floor: Floats  # NaN where there is none
    reason: NDArray[np.object_]
    groups: NDArray[np.object_]  # None where no group is known
    score: str = ""  # the metric's name

    @property
    def group(self) -> NDArray[np.object_] | None:
        """What intervals resample instead of images."""
        return resampled_groups(self.ids, self.groups)

    def __len__(self) -> int:
        return len(self.ids)

    def by_id(self, ids: NDArray[np.object_]) -> Floats:
        """Its values for these images; NaN for an image it does not have."""
        values = dict(zip(self.ids, self.value, strict=True))
        return np.array([values.get(i, np.nan) for i in ids], dtype=np.float64)

    def at_pairs_of(self, other: "MetricColumn") -> Floats:
        """Its values for the images and angles of another column."""
        values = dict(zip(zip(self.ids, self.angles, strict=True), self.value, strict=True))
        return np.array([values[key] for key in zip(other.ids, other.angles, strict=True)], dtype=np.float64)


def resampled_groups(ids: Iterable[str], groups: Collection[str | None]) -> NDArray[np.object_] | None:
    """What intervals resample instead of images: groups, an image without one alone; None if no image has a group."""
    if all(one is None for one in groups):
        return None
    pairs = zip(ids, groups, strict=True)
    return np.array([f"image {i}" if g is None else f"group {g}" for i, g in pairs], dtype=object)


def pick(
    table: pa.Table,
    score: str,
    method: str | None = None,
    region: str | None = None,
    *,
    each_angle: bool = False,
    required: bool = True,
) -> MetricColumn:
    """One value per image, or one per image and angle; an empty column if the rows are absent and not required."""
    keep = matching(score=score, method=method, region=region)
    angle = pc.field("angle")
    some = table.filter(keep & (angle.is_valid() if each_angle else angle.is_null()))
    some = some.sort_by([("id", "ascending"), ("angle", "ascending")])
    if required and not len(some):
        there = sorted({s for s in table["score"].to_pylist() if s})
        what, fix = f"rows of {score!r} of {method!r} in {region!r}", f'evaluate(…, scores=["{score}"])'
        raise EquicamError(what, "an evaluation that has them", f"scores {', '.join(there)}", fix)
    angles, value, floor = (
        np.asarray(some[name].to_numpy(), dtype=np.float64) for name in ("angle", "value", "floor")
    )
    ids, reason, groups = (
        np.array(some[name].to_pylist(), dtype=object) for name in ("id", "reason", "group")
    )
    return MetricColumn(ids, angles, value, floor, reason, groups, score)


def pick_prediction(table: pa.Table, score: str, method: str, *, each_angle: bool = False) -> MetricColumn:
    """A metric of the model's predictions; a control with its own network or images has its own rows."""
    own = pick(table, score, method, each_angle=each_angle, required=False)
    return own if len(own) else pick(table, score, each_angle=each_angle)


def matching(**wanted: str | None) -> pc.Expression:
    """Rows whose columns have these values; None stands for null."""
    return reduce(and_, (pc.field(n).is_null() if v is None else pc.field(n) == v for n, v in wanted.items()))
