"""A transformer's own attributions: attention rollout and gradient × attention."""

from collections.abc import Iterator

from equicam_paper.claims import METHODS
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.measure import eq_row
from equicam_paper.rows import Row

NO_PROPAGATION = "gradient × attention, without the relevance propagation of its paper"
REASONS = {"Attention Rollout": "", "Transformer Attribution": NO_PROPAGATION}


def measure(context: Context) -> Iterator[Row]:
    """Eq of both, and of EquiGrad-CAM."""
    if context.backbone != "vit_b_16":
        return
    found = context.evaluate_both([*(METHODS[name] for name in REASONS), "equigrad-cam"])
    for name, reason in REASONS.items():
        yield eq_row(f"vitbase.{name}", found, METHODS[name], reason=reason)
    yield eq_row("", found, "equigrad-cam")


EXPERIMENT = Experiment(
    "A transformer's own attributions", ("vitbase.",), measure, needs="a ViT-B/16 and ImageNet images"
)
