"""Every method's maps of a batch, presented and in every presentation.

Methods with the same reader share its views: the network runs once for each image, presentation and view.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.chain import grad_cam_rectified
from equicam.core.fusion import FusedMap, fuse
from equicam.core.transforms import Transform
from equicam.core.uncertainty import Region, correlate_views, peum
from equicam.core.views import Fill, Views, Window, crop_centre, select, transform_all
from equicam.errors import EquicamError
from equicam.evaluate.batch import EvaluatedBatch, GroundTruth, MethodMaps, Predictions
from equicam.evaluate.controls import (
    blur_maps,
    coverage_map,
    item_seed,
    randomise_weights,
    shuffle_tiles,
    times_coverage,
    without_float16,
)
from equicam.evaluate.equivariance import LayerTrace
from equicam.evaluate.similarity import size_of
from equicam.evaluate.spec import COVERAGE_VIEWS, IMAGES_PER_SHARD, Condition, EvaluationSpec, MapSpec
from equicam.methods import Method
from equicam.models.surround import input_size
from equicam.readers.forward import Network, predict, read_layer, views_that_fit
from equicam.readers.logits import require_probabilities
from equicam.readers.model import Model
from equicam.readers.reading import Reader
from equicam.runtime.executor import Executor
from equicam.runtime.pending import Tensors
from equicam.runtime.view_reader import ViewReader

Done = Callable[[float], None]
"""Receives the share of the work finished since its last call."""
Checks = list[Callable[[], None]]
"""Each waits for the device, and raises what failed there."""
OF_TRACES = ("activations", "gradients", "logits")
OF_VIEWS = ("peum", "disagreement", "stability")


@dataclass(frozen=True)
class _Kept:
    """Which tensors metrics need in addition to the maps."""

    trace: bool  # activations and gradients of methods of one view
    uncertainty: bool  # PEUM, disagreement and stability of methods of several views
    views_compared: int | None  # by disagreement: the first ones; None: all
    region: Region  # of disagreement


def _fuse_methods(
    reader: ViewReader,
    x: Float[Tensor, "b c H W"],
    target: Int[Tensor, " b"] | None,
    *,
    methods: Mapping[str, Method],
    fills: Mapping[str, Fill],
    kept: _Kept,
) -> Tensors:
    """Every method's tensors as `METHOD.NAME`, and the probabilities of the presented view."""
    readings = reader.read(x, _union(methods), target)
    found: Tensors = {"target": readings.target}
    if readings.probabilities is not None:
        found["probabilities"] = readings.probabilities
    for name, method in methods.items():
        fused = fuse(readings, method.combine, method.fusion, fills[name])
        found |= {f"{name}.{key}": tensor for key, tensor in _measure(fused, method, kept).items()}
    return found


def _measure(fused: FusedMap, method: Method, kept: _Kept) -> Tensors:
    readings, order = fused.readings, fused.order
    found = {"map": fused.map}
    if not method.stretched:
        found["raw"] = fused.raw
    if kept.uncertainty and len(order) > 1:
        maps = select(fused.aligned_maps, order[: kept.views_compared])
        radius = fused.fusion.views.radius
        found["peum"] = peum(fused.aligned_maps, fused.alignment)
        found["disagreement"] = correlate_views(maps, kept.region, radius).disagreement
        found["stability"] = correlate_views(fused.maps_in_presented_frame, radius=radius).stability
    if kept.trace and len(order) == 1 and readings.stage == "features" and readings.logits is not None:
        read = (*(value[0] for value in readings.values), readings.logits)
        found |= dict(zip(OF_TRACES, read, strict=True))
        rectified = fused.combine is grad_cam_rectified  # which may have replaced the method's own
        found["rectified"] = torch.full_like(readings.target, rectified, dtype=torch.bool)
    return found


def _union(methods: Mapping[str, Method]) -> Views:
    """The views of all methods once, the presented view first."""
    each = [method.fusion.views.presented_first()[0] for method in methods.values()]
    return reduce(Views.union, each, Views((0.0,)))


