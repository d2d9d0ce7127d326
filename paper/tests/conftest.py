"""Stand-ins for the paper's networks and data sets; one folder keeps the evaluations that all tests share."""

from functools import partial

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import equicam
from equicam.evaluate import statistics, summary
from equicam_paper.context import Context
from scripts.synthetic import draw_many
from tests.conftest import Cnn, Vit, seeded

SIDE = 32
FACTORY = """
import equicam
from tests.conftest import Cnn, seeded
from conftest import small

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


def save_images(root, folders, seed=0):
    """One synthetic patch in each of the folders."""
    for i, (folder, patch) in enumerate(zip(folders, draw_many(len(folders), seed=seed), strict=True)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(patch.image).save(root / folder / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """Where every context keeps its evaluations: the same one is computed once."""
    return tmp_path_factory.mktemp("evaluations")


@pytest.fixture(scope="session")
def tiles(tmp_path_factory):
    """Three synthetic patches of either class, a folder a class."""
    return save_images(tmp_path_factory.mktemp("tiles"), ("no", "yes") * 3)


@pytest.fixture(scope="session")
def context(tiles, out):
    """A small confident network on three images in the place of ResNet-50 on ImageNet."""
    model = cnn()
    model.module.head.weight.data *= 100
    return Context(model, tiles, out, n=3)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Intervals of a few resamples: no test here reads their width."""
    monkeypatch.setattr(statistics, "bootstrap", partial(statistics.bootstrap, resamples=100))
    monkeypatch.setattr(summary, "signals", partial(summary.signals, resamples=100))


@pytest.fixture(scope="session")
def patches(tmp_path_factory):
    """Synthetic patches as PatchCamelyon keeps them."""
    root = tmp_path_factory.mktemp("pcam")
    made = list(draw_many(5, seed=3))
    for name, values in (("x", [p.image for p in made]), ("y", [[[[p.label]]] for p in made])):
        with h5py.File(root / f"camelyonpatch_level_2_split_test_{name}.h5", "w") as file:
            file[name] = np.concatenate(values) if name == "y" else np.stack(values)
    return root


@pytest.fixture(scope="session")
def birds(tmp_path_factory):
    """Three synthetic patches as CUB-200-2011 keeps birds."""
    root = save_images(tmp_path_factory.mktemp("cub"), ("images",) * 3, seed=5)
    files = {"images": "{i} {j}.png", "image_class_labels": "{i} {i}", "bounding_boxes": "{i} 10 20 60 50"}
    files["train_test_split"] = "{i} 0"
    for name, text in files.items():
        (root / f"{name}.txt").write_text("".join(text.format(i=i, j=i - 1) + "\n" for i in (1, 2, 3)))
    return root


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    """A factory, and files of weights for it that differ a little."""
    root = tmp_path_factory.mktemp("models")
    (root / "nets.py").write_text(FACTORY)
    arch, files = f"{root / 'nets.py'}:tiny", {}
    for i, name in enumerate(("plain", "rotated", "seed0", "seed1", "seed2")):
        (root / name).mkdir()
        files[name] = root / name / "weights.safetensors"
        state = equicam.load(arch).module.state_dict()
        state["head.bias"] = state["head.bias"] + torch.tensor([0.5, 0]) * i
        save_file({key: value.contiguous() for key, value in state.items()}, files[name])
    return arch, files
