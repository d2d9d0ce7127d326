"""Every table, figure and quantitative claim of the paper, by experiment; its data sets, and fine-tuning."""

import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equicam_paper.context import Experiment

__version__ = "0.2.0"

_TABLE = Path(__file__).with_name("experiments.toml")
EXPERIMENTS: dict[str, dict[str, Any]] = tomllib.loads(_TABLE.read_text())
"""In the order of the paper, each with its module and what it is about."""

IMAGENET = "an ImageNet classifier and validation images"


@cache
def load_experiment(name: str) -> "Experiment":
    """The experiment of that name: a function of its module, and what more the module's MORE has of it."""
    from equicam_paper.context import Experiment

    about = EXPERIMENTS[name]
    module = import_module(f"{__name__}.{about['module']}")
    measure, more = getattr(module, name.replace("-", "_")), getattr(module, "MORE", {}).get(name, {})
    answers, needs = tuple(about.get("answers", ())), about.get("needs", IMAGENET)
    return Experiment(about["title"], answers, measure, needs, **more)
