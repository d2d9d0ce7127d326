"""How images are explained, as plain data: one object that travels whole from the caller to the run's manifest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from equicam.errors import EquicamError, not_one_of

CONTEXTS = ("none", "auto")


@dataclass(frozen=True)
class Recipe:
    """Every option that is recorded with a map. A new one is a field here; `explain`, `audit` and the commands pass it."""

    method: Any = "equigrad-cam"  # a name from `equicam.methods()`, or a Method or Fusion of the caller's
    views: Any = None  # how many, or plain values of `Views`; None: as many as the method has
    fill: str | None = None  # reflect, zeros or coverage; None: chosen from protocol, views and context
    protocol: str = "ours"  # or "paper": its authors' view grid, fill, and variants of methods and metrics
    context: str = "none"  # auto: views are cut from a surround, where there is one
    tau: int | float | None = None  # confidence below which PCF drops a view
    gamma: int | float | None = None  # exponent of the soft gate
    dtype: Any = (
        None  # the name of a type: run the network under autocast in it; None: in the model's own type
    )
    compiled: bool = (
        False  # compile the network, and capture CUDA graphs: how it runs, never what it computes
    )
    seed: int = 0

    def __post_init__(self) -> None:
        """Accept Views and torch dtypes, and keep plain values."""
        plain = getattr(self.views, "to_plain", None)
        object.__setattr__(self, "views", self.views if plain is None else plain())
        if self.context not in CONTEXTS:
            raise not_one_of("context", CONTEXTS, self.context, 'context="auto"')
        if self.dtype is not None:
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))

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
