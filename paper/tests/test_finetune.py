"""Fine-tuning learns, resumes to the same weights, leaves the caller's random state alone, and writes a model card."""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import equicam
import equicam_paper
from equicam.core.views import rotate, rotate_each
from equicam.errors import EquicamError
from equicam_paper import finetune as training
from equicam_paper.cli import app
from equicam_paper.finetune import finetune, initial_model

FACTORY = """
import torch
from torch import nn
from torchvision.transforms import v2
import equicam

STEPS = [v2.Resize(24), v2.CenterCrop(24), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]

def tiny():
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )
    steps = v2.Compose([*STEPS, v2.Normalize((0.5,) * 3, (0.5,) * 3)])
    return equicam.wrap(net, layer="3", preprocess=steps, mean=(0.5,) * 3, std=(0.5,) * 3)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Reddish, greenish and bluish noise, and a factory for a network of ten classes."""
    root = tmp_path_factory.mktemp("domain")
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 8)):
        for channel, name in enumerate(("blue", "green", "red")):
            folder = root / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image = rng.integers(0, 140, (28, 28, 3))
                image[..., 2 - channel] += 100
                Image.fromarray(image.astype(np.uint8)).save(folder / f"{i}.png")
    (root / "nets.py").write_text(FACTORY)
    return root


@pytest.fixture
def domain(source, tmp_path):
    """The source in a folder of the test's own."""
    for name in ("data", "nets.py"):
        (tmp_path / name).symlink_to(source / name)
    return tmp_path


@pytest.fixture
def arch(domain):
    return f"{domain / 'nets.py'}:tiny"


OPTIONS = {"epochs": 4, "batch": 8, "rate": 1e-2, "workers": 0, "device": "cpu"}


def test_it_learns_and_its_weights_load_with_the_class_names(domain, arch):
    lines = []
    path, found = finetune(domain / "data", arch, domain / "out", **OPTIONS, progress=lines.append)
    assert found.balanced > 0.9
    assert found.images == 24
    assert set(found.recall) == {"blue", "green", "red"}
    assert len(lines) == 4
    model = equicam.load(arch, weights=path)
    assert model.classes == ("blue", "green", "red")
    images = sorted((domain / "data" / "test").rglob("*.png"))
    predicted = equicam.explain(model, images, method="grad-cam").target.tolist()
    right = np.mean([model.classes[c] == p.parent.name for c, p in zip(predicted, images, strict=True)])
    assert right == pytest.approx(found.accuracy)
    card = (domain / "out" / "card.md").read_text()
    for words in ("blue, green, red", "balanced accuracy", "no rotated training images", "seed 0", "epoch"):
        assert words in card
    assert not (domain / "out" / "checkpoint.pt").exists()


