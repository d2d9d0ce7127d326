import io
from base64 import b64decode

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from equicam.core.chain import Chain, grad_cam, unit
from equicam.core.transforms import Transform
from equicam.core.views import Views
from equicam.demo import synthetic_patches
from equicam.drawing import plots
from equicam.drawing.text import visible
from equicam.images import limited
from equicam.images.files import file_digest
from equicam.readers.names import output_name
from equicam.runs.report import render
from equicam.runs.report.facts import peum_undefined
from equicam.runs.store import StoredMaps
from tests.audit.faked import fake_manifest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.png"


def row_of(path, **more):
    """The row of an image whose whole was explained."""
    row = {"id": "a", "path": str(path), "bytes": path.stat().st_size, "sha256": file_digest(path)}
    return row | {"input_box": None, "target": 0, "view_confidence": None, "view_top1": None} | more


def test_more_views_than_a_strip_holds_are_thinned():
    row = {"id": "a", "path": None, "bytes": 1, "sha256": "", "input_box": None, "target": 0}
    row |= {"view_confidence": [0.5] * 50, "view_top1": [0] * 50}
    flat = np.ones((4, 4), np.float32)
    maps = StoredMaps(flat, 0 * flat, np.ones((50, 4, 4), np.float32))
    found = render.ImageDrawing(row, maps, fake_manifest(tuple(7.2 * t for t in range(50))))
    assert len(found.strip) <= render.MAX_TILES
    assert found.strip[0].label == "0°"
    assert found.blank  # a constant map has no range to stretch


ODD = Transform(50, mirrored=True, scale=1.25, shift=(-0.05, 0.1))
MOVED = Transform(20, mirrored=True), Transform(scale=0.8), Transform(shift=(0.1, -0.2)), ODD


@pytest.mark.parametrize("size", [(96, 96), (64, 96)])
@pytest.mark.parametrize("view", [*map(Transform, (0, 20, 90, 137.5, 340)), *MOVED])
def test_align_is_the_alignment_that_the_method_uses(size, view):
    values = ndimage.gaussian_filter(np.random.default_rng(0).random(size), 3)
    ours = render.align(values, view)
    theirs = Views((view,)).align(torch.from_numpy(values)[None, None], "reflect")[0, 0].numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-9)


def test_a_plane_is_stretched_as_the_chain_does_it_but_not_the_rounding_of_the_store():
    plane = np.random.default_rng(1).random((7, 9)).astype(np.float32)
    theirs = unit(Chain(grad_cam, (70, 90)).upsample(torch.from_numpy(plane)[None]))[0].numpy()
    np.testing.assert_allclose(render.stretch(plane, (70, 90)), theirs, atol=1e-5)
    almost = (1 + np.random.default_rng(2).random((6, 6)) * 1e-3).astype(np.float16).astype(np.float32)
    assert np.ptp(almost) > 0
    assert not render.stretch(almost, (60, 60)).any()


BOXES = {
    None: [None, [0.0, 0.0, 96.0, 96.0], [-0.4, 0.3, 96.9, 95.7]],
    "was not recorded": [[float("nan"), 0.0, 96.0, 96.0], [0.0, 0.0, 96.0], [None, 0.0, 96.0, 96.0]],
    "does not lie in it": [[50.0, 0.0, 20.0, 96.0], [200.0, 0.0, 300.0, 96.0], [-1e30, -1e30, 1e30, 1e30]],
}


@pytest.mark.parametrize(("message", "frames"), BOXES.items())
def test_input_boxes_of_any_kind(path, message, frames):
    synthetic_patches(1)[0].save(path)
    for frame in frames:
        found = render.read_input(row_of(path, input_box=frame), (224, 224))
        assert (message in found) if message else (found.shape == (224, 224, 3) and found[:, 0].max() > 40)


def test_an_input_box_beyond_the_image_is_padded_with_black(path):
    Image.new("RGB", (100, 50), "white").save(path)
    found = render.read_input(row_of(path, input_box=[0.0, -25.0, 100.0, 75.0]), (200, 200))
    parts = found[:50], found[50:150], found[150:]
    assert [np.unique(part).tolist() for part in parts] == [[0], [255], [0]]


