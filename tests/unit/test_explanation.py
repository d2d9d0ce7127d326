"""An explanation as an object: some of its images, its text, its drawings, its files."""

import copy
import pickle
import re
import subprocess
import sys
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from PIL import Image

import equicam
from equicam import EquicamError, Explanation, Views
from equicam.explanation import restore
from equicam.reasons import PEUM_NOTE
from tests.conftest import Cnn, assert_alive, pictures, seeded

NAMES = ("cat", "dog", "<script>alert(1)</script>", "$\\frac{1}", "line\nbreak\x1b[31m")


@pytest.fixture(scope="module")
def model() -> equicam.Model:
    return equicam.wrap(seeded(Cnn), layer="trunk", classes=NAMES)


@pytest.fixture(scope="module")
def e(model) -> Explanation:
    found = equicam.explain(model, pictures(4), views=6, target=[2, 3, 0, 4])
    assert_alive(found.map)
    return found


def tensors(one: Explanation) -> dict[str, torch.Tensor]:
    found = {f.name: getattr(one, f.name) for f in fields(one)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (0, [0]),
        (-1, [3]),
        (np.int64(2), [2]),
        (slice(1, 3), [1, 2]),
        (slice(None, None, -2), [3, 1]),
        ([3, 0, 3], [3, 0, 3]),
        ([], []),
        (torch.tensor([1, -1]), [1, 3]),
        (np.array([True, False, False, True]), [0, 3]),
        (slice(9, None), []),
    ],
)
def test_some_of_the_images(e, index, rows):
    some = e[index]
    assert len(some) == len(rows)
    for name, value in tensors(e).items():
        assert torch.equal(getattr(some, name), value[rows]), name
    assert some.flags == tuple(e.flags[i] for i in rows)
    assert (some.views, some.layer, some.classes) == (e.views, e.layer, e.classes)


@pytest.mark.parametrize(
    "index",
    [True, np.True_, torch.tensor(True), 1.5, [0.5], "0", None, 4, -5, [0, 4], torch.tensor([True, False])],
)
def test_what_is_no_index_of_an_image_is_refused(e, index):
    with pytest.raises(IndexError, match=r"of 4 images needs a number, .*; try e\[0\]"):
        e[index]


def test_it_prints_one_line_for_each_image(e, model):
    head, note, *lines = str(e).splitlines()
    assert (head, note) == ("Explanation of 4 images, 6 views, layer 'trunk'", f"  {PEUM_NOTE}")
    assert len(lines) == 4  # a name with a line break is one line
    assert "\x1b" not in str(e)
    for i, line in enumerate(lines):
        word, score = e.steadiness[i], float(e.peum_score[i])
        assert f"(p = {float(e.confidence[i]):.2f}); {word}; PEUM {score:.4f}" in line
    assert lines[2].startswith("  2  cat (p = ")
    flips, flags = torch.tensor([False] + [True] * 5).expand(4, -1), (frozenset({"edge", "flipped"}),) * 4
    assert "5 of 5 other views flip; flags edge" in str(replace(e, view_flips=flips, flags=flags))
    assert repr(e[:0]) == "Explanation of 0 images, 6 views, layer 'trunk'"
    assert str(e[[0] * 40]).splitlines()[-1] == "  … and 8 more"
    one = str(equicam.explain(replace(model, classes=None), pictures(1), method="grad-cam", target=1))
    assert re.search(r"one view, layer 'trunk'\n  0  class 1 \(p = 0\.\d\d\); cannot say: too few views", one)


def test_one_view_cannot_be_judged_and_has_no_peum(model):
    """By any of them: printed, in a notebook, as a figure."""
    one = equicam.explain(model, pictures(2), method="grad-cam")
    assert one.has_peum == (False, False)
    titles = " ".join(a.get_title() for a in one.plot().axes).replace("\n", " ")
    for text in (str(one), one._repr_html_(), titles):
        assert text.count("cannot say: too few views: none besides the presented one, 5 are needed") == 2
        assert "PEUM" not in text


def test_a_peum_that_means_nothing_is_undefined(e):
    """Where a gate keeps one view, or the map is flat, as in the report."""
    few = torch.zeros_like(e.view_kept)
    few[:, 0] = True
    assert str(replace(e, view_kept=few)).count("PEUM undefined") == 4
    flat = replace(e, flags=(frozenset({"blank"}), *e.flags[1:]))
    assert (flat.has_peum, str(flat).count("PEUM undefined")) == ((False, True, True, True), 1)


def test_html_is_self_contained_and_escaped(e):
    page = e._repr_html_()
    assert page.count("data:image/png;base64,") == 12  # image, own map and overlay
    assert page.count("<svg") == 4
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert page.index("PEUM (per-image explanation uncertainty) is the variance") == page.index("PEUM")
    many = e[[0] * 20]._repr_html_()
    assert many.count("data:image/png;base64,") == 48
    assert "and 4 more" in many


