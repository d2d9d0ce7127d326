"""Every metric by name: what it measures, and the rows it makes of an evaluated batch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.transforms import Element
from equicam.core.uncertainty import REGIONS, Region
from equicam.core.views import Views, transform_all
from equicam.evaluate.batch import EvaluatedBatch, Predictions
from equicam.evaluate.causal import occlusion
from equicam.evaluate.controls import item_seed
from equicam.evaluate.equivariance import WITHOUT_GRID, Eq, compare, mean_where, stages, weighted_mean
from equicam.evaluate.faithfulness import area, curve
from equicam.evaluate.localisation import box_rows, energy_rows
from equicam.evaluate.rows import ReasonCode
from equicam.evaluate.similarity import compare_planes, region_mask, size_of
from equicam.evaluate.table import MetricRows

Kind = Literal["any", "one view", "several views"]
"""Of methods: one view that starts at features, several views, or whichever."""


@dataclass(frozen=True)
class Metric:
    """One entry of the table; some metrics apply to methods of one view or of several views only."""

    about: str
    rows: Callable[[EvaluatedBatch], Iterator[MetricRows]] = field(repr=False)
    applies_to: Kind = "any"
    needs_regions: bool = False  # boxes or label regions of the images
    rotations_only: bool = False
    without_context: bool = False  # it rotates the model's input itself


def prediction_rows(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    """The model's predictions for each image in every presentation; part of every evaluation."""
    found = batch.predictions
    labels = torch.tensor([-1 if t.label is None else t.label for t in batch.truth])
    labels = labels.to(found.target.device, non_blocking=True)
    wrong = torch.where(labels < 0, torch.nan, (labels != found.target).double())
    why = [t.no_label if t.label is None else "" for t in batch.truth]
    reasons = tuple((text, torch.tensor([one == text for one in why])) for text in sorted({*why} - {""}))
    yield from _confidence(None, found, batch)
    yield MetricRows("flip-rate", None, found.flip_rate)
    yield MetricRows("confidence-drop", None, found.confidence_drop)
    yield MetricRows("misclassified", None, wrong, reasons=reasons)
    for method, own in batch.methods.items():
        if own.predictions is not found:  # another network or other images
            yield from _confidence(method, own.predictions, batch)


def _confidence(method: str | None, found: Predictions, batch: EvaluatedBatch) -> Iterator[MetricRows]:
    yield MetricRows("presented-confidence", method, found.of_target[0])
    for name, value in (
        ("confidence", found.of_target[1:]),
        ("confidence-kept", found.confidence_kept),
        ("consistent", found.consistent.double()),
    ):
        yield MetricRows(name, method, value, presentations=batch.presentations)


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
        kept = batch.methods[method].predictions.consistent
        value, floor = (torch.where(kept, v, torch.nan) for v in (eq.value, eq.floor))
        yield MetricRows(
            "eq-consistent", method, value, floor, region, batch.presentations,
            over_angles=mean_where(eq.value, kept), floor_over_angles=mean_where(eq.floor, kept),
            reasons=((ReasonCode.TOP1_CHANGED, ~kept), (ReasonCode.CONSTANT_MAP, eq.constant)),
        )  # fmt: skip


def _eq_weighted(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, region, eq in _each_eq(batch):
        kept = batch.methods[method].predictions.confidence_kept.double()
        value, floor = (weighted_mean(v, kept) for v in (eq.value, eq.floor))
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
    target, whole_pixels = batch.predictions.target, batch.protocol.whole_pixels_per_step
    for method, own in batch.methods.items():
        values = curve(batch.predict, batch.x, own.maps[0], target, kind, whole_pixels=whole_pixels)
        yield MetricRows(kind, method, area(values, batch.protocol.curve_divisor))


def _causal(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    seeds = [item_seed(batch.seed, i, "causal") for i in batch.ids]
    for method, own in batch.methods.items():
        drops = occlusion(
            batch.predict, batch.x, own.maps, batch.presentations, batch.predictions.target,
            seeds=seeds, protocol=batch.protocol, unrelated=batch.unrelated,
        )  # fmt: skip
        for region, presented in drops.presented.items():
            for suffix, lost in (("", presented), ("-rotated", drops.rotated[region])):
                reasons = (
                    (ReasonCode.CONSTANT_MAP, drops.constant),
                    (ReasonCode.NO_OTHER_REGION, lost.isnan()),
                )
                name = f"causal-{region}{suffix}"
                yield MetricRows(name, method, lost, None, batch.region, batch.presentations, reasons=reasons)


def _peum(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if (peum := own.of_views.get("peum")) is not None:
            for region in REGIONS:
                mask = region_mask(region, size_of(peum), peum.device)
                yield MetricRows("peum", method, peum[:, mask].double().mean(1), None, region)


def _of_views(batch: EvaluatedBatch, *, name: str, region: Region | None = None) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if name in own.of_views:
            yield MetricRows(name, method, own.of_views[name], None, region or batch.region)


def _calibration(batch: EvaluatedBatch) -> Iterator[MetricRows]:
    for method, own in batch.methods.items():
        if (peum := own.of_views.get("peum")) is not None:
            value = calibration(peum, own.maps, batch.presentations, batch.region)
            reasons = ((ReasonCode.FLAT, value.isnan()),)
            yield MetricRows("calibration", method, value, None, batch.region, reasons=reasons)


def calibration(
    peum: Float[Tensor, "b H W"],
    maps: Float[Tensor, "v b H W"],
    presentations: Sequence[Element],
    region: Region,
) -> Float[Tensor, " b"]:
    """Spearman over pixels of PEUM with the mean squared drift, both in the presented frame; NaN where either is flat."""
    views = Views(presentations)
    drift = ((views.align(maps[1:], "reflect") - maps[0]) ** 2).mean(0)
    pairs = zip(peum[:, None], drift[:, None], strict=True)
    found = [compare_planes(*pair, "spearman", region, views.radius)[0].squeeze() for pair in pairs]
    return torch.where(torch.stack(found) == 0, torch.nan, torch.stack(found))


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
    "energy": Metric("share of the saliency in the label region, presented and rotated", energy_rows, needs_regions=True, rotations_only=True),
    "pointing": Metric("whether the maximum lies in a box of the object", partial(box_rows, kind="pointing"), needs_regions=True),
    "box-iou": Metric("overlap of the map's box with the object's", partial(box_rows, kind="box-iou"), needs_regions=True),
    "peum": Metric("PEUM (per-image explanation uncertainty): variance of the aligned views, mean over pixels", _peum, applies_to="several views"),
    "disagreement": Metric("1 − mean Pearson over all pairs of aligned views", partial(_of_views, name="disagreement"), applies_to="several views"),
    "stability": Metric("mean Pearson of the presented view's own map with every other view's, aligned", partial(_of_views, name="stability", region="disc"), applies_to="several views"),
    "calibration": Metric("does PEUM lie where the map drifts: Spearman over pixels", _calibration, applies_to="several views"),
}  # fmt: skip


def needs_regions(scores: Iterable[str]) -> bool:
    """Whether any of these scores needs boxes or label regions."""
    return any(METRICS[name].needs_regions for name in METRICS.keys() & scores)


def scores() -> tuple[str, ...]:
    """The names of the metrics that `evaluate` computes."""
    return tuple(METRICS)