@dataclass(frozen=True)
class MapComputer:
    """Computes the maps that a specification names, with the model on its device."""

    spec: EvaluationSpec
    map_specs: tuple[MapSpec, ...]
    executors: Mapping[Condition, Executor]
    window: tuple[int, int] | None = None  # the size of the model's input, in images with context

    @staticmethod
    def of(model: Model, spec: EvaluationSpec) -> "MapComputer":
        """One executor for the model, and one for its copy with random weights if a control needs it."""
        if not model.has_probabilities:
            raise EquicamError(
                "an evaluation", "class probabilities, which its metrics compare", "a regression model",
                "explain or audit, which measure PEUM and stability of any output",
            )  # fmt: skip
        map_specs = spec.map_specs()
        plain = Executor(model, spec.recipe, spec.max_views_per_forward)
        executors: dict[Condition, Executor] = {"plain": plain, "shuffled": plain}
        if any(one.condition == "random-weights" for one in map_specs):
            random = randomise_weights(model, seed=spec.recipe.seed)
            executors["random-weights"] = replace(plain, model=random, recipe=without_float16(spec.recipe))
        window = input_size(model) if spec.recipe.context == "auto" else None
        return MapComputer(spec, map_specs, executors, window)

    @property
    def model(self) -> Model:
        """The model that is evaluated."""
        return _network(self.executors["plain"]).model

    def context(self) -> AbstractContextManager[None]:
        """The autograd and autocast state in which maps and metrics are computed."""
        return self.executors["plain"].context(self.model.device)

    def compute(self, ids: Sequence[str], x: Float[Tensor, "b c H W"]) -> EvaluatedBatch:
        """Every method's maps of the images, under every condition that a control needs."""
        batch, checks = self.start(ids, x)
        for check in checks:
            check()
        return batch

    def start(
        self,
        ids: Sequence[str],
        x: Float[Tensor, "b c H W"],
        truth: Sequence[GroundTruth] = (),
        groups: Sequence[str | None] = (),
        done: Done = lambda _share: None,
    ) -> tuple[EvaluatedBatch, Checks]:
        """The same on a device that may still be computing it."""
        conditions: list[Condition] = sorted({one.condition for one in self.map_specs} | {"plain"})
        spec, seed = self.spec, self.spec.recipe.seed
        methods: dict[str, MethodMaps] = {}
        predictions: dict[str, Predictions] = {}
        checks: Checks = []
        for condition in conditions:
            images = x
            if condition == "shuffled":
                images = x.clone()
                for one, name in zip(self._inputs(images), ids, strict=True):
                    one.copy_(shuffle_tiles(one, item_seed(seed, name, "shuffled")))
            found, more = self._start_calls(condition, images, lambda share: done(share / len(conditions)))
            checks += more
            predictions[condition] = Predictions(
                found["probabilities"], _target(found)[0], self.model.is_multilabel, spec.protocol.kept_is_of_any_class
            )  # fmt: skip
            for one in self._specs(condition):
                methods[one.name] = self._method_maps(one, images, predictions[condition], found)
        batch = EvaluatedBatch(
            ids=ids,
            x=self._inputs(x).contiguous(),
            presentations=spec.presentations,
            predictions=predictions["plain"],
            methods={one.name: methods[one.name] for one in self.map_specs},
            truth=truth or [GroundTruth()] * len(ids),
            predict=partial(_predict, self.executors["plain"]),
            # of rotated maps; other fills are of views
            fill="zeros" if spec.fill == "zeros" else "reflect",
            protocol=spec.protocol,
            seed=seed,
            groups=groups,
        )
        return batch, checks

    def _specs(self, condition: Condition) -> list[MapSpec]:
        return [one for one in self.map_specs if one.condition == condition]

    def _inputs(self, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b c h w"]:
        """The model's inputs, in the middle of images with context."""
        return x if self.window is None else crop_centre(x, self.window)

    def _start_calls(
        self, condition: Condition, x: Float[Tensor, "b c H W"], done: Done
    ) -> tuple[Tensors, Checks]:
        """Tensors of the presented images, then of the images in every presentation: [v, b, …].

        A GPU runs all presentations in one call where they fit. A CPU runs one per call, and reports progress.
        """
        executor, protocol = self.executors[condition], self.spec.protocol
        methods = {one.name: one.method for one in self._specs(condition) if one.method is not None}
        presentations, of = self.spec.presentations, self.spec.has_metrics_of
        kept = _Kept(of("one view"), of("several views"), protocol.views_compared, protocol.region)
        presented, checks = self._start(executor, x, methods, None, kept, self._window(Transform()))
        done(1 / (1 + len(presentations)))
        calls, target = [presented], _target(presented)
        alone = self.window is not None or not _fits_one_call(x, methods, len(presentations))
        together = 1 if alone else len(presentations)
        for start in range(0, len(presentations), together):
            some = presentations[start : start + together]
            images = transform_all(x, some).flatten(0, 1) if self.window is None else x
            call, more = self._start(
                executor, images, methods, target.repeat(len(some)), replace(kept, uncertainty=False),
                self._window(some[0]), pad_to=IMAGES_PER_SHARD * len(some),
            )  # fmt: skip
            calls.append(call)
            checks += more
            done(len(some) / (1 + len(presentations)))
        found = {name: torch.cat([call[name] for call in calls if name in call]) for name in presented}
        return {name: rows.view(-1, len(x), *rows.shape[1:]) for name, rows in found.items()}, checks

    def _start(
        self,
        executor: Executor,
        x: Float[Tensor, "b c H W"],
        methods: Mapping[str, Method],
        target: Int[Tensor, " b"] | None,
        kept: _Kept,
        window: Window | None,
        pad_to: int = IMAGES_PER_SHARD,
    ) -> tuple[Tensors, Checks]:
        """Tensors of every method by name, and the model's probabilities.

        Explainers of the caller's see no model, so they run last, when the target is known.
        """
        by_reader: dict[Reader, dict[str, Method]] = {}
        for name, method in methods.items():
            by_reader.setdefault(method.reader, {})[name] = method
        found: Tensors = {}
        checks: Checks = []
        for reader, some in sorted(by_reader.items(), key=lambda group: group[0].forward is None):
            if reader.forward is None and "probabilities" not in found:
                found["probabilities"] = _predict(executor, x, window)
            if target is None and "probabilities" in found:
                target = _target(found)
            fills = {name: self.spec.fill_of(method) for name, method in some.items()}
            capturable = all(method.capturable(fills[name]) for name, method in some.items())
            pending = executor.start(
                reader,
                partial(_fuse_methods, methods=some, fills=fills, kept=kept),
                x,
                target,
                views_per_image=len(_union(some)),
                key=("evaluate", tuple(some.items()), tuple(fills.items()), kept) if capturable else None,
                window=window,
                pad_to=pad_to,
            )
            checks.append(pending.check)
            found = pending.tensors | found  # the first reader's probabilities stay
        if "probabilities" not in found:
            found["probabilities"] = _predict(executor, x, window)
        return found, checks

    def _window(self, presentation: Transform) -> Window | None:
        return None if self.window is None else Window(self.window, presentation)

    def _method_maps(
        self, one: MapSpec, x: Float[Tensor, "b c H W"], predictions: Predictions, found: Tensors
    ) -> MethodMaps:
        """One method's tensors, with the control applied to its maps."""
        x, name = self._inputs(x), one.name
        ones = torch.ones(size_of(x), dtype=x.dtype, device=x.device)
        coverage = self._coverage(one, x)
        null_map = ones if coverage is None else times_coverage(ones, coverage)
        if one.method is None:
            return MethodMaps(null_map.expand(*predictions.probs.shape[:2], -1, -1), predictions, null_map)
        maps = found[f"{name}.map"]
        if one.blur is not None:
            maps = blur_maps(maps, one.blur)
        if one.times_coverage and coverage is not None:
            maps = times_coverage(maps, coverage)
        of_views = {key: found[f"{name}.{key}"][0] for key in OF_VIEWS if f"{name}.{key}" in found}
        if one.changes_maps:  # the stages of a control are those of its method
            return MethodMaps(maps, predictions, null_map, of_views)
        traces, combine = [], None
        if f"{name}.rectified" in found:
            traces = [
                LayerTrace(*of) for of in zip(*(found[f"{name}.{key}"] for key in OF_TRACES), strict=True)
            ]
            combine = grad_cam_rectified if found[f"{name}.rectified"][0].any() else one.method.combine
        raw = found.get(f"{name}.raw")
        return MethodMaps(maps, predictions, null_map, of_views, traces, combine, raw)

    def _coverage(self, one: MapSpec, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "H W"] | None:
        """The coverage of its views if it is part of the map: by a control, or because views are filled with zeros."""
        fusion = None if one.method is None else one.method.fusion
        views = COVERAGE_VIEWS
        if fusion is not None and not one.times_coverage:
            if fusion.align_at is None or self.spec.fill != "zeros" or len(fusion.views) == 1:
                return None
            views = fusion.views
            if fusion.align_at in ("upsampled", "map"):
                return coverage_map(views, size_of(x), size_of(x), like=x)
        network = _network(self.executors[one.condition])
        features = read_layer(network, x[:1].to(network.model.dtype)).features
        return coverage_map(views, size_of(features), size_of(x), like=x)


def _target(found: Tensors) -> Int[Tensor, "*v b"]:
    """The top-1 class: by the logits, which differ where probabilities are rounded to the same value, if a method read them."""
    return found["target"] if "target" in found else found["probabilities"].argmax(-1)


def _predict(
    executor: Executor, x: Float[Tensor, "n c H W"], window: Window | None = None
) -> Float[Tensor, "n y"]:
    """Class probabilities, as many images per forward pass as fit."""
    x = x if window is None else Views([0]).act(x, window)[0]
    network = _network(executor)

    def some(rows: slice, _fit: int) -> Tensors:
        found = predict(network, x[rows].to(network.model.dtype)).probabilities
        return {"probabilities": require_probabilities(found, "an evaluation")}

    return torch.cat([found["probabilities"] for found in executor.groups(x, 1, some, network)])


def _fits_one_call(x: Float[Tensor, "b c H W"], methods: Mapping[str, Method], presentations: int) -> bool:
    """Whether the views of all presentations fit one forward pass on a GPU."""
    if not x.is_cuda or not all(method.reader.one_pass for method in methods.values()):
        return False
    return presentations * len(x) * len(_union(methods)) <= views_that_fit(x, with_kept=True)


def _network(executor: Executor) -> Network:
    assert executor.model is not None  # noqa: S101  # `MapComputer.of` requires one
    return Network(executor.model, executor.autocast)
