"""Stand-ins for the paper's networks, and rows with made-up numbers."""

import numpy as np
import torch

import equicam
from equicam.demo import synthetic_patches
from equicam.evaluate.statistics import Estimate
from equicam_paper.kept import KeptRows
from equicam_paper.rows import Both, compare
from tests.conftest import Cnn, Vit, seeded

SIDE = 32
FACTORY = """
import equicam
from stand_ins import small
from tests.conftest import Cnn, seeded

def tiny():
    return equicam.wrap(seeded(lambda: Cnn(classes=2)), layer="trunk", preprocess=small, classes=("no", "yes"))
"""


def small(image):
    pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float64)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 128 - 1


LEVELS = {"preprocess": small, "mean": (128 / 255,) * 3, "std": (128 / 255,) * 3}


def cnn():
    return equicam.wrap(seeded(Cnn), layer="trunk", **LEVELS)


def vit():
    return equicam.wrap(seeded(Vit), layer="blocks.1.norm1", preprocess=small)


def save_images(root, folders):
    """One synthetic patch in each of the folders."""
    for i, (folder, patch) in enumerate(zip(folders, synthetic_patches(len(folders)), strict=True)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        patch.save(root / folder / f"{i}.png")
    return root


def estimate(value, half=0.004, n=1000):
    return Estimate(value, value - half, value + half, n)


def measured(claim, value, label, n=1000):
    """A row whose number is the same by both protocols."""
    return compare(claim, Both(estimate(value, n=n), estimate(value, n=n)), label=label)


def kept(experiment, *rows, n=1000, device="cpu", domain="", backbone="resnet50"):
    """Rows as an experiment keeps them."""
    facts = {
        "version": "1", "commit": "abc", "torch": "2", "weights": "w" * 64, "data": "val", "images": "i" * 64, "n": n, "groups": None,
        "drawn": "all", "device": device, "dtype": "float32", "compiled": False, "date": "2026-01-01",
    }  # fmt: skip
    return KeptRows(experiment, backbone, domain, facts, rows)
