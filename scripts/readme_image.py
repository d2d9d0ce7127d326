"""Draw the README's image: one patch at several angles, Grad-CAM above, EquiGrad-CAM below.

    python scripts/readme_image.py [--out docs/drift.png]

A synthetic patch, rotated; each map is computed on the rotated patch. Both rows explain the class predicted on the
upright one.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import equicam
from equicam.data.synthetic import draw
from equicam.models.images import preprocess_image, to_display_images
from equicam.report.overlay import overlay, panel

ANGLES = (0, 45, 90, 135, 180)


def main() -> None:
    """Among fifty patches, draw the one with the highest PEUM that keeps its class at every angle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "drift.png")
    args = parser.parse_args()
    model = equicam.load("embedded")
    patches = [draw(i, seed=11) for i in range(50)]
    x = torch.stack([preprocess_image(model, Image.fromarray(p.image)) for p in patches])
    e = equicam.explain(model, x)
    consistent = [
        i for i, p in enumerate(patches) if p.label == 1 == int(e.target[i]) and not e.view_flips[i].any()
    ]
    index = max(consistent, key=lambda i: float(e.peum_score[i]))
    rotated = equicam.Views(ANGLES).act(x[index : index + 1])[:, 0]
    images = to_display_images(model, rotated)
    rows = [[(f"Patch, rotated {a}°", image) for a, image in zip(ANGLES, images, strict=True)]]
    for method, name in (("grad-cam", "Grad-CAM"), ("equigrad-cam", "EquiGrad-CAM")):
        maps = equicam.explain(model, rotated, method=method, target=int(e.target[index])).map.numpy()
        rows.append(
            [
                (f"{name}, {a}°", overlay(image, m))
                for a, image, m in zip(ANGLES, images, maps.astype(np.float64), strict=True)
            ]
        )
    title = (
        f"A synthetic patch at five angles: {model.classes[int(e.target[index])]}, explained by two methods"
    )
    panel(rows, args.out, title=title, inches=1.55)
    Image.open(args.out).convert("RGB").save(args.out, optimize=True)


if __name__ == "__main__":
    main()
