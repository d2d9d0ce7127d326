"""ViT-L/16: does the gain hold at scale?"""

from collections.abc import Iterator

from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.measure import eq_row, gain_row
from equicam_paper.rows import Row


def measure(context: Context) -> Iterator[Row]:
    """Grad-CAM, EquiGrad-CAM and the relative gain."""
    if context.backbone != "vit_l_16":
        return
    found = context.evaluate_both(["grad-cam", "equigrad-cam"])
    yield eq_row("vitl.gc", found, "grad-cam")
    yield eq_row("vitl.eg", found, "equigrad-cam")
    yield gain_row("vitl.gain", found)


EXPERIMENT = Experiment(
    "ViT-L/16: the gain at scale", ("vitl.",), measure, needs="--model vit_l_16 and ImageNet images"
)
