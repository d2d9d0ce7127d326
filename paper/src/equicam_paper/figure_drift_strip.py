"""Figure drift strip: the maps of one rotated image, Grad-CAM in the rotated frame, EquiGrad-CAM in that of the presented one.

The paper compares maps in two frames. A third row, which it does not have, shows Grad-CAM in the frame of EquiGrad-CAM's row,
where the two can be compared.
"""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.views import Views
from equicam.explain import explain
from equicam.models.images import to_display_images
from equicam.overlay import RgbImage, overlay
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.image_panels import ImageRow, write_images
from equicam_paper.rows import Both, Row, compare, number

ANGLES = (0, 45, 90, 135, 180)
IMAGES = 64
SCALE = ("map", 1.0)


def measure(context: Context) -> Iterator[Row]:
    """The image of median stability among those that keep their class most often; each map explains the rotated image."""
    x = context.open_some(IMAGES)
    found = explain(context.model, x)
    i = typical(found.stability, found.view_flips)
    views = Views(ANGLES)
    rotated = views.act(x[i : i + 1])[:, 0]
    presented, images = (
        to_display_images(context.model, x[i : i + 1])[0],
        to_display_images(context.model, rotated),
    )
    maps = {
        method: explain(context.model, rotated, method=method, target=int(found.target[i])).map.double()
        for method in ("grad-cam", "equigrad-cam")
    }
    back = {method: views.align(of[:, None], "reflect")[:, 0] for method, of in maps.items()}

    def canonical(method: str) -> list[tuple[str, RgbImage]]:
        aligned = back[method].clamp(0, 1)
        agree = correlations(aligned)
        return [
            (f"{a}°: r = {r:.2f}", overlay(presented, m.cpu().numpy()))
            for a, m, r in zip(ANGLES, aligned, agree, strict=True)
        ]

    rows = [
        ImageRow("the rotated images", [(f"{a}°", p) for a, p in zip(ANGLES, images, strict=True)]),
        ImageRow(
            "Grad-CAM, in the rotated frame",
            [(f"{a}°", overlay(p, m.cpu().numpy())) for a, p, m in zip(ANGLES, images, maps["grad-cam"], strict=True)], SCALE,
        ),
        ImageRow("EquiGrad-CAM, rotated back to the presented frame; r with the map at 0°, in the disc", canonical("equigrad-cam"), SCALE),
        ImageRow("Grad-CAM, rotated back as well (not in the paper's figure)", canonical("grad-cam"), SCALE),
    ]  # fmt: skip
    yield write_images(
        rows, "Maps of one image at five angles", context.out / "figure-drift-strip", inches=1.6
    )
    for method, aligned in back.items():
        for angle, r in zip(ANGLES[1:], correlations(aligned.clamp(0, 1))[1:], strict=True):
            label = f"{method} at {angle}°: r with the map at 0°, in the disc"
            if not math.isnan(r):
                yield compare("", Both(number(r, 1), None), label=label)


def typical(stability: Float[Tensor, " b"], flips: Float[Tensor, "b t"] | Tensor) -> int:
    """The image of median stability among those with the fewest flipped views."""
    flipped = flips.sum(1)
    kept = (flipped == flipped.min()).nonzero()[:, 0]
    order = kept[stability[kept].nan_to_num(-1.0).argsort()]
    return int(order[len(order) // 2])


def correlations(maps: Float[Tensor, "t H W"]) -> list[float]:
    """Pearson of every map with the first, inside the inscribed disc."""
    side = maps.shape[-1]
    at = torch.arange(side, device=maps.device) - (side - 1) / 2
    disc = (at[:, None] ** 2 + at**2) <= (side / 2) ** 2
    inside = maps[:, disc]
    return [float(torch.corrcoef(torch.stack((inside[0], one)))[0, 1]) for one in inside]


EXPERIMENT = Experiment(
    "Figure drift strip: maps of one image at five angles", (), measure, needs="a classifier and a few images"
)
