"""Which maps an evaluation is of: methods by name, controls of them, fusions, and explainers of the caller's."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.views import Views
from equicam.errors import EquicamError
from equicam.evaluation.controls import CONTROLS, blurred_maps
from equicam.explain import Explanation
from equicam.methods import METHODS, Fusion, Method, find
from equicam.readers.external import as_explainer, external
from equicam.readers.forward import look
from equicam.readers.gradients import tap
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading

Methods = Sequence[str] | Mapping[str, Any]
World = Literal["plain", "random-weights", "shuffled"]
Count = int | Views | Literal["auto"] | None
"""How many views, or which."""
COVERAGE = "coverage"
"""The control that is a method of its own: a map that never looks at the picture."""


@dataclass(frozen=True)
class Asked:
    """One row of an evaluation: a method, the world it is read in, and what is done to its maps."""

    name: str
    method: Method | None  # None: the coverage map alone
    world: World = "plain"
    covered: bool = False
    blur: float | None = None

    @property
    def several(self) -> bool:
        """Whether it has views to disagree."""
        return self.method is not None and len(self.method.fusion.views) > 1

    @property
    def staged(self) -> bool:
        """Whether it has a chain from features on, of one view."""
        if self.method is None or self.several or self.covered or self.blur is not None:
            return False
        return getattr(self.method.reader, "func", self.method.reader) in (tap, look)

    def after(self, maps: Float[Tensor, "v b H W"]) -> Float[Tensor, "v b H W"]:
        """The control's blur, if it is one."""
        return maps if self.blur is None else blurred_maps(maps, self.blur)


@dataclass(frozen=True, eq=False)
class Foreign:
    """An explainer of the caller's, `(x, target) → map`, as a reader."""

    fn: Any

    def __call__(
        self, _model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
    ) -> Reading:
        """Its own maps; an equivariant explainer's are taken from its explanation."""
        explain = as_explainer(self.fn)

        def plane(views: Tensor, target: Tensor) -> Tensor:
            found: Any = explain(views, target)
            return found.map if isinstance(found, Explanation) else found

        return external(plane, x, pin, autocast=autocast)


def asked(methods: Methods, *, views: Count, as_published: bool) -> tuple[Asked, ...]:
    """Every row asked for; `views` goes to the methods that have several."""
    if isinstance(methods, str) or not methods:
        raise EquicamError(
            "methods",
            needs="a list of names, or a dict of names and methods",
            got=repr(methods),
            fix='["grad-cam"]',
        )
    named: Mapping[str, Any] = methods if isinstance(methods, Mapping) else {m: m for m in methods}
    return tuple(_one(name, what, views, as_published) for name, what in named.items())


def _one(name: str, what: Any, views: Count, as_published: bool) -> Asked:
    if isinstance(what, str):
        return _named(name, what, views, as_published)
    if isinstance(what, Fusion | Method):
        return Asked(name, find(what))
    fusion = Fusion(Views((0.0,)), "map", "map")
    return Asked(name, Method("an explainer of the caller's", fusion, reader=Foreign(what)))


def _named(name: str, what: str, views: Count, as_published: bool) -> Asked:
    if what == COVERAGE:
        return Asked(name, None)
    base, at, control = what.partition("@")
    several = base in METHODS and len(METHODS[base].fusion.views) > 1
    one = Asked(name, find(base, views=views if several else None, as_published=as_published))
    if not at:
        return one
    if control == COVERAGE:
        return replace(one, covered=True)
    if control in ("random-weights", "shuffled"):
        return replace(one, world=control)  # type: ignore[arg-type]
    if (blur := re.fullmatch(r"blur-(\d+(?:\.\d+)?)", control)) and float(blur[1]) > 0:
        return replace(one, blur=float(blur[1]))
    raise EquicamError(
        f"the control of {what!r}",
        needs=f"one of {', '.join(CONTROLS)}",
        got=repr(control),
        fix=f"{base}@blur-16",
    )


def described(one: Asked) -> str:
    """What a row is, in words that stay the same from run to run."""
    if one.method is None:
        return COVERAGE
    m, f = one.method, one.method.fusion
    parts = [
        _called(m.reader),
        _called(m.combine),
        f"{list(f.views.angles)}" if f.auto is None else f"{f.auto}",
        f"{f.align_at}→{f.mean_at}",
        _called(f.weigh),
    ]
    return " · ".join([*parts, one.world, f"covered={one.covered}", f"blur={one.blur}"])


def _called(what: Callable[..., Any]) -> str:
    if isinstance(what, partial):
        return f"{_called(what.func)}({', '.join(f'{k}={_value(v)}' for k, v in what.keywords.items())})"
    if isinstance(what, Foreign):
        return f"{getattr(what.fn, '__qualname__', type(what.fn).__qualname__)}"
    return repr(what) if is_dataclass(what) else getattr(what, "__qualname__", type(what).__qualname__)


def _value(value: Any) -> str:
    return _called(value) if callable(value) else repr(value)
