"""Table labelregion: how much of a map lies on the tissue that makes the label."""

import math
from collections.abc import Iterator
from dataclasses import replace

from equicam.core.chain import unit
from equicam.evaluate import localisation, summary
from equicam.evaluate.controls import coverage_map
from equicam.evaluate.statistics import Estimate
from equicam.images.items import sample_by_class
from equicam.methods import resolve
from equicam.models.images import box_mask
from equicam.recipe import Recipe
from equicam_paper.benchmarks import CENTRE
from equicam_paper.claims import METHODS, Claim
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Remark, Row, by_definition, compare, note

PUBLISHED = ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM", "EquiGrad-CAM+PCF")
SIDES = ("mass in disc 0deg", "mass in disc rotated mean", "drop")
GRID = (7, 7)  # of the paper's ResNet-50
PREPROCESSING = "as this model's preprocessing shows a patch; the paper's resizes to 256 and crops 224"


def measure(context: Context) -> Iterator[Row]:
    """Energy in the label region of positives, presented and rotated, and that of a map without content."""
    yield from _geometry(context)
    items = context.listing if context.domain == "PatchCamelyon" else []
    positives = sample_by_class([item for item in items if item.region is not None], context.n)
    if positives:
        methods = [METHODS[name] for name in PUBLISHED]
        yield from _energy_rows(context.evaluate_both(methods, ["energy"], items=positives))


def _energy_rows(found: Both[Evaluation]) -> Iterator[Row]:
    uniform = _energies(found.clean, "grad-cam", "floor")  # one view without content is a uniform map
    for side, null in zip(SIDES, uniform, strict=True):
        label = f"uniform map, {side}"
        yield compare(f"label.uniform null.{side}", Both(null, None), label=label)
    for name in PUBLISHED:
        method = METHODS[name]
        energies = found.map(_energies, method)
        empty = found.map(lambda e, m: _energies(e, m, "floor")[0].value, method)
        reason = f"its map without content gets {empty.as_published:.3f} by their protocol, {empty.clean:.3f} by ours"
        for side, ours, theirs in zip(SIDES, energies.clean, energies.as_published, strict=True):
            yield compare(
                f"label.{name}.{side}", Both(ours, theirs), label=f"{method}, {side}", reason=reason,
            )  # fmt: skip


def _energies(found: Evaluation, method: str, column: str = "value") -> list[Estimate]:
    """Presented, mean over the rotated, and their difference; `floor` is that of the method's map without content."""
    every = summary.pick(found.table, "energy", method, "label", each_angle=True)
    rotated = summary.pick(found.table, "energy", method, "label")
    first, then = getattr(every, column)[every.angles == 0], getattr(rotated, column)
    return [summary.mean_of(replace(rotated, value=v)) for v in (first, then, first - then)]


def _geometry(context: Context) -> Iterator[Row]:
    """The label region as this model sees it, and the energy that 18 zero-filled views of nothing put into its disc."""
    side = round(CENTRE[0] + CENTRE[2])  # it lies in the middle of a patch
    box = box_mask(context.model, (side, side), CENTRE)
    disc = localisation.disc_of_equal_area(box)
    views = resolve(Recipe("equigrad-cam", protocol="paper")).fusion.views
    cover = unit(coverage_map(views, GRID, (box.shape[0], box.shape[1]), like=box))
    area = float(box.sum())
    for name, value in (
        ("box_px", math.sqrt(area)),
        ("disc_radius", math.sqrt(area / math.pi)),
        ("vignette_null", float(localisation.energy(cover, disc))),
    ):
        other = None if context.model.preprocess is None else Remark("other-input", {})
        yield by_definition(f"label.{name}", value, label=name, reason=PREPROCESSING, near=0.02, unless=other)


def _missing(_context: Context, _claim: Claim) -> Remark:
    return note("positives: --domain PatchCamelyon --data FOLDER")


EXPERIMENT = Experiment(
    "Table labelregion: saliency on the tissue that makes the label",
    ("label.",),
    measure,
    needs="--domain PatchCamelyon, its test images and fine-tuned --weights",
    missing=_missing,
)
