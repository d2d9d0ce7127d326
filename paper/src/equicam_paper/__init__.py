"""Every table, figure and quantitative claim of the paper, by experiment; its data sets, and fine-tuning."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from equicam_paper.context import Experiment

__version__ = "0.2.0"

EXPERIMENTS = {
    "main": "equivariance", "alignment": "equivariance", "decomposition": "causal", "conditional": "conditions",
    "strata": "conditions", "drift-confidence": "conditions", "causal": "causal", "blur": "equivariance",
    "soft-gate": "equivariance", "t-sweep": "equivariance", "angles": "equivariance", "faithfulness": "equivariance",
    "peum-audit": "signals", "localisation": "boxes", "cost": "cost", "equal-compute": "equivariance", "matched": "matched",
    "constants": "constants", "constant-maps": "constants", "hooks": "constants", "vit-attribution": "equivariance",
    "vit-l": "equivariance", "clip": "trainings", "domains": "trainings", "seeds": "trainings",
    "rotation-augmentation": "trainings", "label-region": "boxes", "triage": "signals", "cub": "boxes",
    "cub-rotation": "trainings", "sanity": "sanity", "figure-pipeline": "figures", "figure-signal-noise": "figures",
    "figure-drift-strip": "figures",
}  # fmt: skip
"""In the order of the paper, each with its module."""


def load_experiment(name: str) -> "Experiment":
    """The experiment of that name."""
    found: Experiment = import_module(f"{__name__}.{EXPERIMENTS[name]}").EXPERIMENTS[name]
    return found
