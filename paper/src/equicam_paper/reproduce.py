"""Run one experiment of the paper on your images and keep its rows as JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.images.items import Item
from equicam.models.load import load
from equicam.shards import write_atomic
from equicam_paper import EXPERIMENTS, load_experiment
from equicam_paper.benchmarks import find_items
from equicam_paper.claims import DOMAINS, NETWORKS, claims
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.kept import KeptRows, write_rows
from equicam_paper.plots import write_plots
from equicam_paper.provenance import describe, provenance
from equicam_paper.rotation_augmentation import TRAININGS, WEIGHTS
from equicam_paper.rows import Row
from equicam_paper.scatters import scatters
from equicam_paper.seeds import SEEDS
from equicam_paper.tables import as_csv, as_latex

EXTRA_WEIGHTS = (*(f"{name}{seed}" for seed in TRAININGS for name in WEIGHTS.values()), *SEEDS)
"""Names of the weights that experiments compare with those of the model."""


@dataclass(frozen=True)
class Reproduction:
    """The rows of an experiment, and the file that keeps them."""

    title: str
    rows: tuple[Row, ...]
    path: Path
    provenance: Mapping[str, Any]
    groups: int | None = None  # intervals are over this many groups of images; None: over images


def reproduce(name: str, data: str | None, out: Path, **options: Any) -> Reproduction:
    """Measure every row of an experiment; the options are those of `open_context`."""
    find_experiment(name)
    if data is None:
        raise no_data(name)
    return run_experiment(name, open_context(data, out, **options))


def find_experiment(name: str) -> Experiment:
    """The experiment of this name; refuses an unknown one."""
    if name not in EXPERIMENTS:
        raise EquicamError(
            "an experiment", needs=f"one of {', '.join(EXPERIMENTS)}, or all", got=repr(name), fix="equicam-paper reproduce --list"
        )  # fmt: skip
    return load_experiment(name)


def no_data(name: str) -> EquicamError:
    """The error of a run without images, with what the experiment needs."""
    needs = load_experiment(name).needs if name in EXPERIMENTS else "images"
    return EquicamError(
        f"reproduce {name}", needs=needs, got="no --data", fix=f"equicam-paper reproduce {name} --data FOLDER"
    )


def open_context(
    data: str,
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
    draw: str = "",
    group_by: str | None = None,
    costly: bool = False,
    max_passes: int | None = None,
    extra: Mapping[str, Path] | None = None,
    options: Mapping[str, Any] | None = None,
    progress: bool = False,
    warn: Callable[[str], None] = lambda _text: None,
) -> Context:
    """A network and images to measure on; `options` go to `evaluate`, and `warn` gets a line on each unknown name."""
    items = find_items(
        data, split=split, group_by=group_by
    )  # refuse a missing source before a model is loaded
    loaded = load(model, weights=weights, classes=classes or zero_shot_classes(model, items), device=device)
    context = Context(
        model=loaded, data=data, out=out, backbone=backbone or model, domain=domain, n=n, split=split, draw=draw,
        group_by=group_by, costly=costly, max_passes=max_passes, progress=progress, options=dict(options or {}), extra=dict(extra or {}),
    )  # fmt: skip
    for line in _unpublished(context):
        warn(line)
    return context


def zero_shot_classes(model: str, items: Sequence[Item]) -> list[str] | None:
    """The names of the source's classes, for a zero-shot model that is given none."""
    names = sorted({item.label for item in items if isinstance(item.label, str)})
    return names if model.startswith("open_clip:") and names else None


def run_experiment(name: str, context: Context, keep_as: str = "") -> Reproduction:
    """Measure every row and write them under the experiment's name, or `keep_as`."""
    experiment = load_experiment(name)
    context = experiment.prepare(context)
    context.evaluated.clear()
    rows = tuple(experiment.rows(context))
    kept = KeptRows(keep_as or name, context.backbone, context.domain, provenance(context), rows)
    path = context.out / f"{kept.experiment}.json"
    write_rows(path, kept)
    if kept.ran:
        write_atomic(path.with_suffix(".csv"), as_csv(rows).encode())
        latex = as_latex(rows, experiment.title, describe(kept.provenance))
        write_atomic(path.with_suffix(".tex"), latex.encode())
        write_plots(kept, path.with_suffix(""), scatters(name, context))
    return Reproduction(experiment.title, rows, path, kept.provenance, context.groups)


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
    if any(c.is_about(context.backbone, context.domain) for c in claims().values() if not c.of_protocol):
        return
    for kind, given, known, option in (
        ("network", context.backbone, NETWORKS, "--backbone"),
        ("domain", context.domain, DOMAINS, "--domain"),
    ):
        if given and given not in known:
            yield f"the paper has no {kind} {given} ({', '.join(known)}), so its rows stand alone; {option} names one it has"
