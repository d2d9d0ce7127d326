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

from equicam.core.chain import Combine, grad_cam_rectified
from equicam.core.fusion import FusedMap, fuse
from equicam.core.transforms import Transform
from equicam.core.uncertainty import Region, correlate_views, peum
from equicam.core.views import Fill, Views, Window, crop_centre, select, transform_all
from equicam.errors import EquicamError
from equicam.evaluate.batch import EvaluatedBatch, GroundTruth, MethodMaps, Predictions
from equicam.evaluate.controls import (
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


@dataclass(frozen=True)
class KeptTensors:
    """Which tensors metrics need in addition to the maps."""

    trace: bool  # activations and gradients of methods of one view
    uncertainty: bool  # PEUM, disagreement and stability of methods of several views
    views_compared: int | None  # by disagreement: the first ones; None: all
    region: Region  # of disagreement


def views_read(methods: Mapping[str, Method]) -> int:
    """The views of an image in one call."""
    return len(_union(methods))


def fuse_methods(
    reader: ViewReader,
    x: Float[Tensor, "b c H W"],
    target: Int[Tensor, " b"] | None,
    *,
    methods: Mapping[str, Method],
    fills: Mapping[str, Fill],
    kept: KeptTensors,
) -> Tensors:
    """Every method's tensors as `METHOD.NAME`, and the probabilities of the presented view."""
    readings = reader.read(x, _union(methods), target)
    found: Tensors = {"target": readings.target}
    if readings.probabilities is not None:
        found["probabilities"] = readings.probabilities
    for name, method in methods.items():
        fused = fuse(readings, method.combine, method.fusion, fills[name])
        tensors = _measure(fused, method=method, kept=kept)
        found |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    return found


def trace_of(found: Tensors, name: str) -> tuple[LayerTrace, Combine | None]:
    """A method's trace, and the combine that replaced its own, if one did."""
    trace = LayerTrace(*(found[f"{name}.{key}"] for key in ("activations", "gradients", "logits")))
    return trace, grad_cam_rectified if found[f"{name}.rectified"].any() else None


def _measure(fused: FusedMap, *, method: Method, kept: KeptTensors) -> Tensors:
    readings, order = fused.readings, fused.order
    found = {"map": fused.map}
    if not method.stretched:
        found["raw"] = fused.raw
    if kept.uncertainty and len(order) > 1:
        maps = select(fused.aligned_maps, order[: kept.views_compared])
        found["peum"] = peum(fused.aligned_maps, fused.alignment)
        radius = fused.views.radius
        found["disagreement"] = correlate_views(maps, kept.region, radius).disagreement
        found["stability"] = correlate_views(fused.maps_in_presented_frame, radius=radius).stability
    if kept.trace and len(order) == 1 and readings.stage == "features" and readings.logits is not None:
        activations, gradients = (value[0] for value in readings.values)
        rectified = torch.full_like(readings.target, fused.combine is grad_cam_rectified, dtype=torch.bool)
        found |= {
            "activations": activations,
            "gradients": gradients,
            "logits": readings.logits,
            "rectified": rectified,
        }
    return found


def _union(methods: Mapping[str, Method]) -> Views:
    """The views of all methods once, the presented view first."""
    each = [method.fusion.views.presented_first()[0] for method in methods.values()]
    return reduce(Views.union, each, Views((0.0,)))


Done = Callable[[float], None]
"""Receives the share of the work finished since its last call."""


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
        model = self.executors["plain"].model
        assert model is not None  # noqa: S101  # `of` requires one
        return model

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
        done: Done = lambda _share: None,
    ) -> tuple[EvaluatedBatch, list[Callable[[], None]]]:
        """The same on a device that may still be computing it; each function returned waits, and raises what failed."""
        conditions: list[Condition] = sorted({one.condition for one in self.map_specs} | {"plain"})
        seed = self.spec.recipe.seed
        methods: dict[str, MethodMaps] = {}
        predictions: dict[str, Predictions] = {}
        checks: list[Callable[[], None]] = []
        for condition in conditions:
            images = x
            if condition == "shuffled":
                seeds = [item_seed(seed, i, "shuffled") for i in ids]
                images = x.clone()
                inputs = images if self.window is None else crop_centre(images, self.window)
                for one, tile_seed in zip(inputs, seeds, strict=True):
                    one.copy_(shuffle_tiles(one, tile_seed))
            begun = self._start_calls(condition, images, lambda share: done(share / len(conditions)))
            checks += (check for call in begun for check in call.checks)
            predictions[condition], some = self._under(condition, images, begun)
            methods |= some
        batch = EvaluatedBatch(
            ids=ids,
            x=x if self.window is None else crop_centre(x, self.window).contiguous(),
            presentations=self.spec.presentations,
            predictions=predictions["plain"],
            methods={one.name: methods[one.name] for one in self.map_specs},
            truth=truth or [GroundTruth()] * len(ids),
            predict=partial(predict_batch, self.executors["plain"]),
            fill="zeros"
            if self.spec.fill == "zeros"
            else "reflect",  # of rotated maps; other fills are of views
            protocol=self.spec.protocol,
            seed=seed,
        )
        return batch, checks

    def _specs(self, condition: Condition) -> list[MapSpec]:
        return [one for one in self.map_specs if one.condition == condition]

    def _under(
        self, condition: Condition, x: Float[Tensor, "b c H W"], calls: Sequence["_Call"]
    ) -> tuple[Predictions, dict[str, MethodMaps]]:
        """Predictions and maps under one condition."""
        specs, executor = self._specs(condition), self.executors[condition]
        by_angle = [
            {name: tensor[i : i + len(x)] for name, tensor in call.tensors.items()}
            for call in calls
            for i in range(0, len(call.tensors["probabilities"]), len(x))
        ]
        probs = torch.stack([found["probabilities"] for found in by_angle])
        predictions = Predictions(probs, _target(by_angle[0]), multilabel=self.model.is_multilabel)
        return predictions, {
            one.name: self._method_maps(one, executor, x, predictions, by_angle) for one in specs
        }

    def _start_calls(self, condition: Condition, x: Float[Tensor, "b c H W"], done: Done) -> list["_Call"]:
        """Calls whose tensors are those of the presented images, then of the images in every presentation.

        A GPU runs all presentations in one call where they fit. A CPU runs one per call, and reports progress.
        """
        executor = self.executors[condition]
        methods = {one.name: one.method for one in self._specs(condition) if one.method is not None}
        presentations = self.spec.presentations
        kept = KeptTensors(
            trace=self.spec.needs_traces,
            uncertainty=self.spec.needs_views,
            views_compared=self.spec.protocol.views_compared,
            region=self.spec.protocol.region,
        )
        calls = [self._start(executor, x, methods, None, kept, self._window(Transform()))]
        done(1 / (1 + len(presentations)))
        target = _target(calls[0].tensors)
        alone = self.window is not None or not fits_one_call(x, methods, len(presentations))
        together = 1 if alone else len(presentations)
        for start in range(0, len(presentations), together):
            some = presentations[start : start + together]
            images = present(x, some) if self.window is None else x
            calls.append(
                self._start(
                    executor, images, methods, target.repeat(len(some)), replace(kept, uncertainty=False),
                    self._window(some[0]), pad_to=IMAGES_PER_SHARD * len(some),
                )
            )  # fmt: skip
            done(len(some) / (1 + len(presentations)))
        return calls

    def _start(
        self,
        executor: Executor,
        x: Float[Tensor, "b c H W"],
        methods: Mapping[str, Method],
        target: Int[Tensor, " b"] | None,
        kept: KeptTensors,
        window: Window | None,
        pad_to: int = IMAGES_PER_SHARD,
    ) -> "_Call":
        """Tensors of every method by name, and the model's probabilities.

        Explainers of the caller's see no model, so they run last, when the target is known.
        """
        by_reader: dict[Reader, dict[str, Method]] = {}
        for name, method in methods.items():
            by_reader.setdefault(method.reader, {})[name] = method
        found: Tensors = {}
        checks: list[Callable[[], None]] = []
        for reader, some in sorted(by_reader.items(), key=lambda group: group[0].forward is None):
            if reader.forward is None and "probabilities" not in found:
                found["probabilities"] = predict_batch(executor, _presented(x, window))
            if target is None and "probabilities" in found:
                target = _target(found)
            fills = {name: self.spec.fill_of(method) for name, method in some.items()}
            capturable = all(method.capturable(fills[name]) for name, method in some.items())
            one = executor.start(
                reader,
                partial(fuse_methods, methods=some, fills=fills, kept=kept),
                x,
                target,
                views_per_image=views_read(some),
                key=("evaluate", tuple(some.items()), tuple(fills.items()), kept) if capturable else None,
                window=window,
                pad_to=pad_to,
            )
            checks.append(one.check)
            found = one.tensors | found  # the first reader's probabilities stay
        if "probabilities" not in found:
            found["probabilities"] = predict_batch(executor, _presented(x, window))
        return _Call(found, checks)

    def _window(self, presentation: Transform) -> Window | None:
        return None if self.window is None else Window(self.window, presentation)

    def _method_maps(
        self,
        one: MapSpec,
        executor: Executor,
        x: Float[Tensor, "b c H W"],
        predictions: Predictions,
        by_angle: Sequence[Tensors],
    ) -> MethodMaps:
        """One method's tensors, with the control applied to its maps."""
        x = x if self.window is None else crop_centre(x, self.window)
        ones = torch.ones(size_of(x), dtype=x.dtype, device=x.device)
        coverage = self._coverage(one, executor, x)
        null_map = ones if coverage is None else times_coverage(ones, coverage)
        if one.method is None:
            return MethodMaps(null_map.expand(len(by_angle), len(x), -1, -1), predictions, null_map)
        maps = one.apply_blur(torch.stack([found[f"{one.name}.map"] for found in by_angle]))
        if one.times_coverage and coverage is not None:
            maps = times_coverage(maps, coverage)
        presented, raw = by_angle[0], f"{one.name}.raw"
        # the stages of a control are those of its method
        has_traces = f"{one.name}.activations" in presented and not one.changes_maps
        traces = [trace_of(found, one.name) for found in by_angle] if has_traces else []
        return MethodMaps(
            maps,
            predictions,
            null_map,
            presented.get(f"{one.name}.peum"),
            presented.get(f"{one.name}.disagreement"),
            presented.get(f"{one.name}.stability"),
            [trace for trace, _ in traces],
            traces[0][1] or one.method.combine if traces else None,
            torch.stack([found[raw] for found in by_angle])
            if raw in presented and not one.changes_maps
            else None,
        )

    def _coverage(
        self, one: MapSpec, executor: Executor, x: Float[Tensor, "b c H W"]
    ) -> Float[Tensor, "H W"] | None:
        """The coverage of its views if it is part of the map: by a control, or because views are filled with zeros."""
        fusion = None if one.method is None else one.method.fusion
        if fusion is None or one.times_coverage:
            return coverage_map(COVERAGE_VIEWS, _grid(executor, x), size_of(x), like=x)
        if fusion.align_at is None or self.spec.fill != "zeros" or len(fusion.views) == 1:
            return None
        grid = size_of(x) if fusion.align_at in ("upsampled", "map") else _grid(executor, x)
        return coverage_map(fusion.views, grid, size_of(x), like=x)


