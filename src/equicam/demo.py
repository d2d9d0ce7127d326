"""The whole workflow on synthetic images and the embedded model: audit, rank, verify, report. Needs no network."""

from collections.abc import Callable
from pathlib import Path

from PIL import Image

from equicam.audit.run import Run, audit
from equicam.audit.verify import Verification
from equicam.errors import EquicamError
from equicam.models.load import load
from equicam.reasons import SIGNALS
from equicam.runs.triage import Triage

SHEET = Path(__file__).with_name("demo_patches.jpg")  # patches in rows; scripts/synthetic.py makes it
PATCHES, PATCHES_PER_ROW, SIDE = 200, 20, 96  # pixels


def worst_tenth_sentence(triage: Triage) -> str:
    """How much of the worst tenth the ranking signal finds, against chance, measured at seven other angles."""
    assert triage.quality is not None  # noqa: S101  # half of the images are calibration images
    found = triage.quality.signals[triage.by].captured
    return (
        f"worst tenth by Eq (equivariance: do maps follow a rotated image?) at seven other angles, of {triage.quality.n} calibration images: the first tenth by "
        f"{SIGNALS[triage.by]} holds {100 * found.value:.0f} % of it, a random tenth 10 %"
    )


def synthetic_patches(count: int = PATCHES) -> list[Image.Image]:
    """Patches that look like stained tissue, with and without tumour in their centre; no photographs, and at most 200."""
    if not 0 <= count <= PATCHES:
        raise EquicamError("patches", f"at most {PATCHES}", count, f"count={PATCHES}")
    with Image.open(SHEET) as sheet:
        sheet.load()
    corners = ((SIDE * (i % PATCHES_PER_ROW), SIDE * (i // PATCHES_PER_ROW)) for i in range(count))
    return [sheet.crop((x, y, x + SIDE, y + SIDE)) for x, y in corners]


def run_demo(
    out: str | Path, count: int = PATCHES, *, progress: Callable[[int, int, int], None] | None = None
) -> tuple[Run, Triage, Verification, Path]:
    """Write `count` patches into OUT/images, audit them into OUT/run, and take every step after it up to the report.

    Other counts than all of them get a suffix.
    """
    suffix = "" if count == PATCHES else f"-{count}"
    images, folder = Path(out) / f"images{suffix}", Path(out) / f"run{suffix}"
    images.mkdir(parents=True, exist_ok=True)
    for i, patch in enumerate(synthetic_patches(count)):
        path = images / f"patch-{i:03d}.png"
        if not path.is_file():
            patch.save(path)
    run = audit(images, load("embedded", device="cpu"), folder, calibrate=count // 2, progress=progress)
    return run, run.triage(), run.verify(5, device="cpu"), run.report()
