"""One part of an evaluation read: every method's maps of the pictures as presented and at every angle.

Methods of one reader share its views: activations are computed once for each picture, angle and view.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.combine import Combine
from equicam.core.fusion import Fused, fuse, in_groups, see
from equicam.core.views import Degrees, Fill, Views, picked, rotate, rotate_all
from equicam.evaluation.batch import EvaluatedBatch, GroundTruth, MethodMaps, Predictions
from equicam.evaluation.controls import (
    coverage_map,
    item_seed,
    randomise_weights,
    shuffle_tiles,
    times_coverage,
)
from equicam.evaluation.spec import Condition, EvaluationSpec, ExternalReader, MapSpec
from equicam.evaluation.stages import LayerTrace
from equicam.evaluation.uncertainty import disagreement
from equicam.explain import read
from equicam.methods import Method
from equicam.readers.checks import explained_by, gathered, settle
from equicam.readers.forward import ask, ask_at
from equicam.readers.forward import look as look_alone
from equicam.readers.gradients import tap
from equicam.readers.model import Model
from equicam.runtime.adaptive import settled
from equicam.runtime.batching import views_a_pass


@dataclass(frozen=True)
class MapComputer:
    """Computes every method's maps of a batch of images, with the model on its device."""

    models: Mapping[Condition, Model]
    spec: EvaluationSpec
    asked: Sequence[MapSpec]

    @staticmethod
    def of(model: Model, spec: EvaluationSpec) -> "MapComputer":
        """A computer of the maps that a specification names."""
        map_specs = spec.map_specs()
        model = replace(model, compiled=spec.recipe.compiled)
        models: dict[Condition, Model] = {"plain": model, "shuffled": model}
        if any(one.condition == "random-weights" for one in map_specs):
            models["random-weights"] = randomise_weights(model, seed=spec.recipe.seed)
        return MapComputer(models, spec, map_specs)

    @property
    def model(self) -> Model:
        """The model that is evaluated."""
        return self.models["plain"]

    @property
    def angles(self) -> Sequence[Degrees]:
        """The evaluation angles."""
        return self.spec.angles

    @property
    def fill(self) -> Fill:
        """How pixels outside the image are filled."""
        return self.spec.fill

    @property
    def as_published(self) -> bool:
        """Whether the paper authors' variants are used."""
        return self.spec.recipe.as_published

    @property
    def traced(self) -> bool:
        """Whether activations and gradients are kept."""
        return self.spec.needs_traces

    @property
    def several(self) -> bool:
        """Whether views are compared."""
        return self.spec.needs_views

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of autocast."""
        return None if self.spec.recipe.dtype is None else getattr(torch, self.spec.recipe.dtype)

    @property
    def chunk(self) -> int | None:
        """The most views in one forward pass."""
        return self.spec.max_views_per_forward

    @property
    def seed(self) -> int:
        """The seed of the controls."""
        return self.spec.recipe.seed

    def compute(
        self,
        ids: Sequence[str],
        x: Float[Tensor, "b c H W"],
        truth: Sequence[GroundTruth] = (),
        done: Callable[[float], None] = lambda _share: None,
    ) -> EvaluatedBatch:
        """Every method's maps of the images; `done` receives the share of the work finished since its last call."""
        return look(self, ids, x, truth or [GroundTruth()] * len(ids), done)


