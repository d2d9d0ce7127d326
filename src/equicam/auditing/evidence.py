"""Signal or noise, for one image: does its map drift where the model looks, or only where it does not?

Degrees with their uncertainty, never a bare yes or no: the cost of occluding the pixels whose saliency moves, above
pixels of the same shape elsewhere and above pixels of the same saliency; whether the prediction changes with rotation;
whether the representation does.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from equicam.auditing.queue_files import logged_evidence, write_evidence
from equicam.auditing.reload import Reloaded, unchanged_inputs
from equicam.auditing.sanity import log_sanity
from equicam.auditing.store import RunStore
from equicam.data.items import Item
from equicam.errors import EquicamError
from equicam.evaluation import causal, statistics
from equicam.evaluation.batch import EvaluatedBatch
from equicam.evaluation.controls import item_seed
from equicam.evaluation.equivariance import ANGLES, GROUPS
from equicam.evaluation.faithfulness import blur_out
from equicam.evaluation.maps import MapComputer
from equicam.evaluation.spec import EvaluationSpec
from equicam.evaluation.stages import pooled_cosine
from equicam.evaluation.statistics import Estimate
from equicam.models.images import as_batch, stack_images
from equicam.readers.forward import frozen
from equicam.readers.model import Model
from equicam.recipe import Recipe
from equicam.shards import json_ready

IMAGES_PER_BATCH = 8
REPORTED = ("drift", "agreement", "drift-elsewhere", "same-saliency")
"""Regions whose costs are in the evidence."""
MIN_EFFECT = 0.02
"""Of the probability: a smaller change counts as none."""
CHANGING_PREDICTION = 0.25
"""Share of views with another prediction above which the verdict mentions it."""


@dataclass(frozen=True)
class Evidence:
    """Measurements on one image over the seven angles, each with its 95 % interval, and their verdict."""

    id: str
    moving: Estimate  # probability lost without the pixels whose saliency moves
    staying: Estimate  # without those where it stays
    above_shape: Estimate  # moving, minus the same shape elsewhere
    above_saliency: Estimate  # moving, minus other pixels of the same saliency
    flips: Estimate  # share of views with another prediction
    feature_cosine: float  # cosine of the pooled features, presented against rotated
    unrelated_cosine: float  # the same against other images
    leaning: str  # signal, noise, undecided, no-effect or constant
    verdict: str
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values, null where undefined."""
        found: dict[str, Any] = json_ready(asdict(self))
        return found


def collect_evidence(
    store: RunStore,
    ids: Sequence[str],
    reload: Callable[[], Reloaded],
    tick: Callable[[int], None] = lambda _count: None,
) -> dict[str, Any]:
    """Evidence on these images of a run, in their order, as evidence.json has it.

    The file is written after every batch, and images that it has are not computed again.
    """
    found = logged_evidence(store)
    pending = [name for name in ids if name not in found]
    tick(len(ids) - len(pending))
    if pending:
        if store.manifest.has_values:
            raise EquicamError(
                "evidence", needs="a model with class probabilities: it measures their loss", got="one without",
                fix="equicam report without it",
            )  # fmt: skip
        reloaded = reload()
        ran = reloaded.context.recipe
        recipe = Recipe(dtype=ran.dtype, compiled=ran.compiled, seed=ran.seed)
        items, rows = {item.id: item for item in reloaded.items}, store.rows(set(pending))
        log_sanity(store, reloaded)
        for start in range(0, len(pending), IMAGES_PER_BATCH):
            some = pending[start : start + IMAGES_PER_BATCH]
            known = [items[name] for name in some if name in items and name in rows]
            measured = evidence(reloaded.context.model, known, rows, recipe)
            if measured:
                found |= {name: one.to_json() for name, one in measured.items()}
                write_evidence(store, found)
            tick(len(some))
    return {name: found[name] for name in ids if name in found}


def evidence(
    model: Model,
    items: Sequence[Item],
    rows: Mapping[str, Mapping[str, Any]],
    recipe: Recipe = Recipe(),  # noqa: B008  # frozen
) -> dict[str, Evidence]:
    """Evidence on a batch of images, given their rows in the run, each compared with the others of the batch.

    An image that has changed since the audit or cannot be read is skipped.
    """
    ids, images = unchanged_inputs(model, items, rows)
    if not ids:
        return {}
    computer = MapComputer.of(model, EvaluationSpec(recipe, ["grad-cam"], ("stages",), GROUPS["rotation"]))
    # frozen once for all passes of the batch
    with computer.context(), frozen(model.module, eager=not recipe.compiled):
        return _measure_batch(computer, as_batch(model, stack_images(images)), ids, rows)


def _measure_batch(
    computer: MapComputer, x: torch.Tensor, ids: Sequence[str], rows: Mapping[str, Mapping[str, Any]]
) -> dict[str, Evidence]:
    found = computer.compute(ids, x)
    maps = found.methods["grad-cam"]
    lost = _lost(found, maps.maps, [item_seed(found.seed, name, "causal") for name in ids])
    pooled = pooled_cosine(maps.traces[0], maps.traces[1:]) if maps.traces else None
    measured = {}
    for i, name in enumerate(ids):
        views = len(rows[name]["view_top1"] or ())
        flips = statistics.proportion(round((rows[name]["flip_rate"] or 0) * views), views)
        feature_cosine, unrelated_cosine = (
            (float("nan"), float("nan"))
            if pooled is None
            else (float(pooled.value[:, i].mean()), float(pooled.floor[:, i].mean()))
        )
        costs = {key: values[:, i] for key, values in lost.items()}
        measured[name] = _summarise(name, costs, flips, feature_cosine, unrelated_cosine)
    return measured


