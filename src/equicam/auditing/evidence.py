"""Signal or noise, for one picture: does its map drift where the model looks, or only where it does not?

Degrees with their uncertainty, never a bare yes or no: what occluding the moving pixels costs, above pixels of the same
shape elsewhere and above pixels of the same saliency; whether the prediction turns; whether the representation does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from equicam.auditing.audit import content
from equicam.data.items import Item, open_item
from equicam.errors import EquicamError
from equicam.evaluation import causal, statistics
from equicam.evaluation.controls import item_seed
from equicam.evaluation.equivariance import ANGLES
from equicam.evaluation.maps import MapComputer
from equicam.evaluation.spec import EvaluationSpec
from equicam.evaluation.stages import stages
from equicam.evaluation.statistics import Estimate
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam.shards import json_ready

A_BATCH = 8
MATTERS = 0.02
"""Of the probability: less is no effect to speak of."""


@dataclass(frozen=True)
class Evidence:
    """Numbers on one picture, each over the seven angles with its 95 % interval, and what they lean to."""

    id: str
    moving: Estimate  # probability lost without the pixels whose saliency moves
    staying: Estimate  # without those where it stays
    above_shape: Estimate  # moving, minus the same shape elsewhere
    above_saliency: Estimate  # moving, minus other pixels of the same saliency
    flips: Estimate  # share of views with another prediction
    alike: float  # cosine of the pooled features, presented against turned
    unrelated: float  # the same against other pictures
    verdict: str
    lines: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


@torch.no_grad()
def evidence(
    model: Model,
    items: Sequence[Item],
    rows: Mapping[str, Mapping[str, Any]],
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    tick: Callable[[int], None] = lambda _count: None,
) -> dict[str, Evidence]:
    """Evidence on these pictures; `rows` are their rows in the run. A picture that is not the one explained is left out."""
    found: dict[str, Evidence] = {}
    for start in range(0, len(items), A_BATCH):
        some, pictures = [], []
        for item in items[start : start + A_BATCH]:
            if content(item) != rows[item.id].get("sha256"):
                continue
            try:
                pictures.append(preprocess_image(model, open_item(item)))
                some.append(item)
            except (EquicamError, OSError, ValueError):
                continue
        if some:
            with torch.inference_mode(False), torch.autocast(model.device.type, enabled=False):
                x = as_batch(model, stack_images(pictures))
                found |= _of_batch(model, x, [i.id for i in some], rows, seed, dtype)
        tick(len(items[start : start + A_BATCH]))
    return found


def _of_batch(
    model: Model,
    x: torch.Tensor,
    ids: Sequence[str],
    rows: Mapping[str, Mapping[str, Any]],
    seed: int,
    dtype: torch.dtype | None,
) -> dict[str, Evidence]:
    recipe = Recipe(dtype=None if dtype is None else str(dtype), compiled=model.compiled)
    spec = EvaluationSpec(recipe, ["grad-cam"], ("stages",), ANGLES)
    found = MapComputer.of(model, spec).compute(ids, x)
    shown = found.methods["grad-cam"]
    seeds = [item_seed(seed, name, "causal") for name in ids]
    drops = causal.occlusion(found.predict, x, shown.maps, ANGLES, found.predictions.target, seeds=seeds)
    lost = {name: values.double().cpu().numpy() for name, values in drops.presented.items()}
    pooled = None
    if shown.traces and shown.combine is not None:
        size = (x.shape[-2], x.shape[-1])
        by_stage = stages(
            shown.traces[0],
            shown.traces[1:],
            ANGLES,
            shown.combine,
            target=found.predictions.target,
            size=size,
        )
        pooled = by_stage["pooled-cosine"]
    made = {}
    for i, name in enumerate(ids):
        views = rows[name]["top1_by_view"] or []
        flips = statistics.proportion(sum(v != rows[name]["target"] for v in views), len(views))
        alike, unrelated = (
            (float("nan"), float("nan"))
            if pooled is None
            else (float(pooled.value[:, i].mean()), float(pooled.floor[:, i].mean()))
        )
        made[name] = _judged(
            name, {key: values[:, i] for key, values in lost.items()}, flips, alike, unrelated
        )
    return made


def _judged(
    name: str, lost: Mapping[str, np.ndarray], flips: Estimate, alike: float, unrelated: float
) -> Evidence:
    over_angles = [
        statistics.bootstrap(statistics.mean, values)
        for values in (
            lost["drift"],
            lost["agreement"],
            lost["drift"] - lost["drift-elsewhere"],
            lost["drift"] - lost["same-saliency"],
        )
    ]
    moving, staying, shape, saliency = over_angles
    lines = (
        f"Hiding the pixels whose saliency moves costs {_said(moving)} of the probability; hiding those where it stays, {_said(staying)}.",
        f"That is {_said(shape, sign=True)} above pixels of the same shape elsewhere, and {_said(saliency, sign=True)} above pixels of the same saliency.",
        f"Another prediction in {flips.value:.0%} of the views ({flips.low:.0%} to {flips.high:.0%}).",
        f"Pooled features of turned and presented picture: cosine {alike:.2f}; with other pictures {'unknown' if np.isnan(unrelated) else f'{unrelated:.2f}'}.",
    )
    said = verdict(lost, shape, saliency, flips, alike, unrelated)
    return Evidence(name, moving, staying, shape, saliency, flips, alike, unrelated, said, lines)


def verdict(
    lost: Mapping[str, np.ndarray],
    shape: Estimate,
    saliency: Estimate,
    flips: Estimate,
    alike: float,
    unrelated: float,
) -> str:
    """What the numbers lean to, and how strongly; intervals are over seven angles of one picture."""
    if np.isnan(shape.value) or np.isnan(saliency.value):
        return "Cannot be said: a map is constant."
    cost = np.nanmax([abs(statistics.mean(values)) for values in lost.values()])
    if cost < MATTERS:
        return f"Cannot be said: hiding a tenth of the picture, wherever, changes the probability by less than {MATTERS:g}."
    if min(shape.low, saliency.low) > 0 and min(shape.value, saliency.value) >= MATTERS:
        lean = "Leans to signal: the model uses pixels whose saliency moves, more than their shape or saliency would explain"
    elif max(shape.high, saliency.high) < MATTERS:
        lean = "Leans to noise: the pixels whose saliency moves matter no more than others of their shape or saliency"
    else:
        lean = "Undecided: these angles do not tell whether the pixels whose saliency moves matter more than others of their shape or saliency"
    more = f"{lean} ({_said(shape, sign=True)} and {_said(saliency, sign=True)} of the probability)."
    if flips.low > 0.25:
        more += " The prediction itself turns with the picture, so the map is of a changing answer."
    if not np.isnan(unrelated):
        kept = (alike - unrelated) / (1 - unrelated)
        more += f" The representation keeps {kept:.0%} of what sets it apart from other pictures."
    return more


def _said(e: Estimate, *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    value, low, high = (round(v, 3) + 0.0 for v in (e.value, e.low, e.high))  # no −0.000
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"
