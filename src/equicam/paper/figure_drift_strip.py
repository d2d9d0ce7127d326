"""Figure drift strip: one image at five angles, Grad-CAM above, EquiGrad-CAM below."""

from collections.abc import Iterator

from equicam.core.views import Views
from equicam.explain import explain
from equicam.models.images import to_display_images
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.figure_pipeline import figure_row
from equicam.paper.rows import Row
from equicam.report.overlay import overlay, panel

ANGLES = (0, 45, 90, 135, 180)
IMAGES = 64


def measure(context: Context) -> Iterator[Row]:
    """The least confident image that keeps its class in every view; each map explains the rotated image."""
    x = context.open_some(IMAGES)
    found = explain(context.model, x)
    i = min(range(len(x)), key=lambda i: (int(found.view_flips[i].sum()), float(found.confidence[i])))
    rotated = Views(ANGLES).act(x[i : i + 1])[:, 0]
    images = to_display_images(context.model, rotated)
    panels = [[(f"rotated {a}°", p) for a, p in zip(ANGLES, images, strict=True)]]
    for method, name in (("grad-cam", "Grad-CAM"), ("equigrad-cam", "EquiGrad-CAM")):
        explained = explain(context.model, rotated, method=method, target=int(found.target[i]))
        maps = explained.map.double().cpu().numpy()
        panels.append(
            [(f"{name}, {a}°", overlay(p, m)) for a, p, m in zip(ANGLES, images, maps, strict=True)]
        )
    context.out.mkdir(parents=True, exist_ok=True)
    path = context.out / "drift-strip.png"
    panel(panels, path, inches=1.9)
    yield figure_row(path)


EXPERIMENT = Experiment(
    "Figure drift strip: maps of one image at five angles", (), measure, needs="a classifier and a few images"
)
