"""Which maps an evaluation computes: methods by name, controls of them, fusions, and explainers of the caller's."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Literal

from equicam.core.fusion import Fusion
from equicam.core.transforms import Transform
from equicam.core.views import Fill, Views
from equicam.errors import EquicamError, not_one_of
from equicam.evaluate.controls import CONTROLS
from equicam.methods import METHODS, Method, resolve, resolve_fill
from equicam.protocol import Protocol, find_protocol
from equicam.readers.reading import external
from equicam.recipe import Recipe

Methods = Sequence[str] | Mapping[str, Any]
Condition = Literal["plain", "random-weights", "shuffled"]
"""The network and images a map is computed from: the model's and the caller's, or those of a control."""
COVERAGE = "coverage"
"""The control that is a method of its own: a map that does not depend on the image."""
IMAGES_PER_SHARD = 16
"""Images that are computed together, and compared with each other for their floors."""
COVERAGE_VIEWS = Views.evenly(18)
"""The views whose coverage that control shows."""
VIEW_METRICS = {"peum", "disagreement", "stability", "calibration"}
"""Metrics of the views of one map."""
REGION_METRICS = {"energy", "pointing", "box-iou"}
"""Metrics that need the place of the object."""


@dataclass(frozen=True)
class MapSpec:
    """One method of an evaluation: its name, the condition it runs under, and the control applied to its maps."""

    name: str
    method: Method | None  # None: the coverage map alone
    condition: Condition = "plain"
    times_coverage: bool = False
    blur: float | None = None
    explainer: Any = None  # an explainer of the caller's, `(x, target) → map`

    @property
    def has_several_views(self) -> bool:
        """Whether it has views that can disagree."""
        return self.method is not None and len(self.method.fusion.views) > 1

    @property
    def changes_maps(self) -> bool:
        """Whether it is a control that blurs or darkens a method's maps."""
        return self.times_coverage or self.blur is not None

    @property
    def has_stages(self) -> bool:
        """Whether it has a chain of one view that starts at features."""
        if self.method is None or self.has_several_views or self.changes_maps:
            return False
        return self.method.reader.one_pass


@dataclass(frozen=True)
class EvaluationSpec:
    """Everything that decides the rows of an evaluation, except the model and the images."""

    recipe: Recipe  # its method is ignored: `methods` names several
    methods: Methods
    scores: tuple[str, ...]
    presentations: tuple[Transform, ...]  # of every image, after the presented one
    label_names: tuple[str, ...] = ()  # the labels of the whole source, where they are words
    max_views_per_forward: int | None = None
    group: str = "rotation"  # of the presentations

    @property
    def protocol(self) -> Protocol:
        """In what ours and the paper's differ."""
        return find_protocol(self.recipe.protocol)

    @property
    def fill(self) -> Fill:
        """How pixels outside the image are filled."""
        return resolve_fill(self.recipe)

    def fill_of(self, method: Method) -> Fill:
        """The same for one method: by coverage where its views see less than all, unless a fill is given."""
        sees_less = self.recipe.fill is None and self.fill == "reflect" and method.fusion.views.radius < 1
        return "coverage" if sees_less else self.fill

    @property
    def needs_regions(self) -> bool:
        """Whether a metric needs boxes or label regions."""
        return bool(REGION_METRICS & set(self.scores))

    @property
    def needs_views(self) -> bool:
        """Whether a metric compares the views of a map."""
        return bool(VIEW_METRICS & set(self.scores))

    @property
    def needs_traces(self) -> bool:
        """Whether a metric needs activations and gradients."""
        return "stages" in self.scores

    def map_specs(self) -> tuple[MapSpec, ...]:
        """Every method by name; the recipe's `views` apply to the methods that have several."""
        methods = self.methods
        if isinstance(methods, str) or not methods:
            needs = "a list of names, or a dict of names and methods"
            raise EquicamError("methods", needs, repr(methods), '["grad-cam"]')
        named: Mapping[str, Any] = methods if isinstance(methods, Mapping) else {m: m for m in methods}
        return tuple(self._map_spec(name, method) for name, method in named.items())

    def _map_spec(self, name: str, method: Any) -> MapSpec:
        if isinstance(method, Fusion | Method):
            return MapSpec(name, resolve(Recipe(method)))
        if not isinstance(method, str):
            one_view = Fusion(Views((0.0,)), "map", "map")
            explainer = Method("an explainer of the caller's", one_view, reader=external(method))
            return MapSpec(name, explainer, explainer=method)
        if method == COVERAGE:
            return MapSpec(name, None)
        base, at, control = method.partition("@")
        several = base in METHODS and len(METHODS[base].fusion.views) > 1
        recipe = replace(self.recipe, method=base, views=self.recipe.views if several else None)
        spec = MapSpec(name, resolve(recipe))
        if not at:
            return spec
        if control == COVERAGE:
            return replace(spec, times_coverage=True)
        if control in ("random-weights", "shuffled"):
            return replace(spec, condition=control)  # type: ignore[arg-type]
        if (blur := re.fullmatch(r"blur-(\d+(?:\.\d+)?)", control)) and float(blur[1]) > 0:
            return replace(spec, blur=float(blur[1]))
        raise not_one_of(f"the control of {method!r}", CONTROLS, control, f"{base}@blur-16")


def describe(spec: MapSpec) -> str:
    """A description of a method that is the same from run to run, for fingerprints."""
    if spec.method is None:
        return COVERAGE
    m, f = spec.method, spec.method.fusion
    parts = [
        _name(spec.explainer or m.reader.read),
        _name(m.combine),
        f"{list(f.views.to_plain())}",
        f"{f.align_at}→{f.mean_at}",
        _name(f.weigh),
        *([] if m.stretched else ["not stretched"]),
    ]
    return " · ".join([*parts, spec.condition, f"coverage={spec.times_coverage}", f"blur={spec.blur}"])


def _name(fn: Any) -> str:
    """The name of a function with its options; an object of the caller's by the name of its class."""
    if isinstance(fn, partial):
        options = (f"{k}={_name(v) if callable(v) else repr(v)}" for k, v in fn.keywords.items())
        return f"{_name(fn.func)}({', '.join(options)})"
    return repr(fn) if is_dataclass(fn) else getattr(fn, "__qualname__", type(fn).__qualname__)
