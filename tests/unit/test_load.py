"""Models by name, by file and by factory; weights from files and caches, and every refusal."""

import gc
import os
import pickle
import urllib.error
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import equicam
from equicam import EquicamError
from equicam.models import libraries
from equicam.models.images import VisibleBoxes, input_bytes, visible_box
from equicam.models.libraries import EmbeddedNet
from equicam.models.load import list_names
from equicam.models.weights import fingerprint
from tests.conftest import assert_alive


@pytest.fixture
def net() -> EmbeddedNet:
    torch.manual_seed(0)
    return EmbeddedNet().eval()


X = torch.randn(2, 3, 96, 96, generator=torch.Generator().manual_seed(0))


def same(model: equicam.Model, net: torch.nn.Module) -> bool:
    """The same weights, and scores that differ by the order of sums at most."""
    mine, theirs = (dict(n.named_parameters()) for n in (model.module, net))
    equal = mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    return equal and torch.allclose(model.module(X), net(X), atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["safetensors", "pth", "wrapped.pt", "parallel.pt", "old.pth"])
def test_weights_from_a_file(tmp_path, net, form):
    file = tmp_path / f"w.{form}"
    tensors = {k: v.contiguous() for k, v in net.state_dict().items()}
    if form == "safetensors":
        save_file(tensors, file)
    elif form == "old.pth":
        torch.save({k: v for k, v in tensors.items() if not k.endswith("num_batches_tracked")}, file)
    elif form == "pth":
        torch.save(tensors, file)
    elif form == "wrapped.pt":
        torch.save({"epoch": 3, "state_dict": tensors}, file)
    else:
        torch.save({f"module.{k}": v for k, v in tensors.items()}, file)
    model = equicam.load("embedded", weights=str(file))
    assert same(model, net)
    assert fingerprint(model.module) == fingerprint(equicam.load("embedded", weights=file).module)


def test_a_file_needs_no_suffix_and_a_name_that_is_none_is_refused(tmp_path, net):
    torch.save(net.state_dict(), tmp_path / "checkpoint")
    assert same(equicam.load("embedded", weights=str(tmp_path / "checkpoint")), net)
    for name in ("embedded", "timm:resnet18", "open_clip:ViT-S-32-alt"):
        with pytest.raises(EquicamError, match=r"an existing file or \"random\", got 'IMAGENET1K_V2'"):
            equicam.load(name, weights="IMAGENET1K_V2", classes=["a", "b"])
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(EquicamError, match="a whole safetensors file"):
        equicam.load("embedded", weights=tmp_path / "broken.safetensors")


def test_an_absent_device_is_reported():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(EquicamError, match="a device torch can use here"):
        equicam.load("embedded", device="cuda")


def test_a_head_of_another_size_comes_with_its_file(tmp_path):
    import torchvision

    fine_tuned = torchvision.models.resnet18(num_classes=7).eval()
    torch.save(fine_tuned.state_dict(), tmp_path / "w.pth")
    assert equicam.load("resnet18", weights=tmp_path / "w.pth").classes is None
    model = equicam.load("resnet18", weights=tmp_path / "w.pth", classes=list("abcdefg"))
    torch.testing.assert_close(model.module(X), fine_tuned(X), atol=1e-4, rtol=1e-4)
    assert model.classes == tuple("abcdefg")
    import timm

    fine_tuned = timm.create_model("resnet18", num_classes=3).eval()
    torch.save(fine_tuned.state_dict(), tmp_path / "t.pth")
    model = equicam.load("timm:resnet18", weights=tmp_path / "t.pth")
    assert model.module(X).shape == (2, 3)
    assert model.classes is None