def _lost(found: EvaluatedBatch, maps: torch.Tensor, seeds: Sequence[int]) -> dict[str, np.ndarray]:
    """Probability lost without each region, by angle and image.

    Regions that only say whether hiding has any effect are hidden where the reported ones show none, NaN elsewhere.
    """
    every = list(causal.regions_by_presentation(maps, ANGLES, seeds=seeds))
    constant = torch.stack([flat for _, flat in every])
    lender_constant = constant.roll(1, 1) | (len(found.x) == 1)
    blurred, confidence = blur_out(found.x), found.predictions.of_target[0]
    lost: dict[str, np.ndarray] = {}

    def hide(name: str, chosen: np.ndarray) -> None:
        images = torch.from_numpy(chosen.nonzero()[0]).to(found.x.device)
        masks = torch.stack([regions[name][images] for regions, _ in every])
        drops = causal.lost_without(
            found.predict, found.x[images], blurred[images], masks, found.predictions.target[images], confidence[images]
        )  # fmt: skip
        undefined = constant | lender_constant if name in causal.BORROWED else constant
        lost[name] = np.full(constant.shape, np.nan)
        lost[name][:, chosen] = torch.where(undefined[:, images], torch.nan, drops).double().cpu().numpy()

    for name in REPORTED:
        hide(name, np.ones(len(found.x), dtype=bool))
    still = np.array([not _has_effect(values[:, i] for values in lost.values()) for i in range(len(found.x))])
    if still.any():
        for name in causal.CONTROLS:
            if name not in REPORTED:
                hide(name, still)
    return lost


def _has_effect(lost: Iterable[np.ndarray]) -> bool:
    """Whether hiding any of these regions changes the probability, in the mean over the angles."""
    return any(abs(statistics.mean(values)) >= MIN_EFFECT for values in lost)


def _summarise(
    name: str, lost: Mapping[str, np.ndarray], flips: Estimate, feature_cosine: float, unrelated_cosine: float
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
        f"Hiding the pixels whose saliency moves costs {_text(moving)} of the probability; hiding those where it stays, {_text(staying)}.",
        f"That is {_text(shape, sign=True)} above pixels of the same shape elsewhere, and {_text(saliency, sign=True)} above pixels of the same saliency.",
        f"Another prediction in {flips.value:.0%} of the views ({flips.low:.0%} to {flips.high:.0%}).",
        f"Pooled features of the rotated and the presented image: cosine {feature_cosine:.2f}; with other images {'unknown' if np.isnan(unrelated_cosine) else f'{unrelated_cosine:.2f}'}.",
    )
    lean = leaning(lost, shape, saliency)
    text = verdict(lean, shape, saliency, flips, feature_cosine, unrelated_cosine)
    return Evidence(
        name, moving, staying, shape, saliency, flips, feature_cosine, unrelated_cosine, lean, text, lines
    )


def leaning(lost: Mapping[str, np.ndarray], shape: Estimate, saliency: Estimate) -> str:
    """The code of what the intervals over seven angles of one image support."""
    if np.isnan(shape.value) or np.isnan(saliency.value):
        return "constant"
    if not _has_effect(lost.values()):
        return "no-effect"
    if min(shape.low, saliency.low) > 0 and min(shape.value, saliency.value) >= MIN_EFFECT:
        return "signal"
    return "noise" if max(shape.high, saliency.high) < MIN_EFFECT else "undecided"


_LEANINGS = {
    "constant": "Cannot be judged: a map is constant.",
    "no-effect": f"Cannot be judged: hiding a tenth of the image, wherever, changes the probability by less than {MIN_EFFECT:g}.",
    "signal": "Leans to signal: the model uses pixels whose saliency moves, more than their shape or saliency would explain",
    "noise": f"Leans to noise: the pixels whose saliency moves matter by less than {MIN_EFFECT:g} more than others of their shape or saliency",
    "undecided": "Undecided: these angles do not show whether the pixels whose saliency moves matter more than others of their shape or saliency",
}


def verdict(
    lean: str,
    shape: Estimate,
    saliency: Estimate,
    flips: Estimate,
    feature_cosine: float,
    unrelated_cosine: float,
) -> str:
    """The sentence of a leaning, with its numbers."""
    if lean in ("constant", "no-effect"):
        return _LEANINGS[lean]
    text = (
        f"{_LEANINGS[lean]} ({_text(shape, sign=True)} and {_text(saliency, sign=True)} of the probability)."
    )
    if flips.low > CHANGING_PREDICTION:
        text += " The prediction itself changes with the rotation, so the map explains a changing answer."
    if not np.isnan(unrelated_cosine):
        kept = (feature_cosine - unrelated_cosine) / (1 - unrelated_cosine)
        text += f" The representation keeps {kept:.0%} of its distance from other images (100%: rotating the image does not change it)."
    return text


def _text(e: Estimate, *, sign: bool = False) -> str:
    form = "+.3f" if sign else ".3f"
    value, low, high = (round(v, 3) + 0.0 for v in (e.value, e.low, e.high))  # no −0.000
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"