@dataclass(frozen=True)
class _Call:
    """Tensors that a device may still be computing, and functions that wait for them and raise what failed."""

    tensors: Tensors
    checks: list[Callable[[], None]]


def _target(found: Tensors) -> Int[Tensor, " b"]:
    """The top-1 class: by the logits, which differ where probabilities are rounded to the same value, if a method read them."""
    return found["target"] if "target" in found else found["probabilities"].argmax(1)


def _presented(x: Float[Tensor, "b c H W"], window: Window | None) -> Float[Tensor, "b c h w"]:
    """What the model sees of the images."""
    return x if window is None else Views([0]).act(x, window)[0]


def present(x: Float[Tensor, "b c H W"], presentations: Sequence[Transform]) -> Float[Tensor, "n c H W"]:
    """The images in each presentation, one presentation after the other."""
    return transform_all(x, presentations).flatten(0, 1)


def predict_batch(executor: Executor, x: Float[Tensor, "n c H W"]) -> Float[Tensor, "n y"]:
    """Class probabilities, as many images per forward pass as fit."""
    network = _network(executor)

    def some(rows: slice, _fit: int) -> Tensors:
        found = predict(network, x[rows].to(network.model.dtype)).probabilities
        return {"probabilities": require_probabilities(found, "an evaluation")}

    return torch.cat([found["probabilities"] for found in executor.groups(x, 1, some, network)])


def fits_one_call(x: Float[Tensor, "b c H W"], methods: Mapping[str, Method], presentations: int) -> bool:
    """Whether the views of all presentations fit one forward pass on a GPU."""
    if not x.is_cuda or not all(method.reader.one_pass for method in methods.values()):
        return False
    return presentations * len(x) * views_read(methods) <= views_that_fit(x, with_kept=True)


def _network(executor: Executor) -> Network:
    assert executor.model is not None  # noqa: S101  # `MapComputer.of` requires one
    return Network(executor.model, executor.autocast)


def _grid(executor: Executor, x: Float[Tensor, "b c H W"]) -> tuple[int, int]:
    """Height and width of the target layer's features."""
    network = _network(executor)
    return size_of(read_layer(network, x[:1].to(network.model.dtype)).features)
