"""Every table, figure and quantitative claim of the paper; each experiment is a short module of its own."""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

if TYPE_CHECKING:
    from equicam_paper.experiment import Experiment

EXPERIMENTS = (
    "main", "alignment", "decomposition", "conditional", "strata", "drift-confidence", "causal", "blur", "soft-gate",
    "t-sweep", "angles", "faithfulness", "peum-audit", "localisation", "cost", "equal-compute", "matched", "constants",
    "constant-maps", "hooks", "vit-attribution", "vit-l", "clip", "domains", "seeds", "rotation-augmentation",
    "label-region", "triage", "cub", "cub-rotation", "sanity", "figure-pipeline", "figure-signal-noise", "figure-drift-strip",
)  # fmt: skip


def load_experiment(name: str) -> "Experiment":
    """The experiment of that name."""
    found: Experiment = import_module(f"{__name__}.{name.replace('-', '_')}").EXPERIMENT
    return found
