"""One part of a run: opened pictures in, their rows and maps out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.auditing.store import ITEMS, MAPS, Drawn
from equicam.core.fusion import fuse, in_groups, see
from equicam.core.views import Fill, Views
from equicam.data.decoding import Opened
from equicam.data.items import valid_utf8
from equicam.errors import EquicamError
from equicam.evaluation.equivariance import ANGLES, equivariance
from equicam.evaluation.maps import MapComputer
from equicam.evaluation.similarity import own_and_others, pearson
from equicam.evaluation.spec import EvaluationSpec
from equicam.explain import explanation, read
from equicam.methods import Method
from equicam.models.images import as_batch, preprocess_image
from equicam.readers.finite import finite_images
from equicam.readers.model import Model


@dataclass(frozen=True)
class Plans:
    """How every picture of a run is explained."""

    model: Model
    method: Method
    fill: Fill
    dtype: torch.dtype | None
    calibrated: frozenset[str]
    chunk: int | None = None


def prepared(model: Model, picture: Any) -> np.ndarray:
    """A picture as the model's input, as an array that goes from process to process."""
    return np.ascontiguousarray(preprocess_image(model, picture).float().numpy())


@torch.no_grad()
def computed(plans: Plans, found: Sequence[Opened]) -> tuple[pa.Table, pa.Table]:
    """Rows and maps of a part, bad pictures among them in their place."""
    start = time.perf_counter()
    good = [o for o in found if o.x is not None]
    shapes = {o.x.shape for o in good if o.x is not None}
    if len(shapes) > 1:
        raise EquicamError(
            "preprocessing",
            needs="to bring every picture to one size",
            got=sorted(shapes),
            fix="a crop or resize in it",
        )
    facts: dict[str, dict[str, Any]] = {}
    maps: list[dict[str, Any]] = []
    if good:
        # inference tensors cannot join a backward pass, and our own algebra is never autocast
        with torch.inference_mode(False), torch.autocast(plans.model.device.type, enabled=False):
            # each to the device by itself: joining them first would take longer than bringing them there
            there = [torch.from_numpy(o.x).to(plans.model.device) for o in good if o.x is not None]
            x = as_batch(plans.model, torch.stack(there), check=False)
            sound = finite_images(x).tolist()  # asked on the device, which is quicker
            rest = [o for o, fine in zip(good, sound, strict=True) if fine]
            for o, fine in zip(good, sound, strict=True):
                if not fine:
                    facts[o.item.id] = {"reason": "preprocessing made NaN or infinity of it"}
            if rest:
                some, drawn = _one_by_one(plans, x if all(sound) else x[sound], [o.item.id for o in rest])
                facts |= some
                maps = [one.row(name) for name, one in drawn.items()]
    each = (time.perf_counter() - start) / max(1, len(good))
    rows = [_row(o, facts.get(o.item.id, {}), each) for o in found]
    return pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(maps, schema=MAPS)


