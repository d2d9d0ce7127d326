"""Exceptions out of the caller's code are named, with the line; running out of memory is not."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.errors import ModelError
from tests.conftest import Cnn, explained, pictures, seeded


class Broken(Cnn):
    def forward(self, x):
        raise KeyError("nothing here")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise ZeroDivisionError("of my own")


class BrokenBackward(Cnn):
    def forward(self, x):
        return NoBackward.apply(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "cause", "place"),
    [(Broken, KeyError, "in forward"), (BrokenBackward, ZeroDivisionError, "in backward")],
)
def test_an_exception_of_the_model_is_named_with_its_line(kind, cause, place):
    model = equicam.wrap(seeded(kind), layer="trunk")
    with pytest.raises(ModelError) as found:
        equicam.explain(model, pictures())
    named = f"the model '{kind.__name__}' needs to run on inputs .*got {cause.__name__}: .*test_failures.py:.*{place}"
    assert found.match(f"(?s){named}")
    assert isinstance(found.value.__cause__, cause)


def test_channels_are_named():
    module = nn.Sequential(nn.Conv2d(4, 2, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = equicam.wrap(module, layer="1")
    with pytest.raises(equicam.EquicamError, match="inputs with 4 channels, got 3 channels") as found:
        equicam.explain(model, torch.rand(1, 3, 32, 32))
    assert isinstance(found.value.__cause__, RuntimeError)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
def test_running_out_of_memory_is_not_renamed(error):
    class Full(Cnn):
        def forward(self, x):
            try:
                raise error
            except (torch.OutOfMemoryError, MemoryError):
                raise RuntimeError("the capture broke")  # noqa: B904

    with pytest.raises(RuntimeError, match="the capture broke"):
        explained(seeded(Full), pictures())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def build(:\n", "the file mine.py needs to be imported, got SyntaxError: "),
        ("import no_such_package\n", "got ModuleNotFoundError: No module named 'no_such_package'"),
        ("def build():\n    return {}['weights']\n", "the factory 'build' needs to return a model, got KeyError: 'weights'"),
        ("def build():\n    raise SystemExit(3)\n", "got SystemExit: 3"),
    ],
)  # fmt: skip
def test_an_exception_of_a_factory_is_named_with_its_line(tmp_path, code, message):
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ModelError) as found:
        equicam.load(f"{file}:build")
    assert message in str(found.value)
    assert "mine.py:" in str(found.value).partition(", got ")[2]


class Exits(Cnn):
    def forward(self, x):
        raise SystemExit(7)


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unprintable(Cnn):
    def forward(self, x):
        raise UnprintableError


class Interrupted(Cnn):
    def forward(self, x):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "got"),
    [(Broken, "KeyError: 'nothing here' ("), (Exits, "SystemExit: 7 ("), (Unprintable, "UnprintableError (")],
)
def test_a_model_that_always_raises_fails_alike_with_and_without_a_layer(kind, got):
    net = seeded(kind)
    with pytest.raises(ModelError) as later:
        explained(net, pictures(1), views=1)
    with pytest.raises(ModelError) as choosing:
        equicam.explain(net, pictures(1), views=1)
    assert str(choosing.value) == str(later.value)
    assert f"got {got}" in str(later.value)
    assert "test_failures.py:" in str(later.value)


def test_zeros_of_a_guessed_size_are_named_as_such_and_ctrl_c_stays_ctrl_c():
    with pytest.raises(
        ModelError, match=r"on inputs \(1, 3, 224, 224\), .*; try mending it there, or example="
    ):
        equicam.wrap(seeded(Broken))
    with pytest.raises(KeyboardInterrupt):
        equicam.wrap(seeded(Interrupted))
    with pytest.raises(KeyboardInterrupt):
        explained(seeded(Interrupted), pictures())


def test_an_exception_of_a_target_function_is_named_with_its_line():
    model = equicam.wrap(seeded(Cnn), layer="trunk")
    with pytest.raises(
        ModelError, match=r"target needs a function that runs on .*, got IndexError: "
    ) as found:
        equicam.explain(model, pictures(), target=lambda y: y[:, 99])
    assert "test_failures.py:" in str(found.value)
    assert isinstance(found.value.__cause__, IndexError)


def broken_preprocessing(image):
    raise KeyError("prep bug")


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(2):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


NAMED = "the model's preprocessing needs to take an image of {}, got KeyError: 'prep bug' ("


def test_an_exception_of_a_preprocessing_is_named_with_its_line(photos, tmp_path):
    model = equicam.wrap(seeded(Cnn), layer="trunk", preprocess=broken_preprocessing)
    for context in ("none", "auto"):
        with pytest.raises(ModelError) as found:
            equicam.explain(model, photos / "0.png", context=context)
        assert NAMED.format("48×40") in str(found.value)
        assert "test_failures.py:" in str(found.value)
    with pytest.raises(ModelError, match=r"prep bug.*test_failures\.py:"):
        equicam.evaluate(model, str(photos), methods=["grad-cam"], scores=["eq"], out=tmp_path / "e")
    run = equicam.audit(str(photos), model, tmp_path / "run", views=2, workers=1)
    row = run.items.to_pylist()[0]
    assert row["reason"] == "refused"
    assert json.loads(row["reason_values"])["got"].startswith("KeyError: 'prep bug' (")
    assert "test_failures.py:" in row["reason_values"]


@pytest.mark.parametrize("returned", [None, np.zeros((3, 32, 32)), torch.zeros(1, 3, 32, 32)])
def test_what_a_preprocessing_returns_is_checked(returned, photos):
    model = equicam.wrap(seeded(Cnn), layer="trunk", preprocess=lambda _image: returned)
    with pytest.raises(equicam.EquicamError, match=r"preprocessing needs to return a tensor \[c, H, W\]"):
        equicam.explain(model, photos / "0.png")


MODEL = """
import torch
from torch import nn
import equicam

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=8)
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        {forward}
        return self.head(self.conv(x).mean((2, 3)))

def prep(image):
    {prep}
    return torch.rand(3, 64, 64)

def build():
    return equicam.wrap(Net(), preprocess=prep{layer})
"""
ALL = ("explain", "evaluate", "audit")


@pytest.mark.parametrize(
    ("command", "broken", "layer", "named"),
    [
        ("explain", "forward", "", "got ValueError: mine (mine.py:12, in forward)"),
        ("explain", "exit", "", "got SystemExit: 7 (mine.py:12, in forward)"),
        *(
            (name, "forward", ", layer='conv'", "got ValueError: mine (mine.py:12, in forward)")
            for name in ALL
        ),
        *((name, "prep", "", "got ValueError: mine (mine.py:16, in prep)") for name in ALL),
    ],
)
def test_the_command_line_names_them(photos, tmp_path, monkeypatch, command, broken, layer, named):
    monkeypatch.chdir(tmp_path)
    raised = "raise SystemExit(7)" if broken == "exit" else "raise ValueError('mine')"
    lines = {"forward": "pass", "prep": "pass", "prep" if broken == "prep" else "forward": raised}
    (tmp_path / "mine.py").write_text(MODEL.format(layer=layer, **lines))
    source = photos / "0.png" if command == "explain" else photos
    more = ["--views", "2"] if command != "evaluate" else ["--methods", "grad-cam"]
    arguments = [command, str(source), "--model", "mine.py:build", "--out", "out", *more]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert named in done.output.replace("\n", "")
    assert "Traceback" not in done.output
    assert done.exit_code == 1
    assert "wrap(module" not in done.output
