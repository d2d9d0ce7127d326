"""What is explained: classes by name, labels, values, functions of the output; and images as arrays."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import equicam
from equicam import EquicamError
from equicam.demo import synthetic_patches
from equicam.models.images import as_batch, read_arrays
from equicam.readers.names import class_index
from equicam.runs.manifest import parse_manifest
from tests.conftest import Cnn, assert_alive, explained, light, pictures, seeded

NAMES = ("benign", "malignant", "crane", "crane", "Other")


@pytest.fixture(scope="module")
def model() -> equicam.Model:
    return equicam.wrap(seeded(Cnn), layer="trunk", classes=NAMES)


def wrapped(**options) -> equicam.Model:
    return equicam.wrap(seeded(Cnn), layer="trunk", **options)


# classes by name


def test_a_class_may_be_named(model):
    x = pictures()
    by_number = equicam.explain(model, x, target=[1, 4], views=2)
    assert_alive(by_number.map)
    assert torch.equal(equicam.explain(model, x, target=["malignant", "Other"], views=2).map, by_number.map)
    assert torch.equal(equicam.explain(model, x, target=["malignant", 4], views=2).map, by_number.map)
    assert equicam.explain(model, x, target="malignant", views=2).target.tolist() == [1, 1]
    assert equicam.explain(model, x, target="3", views=2).target.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("malignent", r"a class of the model, by name or number, got 'malignent'; try 'malignant'"),
        ("othre", r"got 'othre'; try 'Other'"),
        (["benign", "bening"], r"got 'bening'; try 'benign'"),
        ("crane", r"one class, got 'crane', the name of classes 2, 3; try target=2 or target=3"),
        (["benign"], "one class for each of 2 images, got 1"),
    ],
)
def test_a_name_that_is_none_suggests_others(model, target, message):
    with pytest.raises(EquicamError, match=message):
        equicam.explain(model, pictures(), target=target)


def test_a_name_is_found_whatever_its_case_and_needs_names(model):
    names = ["sea snake", "Sea Lion", "sea lion", "cocker spaniel", "panpipe"]
    assert (class_index("Sea Snake", names), class_index("sea lion", names)) == (0, 2)
    with pytest.raises(EquicamError, match="the name of classes 1, 2"):
        class_index("SEA LION", names)
    with pytest.raises(EquicamError, match="got 'Spaniel'; try 'cocker spaniel'"):
        class_index("Spaniel", names)
    with pytest.raises(EquicamError, match="the number of a class: there are no class names, got 'benign'"):
        equicam.explain(replace(model, classes=None), pictures(), target="benign")
    with pytest.raises(EquicamError, match="there are no class names"):
        equicam.equivariant(lambda x, t: x[:, 0])(pictures(), "benign")


def test_names_of_imagenet_survive_a_file(tmp_path):
    import timm
    import torchvision

    for name, net in (
        ("mobilenet_v3_small", torchvision.models.mobilenet_v3_small()),
        ("timm:mobilenetv3_small_050", timm.create_model("mobilenetv3_small_050")),
    ):
        save_file({k: v.contiguous() for k, v in net.state_dict().items()}, tmp_path / "w.safetensors")
        assert equicam.load(name, weights=tmp_path / "w.safetensors").classes[1].startswith("goldfish")


# labels that do not exclude each other


def test_labels_have_sigmoids_and_flips_at_one_half():
    model, x = wrapped(task="multilabel"), pictures()
    logits = model.module(x).detach()
    e = equicam.explain(model, x, views=6)
    torch.testing.assert_close(e.probabilities, logits.sigmoid())
    assert e.target.tolist() == logits.argmax(1).tolist()
    for label in range(5):
        e = equicam.explain(model, x, views=6, target=label)
        p = model.module(e.views.act(x).flatten(0, 1))[:, label].sigmoid().view(6, 2).T.detach()
        torch.testing.assert_close(e.view_confidence, p)
        assert torch.equal(e.view_flips, (p >= 0.5) != (p[:, :1] >= 0.5))
        assert torch.equal(e.view_top1 == label, p >= 0.5)
        assert ((e.view_top1 >= 0) & (e.view_top1 < 5)).all()
        assert torch.equal(e.view_flips, e.view_top1 != e.view_top1[:, :1])


def test_the_gate_of_a_label_keeps_the_views_that_have_it():
    model, x = wrapped(task="multilabel"), pictures()
    with torch.no_grad():
        views = equicam.Views.evenly(6).act(x).flatten(0, 1)
        model.module.head.bias[3] -= model.module(views)[:, 3].median()
    e = equicam.explain(model, x, views=6, target=3, method="equigrad-cam+pcf")
    assert 0 < e.view_kept.sum() < 12
    assert torch.equal(e.view_kept, e.view_confidence >= 0.5)


@pytest.mark.parametrize(
    "method", ["score-cam", "rise", "recipro-cam", "ablation-cam", "opti-cam", "finer-cam"]
)
def test_every_reader_takes_labels(method):
    e = equicam.explain(wrapped(task="multilabel"), pictures(), method=light(method), target=1)
    assert e.map.isfinite().all()
    classes = equicam.explain(wrapped(), pictures(), method="grad-cam", target=1)
    assert not torch.allclose(e.confidence, classes.confidence)


def test_evaluate_counts_a_label_as_kept_by_its_own_probability():
    model, x = wrapped(task="multilabel"), pictures(4)
    rows = equicam.evaluate(model, x, methods=["grad-cam"], scores=["eq"], angles=[90, 180]).to_pylist()
    kept = {r["id"]: r["value"] for r in rows if r["score"] == "flip-rate"}
    top = model.module(x).argmax(1)
    turned = [model.module(torch.rot90(x, k, (-2, -1))).detach() for k in range(3)]
    p = torch.stack([scores.sigmoid().gather(1, top[:, None])[:, 0] for scores in turned])
    expected = ((p[1:] >= 0.5) != (p[:1] >= 0.5)).double().mean(0).tolist()
    assert list(kept.values()) == pytest.approx(expected)


# values


class OneOutput(Cnn):
    def __init__(self):
        super().__init__(classes=1)


def test_one_output_is_not_silently_two_classes():
    net, x = seeded(OneOutput), pictures()
    with pytest.warns(UserWarning, match=r'task="regression"\) explains its value'):
        silent = explained(net, x, views=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        binary = equicam.explain(equicam.wrap(net, layer="trunk", task="binary"), x, views=2)
        named = equicam.explain(equicam.wrap(net, layer="trunk", classes=["no", "yes"]), x, views=2)
        value = equicam.explain(equicam.wrap(net, layer="trunk", task="regression"), x, views=2)
    assert torch.equal(silent.map, binary.map)
    assert torch.equal(silent.map, named.map)
    torch.testing.assert_close(value.output, net(x)[:, 0].detach())
    assert value.confidence.isnan().all()
    assert value.view_confidence.isnan().all()
    assert (value.probabilities, value.target.tolist(), value.view_flips.any()) == (None, [0, 0], False)
    assert value.view_kept.all()
    assert f"  0  the output = {float(value.output[0]):.4g}; " in str(value)
    upwards = equicam.explain(equicam.wrap(net, layer="trunk", task="binary"), x, views=2, target=1)
    assert torch.equal(value.raw, upwards.raw)


@pytest.mark.parametrize("method", ["equigrad-cam+pcf", "equigrad-cam+soft"])
def test_values_have_no_gate(method):
    for target in (2, lambda y: y[:, 2]):
        with pytest.raises(EquicamError, match=r'by confidence needs class prob.*try method="equigrad-cam"'):
            equicam.explain(wrapped(task="regression"), pictures(), method=method, target=target)


@pytest.mark.parametrize("method", ["score-cam", "rise", "recipro-cam"])
def test_methods_of_probabilities_refuse_values(method):
    with pytest.raises(EquicamError, match=f"{method} needs class probabilities, got a value"):
        equicam.explain(wrapped(task="regression"), pictures(), method=light(method), target=1)


@pytest.mark.parametrize(
    "method", ["grad-cam++", "layer-cam", "ablation-cam", "opti-cam", "smooth-grad-cam++", "eigen-cam"]
)
def test_other_methods_take_values(method):
    value = equicam.explain(wrapped(task="regression"), pictures(), method=light(method), target=1)
    logit = equicam.explain(wrapped(), pictures(), method=light(method), target=1)
    torch.testing.assert_close(value.raw, logit.raw)
    by_function = equicam.explain(wrapped(), pictures(), method=light(method), target=lambda y: y[:, 1])
    torch.testing.assert_close(by_function.raw, logit.raw)


@pytest.mark.parametrize(
    ("options", "build", "target", "message"),
    [
        ({"task": "regression"}, Cnn, None, "one of 5 outputs: values have no top-1, got None; try target=0"),
        ({"task": "binary"}, Cnn, None, "task='binary' needs one output, got 5"),
        ({"task": "multilabel"}, OneOutput, None, 'needs two outputs or more, got 1; try task="binary"'),
        ({"task": "multiclass"}, OneOutput, None, "needs two outputs or more, got 1"),
        ({"task": "regression"}, Cnn, 5, "classes from 0 to 4"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(options, build, target, message):
    with pytest.raises(EquicamError, match=message):
        equicam.explain(equicam.wrap(seeded(build), layer="trunk", **options), pictures(), target=target)


def test_load_takes_a_task_and_a_sigmoid_on_labels_is_refused():
    assert equicam.load("embedded", task="multilabel").task == "multilabel"
    net = nn.Sequential(seeded(Cnn), nn.Sigmoid())
    with pytest.raises(EquicamError, match="needs logits, got probabilities"):
        equicam.explain(equicam.wrap(net, layer="0.trunk", task="multilabel"), pictures())


# functions of the output


class Segments(Cnn):
    def forward(self, x):
        return {"out": self.last(self.trunk(x)), "aux": None}


def test_a_segmentation_is_explained_by_a_function_of_its_output():
    net, x = seeded(Segments), pictures()
    with pytest.raises(EquicamError, match=r"class logits .*try target=lambda y: …"):
        explained(net, x)
    e = explained(net, x, views=6, target=lambda y: y["out"][:, 2].mean((1, 2)))
    acts = net.trunk(x).detach().requires_grad_()
    (grads,) = torch.autograd.grad(net.last(acts)[:, 2].mean((1, 2)).sum(), acts)
    planes = (grads.mean((2, 3), keepdim=True) * acts).sum(1).relu().detach()
    assert planes.flatten(1).std(1).min() > 1e-4
    torch.testing.assert_close(e.view_maps[:, 0], planes, atol=1e-10, rtol=0)
    one = explained(net, x, views=6, max_views_per_forward=4, target=lambda y: y["out"][:, 2].mean((1, 2)))
    torch.testing.assert_close(one.map, e.map)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y, r"one floating-point value per image, \[12\], got a float64 tensor \(12, 5\)"),
        (lambda y: y[:, 0].sum(), r"got a float64 tensor \(\)"),
        (lambda y: y.argmax(1), "got a int64 tensor"),
        (lambda y: 3.0, "got float"),
        (lambda y: y[:, 0].detach(), "depend on it with gradient"),
        (lambda y: y[:, 0] / 0, "finite"),
    ],
)
def test_functions_that_give_no_value_are_refused(function, message):
    with pytest.raises(EquicamError, match=message):
        equicam.explain(wrapped(), pictures(), views=6, target=function)


def test_what_stays_refused_is_named(tmp_path):
    with pytest.raises(EquicamError, match=r"compiled needs a class as the target.*try compiled=False"):
        equicam.explain(wrapped(), pictures(), target=lambda y: y[:, 0], compiled=True)
    with pytest.raises(EquicamError, match=r"target needs a class here.*try equicam.explain"):
        equicam.equivariant(lambda x, t: x[:, 0])(pictures(), lambda y: y[:, 0])
    with pytest.raises(EquicamError, match=r"an evaluation needs class probabilities.*try explain or audit"):
        equicam.evaluate(wrapped(task="regression"), pictures())
    with pytest.raises(EquicamError, match=r"a target that its manifest can record.*task=\"regression\""):
        equicam.audit(tmp_path, wrapped().explaining(lambda y: y[:, 0]), tmp_path / "run")


def test_a_backbone_needs_a_function():
    import timm

    net = timm.create_model("mobilenetv3_small_050", num_classes=0)
    model = equicam.wrap(net, example=torch.zeros(1, 3, 64, 64))
    x = pictures(1, 64, 64).float()
    with pytest.raises(EquicamError, match=r"a backbone without classes needs a function"):
        equicam.explain(model, x)
    assert equicam.explain(model, x, views=2, target=lambda y: y[:, 0]).map.isfinite().all()


# images as arrays


@pytest.fixture(scope="module")
def embedded() -> equicam.Model:
    return equicam.load("embedded")


PIXELS = np.stack([np.asarray(patch) for patch in synthetic_patches(3)])
PLANES = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)


def test_arrays_of_pixels_are_preprocessed_like_images(embedded):
    def batch(form):
        return as_batch(embedded, read_arrays(form))

    expected = batch([Image.fromarray(one) for one in PIXELS])
    assert expected.std() > 0.1
    forms = [
        PIXELS,
        PIXELS.transpose(0, 3, 1, 2),
        torch.from_numpy(PIXELS),
        PLANES,
        list(PIXELS),
        [torch.from_numpy(one).permute(2, 0, 1) for one in PIXELS],
        [PIXELS[0], Image.fromarray(PIXELS[1]), torch.from_numpy(PIXELS[2])],
        np.concatenate([PIXELS, np.full_like(PIXELS[..., :1], 255)], -1),  # opaque
        expected.numpy(),
    ]
    for form in forms:
        assert torch.equal(batch(form), expected)
    assert torch.equal(batch(PIXELS[0]), expected[:1])
    grey = PIXELS[0, ..., 0]
    for form in (grey, grey[..., None], torch.from_numpy(grey)[None], torch.from_numpy(grey)):
        assert torch.equal(batch(form), batch(Image.fromarray(grey)))
    assert torch.equal(batch(PIXELS[0, :3]), batch(Image.fromarray(PIXELS[0, :3])))  # three rows
    found = equicam.explain(embedded, PIXELS, views=2)
    assert torch.equal(found.inputs, expected)
    assert_alive(found.map)


def test_evaluate_takes_arrays_too(embedded):
    one = equicam.evaluate(embedded, PIXELS, methods=["grad-cam"], angles=[90])
    two = equicam.evaluate(embedded, list(map(Image.fromarray, PIXELS)), methods=["grad-cam"], angles=[90])
    np.testing.assert_array_equal(one["value"].to_numpy(), two["value"].to_numpy())


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (PIXELS / 255.0, r"8-bit pixels, or preprocessed floats \[b, c, H, W\].*astype\(np.uint8\)"),
        (PIXELS[0].astype(np.float32), r"8-bit pixels, or preprocessed floats"),
        (PIXELS.astype(np.int64), r"8-bit pixels .* got int64 \(3, 96, 96, 3\)"),
        (np.zeros((2, 96, 96, 5), np.uint8), r"8-bit pixels .* got uint8 \(2, 96, 96, 5\)"),
        (
            [np.zeros((3, 96, 96), np.float32)] * 2,
            r"got array of float32; try np.stack on preprocessed arrays",
        ),
        (np.zeros((0, 96, 96, 3), np.uint8), "8-bit pixels"),
        (torch.zeros(3, dtype=torch.uint8), "8-bit pixels"),
        (PLANES.float(), r"preprocessed values.*got pixels from 0 to 255; try x.byte"),
        ([torch.zeros(3, 96, 96)], "torch.stack"),
    ],
)
def test_arrays_that_are_neither_are_refused(embedded, images, message):
    for call in (equicam.explain, equicam.evaluate):
        with pytest.raises(EquicamError, match=message if call is equicam.explain else r".+ needs .+"):
            call(embedded, images)


def test_a_model_that_takes_pixels_says_so(embedded):
    x = PLANES.float()
    raw = replace(embedded, mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3)
    assert equicam.explain(raw, x, views=2).map.isfinite().all()
    assert np.array_equal(equicam.explain(raw, x, views=2)._images(), PIXELS)
    net = nn.Sequential(nn.Conv2d(5, 4, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    five = equicam.wrap(net, layer="1")
    assert equicam.explain(five, 200 * torch.rand(1, 5, 32, 32), views=2).map.isfinite().all()


# audits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("images")
    for i, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(made / f"{i}.png")
    return made


def audited(folder, out, **options) -> equicam.Run:
    return equicam.audit(folder, options.pop("model"), out, views=6, workers=1, **options)


def test_a_run_of_labels_records_the_task(folder, tmp_path, embedded):
    model = replace(embedded, task="multilabel")
    run = audited(folder, tmp_path / "run", model=model, target=embedded.classes[1])
    assert run.manifest.task == "multilabel"
    rows = run.items.to_pylist()
    logits = embedded.module(torch.stack([embedded.preprocess(Image.fromarray(p)) for p in PIXELS]))
    assert [r["confidence"] for r in rows] == pytest.approx(logits[:, 1].sigmoid().tolist(), abs=1e-4)
    with pytest.raises(EquicamError, match="task"):  # another task cannot continue it
        audited(folder, tmp_path / "run", model=embedded, target=1)
    assert run.verify(sample=2, model=model).recomputed == 2
    (problem,) = run.verify(sample=2, model=embedded).problems
    assert "a model with task='multilabel', got None" in problem
    text = (run.folder / "manifest.json").read_text()
    assert parse_manifest(text, where="here").task == "multilabel"
    with pytest.raises(EquicamError, match="task"):
        parse_manifest(text.replace('"multilabel"', '"nonsense"'), where="here")


def test_a_run_of_values_has_no_confidence_and_can_be_ranked_and_reported(folder, tmp_path, embedded):
    net = seeded(OneOutput).float()
    model = replace(embedded, module=net, layer="trunk", classes=None, name=None, task="regression")
    run = audited(folder, tmp_path / "run", model=model)
    for row in run.items.to_pylist():
        assert row["status"] == "ok"
        assert row["confidence"] is None
        assert (row["top5"], row["view_confidence"], row["flip_rate"]) == ([], [None] * 6, 0)
        assert row["target"] == 0
        assert row["stability"] is not None
    run.triage(budget=2)
    with pytest.raises(EquicamError, match="class probabilities"):
        run.causal(model=model)
    assert run.report().is_file()
    assert run.verify(sample=1, model=model).recomputed == 1
