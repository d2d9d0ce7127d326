"""equicam: saliency maps that do not move when the image does, and a measure of those that do.

Public names load on first use, so that `import equicam` stays light.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from equicam.errors import EquicamError as EquicamError
    from equicam.evaluate import evaluate as evaluate
    from equicam.explain import Explanation as Explanation
    from equicam.explain import equivariant as equivariant
    from equicam.explain import explain as explain
    from equicam.geometry import Views as Views
    from equicam.geometry import rotate as rotate
    from equicam.methods import Fusion as Fusion
    from equicam.methods import Method as Method
    from equicam.methods import methods as methods
    from equicam.models.load import load as load
    from equicam.models.model import Model as Model
    from equicam.models.model import wrap as wrap
    from equicam.readers.layout import Layout as Layout
    from equicam.scores.protocol import scores as scores
    from equicam.weigh import KeepConfident as KeepConfident
    from equicam.weigh import SoftGate as SoftGate
    from equicam.weigh import uniform as uniform

_HOME = {
    "EquicamError": "errors",
    "Explanation": "explain",
    "Fusion": "methods",
    "KeepConfident": "weigh",
    "Layout": "readers.layout",
    "Method": "methods",
    "Model": "models.model",
    "SoftGate": "weigh",
    "Views": "geometry",
    "equivariant": "explain",
    "evaluate": "evaluate",
    "explain": "explain",
    "load": "models.load",
    "methods": "methods",
    "rotate": "geometry",
    "scores": "scores.protocol",
    "uniform": "weigh",
    "wrap": "models.model",
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
