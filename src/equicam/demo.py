"""The whole workflow on synthetic images and the embedded model: audit, rank, verify, report. Needs no network."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from equicam.audit.run import Run, audit
from equicam.audit.verify import Verification
from equicam.images.synthetic import draw_many
from equicam.models.load import load
from equicam.reasons import SIGNALS
from equicam.runs.triage import Triage

DEFAULT_COUNT = 200


@dataclass(frozen=True)
class DemoResult:
    """The run, and the result of every step after it."""

    run: Run
    triage: Triage
    verification: Verification
    report: Path


def worst_tenth_sentence(triage: Triage) -> str:
    """How much of the worst tenth the ranking signal finds, against chance, measured at seven other angles."""
    assert triage.quality is not None  # noqa: S101  # half of the images are calibration images
    found = triage.quality.signals[triage.by].captured
    return (
        f"worst tenth by Eq (equivariance: do maps follow a rotated image?) at seven other angles, of {triage.quality.n} calibration images: the first tenth by "
        f"{SIGNALS[triage.by]} holds {100 * found.value:.0f} % of it, a random tenth 10 %"
    )


def run_demo(
    out: str | Path, count: int = DEFAULT_COUNT, *, progress: Callable[[int, int, int], None] | None = None
) -> DemoResult:
    """Draw `count` images into OUT/images and audit them into OUT/run; other counts than the default get a suffix."""
    suffix = "" if count == DEFAULT_COUNT else f"-{count}"
    images, folder = Path(out) / f"images{suffix}", Path(out) / f"run{suffix}"
    images.mkdir(parents=True, exist_ok=True)
    for i, patch in enumerate(draw_many(count, seed=7)):
        path = images / f"patch-{i:03d}.png"
        if not path.is_file():
            Image.fromarray(patch.image).save(path)
    model = load("embedded", device="cpu")
    run = audit(images, model, folder, calibrate=count // 2, progress=progress)
    triage = run.triage()
    return DemoResult(run, triage, run.verify(5, device="cpu"), run.report())