def test_images_have_the_proportions_of_the_models_input(path):
    Image.new("RGB", (60, 60), "white").save(path)
    planes = np.random.default_rng(0).random((2, 4, 6)).astype(np.float32)
    maps = StoredMaps(planes[0], planes[1], planes)
    found = render.ImageDrawing(row_of(path), maps, fake_manifest((0.0, 180.0)))
    sizes = {found.input: (224, 149), found.fused: (224, 149), found.strip[1].image: (96, 64)}
    for address, size in sizes.items():
        assert Image.open(io.BytesIO(b64decode(address.split(",")[1]))).size == size


def test_a_file_that_is_another_one_or_no_image_any_more(tmp_path):
    path = tmp_path / "a.bmp"
    Image.new("RGB", (20, 20), "white").save(path)
    row = row_of(path)
    assert not isinstance(render.read_input(row, (224, 224)), str)
    Image.new("RGB", (20, 20), "black").save(path)
    assert path.stat().st_size == row["bytes"]
    assert "has changed" in render.read_input(row, (224, 224))
    path.write_bytes(b"not an image")
    assert "can no longer be read" in render.read_input(row_of(path), (224, 224))
    for gone in (None, "a\0b", "a" * 5000):
        assert "no longer" in render.read_input(row | {"path": gone}, (224, 224))


@pytest.mark.parametrize("values", [[], [0.0], [0.01, float("nan"), 0.01], [0.0, 0.2]])
def test_plots_of_few_values(values):
    peum = np.array(values, dtype=float)
    assert plots.signal_histogram(peum, np.zeros(len(peum), bool), name="PEUM").startswith("<svg ")
    assert plots.flip_histogram(np.zeros(len(peum), dtype=int), 1).endswith("</svg>")
    some = peum[np.isfinite(peum)]
    none = np.zeros(len(some), dtype=bool)
    assert "Eq = 0.5" in plots.signal_against_drift(some, some, none, unstable=0.5, name="PEUM")


def test_plots_hold_text_and_a_bounded_number_of_marks():
    rng = np.random.default_rng(0)
    many = rng.random(30_000)
    svg = plots.signal_against_drift(many, many, many > 0.9, unstable=0.5, name="PEUM")
    assert "<text" in svg
    assert ">PEUM</text>" in svg
    assert len(svg) < 400_000


SPELLED = {
    "plain.png": "plain.png",
    "a\nb": r"a\nb",
    "a\u2028b\u200bc\ufeff": r"a\u2028b\u200bc\ufeff",
    "\ud800": r"\ud800",
    "é e\u0301 🧬": "é e\u0301 🧬",
    "e" + 5 * "\u0301": "e" + 3 * "\u0301" + 2 * r"\u0301",
    "x" * 305: "x" * 300 + "… (5 more characters)",
    None: "None",
}


def test_hidden_characters_are_spelled_out():
    assert {text: visible(text) for text in SPELLED} == SPELLED


def test_an_image_at_a_url_is_fetched_only_if_the_caller_allows_it(monkeypatch):
    monkeypatch.setattr(limited, "inside", lambda: True)  # that store is in the memory of this process
    import hashlib

    import fsspec

    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(data, "PNG")
    fsspec.filesystem("memory").pipe("/render/a.png", data.getvalue())
    row = {"id": "a", "path": "memory://render/a.png", "bytes": len(data.getvalue()), "input_box": None}
    row["sha256"] = hashlib.sha256(data.getvalue()).hexdigest()
    assert "--source" in render.read_input(row, (16, 16))
    assert render.read_input(row, (16, 16), fetch=True).shape == (16, 16, 3)
    assert "changed" in render.read_input(row | {"sha256": "0" * 64}, (16, 16), fetch=True)
    assert "no longer" in render.read_input(row | {"path": "memory://render/none.png"}, (16, 16), fetch=True)


def test_peum_is_undefined_without_two_kept_views_or_a_map():
    undefined = [([], 1, 18), ([], 0, 18), ([], 1, 1), ([], None, 1), (["blank"], 18, 18)]
    undefined.append((["none-kept"], None, 18))
    for case in [*undefined, ([], 18, 18), ([], None, 18), (None, 18, 18)]:
        flags, kept, views = case
        found = peum_undefined({"flags": flags, "views_kept": kept}, views=views)
        assert found is (case in undefined), case


def test_class_names():
    names = [output_name(t, ("a", "b")) for t in (1, 2, -1, None)]
    assert names == ["b", "class 2", "class -1", "class None"]
    assert output_name(0, None) == "class 0"
    assert output_name(3, None, "regression") == "output 3"
    assert output_name(0, None, "regression", is_only=True) == "the output"
    assert output_name(0, ("age",), "regression", is_only=True) == "age"
