"""Which maps an evaluation computes: methods by name, controls of them, fusions, and explainers of the caller's."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from equicam.core.fusion import Fusion
from equicam.core.transforms import Transform
from equicam.core.views import Fill, Views
from equicam.core.weights import KeepConfident, SoftGate
from equicam.errors import EquicamError, not_one_of
from equicam.evaluate.controls import CONTROLS
from equicam.evaluate.metrics import METRICS, Kind
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
    def changes_maps(self) -> bool:
        """Whether it is a control that blurs or darkens a method's maps."""
        return self.times_coverage or self.blur is not None

    @property
    def kind(self) -> Kind:
        """Whether it has several views, which can disagree, or a chain of one view that starts at features."""
        if self.method is None:
            return "any"
        if len(self.method.fusion.views) > 1:
            return "several views"
        return "one view" if self.method.reader.one_pass and not self.changes_maps else "any"


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

    def has_metrics_of(self, kind: Kind) -> bool:
        """Whether a metric applies to methods of this kind only."""
        return any(METRICS[name].applies_to == kind for name in self.scores)

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
            own = self.recipe if method is self.recipe.method else Recipe(method)
            return MapSpec(name, resolve(own))
        one_view = Fusion(Views((0.0,)), "map", "map")
        if not isinstance(method, str):
            explainer = Method("an explainer of the caller's", one_view, reader=external(method))
            return MapSpec(name, explainer, explainer=method)
        if method == COVERAGE:
            return MapSpec(name, None)
        base, at, control = method.partition("@")
        # options apply to the methods that have them
        own, fusion = self.recipe, METHODS[base].fusion if base in METHODS else one_view
        views = own.views if len(fusion.views) > 1 else None
        tau = own.tau if isinstance(fusion.weigh, KeepConfident) else None
        gamma = own.gamma if isinstance(fusion.weigh, SoftGate) else None
        spec = MapSpec(name, resolve(replace(own, method=base, views=views, tau=tau, gamma=gamma)))
        if not at:
            return spec
        if control == COVERAGE:
            return replace(spec, times_coverage=True)
        if control in ("random-weights", "shuffled"):
            return replace(spec, condition=control)  # type: ignore[arg-type]
        if (blur := re.fullmatch(r"blur-(\d+(?:\.\d+)?)", control)) and float(blur[1]) > 0:
            return replace(spec, blur=float(blur[1]))
        raise not_one_of(f"the control of {method!r}", CONTROLS, control, f"{base}@blur-16")
