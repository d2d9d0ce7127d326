"""ImageNet's boxes: does the map point at the object? The paper measures this on birds only."""

from collections.abc import Iterator

from equicam.errors import EquicamError
from equicam_paper.context import Context
from equicam_paper.cub import box_rows, has_boxes
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Row


def measure(context: Context) -> Iterator[Row]:
    """Pointing game and box overlap, with the scores of the middle pixel and the whole frame."""
    if not has_boxes(context):
        raise EquicamError(
            "localisation", needs="images with boxes", got=f"{context.data}: none has any",
            fix="a column `boxes`, or annotations",
        )  # fmt: skip
    yield from box_rows(context, "ImageNet boxes")


EXPERIMENT = Experiment(
    "Pointing and box overlap on ImageNet", (), measure, needs="an ImageNet classifier, images with boxes"
)
