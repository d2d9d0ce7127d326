"""Every score by name: what it says, and the rows it makes of what was found in some pictures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.combine import Combine
from equicam.core.views import Degrees, Fill, rotate
from equicam.evaluation import causal, faithfulness, localisation, uncertainty
from equicam.evaluation.controls import item_seed
from equicam.evaluation.equivariance import confidence_kept, equivariance, over_stable, stable, weighted
from equicam.evaluation.similarity import REGIONS, Region, inside
from equicam.evaluation.stages import Traced, stages
from equicam.evaluation.table import Scored

CONSTANT = "constant map"
ALONE = "no other picture to compare with"
NO_OTHER = "no other picture with a region to borrow"
UNDEFINED = "undefined map"
OUTSIDE = "outside what the model sees"


@dataclass(frozen=True)
class Truth:
    """What is known of a picture, in the model's frame."""

    label: int | None = None
    unknown: str = "no label"  # why there is no label
    boxes: Bool[Tensor, "r H W"] | None = None  # the largest first
    region: Float[Tensor, "H W"] | None = None  # the part that makes the label, soft at its edge
    cropped: bool = False  # it has boxes or a region, but none of that is in the model's frame


@dataclass(frozen=True)
class Said:
    """What a model says of the presented pictures and of those turned to every angle."""

    probs: Float[Tensor, "v b y"]
    target: Int[Tensor, " b"]


@dataclass(frozen=True)
class Shown:
    """One method's maps of the pictures and, where it has them, its views and its chain."""

    maps: Float[Tensor, "v b H W"]  # presented first, then every angle
    said: Said
    null: Float[Tensor, "H W"]  # its map when no view shows anything
    peum: Float[Tensor, "b H W"] | None = None
    disagreement: Float[Tensor, " b"] | None = None
    taken: Int[Tensor, " b"] | None = None  # views a presented picture took, where pictures differ
    traced: Sequence[Traced] = ()
    combine: Combine | None = None


@dataclass(frozen=True)
class Found:
    """What was read of some pictures, for the scores to look at."""

    ids: Sequence[str]
    x: Float[Tensor, "b c H W"]
    angles: Sequence[Degrees]
    said: Said
    shown: Mapping[str, Shown]
    truth: Sequence[Truth]
    ask: faithfulness.Ask
    fill: Fill
    as_published: bool = False
    seed: int = 0

    @property
    def region(self) -> Region:
        """Where single numbers are taken."""
        return "full" if self.as_published else "disc"


Rows = Callable[[Found], Iterator[Scored]]


@dataclass(frozen=True)
class Score:
    """One entry of the table; some scores need methods of one view, some of several."""

    about: str
    rows: Rows = field(repr=False)
    of: Literal["any", "one view", "several views"] = "any"


def predictions(found: Found) -> Iterator[Scored]:
    """What the model says of each picture at every angle; comes with every evaluation."""
    probs, target = found.said.probs, found.said.target
    wrong = [
        torch.nan if t.label is None else float(t.label != c)
        for t, c in zip(found.truth, target.tolist(), strict=True)
    ]
    reasons = sorted({t.unknown for t in found.truth if t.label is None})
    why = tuple(
        (text, torch.tensor([t.label is None and t.unknown == text for t in found.truth])) for text in reasons
    )
    yield from _said(None, found.said, found)
    yield Scored("flip-rate", None, uncertainty.flip_rate(probs, target))
    yield Scored("confidence-drop", None, uncertainty.confidence_drop(probs, target))
    yield Scored("misclassified", None, torch.tensor(wrong), why=why)
    for method, shown in found.shown.items():
        if shown.said is not found.said:  # another network or other pictures have another answer
            yield from _said(method, shown.said, found)


def _said(method: str | None, said: Said, found: Found) -> Iterator[Scored]:
    probs, target = said.probs, said.target
    of_target = probs.gather(2, target[None, :, None].expand(len(probs), -1, 1))[..., 0]
    kept = confidence_kept(probs, target, as_published=found.as_published)
    yield Scored("sure", method, of_target[0])
    yield Scored("confidence", method, of_target[1:], angles=found.angles)
    yield Scored("confidence-kept", method, kept, angles=found.angles)
    yield Scored("stable", method, stable(probs, target).double(), angles=found.angles)


def _eq(found: Found, *, name: str, measure: str) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        for region in REGIONS:
            eq = equivariance(
                shown.maps[1:], shown.maps[0], found.angles, measure=measure, region=region, fill=found.fill
            )
            why = ((CONSTANT, eq.constant), (UNDEFINED, eq.value.isnan()), (ALONE, eq.floor.isnan()))
            yield Scored(name, method, eq.value, eq.floor, region, found.angles, why=why)