@pytest.mark.parametrize("rotated", [False, True])
def test_interrupted_it_resumes_to_the_same_weights(domain, arch, rotated, monkeypatch):
    monkeypatch.setattr(training, "CHECKPOINT_SECONDS", 0.0)
    options = OPTIONS | {"rotation_augment": rotated}
    whole, _ = finetune(domain / "data", arch, domain / "whole", **options)

    def stop(line):
        if line.startswith("epoch 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(domain / "data", arch, domain / "cut", **options, progress=stop)
    assert (domain / "cut" / "checkpoint.pt").is_file()
    with pytest.raises(EquicamError, match="seed was 0, is 1"):
        finetune(domain / "data", arch, domain / "cut", **options, seed=1)
    lines = []
    cut, _ = finetune(domain / "data", arch, domain / "cut", **options, progress=lines.append)
    assert lines[0].startswith("epoch 3")
    torch.testing.assert_close(load_file(cut), load_file(whole), rtol=0, atol=0)


def test_checkpoints_are_a_minute_apart(domain, arch, monkeypatch):
    """Epochs of 25 s: the third ends 75 s after the beginning, the sixth 75 s after the checkpoint of the third."""
    now = [0.0]
    monkeypatch.setattr(training, "monotonic", lambda: now[0])
    saved, save, plain_epoch = [], training.Training._save, training.Training._epoch
    monkeypatch.setattr(
        training.Training, "_save", lambda self: saved.append(len(self.history)) or save(self)
    )

    def epoch(self, *given):
        now[0] += 25
        return plain_epoch(self, *given)

    monkeypatch.setattr(training.Training, "_epoch", epoch)
    options = OPTIONS | {"epochs": 7, "patience": 7}
    finetune(domain / "data", arch, domain / "out", **options)
    assert saved == [3, 6]


def test_seeds_and_rotated_images_make_other_weights(domain, arch):
    short = OPTIONS | {"epochs": 1}
    made = [
        load_file(finetune(domain / "data", arch, domain / f"o{i}", **short | more)[0])["7.weight"]
        for i, more in enumerate(({}, {"workers": 2}, {"seed": 1}, {"rotation_augment": True}))
    ]
    assert torch.equal(made[0], made[1])  # the number of workers decides nothing
    assert not torch.allclose(made[0], made[2])
    assert not torch.allclose(made[0], made[3])


def test_the_caller_s_generators_stay_as_they_were(domain, arch):
    """The weights depend on the seed alone, and the caller's random numbers do not depend on the training."""

    def states():
        return torch.get_rng_state().tolist(), str(np.random.get_state())  # noqa: NPY002  # the global one

    weights, numbers = [], set()
    for i, seed in enumerate((3, 4)):
        torch.manual_seed(seed)
        random.seed(seed)
        before, during = states(), []
        path, _ = finetune(
            domain / "data", arch, domain / f"o{i}", **OPTIONS | {"epochs": 2},
            rotation_augment=True, progress=lambda _line, during=during: during.append(states()),
        )  # fmt: skip
        assert states() == before
        assert during == [before, before]
        weights.append(load_file(path))
        numbers.add(random.random())  # type checks in tests draw from it, so only reseeding shows
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert len(numbers) == 2


def test_it_stops_early_and_keeps_the_best(domain, arch):
    lines, options = [], OPTIONS | {"epochs": 30, "patience": 2}
    finetune(domain / "data", arch, domain / "out", **options, progress=lines.append)
    assert len(lines) < 30


def test_weights_to_start_from_may_lack_the_head_but_must_fit(domain, arch):
    given = {f"0.{k}": torch.full_like(v, 0.25) for k, v in equicam.load(arch).module[0].state_dict().items()}
    save_file(given, domain / "start.safetensors")
    model = initial_model(arch, domain / "start.safetensors", 3)
    assert (model.module[0].weight == 0.25).all()
    assert model.module[7].out_features == 3
    save_file({"trunk.weight": torch.zeros(3)}, domain / "other.safetensors")
    with pytest.raises(EquicamError, match="needs tensors of"):
        initial_model(arch, domain / "other.safetensors", 3)


def test_a_name_without_separator_and_suffix_is_no_file_to_start_from(domain, arch, monkeypatch):
    given = {k: torch.full_like(v, 0.25) for k, v in equicam.load(arch).module.state_dict().items()}
    torch.save(given, domain / "random")
    monkeypatch.chdir(domain)
    assert initial_model("embedded", "random", 3).layer == "layer4"  # the file does not fit it
    assert (initial_model(arch, "./random", 3).module[0].weight == 0.25).all()
    (domain / "random").rename(domain / "checkpoint")
    with pytest.raises(EquicamError, match="got 'checkpoint'"):
        initial_model(arch, "checkpoint", 3)
    with pytest.raises(EquicamError, match=r"an existing file, got 'absent\.pth'"):
        initial_model(arch, "absent.pth", 3)


def test_torchvision_and_timm_heads_are_exchanged():
    assert initial_model("resnet18", "random", 5).module.fc.out_features == 5
    assert initial_model("vgg11", "random", 5).module.classifier[6].out_features == 5
    assert initial_model("timm:vit_tiny_patch16_224", "random", 5).module.head.out_features == 5


def test_one_class_is_refused(domain, arch):
    with pytest.raises(EquicamError, match="two classes or more"):
        finetune(domain / "data" / "train" / "red", arch, domain / "out", train=None)


def test_the_command_says_how_good_it_is(domain, arch):
    where = ["--arch", arch, "--out", str(domain / "out")]
    options = ["--epochs", "1", "--workers", "0", "--device", "cpu"]
    command = ["finetune", str(domain / "data"), *where, *options]
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "on 24 test images" in result.output
    assert (domain / "out" / "weights.safetensors").is_file()
    again = CliRunner().invoke(app, [*command, "--json", "--quiet"])
    schema = Path(equicam_paper.__file__).parent / "schemas/finetune.json"
    jsonschema.Draft202012Validator(json.loads(schema.read_text())).validate(json.loads(again.stdout))
    assert json.loads(again.stdout)["images"] == 24


def test_every_image_is_rotated_by_its_own_angle():
    x = torch.randn(3, 2, 12, 16, dtype=torch.float64)
    angles = torch.tensor([10.0, -75.0, 180.0], dtype=torch.float64)
    found = rotate_each(x, angles)
    for i, angle in enumerate(angles.tolist()):
        assert torch.allclose(found[i], rotate(x[i], angle), atol=1e-9)
