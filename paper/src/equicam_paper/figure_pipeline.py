"""Figure pipeline: one image, its views, their maps aligned, their mean, the final map and PEUM."""

import math
from collections.abc import Iterator, Sequence

from equicam.explain import explain
from equicam.models.images import to_display_images
from equicam.overlay import MAX_DEVIATION, overlay
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.figure_drift_strip import correlations
from equicam_paper.image_panels import ImageRow, cells_image, write_images
from equicam_paper.rows import Both, Row, compare, number

VIEWS = 6
IMAGES = 16


def measure(context: Context) -> Iterator[Row]:
    """The most confident of a few images through EquiGrad-CAM with six views; views and their mean share a scale."""
    x = context.open_some(IMAGES)
    found = explain(context.model, x, views=VIEWS)
    alive = [not flags & {"blank", "constant"} for flags in found.flags]
    i = max(range(len(x)), key=lambda i: (alive[i], float(found.confidence[i])))
    views, own = found.views, found.view_maps[i][:, None]
    aligned = views.align(own, "reflect")
    size, brightest = (x.shape[-1], x.shape[-2]), float(own.max()) or 1.0
    rotated = to_display_images(context.model, views.act(x[i : i + 1])[:, 0])
    image = to_display_images(context.model, x[i : i + 1])[0]
    spread = found.peum[i].double().sqrt().cpu().numpy()
    mean = cells_image(aligned[:, 0].mean(0) / brightest, size)
    activation = ("weighted activation", brightest)
    rows = [
        ImageRow("rotate: the views", list(zip(views.labels, rotated, strict=True))),
        ImageRow("the map of each view, in its own frame", [("", cells_image(p / brightest, size)) for p in own[:, 0]], activation),
        ImageRow(
            "align: the same maps in the frame of the presented image, and their mean",
            [*((label, cells_image(p / brightest, size)) for label, p in zip(views.labels, aligned[:, 0], strict=True)), ("mean", mean)],
            activation,
        ),
        ImageRow("EquiGrad-CAM", [("presented image", image), ("map", overlay(image, found.map[i].double().cpu().numpy()))], ("map", 1.0)),
        ImageRow(
            "where the views disagree: the root of PEUM", [("", overlay(image, spread / MAX_DEVIATION))],
            ("standard deviation", MAX_DEVIATION),
        ),
    ]  # fmt: skip
    yield write_images(rows, "From views to a map", context.out / "figure-pipeline", inches=1.3)
    yield from _numbers(views.labels, found.view_confidence[i].tolist(), correlations(aligned[:, 0]))


def _numbers(labels: Sequence[str], confidence: Sequence[float], alike: Sequence[float]) -> Iterator[Row]:
    """The confidence of each view, and how alike its aligned map is to that of the presented image."""
    for label, p, r in zip(labels, confidence, alike, strict=True):
        yield compare("", Both(number(p, 1), None), label=f"view {label}: confidence")
        if not math.isnan(r):
            yield compare(
                "",
                Both(number(r, 1), None),
                label=f"view {label}: r of its aligned map with that of the presented image",
            )


EXPERIMENT = Experiment(
    "Figure pipeline: from views to a map", (), measure, needs="a classifier and a few images"
)
