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


@cache
def load_experiment(name: str) -> "Experiment":
    """The experiment of that name: a function of its module, and what more the module's MORE has of it."""
    from equicam_paper.context import Experiment

    about = EXPERIMENTS[name] | {"answers": tuple(EXPERIMENTS[name].get("answers", ()))}
    module = import_module(f"{__name__}.{about.pop('module')}")
    more = getattr(module, "MORE", {}).get(name, {})
    return Experiment(measure=getattr(module, name.replace("-", "_")), **about, **more)