class Evil:
    """Opens a file when unpickled."""


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path, monkeypatch):
    target = tmp_path / "ran"
    monkeypatch.setattr(Evil, "__reduce__", lambda self: (open, (str(target), "w")), raising=False)
    with (tmp_path / "w.pth").open("wb") as f:
        pickle.dump({"a": Evil()}, f)
    torch.save({"a": Evil()}, tmp_path / "z.pth")
    for name in ("w.pth", "z.pth"):
        with pytest.raises(EquicamError, match="a file of tensors alone, which loads without run") as caught:
            equicam.load("embedded", weights=tmp_path / name)
        assert not target.exists()
        assert "False" not in str(caught.value)  # no advice to load it unsafely
    monkeypatch.undo()
    torch.save({"a": Evil()}, tmp_path / "z.pth")
    with pytest.raises(EquicamError, match=r"a pickle that imports .*test_load\.Evil"):
        equicam.load("embedded", weights=tmp_path / "z.pth")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda net: {"nonsense": torch.zeros(1)}, "missing .* unknown .*nonsense"),
        (lambda net: {**net.state_dict(), "fc.bias": torch.zeros(5)}, r"of another shape .*fc.bias \(5,\)"),
        (lambda net: [1, 2], "a state dict of tensors, got list"),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, net, content, message):
    torch.save(content(net), tmp_path / "w.pth")
    with pytest.raises(EquicamError, match=message):
        equicam.load("embedded", weights=tmp_path / "w.pth")


FACTORY = """
import torch, equicam
from equicam.models.libraries import EmbeddedNet

def module():
    torch.manual_seed(0)
    return EmbeddedNet()

def ready():
    return equicam.wrap(module(), layer="layer3", classes=["no", "yes"])

def wrong():
    return 3
"""


def test_a_factory_returns_a_module_or_a_model(tmp_path, net):
    file = tmp_path / "my models.py"
    file.write_text(FACTORY)
    plain = equicam.load(f"{file}:module")
    assert same(plain, net)
    assert plain.layer == "layer4"
    ready = equicam.load(f"{file}:ready")
    assert (ready.layer, ready.classes) == ("layer3", ("no", "yes"))
    assert equicam.load(f"{file}:ready", layer="layer2").layer == "layer2"
    torch.manual_seed(5)
    other = EmbeddedNet().eval()
    save_file({k: v.contiguous() for k, v in other.state_dict().items()}, tmp_path / "w.safetensors")
    assert same(equicam.load(f"{file}:ready", weights=tmp_path / "w.safetensors"), other)
    refusals = {"nothing": "known name, got 'nothing'", "wrong": "return a module or the result of"}
    for wrong, message in refusals.items():
        with pytest.raises(EquicamError, match=message):
            equicam.load(f"{file}:{wrong}")


