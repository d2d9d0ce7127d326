"""Every table, figure and quantitative claim of the paper, by experiment; its data sets, and fine-tuning."""

import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equicam_paper.context import Experiment

__version__ = "0.2.0"

EXPERIMENTS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("experiments.toml").read_text()
)
"""In the order of the paper, each with its module and what it is about."""

IMAGENET = "an ImageNet classifier and validation images"


@cache
def load_experiment(name: str) -> "Experiment":
    """The experiment of that name: a function of its module, and what more the module's MORE has of it."""
    from equicam_paper.context import Experiment

    about = EXPERIMENTS[name]
    module = import_module(f"{__name__}.{about['module']}")
    measure, more = getattr(module, name.replace("-", "_")), getattr(module, "MORE", {}).get(name, {})
    return Experiment(
        about["title"], tuple(about.get("answers", ())), measure, about.get("needs", IMAGENET), **more
    )
