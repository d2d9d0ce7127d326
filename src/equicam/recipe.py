"""How images are explained, as plain data: one object that travels whole from the caller to the run's manifest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from equicam.errors import EquicamError, not_one_of

CONTEXTS = ("none", "auto")
DTYPES = ("bfloat16", "float16", "float32", "float64")
MAX_VIEWS = 10_000


@dataclass(frozen=True)
class Recipe:
    """Every option that decides a map, passed whole to `explain`, `audit` and `evaluate`; a keyword of theirs wins."""

    method: Any = "equigrad-cam"  # a name from `equicam.methods()`, or a Method or Fusion of the caller's
    views: Any = None  # how many, or plain values of `Views`; None: as many as the method has
    fill: str | None = None  # reflect, zeros or coverage; None: chosen from protocol, views and context
    protocol: str = "ours"  # or "paper": its authors' view grid, fill, and variants of methods and metrics
    # auto: views are cut from a surround, if there is one; none; None: auto for windows of rasters
    context: Any = None
    tau: int | float | None = None  # confidence below which PCF drops a view
    gamma: int | float | None = None  # exponent of the soft gate
    # a floating type, or its name: run the network under autocast in it; None: in the model's own
    dtype: Any = None
    # compile the network, and capture CUDA graphs: how it runs, never what it computes; None: `audit` does if it is repaid
    compiled: bool | None = None
    seed: int = 0  # of every random choice

    def __post_init__(self) -> None:
        """Accept Views and torch dtypes, and keep plain values."""
        plain = getattr(self.views, "to_plain", None)
        object.__setattr__(self, "views", self.views if plain is None else plain())
        if self.context is not None and self.context not in CONTEXTS:
            raise not_one_of("context", CONTEXTS, self.context, 'context="auto"')
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            if name not in DTYPES:
                raise not_one_of("dtype", DTYPES, name, 'dtype="bfloat16"')
            object.__setattr__(self, "dtype", name)

    @staticmethod
    def of(recipe: "Recipe | None", **given: Any) -> "Recipe":
        """The recipe, or the usual one, with the fields that are given: those that are not None."""
        if not isinstance(recipe, Recipe | None):
            raise EquicamError("recipe", "a Recipe", repr(recipe), 'Recipe(fill="zeros")')
        return replace(
            recipe or Recipe(), **{name: value for name, value in given.items() if value is not None}
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON keeps; a method of the caller's is described by its repr."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["views"] = list(self.views) if isinstance(self.views, tuple) else self.views
        return plain | {"method": self.method if isinstance(self.method, str) else repr(self.method)}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> "Recipe":
        """The recipe `to_json` wrote."""
        known = {f.name for f in fields(Recipe)}
        if unknown := sorted(set(found) - known):
            raise EquicamError(
                "a recipe", f"only {', '.join(sorted(known))}", ", ".join(unknown), "the equicam version that wrote it",
            )  # fmt: skip
        views = found.get("views")
        if isinstance(views, list):
            views = tuple(tuple(one) if isinstance(one, list) else one for one in views)
        return Recipe(**{**found, "views": views})

    def fingerprint(self) -> str:
        """SHA-256 of its JSON: equal recipes, equal fingerprints."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
