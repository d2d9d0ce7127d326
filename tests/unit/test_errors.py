"""Every mistake a caller can make says what was needed, what was given and what to try; nothing stays on the model."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import equicam
from equicam import EquicamError, Fusion, KeepConfident, Layout, SoftGate, Views
from tests.conftest import Cnn, Vit, pictures, seeded
from tests.hostile.generate import encode


class Cut(Cnn):
    def forward(self, x):
        with torch.no_grad():
            acts = self.trunk(x)
        return self.rest(acts.detach())


class Unused(Cnn):
    def __init__(self):
        super().__init__()
        self.spare = nn.Conv2d(3, 3, 1)


class Image(Cnn):
    def forward(self, x):
        return self.trunk(x)


class Answers(Cnn):
    """Its scores in another form."""

    def __init__(self, form, classes=5):
        super().__init__(classes)
        self.form = form

    def forward(self, x):
        return self.form(super().forward(x))


class Folded(Cnn):
    """Windows folded into the batch, as Swin's attention has them."""

    def __init__(self):
        super().__init__()
        self.fold = nn.Identity()

    def forward(self, x):
        acts = self.trunk(x)
        windows = self.fold(acts.unflatten(2, (2, -1)).permute(0, 2, 1, 3, 4).flatten(0, 1))
        return self.rest(windows.unflatten(0, (-1, 2)).permute(0, 2, 1, 3, 4).flatten(2, 3))


def wrapped(build, layer="trunk", **kwargs):
    return equicam.wrap(seeded(build), layer=layer, **kwargs)


def answer(form):
    return equicam.explain(wrapped(lambda: Answers(form)), X)


def dead_head():
    net = seeded(Vit)
    nn.init.zeros_(net.head.weight)
    return equicam.wrap(net, layer="blocks.1.norm1")


