"""One shard of a run: decoded images in, their rows and maps out."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.auditing.store import ITEMS
from equicam.auditing.stored_maps import MAPS, StoredMaps
from equicam.core.correlation import pearson
from equicam.core.transforms import Transform, canvas_size
from equicam.core.views import Views, Window, rotate_all
from equicam.data.decoding import DecodedImage
from equicam.data.items import valid_utf8
from equicam.errors import EquicamError
from equicam.evaluation.equivariance import ANGLES, equivariance
from equicam.explain import Explanation, explain_batch
from equicam.models.images import as_batch
from equicam.models.surround import crops_centre, input_size, preprocess_pixels
from equicam.readers.finite import finite_images
from equicam.readers.model import Model
from equicam.reasons import Reason, describe
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor

LOG = logging.getLogger(__name__)
Facts = dict[str, dict[str, Any]]
"""Columns of rows, by the id of the image."""


@dataclass(frozen=True)
class AuditContext:
    """What computes shards: the model on its device, the recipe, and the ids of the calibration subset."""

    model: Model
    recipe: Recipe
    calibration: frozenset[str]
    tile: int | None = None  # pixels a side of the windows of rasters
    target: int | None = None  # the class to explain; None: each image's top-1

    @cached_property
    def executor(self) -> Executor:
        """Runs the recipe."""
        return Executor(self.model, self.recipe)

    @cached_property
    def grad_cam_executor(self) -> Executor:
        """Runs Grad-CAM, whose Eq is measured on the calibration subset."""
        return Executor(
            self.model, Recipe("grad-cam", dtype=self.recipe.dtype, compiled=self.recipe.compiled)
        )

    @cached_property
    def window(self) -> Window | None:
        """The model's input in images with context."""
        if self.recipe.context == "none":
            return None
        return Window((self.tile, self.tile) if self.tile else input_size(self.model))

    @cached_property
    def has_margin(self) -> bool:
        """Whether the model's preprocessing crops something away that can be used."""
        return crops_centre(self.model)

    def margin(self, one: DecodedImage) -> tuple[int, int]:
        """Rows and columns around the model's input that an image has, at the input's resolution."""
        if one.margin is not None:
            return one.margin
        if self.window is None or not self.has_margin or None in (one.input_box, one.width, one.height):
            return 0, 0
        (x0, y0, x1, y1), (height, width) = one.input_box, self.window.size  # type: ignore[misc]
        canvas_rows, canvas_columns = canvas_size((height, width))
        most = ((canvas_rows - height) // 2, (canvas_columns - width) // 2)
        sides = (min(y0, one.height - y1) * height / (y1 - y0), min(x0, one.width - x1) * width / (x1 - x0))  # type: ignore[operator]
        rows, columns = (max(0, min(round(side), kept)) for side, kept in zip(sides, most, strict=True))
        return rows, columns


def preprocess_to_array(model: Model, image: Any, context: str = "none") -> np.ndarray:
    """The model's input as an array, which other processes can be sent; with context, in its surround."""
    return np.ascontiguousarray(preprocess_pixels(model, image, context).float().numpy())


@torch.no_grad()
def compute_shard(context: AuditContext, decoded: Sequence[DecodedImage]) -> tuple[pa.Table, pa.Table]:
    """Rows and maps of a shard; a bad image is a row in its place."""
    start = time.perf_counter()
    good = [d for d in decoded if d.x is not None]
    shapes = {d.x.shape for d in good if d.x is not None}
    if len(shapes) > 1:
        raise EquicamError(
            "preprocessing", needs="to bring every image to one size", got=sorted(shapes), fix="a crop or resize in it",
        )  # fmt: skip
    facts: Facts = {}
    reasons: dict[str, Reason] = {}
    maps: dict[str, StoredMaps] = {}
    if good:
        # inference tensors cannot join a backward pass, and our own algebra is never autocast
        with torch.inference_mode(False), torch.autocast(context.model.device.type, enabled=False):
            # one copy to the device per image: stacking them on the CPU first takes longer
            tensors = [torch.from_numpy(d.x).to(context.model.device) for d in good if d.x is not None]
            x = as_batch(context.model, torch.stack(tensors), check=False)
            finite = finite_images(x).tolist()
            ids = [d.item.id for d, fine in zip(good, finite, strict=True) if fine]
            margins = [context.margin(d) for d, fine in zip(good, finite, strict=True) if fine]
            for d, fine in zip(good, finite, strict=True):
                if not fine:
                    reasons[d.item.id] = Reason("not-finite")
            if ids:
                facts, maps, refused = _explain_each(context, x if all(finite) else x[finite], ids, margins)
                reasons |= refused
    for d in decoded:
        if reason := d.reason or reasons.get(d.item.id):
            LOG.info("%r could not be explained: %s", d.item.id, describe(reason))
    seconds = (time.perf_counter() - start) / max(1, len(good))
    rows = [_row(d, facts.get(d.item.id, {}), reasons.get(d.item.id), seconds) for d in decoded]
    stored = [one.to_row(name) for name, one in maps.items()]
    return pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(stored, schema=MAPS)


def _explain_each(
    context: AuditContext, x: Float[Tensor, "b c H W"], ids: Sequence[str], margins: Sequence[tuple[int, int]]
) -> tuple[Facts, dict[str, StoredMaps], dict[str, Reason]]:
    """Explain all in one batch; if the model refuses some image, explain each alone and give the refused a reason."""
    try:
        return *_explain(context, x, ids, margins), {}
    except EquicamError as refused:
        facts: Facts = {}
        maps: dict[str, StoredMaps] = {}
        reasons: dict[str, Reason] = {}
        for i, name in enumerate(ids):
            try:
                some, stored = _explain(context, x[i : i + 1], [name], margins[i : i + 1])
                facts |= some
                maps |= stored
            except EquicamError as error:
                fields = {"what": error.what, "needs": error.needs, "got": str(error.got), "fix": error.fix}
                reasons[name] = Reason("refused", fields)
        if not maps:  # no single image is to blame
            raise refused
        return facts, maps, reasons


def _row(d: DecodedImage, facts: dict[str, Any], refused: Reason | None, seconds: float) -> dict[str, Any]:
    reason = d.reason or refused
    label = None if d.item.label is None else str(d.item.label)
    path = valid_utf8(str(d.item.path.absolute()))
    row: dict[str, Any] = {"id": d.item.id, "path": path, "index": d.item.index, "label": label}
    row |= {
        name: getattr(d, name) for name in ("sha256", "bytes", "mtime_ns", "width", "height", "input_box")
    }
    row |= {**facts, "status": "bad" if reason else "ok", "seconds": d.seconds + (0 if reason else seconds)}
    if d.as_stored and not reason:
        row["flags"] = sorted([*row["flags"], "orientation-unread"])
    if d.nodata and not reason:
        row["flags"] = sorted([*row["flags"], "nodata"])
    if d.item.window is not None:
        row |= {name: getattr(d.item.window, name) for name in ("x", "y", "side")}
    if reason:
        row |= {"reason": reason.code, "reason_values": reason.to_row()["values"]}
    return row


def _explain(
    context: AuditContext, x: Float[Tensor, "b c H W"], ids: Sequence[str], margins: Sequence[tuple[int, int]]
) -> tuple[Facts, dict[str, StoredMaps]]:
    e = explain_batch(context.executor, x, context.target, context.window, margins)
    facts = _facts(e, ids)
    wanted = [i for i, name in enumerate(ids) if name in context.calibration]
    if wanted:
        for i, eq in zip(wanted, single_view_eq(context, x[wanted], e.target[wanted]), strict=True):
            facts[ids[i]]["eq"] = eq
    height, width = e.view_maps.shape[-2:]
    peum = torch.nn.functional.adaptive_avg_pool2d(e.peum, (height, width))
    arrays = [v.float().cpu().numpy() for v in (e.layer_map, peum, e.view_maps)]
    return facts, {name: StoredMaps(*(a[i] for a in arrays)) for i, name in enumerate(ids)}


def _facts(e: Explanation, ids: Sequence[str]) -> Facts:
    top5: list[list[int]] = [[]] * len(e)
    top5_confidence: list[list[float]] = [[]] * len(e)
    if e.probabilities is not None:
        top = e.probabilities.topk(min(5, e.probabilities.shape[1]), dim=1)
        top5, top5_confidence = top.indices.tolist(), top.values.tolist()
    columns: dict[str, list[Any]] = {
        "target": e.target.tolist(),
        "confidence": _nulls(e.confidence.tolist()),
        "top5": top5,
        "top5_confidence": top5_confidence,
        "peum_score": e.peum_score.double().tolist(),
        "stability": _nulls(e.stability.tolist()),
        "stability_by_view": e.stability_by_view.tolist(),
        "disagreement": _nulls(e.disagreement.tolist()),
        "flip_rate": e.view_flips.double().mean(1).tolist(),
        "views_kept": e.view_kept.sum(1).tolist(),
        "view_confidence": [_nulls(one) for one in e.view_confidence.tolist()],
        "view_top1": e.view_top1.tolist(),
        "view_agreement": view_agreement(e).tolist(),
        "flags": [sorted(flags) for flags in e.flags],
        "steadiness": [one.word for one in e.steadiness],
        "steadiness_reason": [one.reason.code for one in e.steadiness],
    }
    return {name: {key: values[i] for key, values in columns.items()} for i, name in enumerate(ids)}


def _nulls(values: Sequence[float]) -> list[float | None]:
    """Null where undefined, as for a single view or the confidence of a value."""
    return [None if math.isnan(value) else value for value in values]


def view_agreement(e: Explanation) -> Float[Tensor, "b t"]:
    """Pearson of each view's aligned map with the mean of the others, at layer resolution inside the disc.

    It is 0 where either is flat, and 1 for a lone view.
    """
    aligned = e.views.align(e.view_maps.transpose(0, 1), "reflect").transpose(0, 1)
    views = aligned.shape[1]
    if views == 1:
        return torch.ones(aligned.shape[:2], dtype=torch.float64, device=aligned.device)
    others = (aligned.sum(1, keepdim=True) - aligned) / (views - 1)
    return pearson(aligned, others, "disc", e.views.radius).diagonal(dim1=-2, dim2=-1)


def single_view_eq(
    context: AuditContext, x: Float[Tensor, "b c H W"], target: Int[Tensor, " b"]
) -> list[float]:
    """Disc Eq of Grad-CAM over the seven angles: the measurement that signals are compared with."""
    angles = (0, *ANGLES)
    if context.window is None:
        presented = rotate_all(x, angles).flatten(0, 1)
    else:  # one look at the surround for each angle
        windows = (Window(context.window.size, Transform(angle)) for angle in angles)
        presented = torch.cat([Views([0]).act(x, window)[0] for window in windows])
    found = explain_batch(context.grad_cam_executor, presented, target.repeat(len(angles)))
    maps = found.map.reshape(len(angles), len(x), *found.map.shape[-2:])
    values: list[float] = equivariance(maps[1:], maps[0], ANGLES).value.mean(0).tolist()
    return values
