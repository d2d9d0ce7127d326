"""Table labelregion: how much of a map lies on the tissue that makes the label."""

import math
from collections.abc import Iterator

import pyarrow as pa

from equicam.core.chain import unit
from equicam.data.benchmarks import CENTRE
from equicam.data.items import sample_by_class
from equicam.data.sources import find_items
from equicam.evaluation import localisation, statistics, summary
from equicam.evaluation.controls import coverage_map
from equicam.evaluation.statistics import Estimate
from equicam.methods import find
from equicam.models.images import box_mask
from equicam.paper.context import NAMES, Bench, Experiment, Line, line, number
from equicam.paper.measure import rest, rows_of

METHODS = ("Grad-CAM", "Grad-CAM++", "LayerCAM", "AugCAM unaligned", "EquiGrad-CAM", "EquiGrad-CAM+PCF")
SIDES = ("mass in disc 0deg", "mass in disc rotated mean", "drop")
GRID = (7, 7)  # of the paper's ResNet-50


def run(bench: Bench) -> Iterator[Line]:
    """Energy in the label region of positives, presented and turned, beside what a map of nothing gets."""
    done = list(_geometry(bench))
    items = find_items(bench.data, split=bench.split) if bench.domain == "PatchCamelyon" else []
    positives = [item for item in items if item.region is not None]
    if positives:
        tables = {
            p: rows_of(
                bench,
                sample_by_class(positives, bench.n),
                "label-region",
                [NAMES[words] for words in METHODS],
                ["energy"],
                as_published=p,
            )
            for p in (True, False)
        }
        done += _measured(tables)
    yield from done
    yield from rest(("label.",), done, lambda _: "positives: --domain PatchCamelyon --data FOLDER")


def _measured(tables: dict[bool, pa.Table]) -> Iterator[Line]:
    nothing = _energies(tables[False], "grad-cam", floor=True)  # one view of nothing is a uniform map
    for words, found in zip(SIDES, nothing, strict=True):
        yield line(f"label.uniform null.{words}", clean=found, what=f"uniform map, {words}", tolerance=0.002)
    for method in METHODS:
        ours, theirs = (_energies(tables[p], NAMES[method]) for p in (False, True))
        null = {p: _energies(tables[p], NAMES[method], floor=True)[0].value for p in (False, True)}
        reason = f"its map of nothing gets {null[True]:.3f} by their protocol, {null[False]:.3f} by ours"
        for i, words in enumerate(SIDES):
            yield line(
                f"label.{method}.{words}", clean=ours[i], as_published=theirs[i], what=f"{NAMES[method]}, {words}",
                tolerance=0.004 if words == "drop" else 0.02, reason=reason,
            )  # fmt: skip


def _energies(rows: pa.Table, method: str, *, floor: bool = False) -> list[Estimate]:
    """Presented, mean over the turned, and their difference; of the method or of its map of nothing."""
    every = summary.pick(rows, "energy", method, "label", each_angle=True)
    turned = summary.pick(rows, "energy", method, "label")
    kind = "floor" if floor else "value"
    first, then = getattr(every, kind)[every.angles == 0], getattr(turned, kind)
    return [statistics.bootstrap(statistics.mean, v, cluster=turned.ids) for v in (first, then, first - then)]


def _geometry(bench: Bench) -> Iterator[Line]:
    """The label region as this model sees it, and what 18 zero-filled views of nothing put into its disc."""
    side = round(CENTRE[0] + CENTRE[2])  # it lies in the middle of a patch
    box = box_mask(bench.model, (side, side), CENTRE)
    disc = localisation.disc_of_equal_area(box)
    views = find("equigrad-cam", as_published=True).fusion.views
    cover = unit(coverage_map(views, GRID, (box.shape[0], box.shape[1]), like=box))
    area, reason = (
        float(box.sum()),
        "as this model's preprocessing shows a patch; the paper's resizes to 256 and crops 224",
    )
    for name, value, tolerance in (
        ("box_px", math.sqrt(area), 0.5),
        ("disc_radius", math.sqrt(area / math.pi), 0.3),
        ("vignette_null", float(localisation.energy(cover, disc)), 0.003),
    ):
        yield line(f"label.{name}", clean=number(value), what=name, tolerance=tolerance, reason=reason)


EXPERIMENT = Experiment(
    "Table labelregion: saliency on the tissue that makes the label",
    ("label.",),
    run,
    needs="--domain PatchCamelyon, its test pictures and fine-tuned --weights",
)
