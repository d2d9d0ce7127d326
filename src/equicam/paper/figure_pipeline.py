"""Figure pipeline: one image, its views, their maps aligned, the mean and the final map."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from equicam.explain import explain
from equicam.models.images import to_display_images
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Row, note
from equicam.report.overlay import MAX_DEVIATION, RgbImage, heat, overlay, panel

VIEWS = 6
IMAGES = 16


def measure(context: Context) -> Iterator[Row]:
    """The most confident of a few images through EquiGrad-CAM with six views."""
    x = context.open_some(IMAGES)
    found = explain(context.model, x, views=VIEWS)
    alive = [not flags & {"blank", "constant"} for flags in found.flags]
    i = max(range(len(x)), key=lambda i: (alive[i], float(found.confidence[i])))
    views, own = found.views, found.view_maps[i][:, None]
    aligned = views.align(own, "reflect")
    size, scale = (x.shape[-1], x.shape[-2]), float(own.max()) or 1.0
    rotated = to_display_images(context.model, views.act(x[i : i + 1])[:, 0])
    image = to_display_images(context.model, x[i : i + 1])[0]
    spread = found.peum[i].double().sqrt().cpu().numpy() / MAX_DEVIATION
    mean = found.layer_map[i] / (float(found.layer_map[i].max()) or 1.0)
    panels = [
        [(f"view {label}", p) for label, p in zip(views.labels, rotated, strict=True)],
        [("its own map", _cells(p / scale, size)) for p in own[:, 0]],
        [("aligned", _cells(p / scale, size)) for p in aligned[:, 0]],
    ]
    panels[0].append(("EquiGrad-CAM", overlay(image, found.map[i].double().cpu().numpy())))
    panels[1].append(("views disagree", overlay(image, spread)))
    panels[2].append(("averaged", _cells(mean, size)))
    context.out.mkdir(parents=True, exist_ok=True)
    path = context.out / "pipeline.png"
    panel(panels, path, inches=1.5)
    yield figure_row(path)


def _cells(plane: Float[Tensor, "h w"], size: tuple[int, int]) -> RgbImage:
    """A map at layer resolution, its cells visible."""
    cells = Image.fromarray(heat(np.clip(plane.double().cpu().numpy(), 0, 1)))
    return np.asarray(cells.resize(size, Image.Resampling.NEAREST))


def figure_row(path: Path) -> Row:
    """A figure has no number: its row names the file."""
    written = note(f"written: {path}")
    return Row("", "figure", "figure", None, None, "measured", written)


EXPERIMENT = Experiment(
    "Figure pipeline: from views to a map", (), measure, needs="a classifier and a few images"
)
