"""Does the map point at what makes the label: at the bird, at ImageNet's boxes, at the tissue in the middle of a patch?"""

import math
from collections.abc import Iterator
from dataclasses import replace

from equicam.core.chain import unit
from equicam.errors import EquicamError
from equicam.evaluate import statistics, summary
from equicam.evaluate.controls import coverage_map
from equicam.evaluate.localisation import disc_of_equal_area, energy
from equicam.evaluate.statistics import Estimate
from equicam.images.items import sample_by_class
from equicam.methods import resolve
from equicam.models.images import box_mask
from equicam.recipe import Recipe
from equicam_paper.benchmarks import CENTRE
from equicam_paper.claims import METHODS, Claim
from equicam_paper.context import Context, Evaluation, another_network
from equicam_paper.rows import Both, Remark, Row, by_definition, compare, note

OF_BIRDS = {"eg": "equigrad-cam+pcf", "gc": "grad-cam", "gcpp": "grad-cam++"}
"""The methods by their short names in claims; the paper's method here is PCF."""
BASELINES = {"pointing": "the middle pixel", "box-iou": "the whole frame"}
"""Each metric, and the answer to it that needs no map."""


def cub(context: Context) -> Iterator[Row]:
    """CUB-200-2011: pointing game and box overlap."""
    if context.of_cub:
        yield from _box_rows(context, context.backbone)


def localisation(context: Context) -> Iterator[Row]:
    """The same on ImageNet's boxes; the paper measures this on birds only."""
    if not any(item.boxes for item in context.listing):
        got, fix = f"{context.data}: none has any", "a column `boxes`, or annotations"
        raise EquicamError("localisation", "images with boxes", got, fix)
    yield from _box_rows(context, "ImageNet boxes")


def _box_rows(context: Context, of: str) -> Iterator[Row]:
    """Both metrics of every method, with the score of an answer without a map; `of` names the network as claims do."""
    # only the presented maps are scored: one exact rotation instead of seven
    once = replace(context, options=context.options | {"angles": (180,)})
    found = once.evaluate_both([*OF_BIRDS.values(), "equigrad-cam"], list(BASELINES))
    for metric, baseline in BASELINES.items():
        for short, method in (*OF_BIRDS.items(), ("", "equigrad-cam")):
            claim = f"cub.iou.{of}.{short}"
            if metric == "pointing":
                claim = f"cub.pg.{of}" if short == "eg" else ""
            mean = found.map(Evaluation.mean, metric, method, "boxes")
            floor = statistics.mean(summary.pick(found.clean.table, metric, method, "boxes").floor)
            yield compare(claim, mean, label=f"{method}, {metric}", reason=f"{baseline} gets {floor:.3f}")


def _missing_birds(context: Context, claim: Claim) -> Remark:
    other = note("images of birds with their boxes: --data CUB_200_2011")
    return another_network(context, claim) if context.of_cub else other


ON_TISSUE = ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM", "EquiGrad-CAM+PCF")
SIDES = ("mass in disc 0deg", "mass in disc rotated mean", "drop")
GRID = (7, 7)  # of the paper's ResNet-50
PREPROCESSING = "as this model's preprocessing shows a patch; the paper's resizes to 256 and crops 224"


def label_region(context: Context) -> Iterator[Row]:
    """Table labelregion: energy in the label region of positives, presented, rotated, and of a map without content."""
    yield from _geometry(context)
    items = context.listing if context.domain == "PatchCamelyon" else []
    positives = sample_by_class([item for item in items if item.region is not None], context.n)
    if not positives:
        return
    found = context.evaluate_both([METHODS[name] for name in ON_TISSUE], ["energy"], items=positives)
    uniform = _energies(found.clean, "grad-cam", "floor")  # one view without content is a uniform map
    for side, null in zip(SIDES, uniform, strict=True):
        yield compare(f"label.uniform null.{side}", Both(null, None), label=f"uniform map, {side}")
    for name in ON_TISSUE:
        method = METHODS[name]
        energies = found.map(_energies, method)
        empty = found.map(lambda e, m: _energies(e, m, "floor")[0].value, method)
        reason = f"its map without content gets {empty.as_published:.3f} by their protocol, {empty.clean:.3f} by ours"
        for side, ours, theirs in zip(SIDES, energies.clean, energies.as_published, strict=True):
            both = Both(ours, theirs)
            yield compare(f"label.{name}.{side}", both, label=f"{method}, {side}", reason=reason)


def _energies(found: Evaluation, method: str, column: str = "value") -> list[Estimate]:
    """Presented, mean over the rotated, and their difference; `floor` is that of a map without content."""
    every = summary.pick(found.table, "energy", method, "label", each_angle=True)
    rotated = summary.pick(found.table, "energy", method, "label")
    first, then = getattr(every, column)[every.angles == 0], getattr(rotated, column)
    return [summary.mean_of(replace(rotated, value=v)) for v in (first, then, first - then)]


def _geometry(context: Context) -> Iterator[Row]:
    """The label region as this model sees it, and the energy that 18 zero-filled views of nothing put into its disc."""
    side = round(CENTRE[0] + CENTRE[2])  # it lies in the middle of a patch
    box = box_mask(context.model, (side, side), CENTRE)
    disc = disc_of_equal_area(box)
    views = resolve(Recipe("equigrad-cam", protocol="paper")).fusion.views
    cover = unit(coverage_map(views, GRID, (box.shape[0], box.shape[1]), like=box))
    area = float(box.sum())
    for name, value in (
        ("box_px", math.sqrt(area)),
        ("disc_radius", math.sqrt(area / math.pi)),
        ("vignette_null", float(energy(cover, disc))),
    ):
        other = None if context.model.preprocess is None else Remark("other-input", {})
        yield by_definition(f"label.{name}", value, label=name, reason=PREPROCESSING, near=0.02, unless=other)


MORE = {
    "label-region": {"missing": lambda *_: note("positives: --domain PatchCamelyon --data FOLDER")},
    "cub": {"missing": _missing_birds},
}
