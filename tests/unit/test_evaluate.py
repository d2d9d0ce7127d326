"""The protocol end to end: metrics of `evaluate` are those of `explain`'s maps, one pass for each image, angle and view."""

import io
import json
import pkgutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image
from rich.console import Console
from torch import nn
from torchvision.transforms import v2

import equicam
from equicam.core.uncertainty import correlate_views
from equicam.core.views import Views, disc, rotate
from equicam.errors import EquicamError
from equicam.evaluate import summary
from equicam.evaluate.controls import randomise_weights, shuffle_tiles
from equicam.evaluate.equivariance import ANGLES, equivariance
from equicam.evaluate.loading import Sample, load_image
from equicam.evaluate.metrics import METRICS, Metric
from equicam.evaluate.table import SCHEMA, MetricRows
from equicam.images.items import Item
from equicam.models.images import box_mask
from equicam.runs.report.tables import evaluation_tables
from equicam.runtime.pending import finish_in_order
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded

ANGLES_2 = (45, 90)
BOTH = ["grad-cam", "equigrad-cam"]
PAPER = equicam.Recipe(protocol="paper")


def measure(model, images, **options):
    """Grad-CAM at one angle, unless the options say otherwise."""
    return equicam.evaluate(model, images, **{"methods": ["grad-cam"], "angles": (90,)} | options)


def rows_of(table, score, method=None, region=None):
    """The rows of a metric, those over all angles included."""
    wanted = (score, method, region)
    return [r for r in table.to_pylist() if (r["score"], r["method"], r["region"]) == wanted]


def value(table, score, method=None, region=None, angle=None):
    rows = [r for r in rows_of(table, score, method, region) if r["angle"] == angle]
    return {r["id"]: r["value"] for r in rows}, {r["id"]: r["floor"] for r in rows}


def values(*where):
    return list(value(*where)[0].values())


def pairs(table, score, method=None, region=None):
    """The values of a metric by image and angle."""
    found = rows_of(table, score, method, region)
    return {(r["id"], r["angle"]): r["value"] for r in found if r["angle"] is not None}


@pytest.mark.parametrize("protocol", ["ours", "paper"])
@pytest.mark.parametrize(
    "method", ["grad-cam", "layer-cam", "equigrad-cam", "equigrad-cam+pcf", "equigrad-cam-out", "aug-cam"]
)
def test_eq_is_that_of_explains_maps(cnn, method, protocol):
    x = pictures(3)
    others = ["grad-cam", "equigrad-cam-fine"]  # must not change this one's maps
    recipe, fill = equicam.Recipe(protocol=protocol), "zeros" if protocol == "paper" else "reflect"
    table = equicam.evaluate(cnn, x, methods=[*others, method], views=6, angles=ANGLES_2, recipe=recipe)
    views = None if method in ("grad-cam", "layer-cam") else 6
    explain = partial(equicam.explain, cnn, method=method, views=views, recipe=recipe)
    first = explain(x)
    rotated = [explain(rotate(x, a), target=first.target).map for a in ANGLES_2]
    assert_alive(first.map, *rotated)
    for region in ("disc", "full"):
        eq = equivariance(torch.stack(rotated), first.map, ANGLES_2, region=region, fill=fill)
        for a, angle in enumerate(ANGLES_2):
            found, floor = value(table, "eq", method, region, angle)
            assert list(found.values()) == pytest.approx(eq.value[a].tolist(), abs=1e-9)
            assert list(floor.values()) == pytest.approx(eq.floor[a].tolist(), abs=1e-9)
        assert values(table, "eq", method, region) == pytest.approx(eq.value.mean(0).tolist(), abs=1e-9)


def test_views_are_read_once_for_every_method(cnn):
    rows = []
    cnn.module.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    methods = [
        *(m for m in equicam.methods() if m.startswith("equigrad")),
        "grad-cam",
        "aug-cam",
        "layer-cam",
    ]
    measure(cnn, pictures(2), methods=methods, scores=["eq", "eq-consistent", "peum"], angles=ANGLES_2)
    assert sum(rows) == 2 * 18 * (1 + len(ANGLES_2))
    rows.clear()
    measure(cnn, pictures(2), methods=BOTH, views=4)  # fewer views for methods with several
    assert sum(rows) == 2 * 4 * 2


def test_peum_disagreement_and_predictions(cnn):
    x = pictures(3)
    scores = ["eq", "peum", "disagreement", "stability", "calibration"]
    table = equicam.evaluate(cnn, x, methods=BOTH, scores=scores, angles=ANGLES_2)
    e = equicam.explain(cnn, x)
    own = (
        rotate(equicam.explain(cnn, rotate(x, angle), method="grad-cam", target=e.target).map, -angle)
        for angle in e.views.to_plain()
    )
    for score, region, expected in (
        ("peum", "full", e.peum_score),
        ("disagreement", "disc", correlate_views(torch.stack(list(own))).disagreement),
        ("stability", "disc", e.stability),
    ):
        assert values(table, score, "equigrad-cam", region) == pytest.approx(expected.tolist(), rel=1e-9)
    assert not values(table, "peum", "grad-cam", "full")
    assert values(table, "presented-confidence") == pytest.approx(e.confidence.tolist())
    with torch.no_grad():
        for angle in ANGLES_2:
            probs = cnn.module(rotate(x, angle)).softmax(1)
            kept, confidence = (values(table, s, None, None, angle) for s in ("consistent", "confidence"))
            assert kept == (probs.argmax(1) == e.target).double().tolist()
            assert confidence == pytest.approx(probs[range(3), e.target].tolist())
    wrong = rows_of(table, "misclassified")
    assert all(np.isnan(r["value"]) and r["reason"] == "no label" for r in wrong)


