"""Run one experiment of the paper on your images and keep its rows as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equicam.data.sources import find_items
from equicam.errors import EquicamError
from equicam.models.load import load
from equicam.paper import EXPERIMENTS, load_experiment
from equicam.paper.claims import DOMAINS, NETWORKS
from equicam.paper.context import Context
from equicam.paper.rotation_augmentation import WEIGHTS
from equicam.paper.rows import Row
from equicam.paper.seeds import SEEDS
from equicam.shards import write_atomic

EXTRA_WEIGHTS = (*WEIGHTS.values(), *SEEDS)
"""Names of the weights that experiments compare with those of the model."""


@dataclass(frozen=True)
class Reproduction:
    """The rows of an experiment, and the file that keeps them."""

    title: str
    rows: tuple[Row, ...]
    path: Path


def reproduce(
    name: str,
    data: str | None,
    out: Path,
    *,
    model: str = "resnet50",
    weights: str | None = None,
    classes: Sequence[str] | None = None,
    device: str | None = None,
    backbone: str | None = None,
    domain: str = "",
    n: int | None = None,
    split: str | None = None,
    costly: bool = False,
    extra: Mapping[str, Path] | None = None,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
    warn: Callable[[str], None] = lambda _text: None,
) -> Reproduction:
    """Measure every row of an experiment; `options` go to `evaluate`, and `warn` gets a line on each unknown name."""
    if name not in EXPERIMENTS:
        raise EquicamError(
            "an experiment", needs=f"one of {', '.join(EXPERIMENTS)}", got=repr(name), fix="equicam reproduce --list"
        )  # fmt: skip
    experiment = load_experiment(name)
    if data is None:
        raise EquicamError(
            f"reproduce {name}", needs=experiment.needs, got="no --data", fix=f"equicam reproduce {name} --data FOLDER"
        )  # fmt: skip
    find_items(data, split=split)  # refuse a missing source before a model is loaded
    loaded = load(model, weights=weights, classes=classes, device=device)
    context = Context(
        model=loaded, data=data, out=out, backbone=backbone or model, domain=domain, n=n, split=split, costly=costly,
        progress=progress, options=dict(options or {}), extra=dict(extra or {}),
    )  # fmt: skip
    for line in _unpublished(context):
        warn(line)
    rows = tuple(experiment.rows(context))
    about = {"experiment": name, "model": model, "backbone": context.backbone, "domain": domain, "n": n}
    text = json.dumps(about | {"rows": [row.as_json() for row in rows]}, indent=1, ensure_ascii=False)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    write_atomic(path, text.encode())
    return Reproduction(experiment.title, rows, path)


def parse_extra(given: str) -> tuple[str, Path]:
    """NAME=FILE as the name of extra weights and their file."""
    name, _, file = given.partition("=")
    if name not in EXTRA_WEIGHTS or not Path(file).is_file():
        raise EquicamError(
            "--extra", needs=f"{', '.join(EXTRA_WEIGHTS)} with = and an existing file of weights", got=repr(given),
            fix="--extra rotated=models/rotated/weights.safetensors",
        )  # fmt: skip
    return name, Path(file)


def _unpublished(context: Context) -> Iterator[str]:
    """A network or domain without published numbers is allowed, but may be a misspelling."""
    for kind, given, known, option in (
        ("network", context.backbone, NETWORKS, "--backbone"),
        ("domain", context.domain, DOMAINS, "--domain"),
    ):
        if given and given not in known:
            yield f"the paper has no {kind} {given} ({', '.join(known)}), so its rows stand alone; {option} names one it has"
