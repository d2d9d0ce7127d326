"""Draw docs/context.png: a view of the crop, its corners reflected, and the same view cut from the scene.

python scripts/context_image.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from equicam.core.views import Views, Window, crop_centre, rotate
from equicam.demo import synthetic_patches

OUT = Path(__file__).parents[1] / "docs" / "context.png"
SIDE, DEGREES, INK = 64, 30.0, "#17131f"


def main() -> None:
    """Three panels: the scene, the view reflected, the view with context."""
    scene = torch.from_numpy(np.array(synthetic_patches()[4])).permute(2, 0, 1)[None].double() / 255
    crop = crop_centre(scene, (SIDE, SIDE)).contiguous()
    view = Views([DEGREES])
    reflected, cut = view.act(crop)[0, 0], view.act(scene, Window((SIDE, SIDE)))[0, 0]
    invented = (rotate(torch.ones(1, SIDE, SIDE), DEGREES, fill="zeros")[0] < 0.5).numpy()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.9), layout="constrained")
    figure.suptitle("What a rotated view shows at its corners", fontsize=12, color=INK)
    titles = (
        "Scene, and the window the model sees",
        f"View at {DEGREES:g}°, corners reflected",
        f"View at {DEGREES:g}°, cut from the scene",
    )
    for one, image, title in zip(axes, (scene[0], reflected, cut), titles, strict=True):
        one.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), interpolation="nearest")
        one.set_title(title, fontsize=10, color=INK)
        one.set_axis_off()
    half, middle = SIDE / 2, (scene.shape[-1] - 1) / 2
    corners = np.array([[-half, -half], [half, -half], [half, half], [-half, half], [-half, -half]])
    theta = np.deg2rad(DEGREES)
    matrix = np.array([[np.cos(theta), -np.sin(theta)], [np.sin(theta), np.cos(theta)]])
    for points, dashes, label in (
        (corners, "-", "window as presented"),
        (corners @ matrix.T, "--", f"rotated by {DEGREES:g}°"),
    ):
        axes[0].plot(*(points + middle).T, dashes, color=INK, linewidth=1.4, label=label)
    axes[0].legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=2, fontsize=8, frameon=False)
    axes[1].contour(invented, levels=[0.5], colors=INK, linewidths=1.2)
    axes[1].text(
        2,
        6,
        "invented by reflection",
        fontsize=9,
        color="white",
        bbox={"facecolor": INK, "alpha": 0.8, "pad": 2},
    )
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