def _eq_stable(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        keeps = stable(shown.said.probs, shown.said.target)
        for region in REGIONS:
            eq = equivariance(shown.maps[1:], shown.maps[0], found.angles, region=region, fill=found.fill)
            value, floor = (torch.where(keeps, v, torch.nan) for v in (eq.value, eq.floor))
            whole, whole_floor = (over_stable(v, keeps) for v in (eq.value, eq.floor))
            yield Scored(
                "eq-stable", method, value, floor, region, found.angles, whole=whole, whole_floor=whole_floor,
                why=(("top-1 changed", ~keeps), (CONSTANT, eq.constant)),
            )  # fmt: skip


def _eq_weighted(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        kept = confidence_kept(shown.said.probs, shown.said.target, as_published=found.as_published).double()
        for region in REGIONS:
            eq = equivariance(shown.maps[1:], shown.maps[0], found.angles, region=region, fill=found.fill)
            why = (("a constant map at some angle", eq.constant.any(0)),)
            yield Scored(
                "eq-weighted", method, weighted(eq.value, kept), weighted(eq.floor, kept), region, why=why
            )


def _stages(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        if not shown.traced or shown.combine is None:
            continue
        by_stage = stages(
            shown.traced[0], shown.traced[1:], found.angles, shown.combine,
            target=shown.said.target, size=(found.x.shape[-2], found.x.shape[-1]),
            region=found.region, fill=found.fill, as_published=found.as_published,
        )  # fmt: skip
        for stage, eq in by_stage.items():
            where = torch.full_like(eq.value, eq.reason is not None, dtype=torch.bool)
            flat = "no grid" if stage.endswith("cosine") or stage == "weights" else found.region
            why = (
                (eq.reason or "", where),
                ("no channel varies", eq.value.isnan()),
                (eq.alone, eq.floor.isnan()),
            )
            yield Scored(f"stage-{stage}", method, eq.value, eq.floor, flat, found.angles, why=why)


def _curve(found: Found, *, kind: Literal["insertion", "deletion"]) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        values = faithfulness.curve(
            found.ask, found.x, shown.maps[0], found.said.target, kind, as_published=found.as_published
        )
        yield Scored(kind, method, faithfulness.area(values, as_published=found.as_published))


def _causal(found: Found) -> Iterator[Scored]:
    seeds = [item_seed(found.seed, i, "causal") for i in found.ids]
    for method, shown in found.shown.items():
        drops = causal.occlusion(
            found.ask,
            found.x,
            shown.maps,
            found.angles,
            found.said.target,
            seeds=seeds,
            as_published=found.as_published,
        )
        for region in drops.presented:
            for name, side in (
                (f"causal-{region}", drops.presented),
                (f"causal-{region}-turned", drops.turned),
            ):
                why = ((CONSTANT, drops.constant), (NO_OTHER, side[region].isnan()))
                yield Scored(name, method, side[region], None, found.region, found.angles, why=why)


def _energy(found: Found) -> Iterator[Scored]:
    angles = (0, *found.angles)
    absent = torch.tensor([t.region is None for t in found.truth], device=found.x.device)
    cropped = absent & torch.tensor([t.cropped for t in found.truth], device=found.x.device)
    for method, shown in found.shown.items():
        value = torch.full((len(angles), len(found.ids)), torch.nan, device=found.x.device)
        floor = value.clone()
        for i, truth in enumerate(found.truth):
            if truth.region is None:
                continue
            disc = localisation.disc_of_equal_area(truth.region).to(shown.maps)
            for a, angle in enumerate(angles):
                where = rotate(disc[None], angle)[0] >= 0.5
                value[a, i] = localisation.energy(shown.maps[a, i], where)
                floor[a, i] = localisation.energy(shown.null, where)
        none = (("no label region", absent & ~cropped), (f"label region {OUTSIDE}", cropped))
        turned, null = value[1:].mean(0), floor[1:].mean(0)
        every = tuple((text, where.expand(len(angles), -1)) for text, where in none)
        yield Scored(
            "energy", method, value, floor, "label", angles, whole=turned, whole_floor=null,
            why=(*every, (CONSTANT, value.isnan())),
        )  # fmt: skip
        yield Scored(
            "energy-drop",
            method,
            value[0] - turned,
            None,
            "label",
            why=(*none, (CONSTANT, value.isnan().any(0))),
        )


def _boxes(found: Found, *, kind: Literal["pointing", "box-iou"]) -> Iterator[Scored]:
    absent = torch.tensor([t.boxes is None for t in found.truth])
    cropped = absent & torch.tensor([t.cropped for t in found.truth])
    for method, shown in found.shown.items():
        maps = shown.maps[0]
        still = (maps.flatten(1).amax(1) == maps.flatten(1).amin(1)).cpu()
        for name, largest in ((kind, False), (f"{kind}-largest", True)):
            pairs = [
                (torch.nan, torch.nan)
                if t.boxes is None
                else _at_boxes(kind, plane, t.boxes[:1] if largest else t.boxes)
                for plane, t in zip(maps, found.truth, strict=True)
            ]
            value, floor = torch.tensor(pairs, dtype=torch.float64).T
            value = torch.where(still & ~absent, 0.0, value)
            yield Scored(
                name,
                method,
                value,
                floor,
                "boxes",
                why=((f"boxes {OUTSIDE}", cropped), ("no boxes", absent), (CONSTANT, still)),
            )


def _at_boxes(kind: str, plane: Float[Tensor, "H W"], boxes: Bool[Tensor, "r H W"]) -> tuple[float, float]:
    """A picture's value, and what the middle pixel (pointing) or the whole frame (overlap) would get."""
    height, width = plane.shape
    if kind == "pointing":
        return float(localisation.pointing(plane, boxes)), float(boxes[:, height // 2, width // 2].any())
    mine, frame = localisation.found_box(plane), (0.0, 0.0, float(width), float(height))
    there = [box for box in map(localisation.box_around, boxes) if box is not None]
    best, trivial = (
        max((localisation.overlap(b, t) for t in there if b), default=0.0) for b in (mine, frame)
    )
    return best, trivial


def _peum(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        if shown.peum is not None:
            for region in REGIONS:
                where = inside(region, (shown.peum.shape[-2], shown.peum.shape[-1]), shown.peum.device)
                yield Scored("peum", method, shown.peum[:, where].double().mean(1), None, region)


def _disagreement(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        if shown.disagreement is not None:
            yield Scored("disagreement", method, shown.disagreement, None, found.region)


def _views(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        if shown.taken is not None:
            yield Scored("views", method, shown.taken.double())


def _calibration(found: Found) -> Iterator[Scored]:
    for method, shown in found.shown.items():
        if shown.peum is not None:
            value = uncertainty.calibration(shown.peum, shown.maps, found.angles, found.region)
            yield Scored("calibration", method, value, None, found.region, why=(("flat", value.isnan()),))


SCORES: dict[str, Score] = {
    "eq": Score("Pearson between the map of the turned picture and the turned map", partial(_eq, name="eq", measure="pearson")),
    "eq-spearman": Score("the same by ranks", partial(_eq, name="eq-spearman", measure="spearman")),
    "eq-cosine": Score("the same by cosine", partial(_eq, name="eq-cosine", measure="cosine")),
    "eq-ssim": Score("the same by structural similarity", partial(_eq, name="eq-ssim", measure="ssim")),
    "eq-stable": Score("Eq over the angles that keep the top-1", _eq_stable),
    "eq-weighted": Score("Eq weighed by the confidence the turn leaves", _eq_weighted),
    "stages": Score("Eq at every tensor from features to map, pooled features and logits", _stages, of="one view"),
    "insertion": Score("probability regained as marked pixels return to a blurred picture", partial(_curve, kind="insertion")),
    "deletion": Score("probability kept as marked pixels are blurred (lower is better)", partial(_curve, kind="deletion")),
    "causal": Score("probability lost without the drift region, and without regions it must beat", _causal),
    "energy": Score("saliency in the label region, presented and turned", _energy),
    "pointing": Score("whether the maximum lies in a box of the object", partial(_boxes, kind="pointing")),
    "box-iou": Score("overlap of the map's box with the object's", partial(_boxes, kind="box-iou")),
    "peum": Score("PEUM: variance of the aligned views, mean over pixels", _peum, of="several views"),
    "disagreement": Score("mean 1 − Pearson over pairs of aligned views", _disagreement, of="several views"),
    "views": Score('views that a presented picture took, with views="auto"', _views, of="several views"),
    "calibration": Score("does PEUM lie where the map drifts: Spearman over pixels", _calibration, of="several views"),
}  # fmt: skip


def scores() -> tuple[str, ...]:
    """The names `evaluate` knows."""
    return tuple(SCORES)
