"""Run experiments on your images, one or all of a network in one process, and keep their rows as JSON.

All of them share the model, which is loaded and compiled once, and evaluations.
"""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

import torch

from equicam.errors import EquicamError
from equicam.images.items import Item
from equicam.models.load import load
from equicam.shards import write_atomic
from equicam_paper import EXPERIMENTS, load_experiment
from equicam_paper.benchmarks import find_items
from equicam_paper.claims import DOMAINS, METRICS, NETWORKS, claims
from equicam_paper.context import FORWARD_PASSES, Context
from equicam_paper.kept import KeptRows, write_rows
from equicam_paper.plots import write_plots
from equicam_paper.provenance import describe, provenance
from equicam_paper.rows import Row
from equicam_paper.signals import METRICS as SIGNALS
from equicam_paper.tables import as_csv, as_latex
from equicam_paper.trainings import SEEDS, TRAININGS, WEIGHTS

LISTING = "equicam-paper reproduce --list"
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


def refuse_unknown(name: str, data: str | None) -> None:
    """Refuse a name that is no experiment, and a run without images, with what the experiment needs."""
    if name != "all" and name not in EXPERIMENTS:
        raise EquicamError("an experiment", f"one of {', '.join(EXPERIMENTS)}, or all", repr(name), LISTING)
    if data is None:
        needs = "images" if name == "all" else load_experiment(name).needs
        fix = f"equicam-paper reproduce {name} --data FOLDER"
        raise EquicamError(f"reproduce {name}", needs, "no --data", fix)


def open_context(
    data: str,
    out: Path,
    *,
    model: str = "resnet50",
    weights: str | None = None,
    classes: Sequence[str] | None = None,
    device: str | None = None,
    backbone: str | None = None,
    split: str | None = None,
    group_by: str | None = None,
    warn: Callable[[str], None] = lambda _text: None,
    **more: Any,
) -> Context:
    """A network and images to measure on; `more` are fields of the context, and `warn` gets a line on each unknown name."""
    # refuse a missing source before a model is loaded
    items = find_items(data, split=split, group_by=group_by)
    loaded = load(model, weights=weights, classes=classes or zero_shot_classes(model, items), device=device)
    context = Context(loaded, data, out, backbone or model, split=split, group_by=group_by, **more)
    for line in unpublished(context):
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
        write_plots(kept, path.with_suffix(""), experiment.scatters(context))
    return Reproduction(experiment.title, rows, path, kept.provenance, context.groups)


def parse_extra(given: str) -> tuple[str, Path]:
    """NAME=FILE as the name of extra weights and their file."""
    name, _, file = given.partition("=")
    if name not in EXTRA_WEIGHTS or not Path(file).is_file():
        needs = f"{', '.join(EXTRA_WEIGHTS)} with = and an existing file of weights"
        raise EquicamError("--extra", needs, repr(given), "--extra rotated=models/rotated.safetensors")
    return name, Path(file)


def unpublished(context: Context) -> Iterator[str]:
    """A network or domain without published numbers is allowed, but may be a misspelling."""
    if any(c.is_about(context.backbone, context.domain) for c in claims().values() if not c.of_protocol):
        return
    option = {"network": "--backbone", "domain": "--domain"}
    for kind, given, known in (("network", context.backbone, NETWORKS), ("domain", context.domain, DOMAINS)):
        if given and given not in known:
            what = f"the paper has no {kind} {given} ({', '.join(known)})"
            yield f"{what}, so its rows stand alone; {option[kind]} names one it has"


DOMAIN_METHODS = ("grad-cam", "aug-cam", "equigrad-cam+pcf", "equigrad-cam")
METHODS = (*DOMAIN_METHODS, "grad-cam++", "layer-cam", "equigrad-cam-out", "coverage")
SHARED_BY = {name for name, of in EXPERIMENTS.items() if of.get("reads") == "shared"}
DOMAIN_EXPERIMENTS = ("domains", "triage", "rotation-augmentation", "seeds", "sanity")
COSTLY_EXPERIMENTS = ("constant-maps", "equal-compute", "sanity", "main")
"""Those whose rows need --costly, the cheapest first."""
PASSES = {"shared": 300} | {name: of.get("passes", 0) for name, of in EXPERIMENTS.items()}
"""Forward passes per image by both protocols, roughly; none for those that read the shared evaluation."""
COSTLY_PASSES = {name: of["costly_passes"] for name, of in EXPERIMENTS.items() if "costly_passes" in of}
"""With --costly; those of `main` follow from its methods."""
MAPS_PER_IMAGE = 8  # presented and seven rotations; both protocols share the scores of masked images


