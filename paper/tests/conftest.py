"""Stand-ins for the paper's networks and data sets; one folder keeps the evaluations that all tests share."""

from functools import partial

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import equicam
from equicam.demo import synthetic_patches
from equicam.evaluate import statistics, summary
from equicam_paper.context import Context
from stand_ins import FACTORY, cnn, save_images


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
    model.module.head.weight.data *= 300
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
    images, labels = np.stack(synthetic_patches(5)), np.array([1, 0, 1, 0, 1])
    for name, values in (("x", images), ("y", labels.reshape(-1, 1, 1, 1))):
        with h5py.File(root / f"camelyonpatch_level_2_split_test_{name}.h5", "w") as file:
            file[name] = values
    return root


@pytest.fixture(scope="session")
def birds(tmp_path_factory):
    """Three synthetic patches as CUB-200-2011 keeps birds."""
    root = save_images(tmp_path_factory.mktemp("cub"), ("images",) * 3)
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
