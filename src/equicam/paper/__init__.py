"""Every table, figure and quantitative claim of the paper, by name; each is a short module of its own."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equicam.paper.context import Experiment

NAMES = {
    "main": "main",
    "alignment": "alignment",
    "decomposition": "decomposition",
    "conditional": "conditional",
    "strata": "strata",
    "drift-confidence": "drift_confidence",
    "causal": "causal",
    "blur": "blur",
    "soft-gate": "soft_gate",
    "t-sweep": "t_sweep",
    "angles": "angles",
    "faithfulness": "faithfulness",
    "peum-audit": "peum_audit",
    "localisation": "localisation",
    "cost": "cost",
    "equal-compute": "equal_compute",
    "matched": "matched",
    "constants": "constants",
    "constant-maps": "constant_maps",
    "hooks": "hooks",
    "vit-attribution": "vit_attribution",
    "vit-l": "vit_l",
    "clip": "clip",
    "domains": "domains",
    "seeds": "seeds",
    "rotation-augmentation": "rotation_augmentation",
    "label-region": "label_region",
    "triage": "triage",
    "cub": "cub",
    "cub-rotation": "cub_rotation",
    "figure-pipeline": "figure_pipeline",
    "figure-signal-noise": "figure_signal_noise",
    "figure-drift-strip": "figure_drift_strip",
}


def named(name: str) -> "Experiment":
    """The experiment of that name."""
    found: Experiment = import_module(f"{__name__}.{NAMES[name]}").EXPERIMENT
    return found
