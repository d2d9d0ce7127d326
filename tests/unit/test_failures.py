"""Exceptions out of the caller's code are named, with the line; running out of memory is not."""

import pytest
import torch
from torch import nn

import equicam
from equicam.errors import ModelError
from tests.conftest import Cnn, pictures, seeded


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
    text = str(found.value)
    assert f"the model '{kind.__name__}' needs to run on inputs " in text
    assert f"got {cause.__name__}: " in text
    assert "test_failures.py:" in text
    assert place in text
    assert isinstance(found.value.__cause__, cause)


def test_channels_are_named():
    module = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
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
        equicam.explain(equicam.wrap(seeded(Full), layer="trunk"), pictures())


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