@dataclass(frozen=True)
class Outcome:
    """How a step ended: the file of its rows, or why there is none; the shared evaluation has neither."""

    name: str
    seconds: float
    path: Path | None = None
    reason: str = ""


class TimeUp(BaseException):
    """The minutes are over; a finished shard is kept, and the same command resumes."""


def experiments_of(context: Context) -> tuple[str, ...]:
    """The experiments that a network on its images can answer, in the order of the paper; costly ones alone with --costly."""
    if context.domain:
        return DOMAIN_EXPERIMENTS
    if context.costly:
        return COSTLY_EXPERIMENTS
    return tuple(name for name, of in EXPERIMENTS.items() if not of.get("domain_only"))


def run_all(
    context: Context,
    names: Sequence[str] = (),
    *,
    until: float | None = None,
    rows: Path | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> Iterator[Outcome]:
    """Run experiments one after another, up to a `monotonic` time; one that fails is reported, and the next begins.

    `rows` is a second folder for the files of rows.
    """
    wanted = tuple(names) or experiments_of(context)
    if unknown := sorted(set(wanted) - set(EXPERIMENTS)):
        raise EquicamError("experiments", "names of --list", ", ".join(unknown), LISTING)
    clock = _Clock(len(context.sample), costly_passes(context) if context.costly else _passes(context))
    for name in (*(["shared"] if len(SHARED_BY & set(wanted)) > 1 else []), *wanted):
        if until is not None and monotonic() >= until:
            yield Outcome(name, 0.0, reason="not begun: no time was left")
            continue
        progress(f"{name}: {clock.estimate(name)}")
        begin, reason = monotonic(), ""
        path: Path | None = None
        try:
            with time_limit(until):
                if name == "shared":
                    share(context)
                else:
                    path = run_experiment(name, context).path
        except TimeUp:
            reason = "interrupted: no time was left; the same command resumes"
        except Exception as error:  # noqa: BLE001 the next experiment may well run
            reason = " ".join(str(error).split())[:300] or type(error).__name__
        if path is not None and rows is not None:
            rows.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, rows / path.name)
        outcome = Outcome(name, monotonic() - begin, path, reason)
        clock.add(outcome)
        yield outcome


def _passes(context: Context) -> dict[str, int]:
    """Forward passes per image; `triage` evaluates further seeds itself."""
    further = sum(f"{WEIGHTS['no aug']}{seed}" in context.extra for seed in TRAININGS[1:])
    return PASSES | {"triage": PASSES["shared"] * further}


def costly_passes(context: Context) -> dict[str, int]:
    """The same with --costly; a method published for the first classes also runs on images of those."""
    of_methods = sum(FORWARD_PASSES[method] for method in context.affordable(list(FORWARD_PASSES)))
    return COSTLY_PASSES | {"main": MAPS_PER_IMAGE * of_methods}


def share(context: Context) -> None:
    """One evaluation of the methods and metrics that most experiments read: views are computed once for all of them."""
    if context.domain and not context.costly:
        context.evaluate_both(DOMAIN_METHODS, tuple(dict.fromkeys((*METRICS.values(), *SIGNALS))))
    elif not context.costly:
        context.evaluate_both(METHODS, SIGNALS)


class _Clock:
    """Forward passes and seconds so far, to say how long the next step takes."""

    def __init__(self, images: int, per_image: Mapping[str, int]) -> None:
        self.images, self.per_image = images, per_image
        self.passes, self.seconds = 0, 0.0

    def estimate(self, name: str) -> str:
        passes = self.per_image.get(name, 0) * self.images
        if not passes:
            return "a few seconds"
        rate = self.passes / self.seconds if self.passes else 2500.0 if torch.cuda.is_available() else 15.0
        return f"about {passes:,} forward passes, {passes / rate:,.0f} s"

    def add(self, outcome: Outcome) -> None:
        if not outcome.reason and self.per_image.get(outcome.name, 0):
            self.passes += self.per_image[outcome.name] * self.images
            self.seconds += outcome.seconds


@contextmanager
def time_limit(until: float | None) -> Iterator[None]:
    """Raise TimeUp inside `with` at a `monotonic` time; in the main thread only, where signals arrive."""
    if until is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, until - monotonic()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