def test_a_callers_explainer_is_evaluated_like_ours(cnn):
    calls = []

    def mine(x, target):
        calls.append(target.tolist())
        return equicam.explain(cnn, x, method="grad-cam", target=target).map

    x = pictures(2)
    methods = {"mine": mine, "grad-cam": "grad-cam", "twice": equicam.equivariant(mine, views=4)}
    table = equicam.evaluate(cnn, x, methods=methods, angles=ANGLES_2)
    ours, theirs, twice = (values(table, "eq", m, "disc") for m in ("grad-cam", "mine", "twice"))
    assert theirs == pytest.approx(ours, abs=1e-9)
    assert twice != theirs
    alone = equicam.evaluate(cnn, x, methods={"mine": mine}, angles=ANGLES_2)
    assert value(alone, "eq", "mine", "disc") == value(table, "eq", "mine", "disc")
    top = cnn.module(x).argmax(1).tolist()
    assert all(c == top or c == top * 4 for c in calls)


def test_functions_that_differentiate_or_cannot_be_hashed_fusions_and_names_are_methods(cnn):
    def gradient(x, target):
        x = x.clone().requires_grad_()
        chosen = cnn.module(x).gather(1, target[:, None]).sum()
        return torch.autograd.grad(chosen, x)[0].abs().sum(1)

    @dataclass
    class Mine:
        power: int = 1

        def __call__(self, x, target):
            return x.mean(1) ** self.power

    fusion = equicam.Fusion(Views.evenly(18), "features", "features")
    methods = {
        "gradient": gradient,
        "one": Mine(),
        "three": Mine(3),
        "fusion": fusion,
        "name": "equigrad-cam",
    }
    with torch.no_grad():
        table = equicam.evaluate(cnn, pictures(2), methods=methods, angles=ANGLES_2)
    eq = {name: value(table, "eq", name, "disc") for name in methods}
    assert np.std([*eq["gradient"][0].values()]) > 0
    assert eq["one"] != eq["three"]
    assert eq["fusion"] == eq["name"]


def test_controls_run_under_their_own_condition_only(cnn):
    x = pictures(3)
    before = {k: v.clone() for k, v in cnn.module.state_dict().items()}
    controls = ["coverage", "blur-3", "random-weights", "shuffled"]
    names = ["grad-cam", "coverage", *(f"grad-cam@{control}" for control in controls)]
    table = equicam.evaluate(cnn, x, methods=names, angles=ANGLES_2)
    assert len({tuple(values(table, "eq", m, "disc")) for m in names}) == len(names)
    one, floor = value(table, "eq", "coverage", "disc")
    assert list(one.values()) == pytest.approx(list(floor.values()))  # it does not depend on the image
    assert all(torch.equal(v, before[k]) for k, v in cnn.module.state_dict().items())