def _one_by_one(
    plans: Plans, x: Float[Tensor, "b c H W"], ids: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
    """All together; where the model refuses some, each alone, and the refused ones with the reason."""
    try:
        return _explained(plans, x, ids)
    except EquicamError as refused:
        facts: dict[str, dict[str, Any]] = {}
        drawn: dict[str, Drawn] = {}
        for i, name in enumerate(ids):
            try:
                some, maps = _explained(plans, x[i : i + 1], [name])
                facts |= some
                drawn |= maps
            except EquicamError as error:
                facts[name] = {"reason": str(error)}
        if not drawn:  # nothing to do with single pictures
            raise refused
        return facts, drawn


def _row(o: Opened, facts: dict[str, Any], each: float) -> dict[str, Any]:
    reason = o.reason or facts.get("reason")
    label = None if o.item.label is None else str(o.item.label)
    kept = ("sha256", "bytes", "mtime_ns", "width", "height", "frame")
    path = valid_utf8(str(o.item.path.absolute()))
    row: dict[str, Any] = {"id": o.item.id, "path": path, "index": o.item.index, "label": label}
    row |= {name: getattr(o, name) for name in kept}
    row |= {**facts, "status": "bad" if reason else "ok", "reason": reason}
    return row | {"seconds": o.seconds + (0 if reason else each)}


def _explained(
    plans: Plans, x: Float[Tensor, "b c H W"], ids: Sequence[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
    fusion = plans.method.fusion
    reading = partial(read, plans.model, plans.method.reader, plans.dtype)

    def work(some: slice, most: int) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
        fused = fuse(
            see(reading, x[some], fusion.views, None, most), plans.method.combine, fusion, plans.fill
        )
        return _facts(fused, ids[some])

    facts: dict[str, dict[str, Any]] = {}
    drawn: dict[str, Drawn] = {}
    for one, pictures in in_groups(x, len(fusion.views.presented_first()[0]), plans.chunk, work):
        facts |= one
        drawn |= pictures
    wanted = [i for i, name in enumerate(ids) if name in plans.calibrated]
    if wanted:
        for i, eq in zip(wanted, single_view_eq(plans, x[wanted], [ids[i] for i in wanted]), strict=True):
            facts[ids[i]]["eq"] = eq
    return facts, drawn


def _facts(fused: Any, ids: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, Drawn]]:
    e, seen = explanation(fused), fused.seen
    grid = e.planes.shape[-2:]
    peum = torch.nn.functional.adaptive_avg_pool2d(e.peum, (grid[0], grid[1]))
    # how each view's own plane agrees with the mean of the others, turned back at layer resolution
    back = Views(e.angles).undo(e.planes.transpose(0, 1), "reflect").transpose(0, 1)
    agree = _agreement(back)
    probs = seen.presented.probs
    top = probs.topk(min(5, probs.shape[1]), dim=1)
    columns: dict[str, list[Any]] = {
        "target": e.target.tolist(),
        "prob": e.sure.tolist(),
        "top5": top.indices.tolist(),
        "top5_prob": top.values.tolist(),
        "peum": e.score.double().tolist(),
        "flip_rate": e.flips.double().mean(1).tolist(),
        "kept": e.kept.sum(1).tolist(),
        "prob_by_view": e.prob.tolist(),
        "top1_by_view": seen.top1[fused.place].T.tolist(),
        "agree_by_view": agree.tolist(),
        "flags": [sorted(flags) for flags in e.flags],
    }
    facts = {name: {key: values[i] for key, values in columns.items()} for i, name in enumerate(ids)}
    arrays = [v.float().cpu().numpy() for v in (e.plane, peum, e.planes)]
    return facts, {name: Drawn(*(a[i] for a in arrays)) for i, name in enumerate(ids)}


def _agreement(planes: Float[Tensor, "b t h w"]) -> Float[Tensor, "b t"]:
    """Pearson of each view with the mean of the others inside the disc; 0 where either is flat, 1 for a lone view."""
    views = planes.shape[1]
    if views == 1:
        return torch.ones(planes.shape[:2], dtype=torch.float64, device=planes.device)
    others = (planes.sum(1, keepdim=True) - planes) / (views - 1)
    return own_and_others(pearson(planes, others, "disc"))[0]


def single_view_eq(plans: Plans, x: Float[Tensor, "b c H W"], ids: Sequence[str]) -> list[float]:
    """Disc Eq of Grad-CAM over the seven angles: what PEUM is held against."""
    recipe = Recipe(dtype=None if plans.dtype is None else str(plans.dtype), compiled=plans.model.compiled)
    spec = EvaluationSpec(recipe, ["grad-cam"], ("eq",), ANGLES, max_views_per_forward=plans.chunk)
    maps = MapComputer.of(plans.model, spec).compute(ids, x).methods["grad-cam"].maps
    values: list[float] = equivariance(maps[1:], maps[0], ANGLES).value.mean(0).tolist()
    return values
