"""CUB-200-2011: rotation augmentation against alignment."""

from collections.abc import Iterator

from equicam.evaluate.statistics import Estimate
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.rotation_augmentation import (
    WEIGHTS,
    evaluate_weights,
    has_weights,
    measure_weights,
    training,
)
from equicam_paper.rows import Both, Row, compare


def measure(context: Context) -> Iterator[Row]:
    """As in the domains; the paper gives one number for EquiGrad-CAM on either model."""
    if not has_weights(context):
        return
    measured = measure_weights(evaluate_weights(context))
    for name, found in measured.items():
        if not name.startswith("EG"):
            yield compare(f"rotaug.CUB.{name}", found.mean, label=name, reason=found.reason)
            yield from found.seed_rows(name)
    plain, rotated = (measured[f"EG Eq {name}"].mean for name in WEIGHTS)
    ours, theirs = (
        [e for e in pair if e]
        for pair in ((plain.clean, rotated.clean), (plain.as_published, rotated.as_published))
    )
    yield compare(
        "rotaug.CUB.EG Eq either model", Both(min(ours, key=_value), min(theirs, key=_value)),
        label="EG Eq, the lower of both models",
        reason=f"by our protocol {ours[0].value:.3f} plain, {ours[1].value:.3f} rotated",
    )  # fmt: skip


def _value(found: Estimate) -> float:
    return found.value


EXPERIMENT = Experiment(
    "CUB-200-2011: rotation augmentation against alignment",
    ("rotaug.CUB",),
    measure,
    needs="CUB-200-2011 and two fine-tuned files of weights",
    missing=lambda _context, claim: training(claim, "cub-rotation"),
)