def test_a_network_of_random_weights_is_not_run_in_float16():
    """Signals fade in it: in float16 a random MobileNetV2 has constant maps, and none would say how steady it is.

    By PyTorch's own initialisation most of its maps would be blank in any type.
    """
    x = torch.rand((2, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    model = equicam.wrap(torchvision.models.mobilenet_v2().eval())
    random, name = randomise_weights(model), "grad-cam@random-weights"
    types = (torch.float16, None)
    explain = partial(equicam.explain, method="grad-cam")
    faded, kept = (explain(random, x, dtype=kind).map.std().item() for kind in types)
    assert faded == 0 < 0.1 < kept
    for seed in range(1, 4):
        found = explain(randomise_weights(model, seed=seed), x)
        assert not any("blank" in flags for flags in found.flags)
    find = partial(measure, model, x, methods=["grad-cam", name], angles=ANGLES_2)
    found, wanted = (values(find(dtype=kind), "eq", name, "disc") for kind in types)
    assert min(map(abs, wanted)) > 0.01
    assert found == pytest.approx(wanted, abs=1e-6)
    narrow = replace(model, module=random.module.half())
    assert narrow.dtype == torch.float16
    assert randomise_weights(narrow).dtype == torch.float32


def test_the_target_is_known_where_all_probabilities_are_equal(cnn):
    """Logits of 1e-20, a deep network with random weights has such: maps do not depend on their scale."""

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = cnn.module

        def forward(self, x):
            return 1e-20 * self.net(x)

    x = pictures(4)
    small = equicam.wrap(Small().eval(), layer=f"net.{cnn.layer}")
    targets = equicam.explain(cnn, x).target
    assert len(set(equicam.explain(small, x).probabilities.flatten().tolist())) == 1
    assert targets.any()  # not all 0, which the first of equal probabilities would be
    tables = [equicam.evaluate(one, x, methods=BOTH, angles=ANGLES_2) for one in (cnn, small)]
    for method in BOTH:
        usual, found = (values(table, "eq", method, "disc") for table in tables)
        assert found == pytest.approx(usual, abs=1e-4)


@pytest.mark.parametrize("kind", ["cnn", "vit"])
def test_random_weights_are_all_other_weights(kind, request):
    model = request.getfixturevalue(kind)
    one, other = (dict(randomise_weights(model, seed=1).module.named_parameters()) for _ in range(2))
    for name, weight in model.module.named_parameters():
        assert torch.equal(one[name], other[name])
        if weight.numel() > 8 and len(one[name].unique()) > 1:  # neither biases nor scales
            assert not torch.allclose(weight, one[name]), name


def test_weights_are_randomised_from_the_head_down_but_not_to_what_a_fine_tune_began_with():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    torch.manual_seed(0)
    net[3].reset_parameters()
    began = net[3].weight.detach().clone()
    head = randomise_weights(equicam.wrap(net, layer="0"), share=0.0).module[3].weight
    assert_alive(head)
    assert not torch.isclose(head, began, atol=1e-3).any()
    model = equicam.wrap(seeded(Vit), layer="blocks.1.norm1")

    def changed(share):
        other = randomise_weights(model, seed=1, share=share).module.state_dict()
        return {n for n, weight in model.module.state_dict().items() if not torch.equal(weight, other[n])}

    head, half, every = map(changed, (0, 0.5, 1))
    assert {name.split(".")[0] for name in head} == {"head"}
    assert head < half < every
    assert any(name.startswith("blocks.1") for name in half)
    assert any("." not in name for name in every)  # class token and positions, which no layer initialises
    assert not any("." not in name for name in half)


def test_shuffled_tiles_keep_every_pixel():
    x = pictures(1, 30, 35)[0]
    mixed = shuffle_tiles(x, seed=1)
    assert not torch.equal(mixed, x)
    assert torch.equal(mixed.flatten().sort().values, x.flatten().sort().values)
    assert torch.equal(mixed, shuffle_tiles(x, seed=1))
    assert not torch.equal(mixed, shuffle_tiles(x, seed=2))


def write_images(folder, count, seed):
    """Images of 48 × 48 random squares."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        image = np.kron(rng.integers(0, 255, (8, 8, 3)), np.ones((6, 6, 1))).astype(np.uint8)
        Image.fromarray(image).save(folder / f"{i}.png")


@pytest.fixture
def folder(tmp_path):
    """Seven images in two classes: one broken, one listed but missing."""
    write_images(tmp_path, 6, seed=0)
    boxes, region = "4 4 30 30;2 2 10 12", "16 16 32 32"
    lines = [f"{i}.png,{i % 2},{boxes if i else ''},{region if i % 2 else ''}" for i in range(6)]
    (tmp_path / "5.png").write_bytes(b"not an image")
    (tmp_path / "items.csv").write_text("\n".join(["path,label,boxes,region", *lines, "gone.png,0,,"]))
    return tmp_path


@pytest.fixture
def small():
    steps = v2.Compose(
        [v2.Resize(40), v2.CenterCrop(32), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.5,) * 3, (0.5,) * 3)]
    )  # fmt: skip
    return equicam.wrap(seeded(Cnn), layer="trunk", preprocess=steps, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_bad_images_and_any_error_of_preprocessing_are_rows_with_a_reason(small, folder):
    table = equicam.evaluate(small, folder, methods=["grad-cam"], angles=ANGLES_2)
    bad = table.filter(pc.is_null(table["score"])).to_pylist()
    assert {r["id"] for r in bad} == {"5.png", "gone.png"}
    assert all(np.isnan(r["value"]) and r["reason"] for r in bad)
    assert "No such file" in next(r["reason"] for r in bad if r["id"] == "gone.png")
    assert set(value(table, "eq", "grad-cam", "disc")[0]) == {f"{i}.png" for i in range(5)}

    def divide_by_zero(image):
        return small.preprocess(image) if image.getpixel((0, 0)) != first else 1 / 0

    first = Image.open(folder / "2.png").convert("RGB").getpixel((0, 0))
    table = measure(replace(small, preprocess=divide_by_zero), [folder / f"{i}.png" for i in range(4)])
    (bad,) = table.filter(pc.is_null(table["score"])).to_pylist()
    assert bad["id"].endswith("2.png")
    what = "the model's preprocessing needs to take an image of 48×48"
    assert bad["reason"].startswith(f"{what}, got ZeroDivisionError: division by zero (")
    assert "in divide_by_zero" in bad["reason"]


def test_every_metric_runs_and_every_undefined_row_has_a_reason(small, folder):
    table = measure(small, str(folder), methods=BOTH, scores=equicam.scores(), angles=ANGLES_2, views=4)
    columns = "id method score angle presentation region value floor reason group"
    assert table.column_names == columns.split()
    assert all(r["reason"] for r in table.to_pylist() if np.isnan(r["value"]))
    wrong, _ = value(table, "misclassified")
    pointing, _ = value(table, "pointing", "grad-cam", "boxes")
    assert np.isnan(pointing["0.png"])
    assert pointing["1.png"] in (0.0, 1.0)
    energy, null = value(table, "energy", "grad-cam", "label", 0.0)
    assert np.isnan(energy["0.png"])
    assert 0 <= energy["1.png"] <= 1
    assert null["1.png"] == pytest.approx((13 + 1 / 3) ** 2 / 32**2, rel=0.15)
    assert all(v in (0.0, 1.0) for v in wrong.values())
    lines = summary.summarise(table, resamples=50)
    some = {"eq", "insertion", "causal-drift", "stage-activations", "box-iou", "peum"}
    assert {line.score for line in lines} >= some


def test_tables_lose_no_digit_however_narrow(small, folder):
    table = measure(small, folder, methods=BOTH, views=4)
    lines = [line for line in summary.summarise(table) if line.score == "eq"]
    for width in (80, 60):
        console = Console(width=width, file=io.StringIO())
        console.print(next(evaluation_tables(table)))
        text = console.file.getvalue()
        for line in lines:
            assert f"{line.floor:.3f}" in text
            assert f"{line.skill.value:.3f}" in text
            assert f"{line.value.value:.3f}" in text


@pytest.fixture
def patients(tmp_path):
    """Eight images of three patients, and one of nobody."""
    write_images(tmp_path, 9, seed=3)
    lines = [f"{i}.png,{i % 2},{'' if i == 8 else f'p{i % 3}'}" for i in range(9)]
    (tmp_path / "items.csv").write_text("\n".join(["path,label,patient", *lines]))
    return tmp_path


def test_rows_carry_groups_and_intervals_are_by_group(small, patients):
    options = {"methods": BOTH, "scores": ["eq", "peum"], "angles": ANGLES_2, "views": 4}
    by_patient = equicam.evaluate(small, patients, group_by="patient", **options)
    by_image = equicam.evaluate(small, patients, **options)
    assert set(by_image["group"].to_pylist()) == {None}
    wanted = {f"{i}.png": None if i == 8 else f"p{i % 3}" for i in range(9)}
    assert {r["id"]: r["group"] for r in by_patient.to_pylist()} == wanted
    assert (summary.count_groups(by_patient), summary.count_groups(by_image)) == (4, None)
    for a, b in zip(summary.summarise(by_patient), summary.summarise(by_image), strict=True):
        assert (a.value.n, a.value.value) == (b.value.n, pytest.approx(b.value.value, nan_ok=True))
        assert (a.value.groups, b.value.groups) == (4 if a.value.n else 0, None)
    contrast = partial(summary.contrast, method="equigrad-cam", other="grad-cam")
    with_groups, without = (contrast(t).difference for t in (by_patient, by_image))
    assert (with_groups.groups, without.groups) == (4, None)
    assert (with_groups.low, with_groups.high) != (without.low, without.high)
    assert {s.pearson.groups for s in summary.signals(by_patient, resamples=50)} == {4}
    remarks = [part for part in evaluation_tables(by_patient) if isinstance(part, str)]
    assert any("over 4 groups" in text and "unreliable" in text for text in remarks)
    assert not any("groups" in part for part in evaluation_tables(by_image) if isinstance(part, str))


def test_the_floor_has_no_image_of_the_same_group(small, patients):
    table = measure(small, patients, group_by="patient")
    found, floors = value(table, "eq", "grad-cam", "disc", 90.0)
    ids = list(found)
    maps = [equicam.explain(small, [Image.open(patients / i)], method="grad-cam").map[0] for i in ids]
    x = torch.stack([small.preprocess(Image.open(patients / i)) for i in ids]).to(small.dtype)
    target = equicam.explain(small, x, method="grad-cam").target
    moved = equicam.explain(small, rotate(x, 90), method="grad-cam", target=target).map
    assert_alive(moved, *maps)
    inside = disc(tuple(moved.shape[-2:]), moved.device)
    reference = [torch.rot90(m)[inside].numpy() for m in maps]
    group = [None if i == "8.png" else int(i[0]) % 3 for i in ids]
    for i, name in enumerate(ids):
        r = [np.corrcoef(moved[i][inside].numpy(), one)[0, 1] for one in reference]
        others = [r[j] for j in range(9) if j != i and (group[i] is None or group[j] != group[i])]
        assert len(others) == (8 if group[i] is None else 6 if group[i] < 2 else 7)
        assert found[name] == pytest.approx(r[i], abs=1e-6)
        assert floors[name] == pytest.approx(np.mean(others), abs=1e-6)


def test_one_group_alone_has_no_floor(small, patients):
    text = (patients / "items.csv").read_text()
    lines = [",".join([*line.split(",")[:2], "p0"]) for line in text.splitlines()[1:]]
    (patients / "items.csv").write_text("\n".join(["path,label,group", *lines]))
    table = measure(small, patients, scores=["eq", "causal"])
    _, floors = value(table, "eq", "grad-cam", "disc")
    borrowed = values(table, "causal-drift-of-another", "grad-cam", "disc")
    assert np.isnan([*floors.values(), *borrowed]).all()


def test_the_sample_is_shuffled_so_that_neighbours_are_not_of_neighbouring_classes():
    items = [Item(f"{c:03d}/{i}.png", Path(), label=c) for c in range(40) for i in range(2)]
    orders = (items, 0), (items[::-1], 0), (items, 1)
    one, same, other = (Sample([*some], lambda _item: None).shuffled(seed).items for some, seed in orders)
    assert one == same != other
    assert sorted(i.id for i in one) == [i.id for i in items]
    apart = np.abs(np.diff([item.label for item in one]))
    assert apart.mean() > 8  # 13.3 of random pairs; in order it is 0.5


def test_boxes_follow_the_models_own_preprocessing(small):
    # 48 → 40, centre 32: the middle third becomes 13.3 wide
    mask = box_mask(small, (48, 48), (16.0, 16.0, 32.0, 32.0))
    assert mask.shape == (32, 32)
    assert mask.sum().item() == pytest.approx((40 / 3) ** 2, rel=0.02)
    columns = torch.arange(32)
    assert (mask.sum(0) @ columns.double() / mask.sum()).item() == pytest.approx(15.5, abs=0.05)
    assert box_mask(small, (48, 48), (0.0, 0.0, 48.0, 48.0)).min() > 0.99
    assert box_mask(small, (48, 48), (0.0, 0.0, 3.0, 3.0)).max() < 0.5  # cropped away


@pytest.mark.parametrize(
    ("classes", "labels", "expected"),
    [
        ("bxayz", ["b", "a", "a", 4], [0, 2, 2, 4]),  # by name
        ("vwxyz", [*"abcde"], [None] * 5),
        ("vwxyz", [*"01234"], range(5)),
        ("", [*"edcba"], [4, 3, 2, 1, 0]),  # no names: by their order
        ("", ["b", "a", "a", 4], [None, None, None, 4]),  # five outputs, two names: no order
    ],
)
def test_labels_by_name_by_order_and_unknown(small, folder, classes, labels, expected):
    items = [Item(id=str(i), path=folder / f"{i % 4}.png", label=label) for i, label in enumerate(labels)]
    model = replace(small, classes=tuple(classes)) if classes else small
    target = equicam.explain(model, [i.path for i in items]).target.tolist()
    rows = rows_of(measure(model, items), "misclassified")
    for row, e, label in zip(rows, expected, labels, strict=True):
        assert row["reason"] == (f"label {label!r} is none of the model's 5 classes" if e is None else None)
    wrong = [float("nan") if e is None else float(t != e) for t, e in zip(target, expected, strict=True)]
    assert [r["value"] for r in rows] == pytest.approx(wrong, nan_ok=True)


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interrupted_evaluation_resumes_with_the_same_rows(small, folder, tmp_path, monkeypatch, ahead):
    module = import_module("equicam.evaluate.evaluate")
    monkeypatch.setattr(module, "finish_in_order", lambda started, _ahead: finish_in_order(started, ahead))
    monkeypatch.setattr(module, "IMAGES_PER_SHARD", 2)
    options = {"methods": BOTH, "angles": ANGLES_2, "views": 4}
    whole = equicam.evaluate(small, folder, out=tmp_path / "whole.parquet", **options)
    out = tmp_path / "cut.parquet"
    passes = []

    def interrupt(_module, inputs):
        passes.append(len(inputs[0]))
        if len(passes) == 4:
            raise KeyboardInterrupt

    handle = small.module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        equicam.evaluate(small, folder, out=out, **options)
    assert not out.exists()
    shards = {path.name for path in (tmp_path / "cut.parquet.shards").iterdir()}
    assert shards == {"fingerprint.json", "shard-000000.parquet"}
    with pytest.raises(EquicamError, match=r"angles was \[45.0, 90.0\], is \[45.0\]"):
        equicam.evaluate(small, folder, out=out, **options | {"angles": (45,)})
    table = equicam.evaluate(small, folder, out=out, **options)
    handle.remove()
    assert str(table.to_pylist()) == str(whole.to_pylist())  # as text, where NaN equals NaN
    assert not (tmp_path / "cut.parquet.shards").exists()
    assert "weights" in json.loads(pq.read_schema(out).metadata[b"equicam"])
    # a finished file is read, not computed, and another evaluation does not overwrite it
    small.module.register_forward_pre_hook(lambda *_: pytest.fail("computed again"))
    assert equicam.evaluate(small, folder, out=out, **options).num_rows == whole.num_rows
    with pytest.raises(EquicamError, match="methods was"):
        equicam.evaluate(small, folder, out=out, **options | {"methods": ["grad-cam"]})


def test_what_decides_the_rows_must_not_change(small, folder, tmp_path):
    def change_weights():
        with torch.no_grad():
            next(small.module.parameters()).add_(1e-3)
        return {}

    def change_image():
        Image.fromarray(np.full((40, 50, 3), 90, np.uint8)).save(folder / "3.png")
        return {}

    def batch(v):
        return {"images": torch.full((2, 3, 32, 32), v)}

    def in_memory(v):
        return {"images": [Image.new("RGB", (40, 40), (v,) * 3)] * 2}

    flipped = replace(small, preprocess=lambda image: small.preprocess(image).flip(-1))
    mine = {"methods": {"mine": lambda x, _: x.mean(1)}}
    for changed, before, change in (
        ("preprocessing was", {}, lambda: {"model": flipped}),
        ("content was", {}, change_image),
        ("weights was", {}, change_weights),
        ("content was", batch(1.0), lambda: batch(2.0)),
        ("content was", in_memory(9), lambda: in_memory(18)),
        ('group was "rotation", is "scale"', {}, lambda: {"group": "scale", "angles": None}),
        ("explainers was", mine, lambda: {"methods": {"mine": lambda x, _: x.amax(1)}}),
    ):
        options = {"model": small, "images": folder, "out": tmp_path / "rows.parquet"} | before
        measure(**options)
        measure(**options)
        with pytest.raises(EquicamError, match=changed):
            measure(**options | change())
        options["out"].unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["grad-kam"]}, "method needs one of"),
        ({"methods": ["grad-cam@blurred"]}, "'grad-cam@blurred' needs one of coverage, blur-SIGMA"),
        ({"methods": ["grad-cam@blur-0"]}, "control of 'grad-cam@blur-0' needs one of"),
        ({"methods": []}, "methods needs a list of names"),
        ({"scores": ["eqq"]}, "scores needs a list of eq,"),
        ({"scores": ["eq", "eq"]}, "scores needs each one once, got 'eq' twice"),
        ({"methods": ["grad-cam"], "scores": ["peum"]}, "score 'peum' needs a method of several views"),
        ({"methods": ["equigrad-cam"], "scores": ["stages"]}, "score 'stages' needs a method of one view"),
        ({"methods": ["coverage", "equigrad-cam"], "scores": ["stages"]}, "that starts at features"),
        ({"methods": ["grad-cam@blur-3"], "scores": ["stages"]}, "that starts at features"),
        ({"angles": (0, 90)}, "angles needs rotations other than 0°"),
        ({"angles": (float("nan"),)}, "angles needs rotations other than 0°"),
        ({"angles": (90, 450)}, "angles needs each one once"),
        ({"split": "test"}, "split needs a folder or manifest"),
        ({"n": 0}, "n"),
        ({"group": "mirror"}, "group needs one of rotation, dihedral, scale, shift, got 'mirror'"),
        ({"group": "scale", "recipe": PAPER}, "protocol paper needs group rotation, its only one, got scale"),
        ({"group": "scale", "angles": (15,)}, "angles needs group rotation or dihedral, got scale"),
        ({"group": "dihedral", "angles": ()}, "angles needs finite numbers of degrees"),
        ({"group": "dihedral", "angles": (0, float("inf"))}, "angles needs finite numbers of degrees"),
        ({"group": "dihedral", "angles": (0, 360)}, "angles needs each one once"),
        ({"group": "dihedral", "scores": ["energy"]}, "score 'energy' needs group rotation, got dihedral"),
        ({"group": "shift", "scores": ["eq", "energy"]}, "score 'energy' needs group rotation, got shift"),
    ],
)
def test_impossible_options_are_refused_before_the_model_runs(cnn, options, message):
    cnn.module.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(EquicamError, match=message):
        equicam.evaluate(cnn, pictures(2), **options)


def test_an_image_has_the_same_values_in_any_batch(cnn):
    x = pictures(4)
    options = {"methods": BOTH, "scores": ["eq", "insertion", "eq-spearman"], "angles": ANGLES_2, "views": 6}
    together, apart = equicam.evaluate(cnn, x, **options), equicam.evaluate(cnn, x[2:3], **options)
    # ranks tell values apart that differ by rounding
    for score, region, close in (
        ("eq", "disc", 1e-9),
        ("eq-spearman", "full", 1e-4),
        ("insertion", None, 1e-9),
    ):
        for method in BOTH:
            alone, floor = value(apart, score, method, region)
            assert alone["0"] == pytest.approx(value(together, score, method, region)[0]["2"], abs=close)
            assert score == "insertion" or np.isnan(floor["0"])


def test_the_sample_is_spread_over_classes_and_its_digest_kept(small, folder):
    table = measure(small, folder, n=2)
    assert set(value(table, "presented-confidence")[0]) == {"0.png", "1.png"}  # one of each class
    about = json.loads(table.schema.metadata[b"equicam"])
    assert about["images"] == 2
    assert len(about["sample"]) == 64


def test_summaries_by_hand(vit):
    table = equicam.evaluate(vit, pictures(6), methods=BOTH, scores=["eq", "peum", "disagreement"], views=4)
    eq, keeps = pairs(table, "eq", "grad-cam", "disc"), pairs(table, "consistent")
    weight, confidence = pairs(table, "confidence-kept"), pairs(table, "confidence")
    found = summary.conditional(table, "grad-cam")
    assert 0 < np.mean(list(keeps.values())) < 1
    assert found.all.value == pytest.approx(np.mean(list(eq.values())))
    assert found.consistent.value == pytest.approx(np.mean([v for k, v in eq.items() if keeps[k]]))
    weighted = np.average(list(eq.values()), weights=[weight[k] for k in eq])
    assert found.weighted.value == pytest.approx(weighted)
    assert found.consistency_rate.value == pytest.approx(np.mean(list(keeps.values())))
    by_angle = dict(summary.by_angle(table, "grad-cam"))
    assert list(by_angle) == list(ANGLES)
    assert by_angle[45.0].value == pytest.approx(np.mean([v for (_, a), v in eq.items() if a == 45]))
    presented = value(table, "presented-confidence")[0]
    lost = [presented[i] - confidence[i, a] for i, a in eq if keeps[i, a]]
    drift = [1 - v for k, v in eq.items() if keeps[k]]
    r, *_ = summary.drift_and_confidence(table, "grad-cam")
    assert r.r == pytest.approx(np.corrcoef(drift, lost)[0, 1])
    better = summary.contrast(table, "equigrad-cam", "grad-cam")
    a, b = (np.array(values(table, "eq", m, "disc")) for m in ("equigrad-cam", "grad-cam"))
    assert better.difference.value == pytest.approx((a - b).mean())
    assert better.wins == pytest.approx((a > b).mean())
    signals = {s.name: s for s in summary.signals(table, resamples=50)}
    peum = np.array(values(table, "peum", "equigrad-cam", "full"))
    of_peum, of_flips = (signals[name].pearson.r for name in ("peum (full)", "flip-rate"))
    assert of_peum == pytest.approx(np.corrcoef(peum, 1 - b)[0, 1])
    assert signals["flip-rate"].behind_peum.value == pytest.approx(of_peum - of_flips)
    assert set(signals) == {"peum (full)", "peum (disc)", "disagreement", "flip-rate", "confidence-drop"}
    with pytest.raises(EquicamError, match="needs an evaluation that has them"):
        summary.pick(table, "insertion", "grad-cam")


def test_strata_of_confidence_are_half_open_and_the_last_closed():
    eq = {"score": "eq", "method": "mine", "region": "disc"}
    confidences = [0.0, 0.19, 0.2, 0.8, 1.0, None, 0.5]
    rows = []
    for i, p in enumerate(confidences):
        rows.append({"id": str(i), "value": float(i + 1) if i < 6 else float("nan"), **eq})
        rows.append({"id": str(i), "value": p, "score": "presented-confidence"})
    found = dict(summary.by_confidence(pa.Table.from_pylist(rows, schema=SCHEMA), "mine"))
    assert list(found) == ["0–0.2", "0.2–0.4", "0.4–0.6", "0.6–0.8", "0.8–1"]
    assert [one.n for one in found.values()] == [2, 1, 0, 0, 2]
    assert [found[name].value for name in ("0–0.2", "0.2–0.4", "0.8–1")] == [1.5, 3, 4.5]


def test_rows_of_constant_maps_count_zero_and_are_reported(cnn):
    def some_flat(x, target):
        maps = equicam.explain(cnn, x, method="grad-cam", target=target).map
        return torch.where(x.mean((1, 2, 3))[:, None, None] > x.mean(), maps, 0)

    table = equicam.evaluate(cnn, pictures(4), methods={"flat": some_flat}, angles=ANGLES_2)
    rows = [r for r in rows_of(table, "eq", "flat", "disc") if r["angle"] is not None]
    found, constant = np.array([(r["value"], r["reason"] == "constant map") for r in rows]).T
    assert 0 < constant.mean() < 1
    assert not found[constant == 1].any()
    (line,) = [s for s in summary.summarise(table, resamples=20) if s.score == "eq" and s.region == "disc"]
    assert line.constant == pytest.approx(constant.mean())
    assert line.without_constant == pytest.approx(found[constant == 0].mean())
    assert line.value.value == pytest.approx(found.mean())


def test_out_must_be_a_file_that_can_be_written(small, folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    small.module.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for out, words in {"notes.txt": "not one of ours", ".": "got a folder", "a/b": "no such folder"}.items():
        with pytest.raises(EquicamError, match=words):
            measure(small, folder, out=tmp_path / out)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_follow_exif_orientation(small, tmp_path, orientation):
    """A bright patch and its box, both in stored pixels: whatever EXIF does, the box covers the patch."""
    stored = np.zeros((80, 80, 3), np.uint8)
    stored[16:30, 40:60] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / "oriented.png", exif=exif)
    item = Item(id="a", path=tmp_path / "oriented.png", boxes=((40.0, 16.0, 60.0, 30.0),))
    x, truth = load_image(small, item)
    assert torch.equal(truth.boxes[0], x[0] > 0)


def test_cropped_boxes_have_a_reason_and_huge_boxes_do_no_harm(small, folder):
    items = [
        Item(id="away", path=folder / "0.png", region=(0.0, 0.0, 2.0, 2.0), boxes=((0.0, 0.0, 3.0, 3.0),)),
        Item(id="wild", path=folder / "1.png", boxes=((1e30, 0.0, 2e30, 5.0), (8.0, 8.0, 1e30, 40.0))),
    ]
    table = measure(small, items, scores=["energy", "pointing"])
    rows = {(r["id"], r["score"], r["angle"]): r for r in table.to_pylist()}
    assert np.isnan(rows["away", "energy", 90.0]["value"])
    assert rows["away", "energy-drop", None]["reason"] == "label region outside the model's input"
    assert rows["away", "pointing", None]["reason"] == "boxes outside the model's input"
    assert rows["wild", "pointing", None]["value"] in (0.0, 1.0)


def test_rows_are_in_the_callers_order_and_no_image_is_alone_in_a_shard(small, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(import_module("equicam.evaluate.evaluate"), "IMAGES_PER_SHARD", 4)
    paths = sorted(folder.glob("[0-4].png"), reverse=True)
    for more in ({}, {"out": tmp_path / "rows.parquet"}, {"n": 5}, {"n": 3}):
        table = measure(small, paths, **more)
        ids = table["id"].to_pylist()
        listed = [str(path) for path in paths if str(path) in ids]
        assert list(dict.fromkeys(ids)) == listed
        assert sorted(ids, key=listed.index) == ids
        assert len(listed) == more.get("n", len(paths))
        assert not np.isnan(list(value(table, "eq", "grad-cam", "disc")[1].values())).any()


def test_controls_with_their_own_predictions_are_conditioned_on_those(vit):
    shuffled = "grad-cam@shuffled"
    table = equicam.evaluate(vit, pictures(6), methods=["grad-cam", shuffled], scores=["eq", "eq-consistent"])
    kept = list(pairs(table, "eq-consistent", shuffled, "disc").values())
    assert 0 < np.isfinite(kept).sum() < len(kept)
    found = summary.conditional(table, shuffled)
    assert found.consistent.value == pytest.approx(np.nanmean(kept))
    assert found.consistency_rate.value == pytest.approx(np.isfinite(kept).mean())


def test_causal_rows_are_compared_with_their_controls(cnn):
    table = equicam.evaluate(cnn, pictures(4), methods=["grad-cam"], scores=["causal"], angles=ANGLES_2)
    lines = {line.region: line for line in summary.occlusion_effects(table, "grad-cam")}
    assert next(iter(lines)) == "drift"
    regions = ("drift", "same-saliency")
    drift, control = (np.array(values(table, f"causal-{r}", "grad-cam", "disc")) for r in regions)
    assert lines["same-saliency"].drift_above.difference.value == pytest.approx((drift - control).mean())
    assert lines["drift"].presented.value == pytest.approx(drift.mean())


def over_angles_without_floor(batch):
    of = {"presentations": batch.presentations, "floor_over_angles": torch.zeros(len(batch.ids))}
    return MetricRows("mine", None, torch.zeros(len(batch.presentations), len(batch.ids)), **of)


def test_a_custom_metric_that_yields_something_else_is_refused(cnn, monkeypatch):
    for wrong, got in (
        (lambda _batch: 0.5, "float: 0.5"),
        (
            lambda batch: MetricRows("mine", "grad-cam", torch.zeros(len(batch.ids) + 1)),
            r"'mine' with \(3,\)",
        ),
        (over_angles_without_floor, "'mine' with floor_over_angles and no floor"),
    ):
        monkeypatch.setitem(METRICS, "mine", Metric("mine", lambda batch, wrong=wrong: iter([wrong(batch)])))
        with pytest.raises(EquicamError, match=rf"yield MetricRows with \[2\] values.* got {got}"):
            measure(cnn, pictures(2), scores=["mine"])


def test_a_metric_may_fill_the_same_tensor_again(cnn, monkeypatch):
    def rows(batch):
        values = torch.zeros(len(batch.ids), dtype=torch.float64, requires_grad=True)
        for name in ("one", "two"):
            with torch.no_grad():
                values += 1
            yield MetricRows(name, "grad-cam", values)

    monkeypatch.setitem(METRICS, "mine", Metric("mine", rows))
    table = measure(cnn, pictures(2), scores=["mine"])
    assert [values(table, name, "grad-cam") for name in ("one", "two")] == [[1, 1], [2, 2]]


@pytest.mark.parametrize(
    "methods", [["coverage"], ["grad-cam@shuffled"], {"mine": lambda x, _target: x.mean(1)}]
)
def test_images_that_are_not_finite_are_named(methods):
    class Tolerant(Cnn):
        def forward(self, x):
            return super().forward(x.nan_to_num())

    x = pictures(3)
    x[1, 0, 4, 4] = torch.nan
    with pytest.raises(EquicamError, match=r"finite pixels, got NaN or infinity in image \[1\]"):
        equicam.evaluate(equicam.wrap(seeded(Tolerant), layer="trunk"), x, methods=methods)


def test_every_module_can_be_imported_from_its_package():
    """The function `equicam.evaluate` hides the package of that name, and nothing hides a module in it."""
    assert callable(equicam.evaluate)
    assert callable(equicam.scores)
    for found in pkgutil.walk_packages(import_module("equicam.evaluate").__path__, "equicam.evaluate."):
        names: dict = {}
        package, _, module = found.name.rpartition(".")
        exec(f"from {package} import {module} as m", names)
        assert names["m"] is sys.modules[found.name]