X = pictures()
NAN = torch.cat((X, X.clone().index_fill_(2, torch.tensor([3]), torch.nan)))
MISTAKES = {
    "fewer targets than images": (lambda: equicam.explain(wrapped(Cnn), X, target=[1]), r"one class for each of 2 images, got 1"),
    "more targets than images": (lambda: equicam.explain(wrapped(Cnn), X, target=[1, 2, 3]), r"each of 2 images, got 3"),
    "a class out of range": (lambda: equicam.explain(wrapped(Cnn), X, target=5), r"classes from 0 to 4, got \[5, 5\]"),
    "a negative class": (lambda: equicam.explain(wrapped(Cnn), X, target=[0, -1]), r"classes from 0 to 4, got \[0, -1\]"),
    "a fractional class": (lambda: equicam.explain(wrapped(Cnn), X, target=torch.tensor(1.0)), r"target needs a class by number or name"),
    "a wrong layer name": (lambda: wrapped(Cnn, "trunks"), r"got 'trunks'; try 'trunk'"),
    "a layer of another model": (lambda: wrapped(Cnn, nn.ReLU()), r"a submodule of the model, got another ReLU"),
    "a layer that is not spatial": (lambda: equicam.explain(wrapped(Cnn, "head"), X), r"target layer needs an output .* got shape \(\d+, 5\)"),
    "a layer of one cell": (lambda: equicam.explain(wrapped(Cnn, "after.1"), X), r"grid of 2×2 or more, got 1×1"),
    "a layer that never runs": (lambda: equicam.explain(wrapped(Unused, "spare"), X), r"'spare' needs to run"),
    "a layer cut off from the score": (lambda: equicam.explain(wrapped(Cut), X), r"depend on it with gradient"),
    "the wrong layout": (lambda: equicam.explain(wrapped(Cnn, layout="tokens"), X), r"an output \[n, tokens, k\]"),
    "an unknown layout": (lambda: wrapped(Cnn, layout="wide"), r"nchw, nhwc, tokens or a Layout, got 'wide'"),
    "tokens that tile nothing": (lambda: equicam.explain(wrapped(Vit, "blocks.1.norm1", layout=Layout("tokens", prefix=3)), X), r"grid of 65 tokens"),
    "a grid that does not fit": (lambda: equicam.explain(wrapped(Vit, "blocks.1.norm1", layout=Layout("tokens", 1, (7, 8))), X), r"needs 57 tokens, got 65"),
    "patches behind the last attention": (lambda: equicam.explain(wrapped(Vit, "blocks.1.norm2"), X), r"exactly zero at every patch.*try the last block's first LayerNorm"),
    "a head of zeros": (lambda: equicam.explain(dead_head(), X), r"the model's head needs weights that are not all zero"),
    "NaN pixels": (lambda: equicam.explain(wrapped(Cnn), NAN), r"finite pixels, got NaN or infinity in image \[2, 3\]"),
    "sigmoid outputs": (lambda: answer(lambda s: s[:, 0].sigmoid()), r"needs logits, got probabilities"),
    "softmax outputs": (lambda: answer(lambda s: {"probs": s.softmax(1)}), r"needs logits, got probabilities"),
    "windows folded into the batch": (lambda: equicam.explain(wrapped(Folded, "fold"), X), r"one row per image, 36 in all, got shape \(72,"),
    "a dict that does not say which": (lambda: answer(lambda s: {"embedding": s[:, :3], "scores": s}), r"class logits \[36, classes\].*got dict"),
    "one number for all": (lambda: answer(lambda s: s.sum()), r"got a tensor \(\)"),
    "too few class names": (lambda: equicam.explain(wrapped(Cnn, classes=["a", "b"]), X), r"one for each of 5 classes, got 2"),
    "class names in one string": (lambda: equicam.wrap(seeded(Cnn), "trunk", classes="ab"), r"a list of names, got 'ab'"),
    "a picture to a plain module": (lambda: equicam.explain(seeded(Cnn), X[0]), r"\[b, c, H, W\]"),
    "NaN scores": (lambda: answer(lambda s: s * torch.nan), r"finite class logits"),
    "a picture without a batch": (lambda: equicam.explain(wrapped(Cnn), X[0]), r"\[b, c, H, W\].*tensor \(3, 32, 32\); try x\[None\]"),
    "integers instead of numbers": (lambda: equicam.explain(wrapped(Cnn), X.int()), r"got a int32 tensor"),
    "no images": (lambda: equicam.explain(wrapped(Cnn), X[:0]), r"got a float64 tensor \(0, 3, 32, 32\)"),
    "an empty list": (lambda: equicam.explain(wrapped(Cnn), []), r"got an empty list"),
    "an output that is no score": (lambda: equicam.explain(wrapped(Image), X), r"class logits \[36, classes\].*got a tensor \(36, 6, 8, 8\)"),
    "an unknown method": (lambda: equicam.explain(wrapped(Cnn), X, method="gradcam"), r"one of grad-cam, .* got 'gradcam'"),
    "tau without a gate": (lambda: equicam.explain(wrapped(Cnn), X, recipe=equicam.Recipe(tau=0.2)), r'tau needs .* try "equigrad-cam\+pcf"'),
    "gamma without a gate": (lambda: equicam.explain(wrapped(Cnn), X, recipe=equicam.Recipe(gamma=2)), r'gamma needs .* try "equigrad-cam\+soft"'),
    "tau above one": (lambda: KeepConfident(1.5), r"a probability from 0 to 1, got 1.5"),
    "gamma below zero": (lambda: SoftGate(-1), r"a finite number ≥ 0, got -1"),
    "no views": (lambda: equicam.explain(wrapped(Cnn), X, views=0), r"a count of 1 or more, got 0"),
    "no angles": (lambda: Views(()), r"at least one finite angle"),
    "an infinite angle": (lambda: Views((float("inf"),)), r"at least one finite angle"),
    "averaging before turning back": (lambda: Fusion(Views((0,)), "map", "features"), r"align_at no later than mean_at"),
    "an empty pass": (lambda: equicam.explain(wrapped(Cnn), X, max_views_per_forward=0), r"1 view or more, got 0"),
    "something that is no module": (lambda: equicam.wrap.__wrapped__("resnet50"), r"needs a torch.nn.Module, got str"),
    "an explainer without a class": (lambda: equicam.equivariant(lambda x, t: x[:, 0])(X, None), r"a target class, got None"),
    "an explainer that returns no maps": (lambda: equicam.equivariant(lambda x, t: x.sum())(X, 0), r"maps \[\d+, h, w\] as a tensor, got \(\)"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained(mistake):
    call, message = MISTAKES[mistake]
    with pytest.raises(EquicamError, match=r"(?s).+ needs .+, got .+; try .+") as caught:
        call()
    assert caught.match(r"(?s)" + message)


@pytest.mark.parametrize(
    ("layer", "build"),
    [("head", Cnn), ("after.1", Cnn), ("trunk", Cut), ("trunk", Image), ("blocks.1.norm2", Vit)],
)
def test_nothing_is_left_on_the_model(layer, build):
    made = wrapped(build, layer)
    with pytest.raises(EquicamError):
        equicam.explain(made, X)
    assert not any(part._forward_hooks for part in made.module.modules())
    assert all(p.requires_grad and p.grad is None for p in made.module.parameters())


SCRIPT = """
import sys
import torch, equicam
from equicam.models.libraries import EmbeddedNet
model, x = equicam.wrap(EmbeddedNet(), "layer4"), torch.randn(1, 3, 96, 96)
for call in sys.argv[1:]:
    try:
        eval(call)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
    else:
        print("no error")
"""
CALLS = {
    'equicam.Run("run")': "try equicam.open_run(folder)",
    "equicam.open_run(3)": "needs the path of its folder, got 3",
    "equicam.compare(3, 4)": "needs the path of its folder, got 3",
    'equicam.explain("embedded", x)': "or equicam.load('embedded')",
    'equicam.wrap(torch.nn.Sequential(torch.nn.Flatten()), layer="0", task="regresion")': 'try task="regression"',
    'equicam.audit(".", equicam.load("embedded"), "run", target=len)': "needs a class by name or number, got builtin_function_or_method",
    "equicam.explain(model, x, target='cat')": "got 'cat'",
    "equicam.explain(model, x, views=[0, 90])": "got [0, 90]",
    "equicam.explain(model, x, views='many')": "got 'many'",
    "equicam.explain(model, x, max_views_per_forward=2.5)": "got 2.5",
    "equicam.explain(model, x, dtype='int8')": "got 'int8'",
    "equicam.explain(model, x, recipe=equicam.Recipe(fill='mirror'))": "got 'mirror'",
    "equicam.Views(5)": "got 5",
    "equicam.Views(('a',))": "'a'",
    "equicam.equivariant(3)(x, 0)": "got",
    "equicam.wrap('resnet50')": "got str",
    "equicam.wrap(EmbeddedNet(), 'layer4', task='softmax')": "got 'softmax'",
}
"""Calls with arguments of the wrong kind, and a part of their error."""


def test_wrong_types_are_explained_where_no_checker_runs(tmp_path):
    """In a process of its own: under pytest the types are checked first."""
    (tmp_path / "a.png").write_bytes(encode("png"))
    command = [sys.executable, "-c", SCRIPT, *CALLS]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for line, advice in zip(found.stdout.splitlines(), CALLS.values(), strict=True):
        assert re.match("EquicamError .+ needs .+; try ", line), line
        assert advice in line
    assert not (tmp_path / "run").exists()


def test_errors_are_value_errors():
    assert issubclass(EquicamError, ValueError)


def test_pixels_of_an_array_get_advice_for_arrays():
    with pytest.raises(EquicamError, match=r"x\.astype\(np\.uint8\) of an array"):
        equicam.explain(equicam.load("embedded"), np.full((1, 3, 96, 96), 200.0, np.float32))


def test_a_run_of_one_view_has_no_report_and_says_so(tmp_path):
    (tmp_path / "a.png").write_bytes(encode("png"))
    run = equicam.audit(tmp_path, equicam.load("embedded"), tmp_path / "run", views=1, workers=1)
    with pytest.raises(EquicamError, match="several views of each image") as refused:
        run.report()
    assert "triage" not in str(refused.value)