def test_overlays_are_the_maps_over_the_images(e, model):
    mean, std = (torch.tensor(v)[:, None, None] for v in (model.mean, model.std))
    display = ((pictures(4) * std + mean).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    found = e.overlay()
    assert (found.shape, found.dtype) == ((4, 32, 32, 3), np.uint8)
    cold = e.map.numpy() == 0  # greyed, and the image's own brightness
    luminance = np.array([0.299, 0.587, 0.114])
    assert cold.any()
    np.testing.assert_allclose((found @ luminance)[cold], (display @ luminance)[cold], atol=1.5)
    hot = e.map.numpy() > 0.9
    assert np.abs(found.astype(float) - display)[hot].mean() > 20
    unknown = replace(e, inputs=None)
    assert unknown.overlay().shape == found.shape
    assert (unknown.overlay()[cold] == 214).all()


def test_inputs_are_the_callers_tensor_and_no_copy(model):
    x = pictures(2)
    e = equicam.explain(model, x, views=2)
    assert e.inputs.data_ptr() == x.data_ptr()
    larger = pictures(1, 48, 48)
    inside = equicam.explain(model, larger, window=32, views=2)
    assert torch.equal(inside.inputs, larger[..., 8:40, 8:40])


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_inputs_of_other_channels_are_displayed(channels):
    net = seeded(Cnn)
    net.trunk[0] = torch.nn.Conv2d(channels, 6, 3, stride=2, padding=1).double()
    x = torch.randn(2, channels, 32, 32, dtype=torch.float64)
    e = equicam.explain(equicam.wrap(net, layer="trunk"), x, views=2)
    assert e.overlay().shape == (2, 32, 32, 3)
    grey = e.map.numpy() == 0
    assert grey.any()
    assert (e.overlay()[grey].max(1) - e.overlay()[grey].min(1)).max() <= 1
    assert np.ptp(e.overlay()[~grey], axis=1).max() > 20  # colours


def test_a_figure_has_a_row_for_each_image(e, model):
    figure = e.plot(images=3)
    assert len([a for a in figure.axes if a.get_title() == "image"]) == 3
    titles = [a.get_title() for a in figure.axes]
    assert sum(t.startswith("spread") for t in titles) == 3
    texts = " ".join(" ".join(titles).split())
    assert texts.index("PEUM (per-image explanation uncertainty)") == texts.index("PEUM")
    (curve,) = [a for a in e[0].plot().axes if a.get_xlabel() == "angle of rotation (°)"]
    assert curve.get_ylabel().startswith("correlation")
    x, y = curve.lines[0].get_data()
    assert list(x) == [0, 60, 120, 180, 240, 300, 360]
    np.testing.assert_allclose(y[:6], e.stability_by_view[0])
    single = equicam.explain(model, pictures(1), method="grad-cam").plot()
    assert not any("spread" in a.get_title() for a in single.axes)
    mirrored = equicam.explain(model, pictures(1), views=Views.dihedral(4)).plot()
    assert "view" in [a.get_xlabel() for a in mirrored.axes]
    with pytest.raises(EquicamError, match="a figure needs an image"):
        e[:0].plot()


@pytest.mark.parametrize("name", ["a.png", "sub/a.pdf", "a.svg", "a.jpg"])
def test_figures_are_written_by_suffix(e, name, tmp_path):
    written = e[:1].save(tmp_path / name)
    assert written == tmp_path / name
    assert written.read_bytes()[:4] in (b"\x89PNG", b"%PDF", b"<?xm", b"\xff\xd8\xff\xe0")


def test_a_folder_gets_overlays_figures_and_tensors(e, tmp_path):
    e[:2].save(tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["0.overlay.png", "0.png", "1.overlay.png", "1.png", "explanation.pt"]
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out" / "1.overlay.png")), e.overlay()[1])
    with pytest.raises(EquicamError, match=r"save needs a folder, or a file that ends in .*'a.docx'"):
        e.save(tmp_path / "a.docx")


def test_tensors_come_back_without_running_code(e, tmp_path):
    file = e[1:3].save(tmp_path / "e.pt")
    plain = torch.load(file, weights_only=True)
    assert plain["classes"] == NAMES
    back = Explanation.load(file)
    for name, value in tensors(e[1:3]).items():
        assert torch.equal(getattr(back, name), value), name
    assert (back.flags, back.views, back.layer) == (e[1:3].flags, e.views, e.layer)
    assert (back.classes, back.mean, back.std, back.task) == (e.classes, e.mean, e.std, e.task)
    assert str(back) == str(e[1:3])
    whole = e.save(tmp_path / "whole.pt")
    assert file.stat().st_size < 0.7 * whole.stat().st_size  # a slice does not carry the storage of all
    assert str(Explanation.load(e[1:3].save(tmp_path / "folder"))) == str(e[1:3])
    mirrored = replace(e[0], views=Views.dihedral(6))
    assert Explanation.load(mirrored.save(tmp_path / "m.pt")).views == mirrored.views


def test_a_file_of_something_else_is_refused(e, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    state = e.state()
    contents = [
        {"map": Evil()}, [1], {}, state | {"map": state["map"][:2]}, state | {"views": []}, state | {"flags": 3},
        {k: v for k, v in state.items() if k != "peum"}, state | {"views": [0, 180]}, state | {"classes": [1, 2]},
        state | {"mean": ["a"]}, state | {"std": [float("nan")]}, state | {"mean": 0.5}, state | {"task": "other"}, state | {"layer": 3},
        state | {"flags": [["blank"]] * 3}, state | {"flags": [[1]] * 4}, state | {"target": state["target"].float()},
        state | {"view_maps": state["view_maps"][:, :2]}, state | {"view_maps": state["view_maps"][..., 1:]},
        state | {"peum": state["peum"][..., 1:]}, state | {"inputs": state["inputs"][..., 1:]}, state | {"stability": 0.5},
        state | {"output": "high"}, state | {"views": 6}, state | {"views": [[1, 2]]},
    ]  # fmt: skip
    for content in contents:
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(EquicamError, match=r"explanation .* needs a file that Explanation.save wrote"):
            Explanation.load(tmp_path / "w.pt")
    assert not (tmp_path / "ran").exists()
    for changed, got in (
        ({"views": [0, 180]}, "tensors of 4 images in 6 views next to 4 images in 2 views"),
        ({"classes": [1, 2]}, "classes other than text"),
    ):
        torch.save(state | changed, tmp_path / "w.pt")
        with pytest.raises(EquicamError) as refused:
            Explanation.load(tmp_path / "w.pt")
        assert refused.value.got == got
    with pytest.raises(EquicamError, match="FileNotFoundError"):
        Explanation.load(tmp_path / "absent.pt")


def test_arrays_pickles_and_iteration_in_order(e):
    arrays = e.to_numpy()
    assert arrays.keys() == tensors(e).keys()
    assert np.array_equal(arrays["map"], e.map.numpy())
    assert torch.equal(pickle.loads(pickle.dumps(e)).map, e.map)
    assert [int(one.target) for one in e] == [2, 3, 0, 4]
    assert [one.steadiness for one in e] == [(s,) for s in e.steadiness]


def test_torch_saves_and_loads_it_as_it_is(e, tmp_path):
    torch.save({"all": e, "some": e[1:3]}, tmp_path / "e.pt")
    back = torch.load(tmp_path / "e.pt")["some"]
    for name, value in tensors(e[1:3]).items():
        assert torch.equal(getattr(back, name), value), name
    assert str(back) == str(e[1:3])
    torch.save(e, tmp_path / "one.pt")
    assert str(Explanation.load(tmp_path / "one.pt")) == str(e)
    assert copy.deepcopy(e).map.data_ptr() != e.map.data_ptr()
    code = f"import torch; from equicam import Explanation; print(torch.load({str(tmp_path / 'one.pt')!r}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.rstrip("\n") == str(e)


def test_a_pickle_of_an_inconsistent_explanation_is_refused(e, tmp_path):
    class Other:
        def __reduce__(self):
            return restore, (e.state() | {"views": [0, 180]},)

    torch.save(Other(), tmp_path / "e.pt")
    with pytest.raises(EquicamError, match="a stored explanation needs a file that"):
        torch.load(tmp_path / "e.pt")


def test_showing_without_a_display_says_what_to_do(e, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "get_backend", lambda: "agg")
    with pytest.raises(EquicamError, match=r'show needs a notebook or a display.*save\("explained.png"\)'):
        e.show()


def test_an_explainer_without_a_model_has_a_text_too():
    explained = equicam.equivariant(lambda x, target: x[:, 0].abs(), views=6)(pictures(1).float(), 1)
    assert "  0  class 1; " in str(explained)
    assert explained.overlay().std() > 1
    assert "<img" in explained._repr_html_()


def test_models_and_runs_have_short_reprs():
    model = equicam.load("embedded")
    assert repr(model) == "Model('embedded', layer 'layer4', 2 classes, float32 on cpu)"
    own = equicam.wrap(seeded(Cnn), layer="trunk", task="multilabel")
    assert repr(own) == "Model(Cnn, layer 'trunk', multilabel, float64 on cpu)"
