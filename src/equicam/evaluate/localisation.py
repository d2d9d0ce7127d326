"""Does a map point at the object? Energy in the label region, pointing game and box overlap."""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import ndimage
from torch import Tensor

from equicam.core.transforms import Transform
from equicam.core.views import transform_all
from equicam.evaluate.batch import EvaluatedBatch
from equicam.evaluate.rows import ReasonCode
from equicam.evaluate.table import MetricRows

Box = tuple[float, float, float, float]
THRESHOLD = 0.3
"""Share of a map's maximum above which a pixel belongs to the object."""


def energy(maps: Float[Tensor, "*v H W"], region: Bool[Tensor, "*a H W"]) -> Float[Tensor, "*va"]:
    """Saliency inside the region over all saliency; NaN for a map that is 0 everywhere."""
    return (maps * region).sum((-2, -1)) / maps.sum((-2, -1))


def disc_of_equal_area(region: Float[Tensor, "H W"]) -> Bool[Tensor, "H W"]:
    """The disc with a region's area and centre: the same share of the image at every angle about its centre."""
    height, width = region.shape
    area = float(region.sum())
    y = torch.arange(height, dtype=region.dtype, device=region.device)[:, None]
    x = torch.arange(width, dtype=region.dtype, device=region.device)[None, :]
    centre_y, centre_x = ((region * axis).sum() / area for axis in (y, x))
    return (x - centre_x) ** 2 + (y - centre_y) ** 2 <= area / math.pi


def _pointing(plane: Float[Tensor, "H W"], regions: Bool[Tensor, "r H W"]) -> bool:
    """Whether the first maximum lies in any of the regions."""
    return bool(regions.flatten(1)[:, plane.argmax()].any())


def _boxes(components: np.ndarray) -> list[Box]:
    """The half-open box around each component, numbered from 1."""
    return [
        (float(columns.start), float(rows.start), float(columns.stop), float(rows.stop))
        for rows, columns in ndimage.find_objects(components)
    ]


def _saliency_box(plane: Float[Tensor, "H W"]) -> Box | None:
    """The box around the largest 4-connected component above 0.3 of the maximum; None without positives."""
    values = plane.detach().cpu().numpy()
    components, count = ndimage.label(values > THRESHOLD * values.max())
    return _boxes(components)[int(np.bincount(components.ravel())[1:].argmax())] if count else None


def _overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    intersection = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - intersection
    return intersection / union if union else 0.0


def energy_rows(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    """Energy at angle 0 and in every presentation, and the drop from the presented to the rotated images."""
    presentations = (Transform(), *batch.presentations)
    absent = torch.tensor([t.region is None for t in batch.truth], device=batch.x.device)
    cropped = absent & torch.tensor([t.cropped for t in batch.truth], device=batch.x.device)
    missing = ((ReasonCode.NO_LABEL_REGION, absent & ~cropped), (ReasonCode.LABEL_REGION_OUTSIDE, cropped))
    for method, own in batch.methods.items():
        value = torch.full((len(presentations), len(batch.ids)), torch.nan, device=batch.x.device)
        floor = value.clone()
        for i, truth in enumerate(batch.truth):
            if truth.region is not None:
                where = transform_all(disc_of_equal_area(truth.region).to(own.maps), presentations) >= 0.5
                value[:, i], floor[:, i] = energy(own.maps[:, i], where), energy(own.null_map, where)
        rotated = value[1:].mean(0)
        at_every_angle = tuple((code, where.expand(len(presentations), -1)) for code, where in missing)
        yield MetricRows(
            "energy", method, value, floor, "label", presentations,
            over_angles=rotated, floor_over_angles=floor[1:].mean(0),
            reasons=(*at_every_angle, (ReasonCode.CONSTANT_MAP, value.isnan())),
        )  # fmt: skip
        reasons = (*missing, (ReasonCode.CONSTANT_MAP, value.isnan().any(0)))
        yield MetricRows("energy-drop", method, value[0] - rotated, None, "label", reasons=reasons)


def box_rows(batch: EvaluatedBatch, *, kind: Literal["pointing", "box-iou"]) -> Iterator[MetricRows]:
    """A metric of boxes, counting any box of the object, and counting its largest box alone."""
    absent = torch.tensor([t.boxes is None for t in batch.truth])
    cropped = absent & torch.tensor([t.cropped for t in batch.truth])
    for method, own in batch.methods.items():
        maps = own.maps[0]
        constant = (maps.flatten(1).amax(1) == maps.flatten(1).amin(1)).cpu()
        reasons = (
            (ReasonCode.BOXES_OUTSIDE, cropped),
            (ReasonCode.NO_BOXES, absent),
            (ReasonCode.CONSTANT_MAP, constant),
        )
        for name, count in ((kind, None), (f"{kind}-largest", 1)):
            pairs = [
                (torch.nan, torch.nan) if t.boxes is None else _value_and_floor(kind, plane, t.boxes[:count])
                for plane, t in zip(maps, batch.truth, strict=True)
            ]
            value, floor = torch.tensor(pairs, dtype=torch.float64).T
            value = torch.where(constant & ~absent, 0.0, value)
            yield MetricRows(name, method, value, floor, "boxes", reasons=reasons)


def _value_and_floor(
    kind: str, plane: Float[Tensor, "H W"], boxes: Bool[Tensor, "r H W"]
) -> tuple[float, float]:
    """An image's value; the floor is that of the middle pixel (pointing) or of the whole frame (overlap)."""
    height, width = plane.shape
    if kind == "pointing":
        return float(_pointing(plane, boxes)), float(boxes[:, height // 2, width // 2].any())
    frame = (0.0, 0.0, float(width), float(height))
    objects = [box for mask in boxes for box in _boxes(mask.cpu().numpy().astype(np.int8))]
    both = (_saliency_box(plane), frame)
    best, trivial = (max((_overlap(box, one) for one in objects if box), default=0.0) for box in both)
    return best, trivial
