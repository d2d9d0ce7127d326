"""Every experiment of one network in one process: the model is loaded and compiled once, evaluations are shared."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from types import FrameType

import torch

from equicam.errors import EquicamError
from equicam_paper import EXPERIMENTS
from equicam_paper.claims import METRICS
from equicam_paper.context import FORWARD_PASSES, Context
from equicam_paper.reproduce import run_experiment
from equicam_paper.rotation_augmentation import TRAININGS, WEIGHTS

METHODS = (
    "grad-cam",
    "grad-cam++",
    "layer-cam",
    "aug-cam",
    "equigrad-cam",
    "equigrad-cam+pcf",
    "equigrad-cam-out",
    "coverage",
)
SHARED_BY = {
    "main", "alignment", "conditional", "strata", "drift-confidence", "angles", "peum-audit", "constants", "triage", "domains",
}  # fmt: skip
"""Experiments that read the shared evaluation."""
SIGNALS = ("eq", "peum", "disagreement", "stability")
DOMAIN_METHODS = ("grad-cam", "aug-cam", "equigrad-cam+pcf", "equigrad-cam")
DOMAIN_EXPERIMENTS = ("domains", "triage", "rotation-augmentation", "seeds", "sanity")
OF_DOMAINS = ("domains", "rotation-augmentation", "seeds", "label-region", "clip", "cub", "cub-rotation")
"""Without a domain they measure nothing."""
COSTLY_EXPERIMENTS = ("constant-maps", "equal-compute", "sanity", "main")
"""Those whose rows need --costly, the cheapest first."""
PASSES = {
    "shared": 300, "decomposition": 40, "causal": 250, "blur": 20, "soft-gate": 300, "t-sweep": 600, "faithfulness": 500,
    "localisation": 80, "matched": 150, "constants": 10, "domains": 0, "triage": 0, "rotation-augmentation": 600, "sanity": 1050, "seeds": 900,
}  # fmt: skip
"""Forward passes per image by both protocols, roughly; nothing for those that read the shared evaluation."""
COSTLY_PASSES = {"constant-maps": 2050, "equal-compute": 4300}
"""With --costly; those of `main` follow from its methods."""
MAPS_PER_IMAGE = 8
"""The presented image and seven rotations; both protocols share the scores of masked images."""


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
    return tuple(name for name in EXPERIMENTS if name not in OF_DOMAINS)


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
        raise EquicamError(
            "experiments",
            needs="names of --list",
            got=", ".join(unknown),
            fix="equicam-paper reproduce --list",
        )
    clock = _Clock(len(context.sample), _costly_passes(context) if context.costly else _passes(context))
    steps: list[tuple[str, Callable[[], Path | None]]] = []
    if len(SHARED_BY & set(wanted)) > 1:
        steps.append(("shared", lambda: _share(context)))
    steps += [(name, partial(_run, name, context)) for name in wanted]
    for name, step in steps:
        if until is not None and monotonic() >= until:
            yield Outcome(name, 0.0, reason="not begun: no time was left")
            continue
        progress(f"{name}: {clock.estimate(name)}")
        begin, path, reason = monotonic(), None, ""
        try:
            with time_limit(until):
                path = step()
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


def _costly_passes(context: Context) -> dict[str, int]:
    """Forward passes per image of the sample; a method published for the first classes also runs on images of those."""
    of_methods = sum(FORWARD_PASSES[method] for method in context.affordable(list(FORWARD_PASSES)))
    return COSTLY_PASSES | {"main": MAPS_PER_IMAGE * of_methods}


def _run(name: str, context: Context) -> Path:
    return run_experiment(name, context).path


def _share(context: Context) -> None:
    """One evaluation of the methods and metrics that most experiments read: views are computed once for all of them."""
    if context.costly:
        return
    methods, metrics = (
        (DOMAIN_METHODS, tuple(dict.fromkeys((*METRICS.values(), *SIGNALS))))
        if context.domain
        else (METHODS, SIGNALS)
    )
    context.evaluate_both(methods, metrics)


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