@dataclass(frozen=True)
class _Piece:
    """One method's map of some pictures at one angle."""

    map: Float[Tensor, "b H W"]
    peum: Float[Tensor, "o H W"] | None = None  # of the presented pictures, if they are among them
    disagreement: Float[Tensor, " o"] | None = None
    taken: Int[Tensor, " b"] | None = None  # how many views a picture took, where pictures differ
    traced: LayerTrace | None = None
    combine: Combine | None = None

    def apart(self, count: int) -> "list[_Piece]":
        """Pieces of so many pictures each; what the presented pictures alone have is with the first."""
        traced: Sequence[LayerTrace | None] = [None] * (len(self.map) // count)
        if self.traced is not None:
            columns = (
                torch.split(getattr(self.traced, f), count) for f in ("activations", "gradients", "logits")
            )
            traced = [LayerTrace(*row) for row in zip(*columns, strict=True)]
        maps = torch.split(self.map, count)
        pieces = [_Piece(m, traced=t, combine=self.combine) for m, t in zip(maps, traced, strict=True)]
        taken = None if self.taken is None else self.taken[:count]
        return [replace(pieces[0], peum=self.peum, disagreement=self.disagreement, taken=taken), *pieces[1:]]


def look(
    plan: MapComputer,
    ids: Sequence[str],
    x: Float[Tensor, "b c H W"],
    truth: Sequence[GroundTruth],
    tick: Callable[[float], None],
) -> EvaluatedBatch:
    """Read a part; `tick` hears after every angle which share of the work is done."""
    worlds: list[Condition] = sorted({one.condition for one in plan.asked} | {"plain"})
    shown: dict[str, MethodMaps] = {}
    said: dict[str, Predictions] = {}
    for world in worlds:
        pictures = x
        if world == "shuffled":
            seeds = [item_seed(plan.seed, i, "shuffled") for i in ids]
            pictures = torch.stack([shuffle_tiles(one, seed) for one, seed in zip(x, seeds, strict=True)])
        mine = [one for one in plan.asked if one.condition == world]
        said[world], some = _world(
            plan, plan.models[world], pictures, mine, lambda share: tick(share / len(worlds))
        )
        shown |= some
    return EvaluatedBatch(
        ids=ids,
        x=x,
        angles=plan.angles,
        predictions=said["plain"],
        methods={one.name: shown[one.name] for one in plan.asked},
        truth=truth,
        predict=partial(_ask, plan.models["plain"], plan.dtype),
        fill=plan.fill,
        as_published=plan.as_published,
        seed=plan.seed,
    )


def _world(
    plan: MapComputer,
    model: Model,
    x: Float[Tensor, "b c H W"],
    mine: Sequence[MapSpec],
    tick: Callable[[float], None],
) -> tuple[Predictions, dict[str, MethodMaps]]:
    methods = {one.name: one.method for one in mine if one.method is not None}
    said, found = _every_angle(plan, model, x, methods, tick)
    told = Predictions(said, said[0].argmax(1))
    shown = {}
    for one in mine:
        shown[one.name] = _shown(plan, model, x, one, told, found.get(one.name, []))
    return told, shown


def _shown(
    plan: MapComputer,
    model: Model,
    x: Float[Tensor, "b c H W"],
    one: MapSpec,
    said: Predictions,
    pieces: Sequence[_Piece],
) -> MethodMaps:
    size = (x.shape[-2], x.shape[-1])
    fusion = None if one.method is None else one.method.fusion
    blank = torch.ones(size, dtype=x.dtype, device=x.device)
    zeros = (
        fusion is not None and fusion.align_at is not None and plan.fill == "zeros" and len(fusion.views) > 1
    )
    cover = blank
    if one.method is None or one.times_coverage or zeros:
        grid = size
        if fusion is None or one.times_coverage or fusion.align_at not in ("upsampled", "map"):
            features, _, _ = ask_at(model, x[:1].to(model.dtype), plan.dtype)
            grid = (features.shape[-2], features.shape[-1])
        views = Views.evenly(18) if fusion is None or one.times_coverage else fusion.views
        cover = coverage_map(views, grid, size, like=x)
    if one.method is None:
        alone = times_coverage(blank, cover).expand(1 + len(plan.angles), len(x), -1, -1)
        return MethodMaps(alone, said, alone[0, 0])
    maps = one.apply_blur(torch.stack([p.map for p in pieces]))
    if one.times_coverage:
        maps = times_coverage(maps, cover)
    first = pieces[0]
    null = times_coverage(blank, cover) if zeros or one.times_coverage else blank
    # a control of the map has the stages of its method
    traced = [
        p.traced for p in pieces if p.traced is not None and one.blur is None and not one.times_coverage
    ]
    return MethodMaps(maps, said, null, first.peum, first.disagreement, first.taken, traced, first.combine)


def _every_angle(
    plan: MapComputer,
    model: Model,
    x: Float[Tensor, "b c H W"],
    methods: Mapping[str, Method],
    tick: Callable[[float], None],
) -> tuple[Float[Tensor, "v b y"], dict[str, list[_Piece]]]:
    """What the model says of the presented pictures and at every angle, and every method's maps of them.

    A device is kept busy by all angles at once, where they fit; a processor is by one, and people like to see it move.
    """
    angles = (0, *plan.angles)
    together = angles if _fit(plan, x, methods) else (0,)
    full = False
    try:
        said, found = _at(plan, model, rotate_all(x, together).flatten(0, 1), methods, None, len(x))
    except torch.OutOfMemoryError:
        if together == (0,):
            raise
        together = (0,)
        full = True  # tried again outside, where nothing holds what the first try has made
    if full:
        said, found = _at(plan, model, x, methods, None, len(x))
    probs = [said]
    pieces = {name: piece.apart(len(x)) for name, piece in found.items()}
    tick(len(together) / len(angles))
    target = said[: len(x)].argmax(1)
    for angle in angles[len(together) :]:
        said, found = _at(plan, model, rotate(x, angle), methods, target, 0)
        probs.append(said)
        for name, piece in found.items():
            pieces[name].append(piece)
        tick(1 / len(angles))
    return torch.cat(probs).view(len(angles), len(x), -1), pieces


def _fit(plan: MapComputer, x: Float[Tensor, "b c H W"], methods: Mapping[str, Method]) -> bool:
    """Whether all angles are read in one pass: on a device, by readers that pass each view once, if memory allows."""
    if not x.is_cuda or any(
        getattr(m.reader, "func", m.reader) not in (tap, look_alone) for m in methods.values()
    ):
        return False
    views = len(_together([m.fusion.views for m in methods.values()])) if methods else 1
    most = views_a_pass(x) if plan.chunk is None else plan.chunk
    return (1 + len(plan.angles)) * len(x) * views <= most


def _at(
    plan: MapComputer,
    model: Model,
    x: Float[Tensor, "b c H W"],
    methods: Mapping[str, Method],
    target: Int[Tensor, " b"] | None,
    originals: int,
) -> tuple[Float[Tensor, "b y"], dict[str, _Piece]]:
    """What the model says, and a map by every method; explainers of the caller's come last, when the class is known.

    Without a target the first `originals` pictures give it, and the rest are turned copies of them.
    """
    groups: dict[object, dict[str, Method]] = {}
    for name, method in methods.items():
        groups.setdefault(method.reader, {})[name] = method
    said: Tensor | None = None
    found: dict[str, _Piece] = {}
    for reader, some in sorted(groups.items(), key=lambda g: isinstance(g[0], ExternalReader)):
        if isinstance(reader, ExternalReader) and said is None:
            said = _ask(model, plan.dtype, x)
        if target is None and said is not None:
            target = said[:originals].argmax(1).repeat(len(x) // originals)
        pieces, probs = _group(plan, model, x, some, target, originals)
        said = probs if said is None else said
        found |= pieces
    return _ask(model, plan.dtype, x) if said is None else said, found


def _group(
    plan: MapComputer,
    model: Model,
    x: Float[Tensor, "b c H W"],
    methods: Mapping[str, Method],
    target: Int[Tensor, " b"] | None,
    originals: int,
) -> tuple[dict[str, _Piece], Float[Tensor, "b y"] | None]:
    """Methods of one reader, fed from one set of views."""
    fixed = {name: m for name, m in methods.items() if m.fusion.auto is None}
    views = _together([m.fusion.views for m in fixed.values()] or [Views((0.0,))])
    reading = partial(read, model, next(iter(methods.values())).reader, plan.dtype)
    copies = 0 < originals < len(x)

    def work(some: slice, most: int) -> tuple[dict[str, _Piece], Tensor | None]:
        given = None if target is None else target[some]
        with gathered() as checks, explained_by(checks):
            seen = see(reading, x[some], views, given, most, originals=originals if copies else None)
            fused = {name: fuse(seen, m.combine, m.fusion, plan.fill) for name, m in fixed.items()}
            # what views disagree on is told of the presented pictures alone
            of = originals if copies else len(seen.target) if originals else 0
            pieces = {name: _piece(plan, one, of) for name, one in fused.items()}
        settle(checks)
        for name, m in methods.items():
            if m.fusion.auto is not None:
                parts = settled(reading, x[some], m.combine, m.fusion, seen.target, plan.fill, most)
                pieces[name] = _settled_piece(plan, list(parts), of)
        return pieces, seen.presented.probs

    if copies:  # never cut: the originals must be among them
        return work(slice(0, len(x)), len(x) * len(views))
    most = max(len(views), *(len(m.fusion.views) for m in methods.values()))
    done = in_groups(x, most, plan.chunk, work)
    probs = [p for _, p in done if p is not None]
    joined = {name: _joined([pieces[name] for pieces, _ in done]) for name in methods}
    return joined, torch.cat(probs) if probs else None


def _piece(plan: MapComputer, fused: Fused, originals: int) -> _Piece:
    seen, count = fused.seen, len(fused.place)
    peum = apart = traced = None
    if plan.several and originals and count > 1:
        mine = fused if originals == len(seen.target) else fused.at(slice(0, originals))
        peum = mine.peum()
        views = (
            fused.place[:6] if plan.as_published else fused.place
        )  # the authors compare the first six only
        apart = disagreement(picked(mine.maps, views), "full" if plan.as_published else "disc")
    scores = seen.presented.scores
    if plan.traced and count == 1 and seen.stage == "features" and scores is not None:
        acts, grads = seen.presented.value
        traced = LayerTrace(acts, grads, scores)
    return _Piece(fused.map, peum, apart, traced=traced, combine=fused.combine)


def _settled_piece(plan: MapComputer, parts: Sequence[tuple[Tensor, Fused]], originals: int) -> _Piece:
    """Pictures that took different views, in their order again."""
    order = torch.cat([where for where, _ in parts]).argsort()
    pieces = [_piece(plan, fused, len(where) if originals else 0) for where, fused in parts]
    taken = [torch.full_like(where, len(fused.views)) for where, fused in parts]

    def whole(found: Sequence[Tensor | None]) -> Tensor:
        return torch.cat([one for one in found if one is not None])[order]

    several = plan.several and originals
    return _Piece(
        whole([p.map for p in pieces]),
        whole([p.peum for p in pieces])[:originals] if several else None,
        whole([p.disagreement for p in pieces])[:originals] if several else None,
        taken=whole(taken),
        combine=pieces[0].combine,
    )


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    if len(pieces) == 1:
        return pieces[0]
    traced = [p.traced for p in pieces if p.traced is not None]
    peums = [p.peum for p in pieces if p.peum is not None]
    aparts = [p.disagreement for p in pieces if p.disagreement is not None]
    taken = [p.taken for p in pieces if p.taken is not None]
    return _Piece(
        torch.cat([p.map for p in pieces]),
        torch.cat(peums) if peums else None,
        torch.cat(aparts) if aparts else None,
        torch.cat(taken) if taken else None,
        LayerTrace(
            *(torch.cat([getattr(t, f) for t in traced]) for f in ("activations", "gradients", "logits"))
        )
        if traced
        else None,
        pieces[0].combine,
    )


def _together(several: Sequence[Views]) -> Views:
    """All their views once, the presented one first."""
    angles = {angle % 360: angle for views in several for angle in views.presented_first()[0].angles}
    return Views(tuple(angles.values()))


def _ask(model: Model, dtype: torch.dtype | None, x: Float[Tensor, "n c H W"]) -> Float[Tensor, "n y"]:
    """Class probabilities, as many pictures a pass as memory allows."""
    most = views_a_pass(x)
    found = [ask(model, some.to(model.dtype), dtype)[1] for some in torch.split(x, most)]
    return torch.cat(found)
