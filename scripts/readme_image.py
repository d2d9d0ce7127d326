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
    found = equicam.explain(model, x)
    right = [
        i for i, p in enumerate(patches) if p.label == 1 == int(found.target[i]) and not found.flips[i].any()
    ]
    index = max(right, key=lambda i: float(found.score[i]))
    turned = equicam.Views(ANGLES).act(x[index : index + 1])[:, 0]
    pictures = to_display_images(model, turned)
    rows = [[(f"turned {a}°", p) for a, p in zip(ANGLES, pictures, strict=True)]]
    for method, name in (("grad-cam", "Grad-CAM"), ("equigrad-cam", "EquiGrad-CAM")):
        maps = equicam.explain(model, turned, method=method, target=int(found.target[index])).map.numpy()
        rows.append(
            [
                (f"{name}, {a}°", overlay(p, m))
                for a, p, m in zip(ANGLES, pictures, maps.astype(np.float64), strict=True)
            ]
        )
    panel(rows, args.out, inches=1.9)


if __name__ == "__main__":
    main()
