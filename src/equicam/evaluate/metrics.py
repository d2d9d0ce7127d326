"""Every metric by name: what it measures, and the rows it makes of an evaluated batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.transforms import Element
from equicam.core.uncertainty import REGIONS, Region
from equicam.core.views import Views, transform_all
from equicam.evaluate import causal, faithfulness
from equicam.evaluate.batch import EvaluatedBatch, Predictions
from equicam.evaluate.controls import item_seed
from equicam.evaluate.equivariance import (
    WITHOUT_GRID,
    Eq,
    compare,
    confidence_kept,
    consistent,
    mean_where,
    stages,
    target_probability,
    weighted_mean,
)
from equicam.evaluate.localisation import box_rows, energy_rows
from equicam.evaluate.rows import ReasonCode
from equicam.evaluate.similarity import region_mask, size_of, spearman
from equicam.evaluate.table import MetricRows


def flip_rate(
    probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"], *, multilabel: bool = False
) -> Float[Tensor, " b"]:
    """Share of the presentations whose prediction is not the presented one's, the first of `probs`."""
    return (~consistent(probs, target, multilabel=multilabel)).double().mean(0)


def confidence_drop(probs: Float[Tensor, "v b y"], target: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Mean over the presentations of 1 − p_c(T x) / p_c(x)."""
    of_target = target_probability(probs, target).double()
    return (1 - of_target[1:] / of_target[0]).mean(0)


def calibration(
    peum: Float[Tensor, "b H W"],
    maps: Float[Tensor, "v b H W"],
    presentations: Sequence[Element],
    region: Region,
) -> Float[Tensor, " b"]:
    """Spearman over pixels of PEUM with the mean squared drift, both in the presented frame; NaN where either is flat."""
    views = Views(presentations)
    drift = ((views.align(maps[1:], "reflect") - maps[0]) ** 2).mean(0)
    pairs = zip(peum, drift, strict=True)
    found = torch.stack([spearman(p[None], d[None], region, views.radius)[0, 0] for p, d in pairs])
    return torch.where(found == 0, torch.nan, found)


@dataclass(frozen=True)
class Metric:
    """One entry of the table; some metrics apply to methods of one view or of several views only."""

    about: str
    rows: Callable[[EvaluatedBatch], Iterator[MetricRows]] = field(repr=False)
    applies_to: Literal["any", "one view", "several views"] = "any"
    rotations_only: bool = False
    without_context: bool = False  # it rotates the model's input itself


def prediction_rows(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    """The model's predictions for each image in every presentation; part of every evaluation."""
    probs, target, multilabel = (
        batch.predictions.probs,
        batch.predictions.target,
        batch.predictions.multilabel,
    )
    labels = torch.tensor([-1 if t.label is None else t.label for t in batch.truth])
    labels = labels.to(target.device, non_blocking=True)
    wrong = torch.where(labels < 0, torch.nan, (labels != target).double())
    missing = sorted({t.no_label for t in batch.truth if t.label is None})
    reasons = tuple(
        (text, torch.tensor([t.label is None and t.no_label == text for t in batch.truth]))
        for text in missing
    )
    yield from _confidence(None, batch.predictions, batch)
    yield MetricRows("flip-rate", None, flip_rate(probs, target, multilabel=multilabel))
    yield MetricRows("confidence-drop", None, confidence_drop(probs, target))
    yield MetricRows("misclassified", None, wrong, reasons=reasons)
    for method, own in batch.methods.items():
        if own.predictions is not batch.predictions:  # another network or other images
            yield from _confidence(method, own.predictions, batch)


def _confidence(method: str | None, predictions: Predictions, batch: EvaluatedBatch) -> Iterator[MetricRows]:
    probs, target, of_target = predictions.probs, predictions.target, predictions.of_target
    kept = confidence_kept(probs, target, of_any_class=batch.protocol.kept_is_of_any_class)
    yield MetricRows("presented-confidence", method, of_target[0])
    yield MetricRows("confidence", method, of_target[1:], presentations=batch.presentations)
    yield MetricRows("confidence-kept", method, kept, presentations=batch.presentations)
    same = consistent(probs, target, multilabel=predictions.multilabel)
    yield MetricRows("consistent", method, same.double(), presentations=batch.presentations)


def _each_eq(batch: EvaluatedBatch, measure: str = "pearson") -> Iterator[tuple[str, Region, Eq]]:
    """Eq of every method in both regions."""
    views, unrelated = Views(batch.presentations), batch.unrelated
    for method, own in batch.methods.items():
        maps = own.maps if own.raw is None or measure != "pearson" else own.raw
        reference = transform_all(maps[0], views.transforms, fill=batch.fill)
        for region in REGIONS:
            yield method, region, compare(maps[1:], reference, views, measure, region, unrelated)


def _eq(batch: EvaluatedBatch, *, name: str, measure: str) -> Iterator[MetricRows]:
    for method, region, eq in _each_eq(batch, measure):
        reasons = (
            (ReasonCode.CONSTANT_MAP, eq.constant),
            (ReasonCode.UNDEFINED_MAP, eq.value.isnan()),
            (ReasonCode.NO_OTHER_IMAGE, eq.floor.isnan()),
        )
        yield MetricRows(name, method, eq.value, eq.floor, region, batch.presentations, reasons=reasons)


def _eq_consistent(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, region, eq in _each_eq(batch):
        predictions = batch.methods[method].predictions
        kept = consistent(predictions.probs, predictions.target, multilabel=predictions.multilabel)
        value, floor = (torch.where(kept, v, torch.nan) for v in (eq.value, eq.floor))
        over_angles, floor_over_angles = (mean_where(v, kept) for v in (eq.value, eq.floor))
        yield MetricRows(
            "eq-consistent", method, value, floor, region, batch.presentations,
            over_angles=over_angles, floor_over_angles=floor_over_angles,
            reasons=((ReasonCode.TOP1_CHANGED, ~kept), (ReasonCode.CONSTANT_MAP, eq.constant)),
        )  # fmt: skip


def _eq_weighted(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, region, eq in _each_eq(batch):
        predictions = batch.methods[method].predictions
        kept = confidence_kept(
            predictions.probs, predictions.target, of_any_class=batch.protocol.kept_is_of_any_class
        )
        value, floor = (weighted_mean(v, kept.double()) for v in (eq.value, eq.floor))
        reasons = ((ReasonCode.CONSTANT_AT_SOME_ANGLE, eq.constant.any(0)),)
        yield MetricRows("eq-weighted", method, value, floor, region, reasons=reasons)


def _stages(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if not own.traces or own.combine is None:
            continue
        by_stage = stages(
            own.traces[0], own.traces[1:], batch.presentations, own.combine,
            target=own.predictions.target, size=size_of(batch.x),
            region=batch.region, fill=batch.fill, rectify_last=batch.protocol.reference_is_rectified_last, unrelated=batch.unrelated,
        )  # fmt: skip
        for stage, eq in by_stage.items():
            undefined = torch.full_like(eq.value, eq.reason is not None, dtype=torch.bool)
            region = "no grid" if stage in WITHOUT_GRID else batch.region
            reasons = (
                (eq.reason or "", undefined),
                (ReasonCode.NO_VARYING_CHANNEL, eq.value.isnan()),
                (eq.no_floor, eq.floor.isnan()),
            )
            yield MetricRows(
                f"stage-{stage}", method, eq.value, eq.floor, region, batch.presentations, reasons=reasons
            )


def _curve(batch: EvaluatedBatch, *, kind: Literal["insertion", "deletion"]) -> Iterator[MetricRows]:
    target = batch.predictions.target
    for method, own in batch.methods.items():
        values = faithfulness.curve(
            batch.predict,
            batch.x,
            own.maps[0],
            target,
            kind,
            whole_pixels=batch.protocol.whole_pixels_per_step,
        )
        yield MetricRows(kind, method, faithfulness.area(values, batch.protocol.curve_divisor))


def _causal(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    seeds = [item_seed(batch.seed, i, "causal") for i in batch.ids]
    for method, own in batch.methods.items():
        drops = causal.occlusion(
            batch.predict, batch.x, own.maps, batch.presentations, batch.predictions.target,
            seeds=seeds, region=batch.region, fill=batch.protocol.causal_fill, soft_masks=batch.protocol.soft_masks,
            controls=batch.protocol.causal_controls, unrelated=batch.unrelated,
        )  # fmt: skip
        for region in drops.presented:
            for name, lost in (
                (f"causal-{region}", drops.presented[region]),
                (f"causal-{region}-rotated", drops.rotated[region]),
            ):
                reasons = (
                    (ReasonCode.CONSTANT_MAP, drops.constant),
                    (ReasonCode.NO_OTHER_REGION, lost.isnan()),
                )
                yield MetricRows(name, method, lost, None, batch.region, batch.presentations, reasons=reasons)


def _peum(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if own.peum is not None:
            for region in REGIONS:
                mask = region_mask(region, size_of(own.peum), own.peum.device)
                yield MetricRows("peum", method, own.peum[:, mask].double().mean(1), None, region)


def _disagreement(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if own.disagreement is not None:
            yield MetricRows("disagreement", method, own.disagreement, None, batch.region)


def _stability(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if own.stability is not None:
            yield MetricRows("stability", method, own.stability, None, "disc")


def _calibration(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if own.peum is not None:
            value = calibration(own.peum, own.maps, batch.presentations, batch.region)
            reasons = ((ReasonCode.FLAT, value.isnan()),)
            yield MetricRows("calibration", method, value, None, batch.region, reasons=reasons)


METRICS: dict[str, Metric] = {
    "eq": Metric("Eq (equivariance): Pearson between the map of the rotated image and the rotated map", partial(_eq, name="eq", measure="pearson")),
    "eq-spearman": Metric("the same by ranks", partial(_eq, name="eq-spearman", measure="spearman")),
    "eq-cosine": Metric("the same by cosine", partial(_eq, name="eq-cosine", measure="cosine")),
    "eq-ssim": Metric("the same by structural similarity", partial(_eq, name="eq-ssim", measure="ssim")),
    "eq-consistent": Metric("Eq over the angles that keep the top-1", _eq_consistent),
    "eq-weighted": Metric("Eq weighted by the share of confidence kept under rotation", _eq_weighted),
    "stages": Metric("Eq at every tensor from features to map, pooled features and logits", _stages, applies_to="one view"),
    "insertion": Metric("probability regained as marked pixels return to a blurred image", partial(_curve, kind="insertion")),
    "deletion": Metric("probability kept as marked pixels are blurred (lower is better)", partial(_curve, kind="deletion")),
    "causal": Metric("probability lost without the drift region, and without control regions", _causal, without_context=True),
    "energy": Metric("share of the saliency in the label region, presented and rotated", energy_rows, rotations_only=True),
    "pointing": Metric("whether the maximum lies in a box of the object", partial(box_rows, kind="pointing")),
    "box-iou": Metric("overlap of the map's box with the object's", partial(box_rows, kind="box-iou")),
    "peum": Metric("PEUM (per-image explanation uncertainty): variance of the aligned views, mean over pixels", _peum, applies_to="several views"),
    "disagreement": Metric("1 − mean Pearson over all pairs of aligned views", _disagreement, applies_to="several views"),
    "stability": Metric("mean Pearson of the presented view's own map with every other view's, aligned", _stability, applies_to="several views"),
    "calibration": Metric("does PEUM lie where the map drifts: Spearman over pixels", _calibration, applies_to="several views"),
}  # fmt: skip


def scores() -> tuple[str, ...]:
    """The names of the metrics that `evaluate` computes."""
    return tuple(METRICS)