RANDOM = {"weights": "random"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet51", {}, "got 'resnet51'; try .*resnet50"),
        ("timm:resnet_18", {}, "timm model needs a known name"),
        ("timm:resnet18.nonsense", {}, "weights of timm's resnet18 needs a known name"),
        ("keras:resnet", {}, "one of timm, open_clip, hf"),
        ("open_clip:ViT-B-33/openai", {}, "open_clip architecture"),
        ("nowhere.py:build", {}, "an existing file.py"),
        ("nowhere.py", {}, "an existing file.py"),
        ("resnet50", {"weights": "IMAGENET1K_V9"}, r"of resnet50.*got 'IMAGENET1K_V9'; try .*IMAGENET1K_V1"),
        ("timm:vit_small_patch14_dinov2", RANDOM | {"classes": None}, "a classifier, got a backbone"),
        ("open_clip:ViT-S-32-alt", RANDOM | {"templates": ["a photo"]}, r"a \{\} for the class name"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_known_names(name, options, message):
    with pytest.raises(EquicamError, match=message):
        equicam.load(name, **{"classes": ["a", "b"]} | options)


def test_no_network_is_reported_with_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    with pytest.raises(
        EquicamError, match=r"(?s)a copy in the cache \(.*checkpoints/resnet18.*pth\).*no route"
    ):
        equicam.load("resnet18")


def test_no_hub_is_reported_too(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("timm:resnet18.a1_in1k", "hf:somebody/something", "open_clip:ViT-B-32/laion2b_s34b_b79k"):
        with pytest.raises(EquicamError, match="needs a download, or a copy in the cache"):
            equicam.load(name, classes=["a", "b"])


def test_weights_in_the_cache_need_no_network(monkeypatch, tmp_path):
    import torchvision

    published = torchvision.models.MobileNet_V3_Small_Weights.IMAGENET1K_V1
    made = torchvision.models.mobilenet_v3_small()
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(made.state_dict(), folder / published.url.rpartition("/")[2])
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", None)
    model = equicam.load("mobilenet_v3_small")
    torch.testing.assert_close(model.module(X), made.eval()(X), atol=1e-4, rtol=1e-4)
    assert model.classes[1] == "goldfish"


def test_a_missing_extra_is_reported(monkeypatch):
    util, find = libraries.importlib.util, libraries.importlib.util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "open_clip" else find(name))
    with pytest.raises(EquicamError, match=r"pip install 'equicam\[clip\]'"):
        equicam.load("open_clip:ViT-B-32/openai", classes=["a", "b"])


def test_options_override_what_is_chosen():
    model = equicam.load("embedded", layer="layer3", layout="nchw", rectify_weights=True, device="cpu")
    assert (model.layer, model.layout.kind, model.rectify_weights) == ("layer3", "nchw", True)
    assert_alive(equicam.explain(model, X, views=2).map)


def test_every_name_listed_is_known():
    listed = list_names()
    assert {"resnet50", "vit_b_16", "timm:vit_small_patch16_224"} <= set(listed)
    assert "fcn_resnet50" not in listed


def test_files_in_the_working_folder_do_not_replace_names(tmp_path, monkeypatch):
    for name in ("resnet18", "embedded", "IMAGENET1K_V9", "timm:resnet18"):
        (tmp_path / name).write_bytes(b"not a model")
    monkeypatch.chdir(tmp_path)
    assert equicam.load("embedded").layer == "layer4"
    assert equicam.load("resnet18", weights="random").layer == "layer4"
    with pytest.raises(EquicamError, match=r"got 'IMAGENET1K_V9'; try .*IMAGENET1K_V1"):
        equicam.load("resnet18", weights="IMAGENET1K_V9")
    torch.save(EmbeddedNet().state_dict(), tmp_path / "checkpoint")
    assert equicam.load("embedded", weights="./checkpoint").layer == "layer4"
    with pytest.raises(EquicamError, match="an existing file or \"random\", got 'checkpoint'"):
        equicam.load("embedded", weights="checkpoint")


def test_a_refused_pickle_that_is_no_zip_file_names_its_imports_too(tmp_path, monkeypatch):
    target = tmp_path / "ran"
    monkeypatch.setattr(Evil, "__reduce__", lambda self: (os.system, (f"touch '{target}'",)), raising=False)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "w.pth").write_bytes(pickle.dumps({"a": Evil(), "b": Evil()}, protocol))
        with pytest.raises(EquicamError, match=r"got a pickle that imports (posix|nt)\.system; try"):
            equicam.load("embedded", weights=tmp_path / "w.pth")
    torch.save({"x": torch.ones(2), "a": Evil()}, tmp_path / "l.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(EquicamError, match=r"a pickle that imports .*(posix|nt)\.system"):
        equicam.load("embedded", weights=tmp_path / "l.pth")
    assert not target.exists()


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"X\x01", b"cat\ndog\n", pickle.dumps(7)[:-1], b"\x8d" + b"\xff" * 8]
)
def test_weights_that_are_no_file_of_tensors_are_not_called_missing(content, tmp_path):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(EquicamError, match=r"got bytes that are not tensors \(\w+\)"):
        equicam.load("embedded", weights=tmp_path / "w.pth")


def test_no_cache_keeps_a_network_alive():
    model = equicam.load("embedded")
    network = weakref.ref(model.module)
    boxes = VisibleBoxes(model)
    assert boxes((120, 96)) == boxes((120, 96)) == visible_box(model, (120, 96))
    assert list(boxes.by_size) == [(120, 96)]
    input_bytes(model)
    del model, boxes
    gc.collect()
    assert network() is None


def test_a_preprocess_need_not_be_hashable():
    class Unhashable:
        __hash__ = None

        def __call__(self, image):
            return torch.from_numpy(np.asarray(image.resize((8, 8)), dtype=np.float32)).permute(2, 0, 1) / 255

    model = equicam.wrap(EmbeddedNet(), preprocess=Unhashable(), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert VisibleBoxes(model)((16, 16)) == pytest.approx((0, 0, 16, 16), abs=2)
