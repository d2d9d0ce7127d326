"""equicam: saliency maps that rotate with the image, and a measure of those that do not.

Public names load on first use, so that `import equicam` stays light.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from equicam.audit.run import Run as Run
    from equicam.audit.run import audit as audit
    from equicam.audit.run import compare as compare
    from equicam.audit.run import open_run as open_run
    from equicam.core.fusion import Fusion as Fusion
    from equicam.core.transforms import Transform as Transform
    from equicam.core.views import Views as Views
    from equicam.core.views import rotate as rotate
    from equicam.core.weights import KeepConfident as KeepConfident
    from equicam.core.weights import SoftGate as SoftGate
    from equicam.core.weights import uniform as uniform
    from equicam.errors import EquicamError as EquicamError
    from equicam.evaluate.evaluate import evaluate as evaluate
    from equicam.evaluate.metrics import scores as scores
    from equicam.explain import equivariant as equivariant
    from equicam.explain import explain as explain
    from equicam.explanation import Explanation as Explanation
    from equicam.methods import Method as Method
    from equicam.methods import methods as methods
    from equicam.models.layers import wrap as wrap
    from equicam.models.load import load as load
    from equicam.rasters.options import Input as Input
    from equicam.rasters.options import Tiling as Tiling
    from equicam.readers.layout import Layout as Layout
    from equicam.readers.model import Model as Model
    from equicam.recipe import Recipe as Recipe

_HOME = {
    "EquicamError": "errors",
    "Explanation": "explanation",
    "Fusion": "core.fusion",
    "Input": "rasters.options",
    "KeepConfident": "core.weights",
    "Layout": "readers.layout",
    "Method": "methods",
    "Model": "readers.model",
    "Recipe": "recipe",
    "Run": "audit.run",
    "SoftGate": "core.weights",
    "Tiling": "rasters.options",
    "Transform": "core.transforms",
    "Views": "core.views",
    "audit": "audit.run",
    "compare": "audit.run",
    "equivariant": "explain",
    "evaluate": "evaluate.evaluate",
    "explain": "explain",
    "load": "models.load",
    "methods": "methods",
    "open_run": "audit.run",
    "rotate": "core.views",
    "scores": "evaluate.metrics",
    "uniform": "core.weights",
    "wrap": "models.layers",
}
__all__ = [*_HOME, "__version__"]


class _Package(ModuleType):
    """Python binds a loaded submodule to its package's attribute; here a function of the same name keeps it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOME})


sys.modules[__name__].__class__ = _Package
