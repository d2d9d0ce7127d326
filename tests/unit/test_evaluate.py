"""The protocol end to end: metrics of `evaluate` are those of `explain`'s maps, one pass for each image, angle and view."""

import json
import pkgutil
import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

import equicam
from equicam.core.uncertainty import correlate_views
from equicam.core.views import Views, disc, rotate
from equicam.errors import EquicamError
from equicam.evaluate import summary
from equicam.evaluate.controls import randomise_weights, shuffle_tiles
from equicam.evaluate.equivariance import ANGLES, equivariance
from equicam.evaluate.loading import Sample, load_image
from equicam.evaluate.metrics import METRICS, Metric
from equicam.evaluate.table import MetricRows
from equicam.images.items import Item
from equicam.models.images import box_mask
from equicam.runs.report.tables import evaluation_tables
from equicam.runtime.pending import finish_in_order
from tests.conftest import Cnn, Vit, assert_alive, pictures, seeded

ANGLES_2 = (45, 90)


def value(table, score, method=None, region=None, angle=None):
    rows = [
        r
        for r in table.to_pylist()
        if (r["score"], r["method"], r["region"], r["angle"]) == (score, method, region, angle)
    ]
    return {r["id"]: r["value"] for r in rows}, {r["id"]: r["floor"] for r in rows}


@pytest.mark.parametrize("protocol", ["ours", "paper"])
@pytest.mark.parametrize(
    "method", ["grad-cam", "layer-cam", "equigrad-cam", "equigrad-cam+pcf", "equigrad-cam-out", "aug-cam"]
)
def test_eq_is_that_of_explains_maps(cnn, method, protocol):
    x = pictures(3)
    others = ["grad-cam", "equigrad-cam-fine"]  # must not change this one's maps
    table = equicam.evaluate(
        cnn, x, methods=[*others, method], views=6, angles=ANGLES_2, recipe=equicam.Recipe(protocol=protocol)
    )
    fill = "zeros" if protocol == "paper" else "reflect"
    views = None if method in ("grad-cam", "layer-cam") else 6
    explain = partial(
        equicam.explain, cnn, method=method, views=views, recipe=equicam.Recipe(protocol=protocol)
    )
    first = explain(x)
    rotated = [explain(rotate(x, a), target=first.target).map for a in ANGLES_2]
    assert_alive(first.map, *rotated)
    for region in ("disc", "full"):
        eq = equivariance(torch.stack(rotated), first.map, ANGLES_2, region=region, fill=fill)
        for a, angle in enumerate(ANGLES_2):
            found, floor = value(table, "eq", method, region, angle)
            assert list(found.values()) == pytest.approx(eq.value[a].tolist(), abs=1e-9)
            assert list(floor.values()) == pytest.approx(eq.floor[a].tolist(), abs=1e-9)
        whole, _ = value(table, "eq", method, region)
        assert list(whole.values()) == pytest.approx(eq.value.mean(0).tolist(), abs=1e-9)


def test_views_are_read_once_for_every_method(cnn):
    rows = []
    cnn.module.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    every = [m for m in equicam.methods() if m.startswith("equigrad")] + ["grad-cam", "aug-cam", "layer-cam"]
    equicam.evaluate(cnn, pictures(2), methods=every, scores=["eq", "eq-consistent", "peum"], angles=ANGLES_2)
    assert sum(rows) == 2 * 18 * (1 + len(ANGLES_2))


def test_peum_disagreement_and_predictions(cnn):
    x = pictures(3)
    table = equicam.evaluate(
        cnn,
        x,
        methods=["grad-cam", "equigrad-cam"],
        scores=["eq", "peum", "disagreement", "stability", "calibration"],
        angles=ANGLES_2,
    )
    e = equicam.explain(cnn, x)
    found, _ = value(table, "peum", "equigrad-cam", "full")
    assert list(found.values()) == pytest.approx(e.peum_score.tolist(), rel=1e-9)
    assert not value(table, "peum", "grad-cam", "full")[0]
    found, _ = value(table, "disagreement", "equigrad-cam", "disc")
    own = (
        rotate(equicam.explain(cnn, rotate(x, angle), method="grad-cam", target=e.target).map, -angle)
        for angle in e.views.to_plain()
    )
    expected = correlate_views(torch.stack(list(own))).disagreement
    assert list(found.values()) == pytest.approx(expected.tolist(), rel=1e-9)
    found, _ = value(table, "stability", "equigrad-cam", "disc")
    assert list(found.values()) == pytest.approx(e.stability.tolist(), rel=1e-9)
    presented, _ = value(table, "presented-confidence")
    assert list(presented.values()) == pytest.approx(e.confidence.tolist())
    with torch.no_grad():
        for angle in ANGLES_2:
            probs = cnn.module(rotate(x, angle)).softmax(1)
            kept, _ = value(table, "consistent", angle=angle)
            assert list(kept.values()) == (probs.argmax(1) == e.target).double().tolist()
            confidence, _ = value(table, "confidence", angle=angle)
            assert list(confidence.values()) == pytest.approx(probs[range(3), e.target].tolist())
    wrong = [r for r in table.to_pylist() if r["score"] == "misclassified"]
    assert all(np.isnan(r["value"]) and r["reason"] == "no label" for r in wrong)


def test_a_callers_explainer_is_evaluated_like_ours(cnn):
    calls = []

    def mine(x, target):
        calls.append(target.tolist())
        return equicam.explain(cnn, x, method="grad-cam", target=target).map

    x = pictures(2)
    methods = {"mine": mine, "grad-cam": "grad-cam", "twice": equicam.equivariant(mine, views=4)}
    table = equicam.evaluate(cnn, x, methods=methods, angles=ANGLES_2)
    ours, theirs = (value(table, "eq", m, "disc")[0] for m in ("grad-cam", "mine"))
    assert list(theirs.values()) == pytest.approx(list(ours.values()), abs=1e-9)
    assert value(table, "eq", "twice", "disc")[0] != theirs
    alone = equicam.evaluate(cnn, x, methods={"mine": mine}, angles=ANGLES_2)
    assert value(alone, "eq", "mine", "disc") == value(table, "eq", "mine", "disc")
    top = cnn.module(x).argmax(1).tolist()
    assert all(c == top or c == top * 4 for c in calls)


def test_fusions_and_methods_by_name(cnn):
    fusion = equicam.Fusion(Views.evenly(18), "features", "features")
    table = equicam.evaluate(cnn, pictures(2), methods={"a": fusion, "b": "equigrad-cam"}, angles=ANGLES_2)
    assert value(table, "eq", "a", "disc") == value(table, "eq", "b", "disc")


def test_fewer_views_go_to_methods_with_several(cnn):
    rows = []
    cnn.module.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    equicam.evaluate(cnn, pictures(2), methods=["grad-cam", "equigrad-cam"], views=4, angles=(90,))
    assert sum(rows) == 2 * 2 * 4


def test_controls_run_under_their_own_condition_only(cnn):
    x = pictures(3)
    before = {k: v.clone() for k, v in cnn.module.state_dict().items()}
    names = [
        "grad-cam",
        "coverage",
        "grad-cam@coverage",
        "grad-cam@blur-3",
        "grad-cam@random-weights",
        "grad-cam@shuffled",
    ]
    table = equicam.evaluate(cnn, x, methods=names, angles=ANGLES_2)
    found = {m: list(value(table, "eq", m, "disc")[0].values()) for m in names}
    assert len({tuple(v) for v in found.values()}) == len(names)
    one, floor = value(table, "eq", "coverage", "disc")
    assert list(one.values()) == pytest.approx(list(floor.values()))  # it does not depend on the image
    assert all(torch.equal(v, before[k]) for k, v in cnn.module.state_dict().items())


def test_a_network_of_random_weights_is_not_run_in_float16():
    """Signals fade in it: in float16 a random MobileNetV2 has constant maps, and none would say how steady it is."""
    x = torch.rand((2, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    model = equicam.wrap(torchvision.models.mobilenet_v2().eval())
    random = randomise_weights(model)
    faded, kept = (
        equicam.explain(random, x, method="grad-cam", dtype=kind).map.std().item()
        for kind in (torch.float16, None)
    )
    assert faded == 0 < 0.1 < kept
    name = "grad-cam@random-weights"
    found, wanted = (
        value(
            equicam.evaluate(model, x, methods=["grad-cam", name], angles=ANGLES_2, dtype=kind),
            "eq",
            name,
            "disc",
        )[0]
        for kind in (torch.float16, None)
    )
    assert min(map(abs, wanted.values())) > 0.01
    assert found == pytest.approx(wanted, abs=1e-6)
    narrow = replace(model, module=randomise_weights(model).module.half())
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
    methods = ["grad-cam", "equigrad-cam"]
    tables = [equicam.evaluate(one, x, methods=methods, angles=ANGLES_2) for one in (cnn, small)]
    for method in methods:
        usual, found = (value(table, "eq", method, "disc")[0] for table in tables)
        assert list(found.values()) == pytest.approx(list(usual.values()), abs=1e-4)


def test_a_deep_network_with_random_weights_has_maps():
    """By PyTorch's own initialisation most maps of MobileNetV2 are blank."""
    model = equicam.wrap(torchvision.models.mobilenet_v2().eval())
    x = torch.randn(3, 3, 96, 96)
    found = [equicam.explain(randomise_weights(model, seed=seed), x, method="grad-cam") for seed in range(3)]
    assert all("blank" not in flags for one in found for flags in one.flags)


@pytest.mark.parametrize("build", [Cnn, Vit])
def test_random_weights_are_all_other_weights(build):
    model = equicam.wrap(seeded(build), layer="trunk" if build is Cnn else "blocks.1.norm1")
    other = randomise_weights(model, seed=1)
    for (name, a), b in zip(model.module.named_parameters(), other.module.parameters(), strict=True):
        if (
            a.numel() > 8
            and not torch.equal(b, torch.ones_like(b))
            and not torch.equal(b, torch.zeros_like(b))
        ):
            assert not torch.allclose(a, b), name
    again = randomise_weights(model, seed=1)
    assert all(
        torch.equal(a, b) for a, b in zip(other.module.parameters(), again.module.parameters(), strict=True)
    )


def test_a_random_head_is_not_the_one_that_a_fine_tune_began_with():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    torch.manual_seed(0)
    net[3].reset_parameters()
    began = net[3].weight.detach().clone()
    head = randomise_weights(equicam.wrap(net, layer="0"), share=0.0).module[3].weight
    assert_alive(head)
    assert not torch.isclose(head, began, atol=1e-3).any()


def test_weights_are_randomised_from_the_head_down():
    model = equicam.wrap(seeded(Vit), layer="blocks.1.norm1")

    def changed(share):
        other = randomise_weights(model, seed=1, share=share).module.state_dict()
        return [
            name for name, weight in model.module.state_dict().items() if not torch.equal(weight, other[name])
        ]

    head, half, every = changed(0), changed(0.5), changed(1)
    assert {name.split(".")[0] for name in head} == {"head"}
    assert set(head) < set(half) < set(every)
    assert "blocks.1.attn.qkv.weight" in half or any(name.startswith("blocks.1") for name in half)
    assert not any(name.startswith("blocks.0") for name in head)
    assert any("." not in name for name in every)  # class token and positions, which no layer initialises
    assert not any("." not in name for name in half)


def test_shuffled_tiles_keep_every_pixel():
    x = pictures(1, 30, 35)[0]
    mixed = shuffle_tiles(x, seed=1)
    assert not torch.equal(mixed, x)
    assert torch.equal(mixed.flatten().sort().values, x.flatten().sort().values)
    assert torch.equal(mixed, shuffle_tiles(x, seed=1))
    assert not torch.equal(mixed, shuffle_tiles(x, seed=2))


@pytest.fixture
def folder(tmp_path):
    """Seven images in two classes: one broken, one listed but missing."""
    rng = np.random.default_rng(0)
    lines = ["path,label,boxes,region"]
    for i in range(6):
        image = np.kron(rng.integers(0, 255, (8, 8, 3)), np.ones((6, 6, 1))).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{i % 2},{'4 4 30 30;2 2 10 12' if i else ''},{'16 16 32 32' if i % 2 else ''}")
    (tmp_path / "5.png").write_bytes(b"not an image")
    lines.append("gone.png,0,,")
    (tmp_path / "items.csv").write_text("\n".join(lines))
    return tmp_path


@pytest.fixture
def small():
    from torchvision.transforms import v2

    steps = v2.Compose(
        [
            v2.Resize(40),
            v2.CenterCrop(32),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.5,) * 3, (0.5,) * 3),
        ]
    )
    return equicam.wrap(seeded(Cnn), layer="trunk", preprocess=steps, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_bad_images_are_rows_with_a_reason(small, folder):
    table = equicam.evaluate(small, folder, methods=["grad-cam"], angles=ANGLES_2)
    bad = table.filter(pc.is_null(table["score"])).to_pylist()
    assert {r["id"] for r in bad} == {"5.png", "gone.png"}
    assert all(np.isnan(r["value"]) and r["reason"] for r in bad)
    assert "No such file" in next(r["reason"] for r in bad if r["id"] == "gone.png")
    assert set(value(table, "eq", "grad-cam", "disc")[0]) == {f"{i}.png" for i in range(5)}


def test_every_metric_runs_and_every_undefined_row_has_a_reason(small, folder):
    table = equicam.evaluate(
        small,
        str(folder),
        methods=["grad-cam", "equigrad-cam"],
        scores=equicam.scores(),
        angles=ANGLES_2,
        views=4,
    )
    rows = table.to_pylist()
    assert table.column_names == [
        "id", "method", "score", "angle", "presentation", "region", "value", "floor", "reason", "group",
    ]  # fmt: skip
    undefined = [r for r in rows if np.isnan(r["value"])]
    assert all(r["reason"] for r in undefined)
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
    assert {line.score for line in lines} >= {
        "eq",
        "insertion",
        "causal-drift",
        "stage-activations",
        "box-iou",
        "peum",
    }


@pytest.fixture
def patients(tmp_path):
    """Eight images of three patients, and one of nobody."""
    rng = np.random.default_rng(3)
    lines = ["path,label,patient"]
    for i in range(9):
        image = np.kron(rng.integers(0, 255, (8, 8, 3)), np.ones((6, 6, 1))).astype(np.uint8)
        Image.fromarray(image).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{i % 2},{'' if i == 8 else f'p{i % 3}'}")
    (tmp_path / "items.csv").write_text("\n".join(lines))
    return tmp_path


def test_rows_carry_groups_and_intervals_are_by_group(small, patients):
    options = {
        "methods": ["grad-cam", "equigrad-cam"],
        "scores": ["eq", "peum"],
        "angles": ANGLES_2,
        "views": 4,
    }
    by_patient = equicam.evaluate(small, patients, group_by="patient", **options)
    by_image = equicam.evaluate(small, patients, **options)
    assert set(by_image["group"].to_pylist()) == {None}
    assert {r["id"]: r["group"] for r in by_patient.to_pylist()} == {
        f"{i}.png": None if i == 8 else f"p{i % 3}" for i in range(9)
    }
    assert (summary.count_groups(by_patient), summary.count_groups(by_image)) == (4, None)
    for a, b in zip(summary.summarise(by_patient), summary.summarise(by_image), strict=True):
        assert (a.value.n, a.value.value) == (b.value.n, pytest.approx(b.value.value, nan_ok=True))
        assert (a.value.groups, b.value.groups) == (4 if a.value.n else 0, None)
    with_groups, without = (summary.contrast(t, "equigrad-cam", "grad-cam") for t in (by_patient, by_image))
    assert (with_groups.groups, without.groups) == (4, None)
    assert (with_groups.low, with_groups.high) != (without.low, without.high)
    assert {s.pearson.groups for s in summary.signals(by_patient, resamples=50)} == {4}
    remarks = [part for part in evaluation_tables(by_patient) if isinstance(part, str)]
    assert any("over 4 groups" in text and "unreliable" in text for text in remarks)
    assert not any("groups" in part for part in evaluation_tables(by_image) if isinstance(part, str))


def test_the_floor_has_no_image_of_the_same_group(small, patients):
    table = equicam.evaluate(small, patients, methods=["grad-cam"], angles=(90,), group_by="patient")
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
    table = equicam.evaluate(small, patients, methods=["grad-cam"], scores=["eq", "causal"], angles=(90,))
    _, floors = value(table, "eq", "grad-cam", "disc")
    borrowed, _ = value(table, "causal-drift-of-another", "grad-cam", "disc")
    assert np.isnan(list(floors.values())).all()
    assert np.isnan(list(borrowed.values())).all()


def test_the_sample_is_shuffled_so_that_neighbours_are_not_of_neighbouring_classes():
    items = [Item(f"{c:03d}/{i}.png", Path(), label=c) for c in range(40) for i in range(2)]
    one, same, other = (
        Sample(list(order), lambda _item: None).shuffled(seed).items
        for order, seed in ((items, 0), (items[::-1], 0), (items, 1))
    )
    assert one == same != other
    assert sorted(i.id for i in one) == [i.id for i in items]
    apart = np.abs(np.diff([item.label for item in one]))
    assert apart.mean() > 8  # 13.3 of random pairs; in order it is 0.5


def test_boxes_follow_the_models_own_preprocessing(small):
    mask = box_mask(
        small, (48, 48), (16.0, 16.0, 32.0, 32.0)
    )  # 48 → 40, centre 32: the middle third becomes 13.3 wide
    assert mask.shape == (32, 32)
    assert mask.sum().item() == pytest.approx((40 / 3) ** 2, rel=0.02)
    columns = torch.arange(32)
    assert (mask.sum(0) @ columns.double() / mask.sum()).item() == pytest.approx(15.5, abs=0.05)
    assert box_mask(small, (48, 48), (0.0, 0.0, 48.0, 48.0)).min() > 0.99
    assert box_mask(small, (48, 48), (0.0, 0.0, 3.0, 3.0)).max() < 0.5  # cropped away


def test_labels_by_name_by_order_and_unknown(small, folder):
    items = [
        Item(id=str(i), path=folder / f"{i}.png", label=label) for i, label in enumerate(["b", "a", "a", 4])
    ]
    model = equicam.wrap(
        small.module, layer="trunk", preprocess=small.preprocess, classes=["b", "x", "a", "y", "z"]
    )
    target = equicam.explain(model, [i.path for i in items]).target.tolist()
    table = equicam.evaluate(model, items, methods=["grad-cam"], angles=(90,))
    wrong, _ = value(table, "misclassified")
    assert wrong == {str(i): float(t != (0, 2, 2, 4)[i]) for i, t in enumerate(target)}
    table = equicam.evaluate(
        small, items, methods=["grad-cam"], angles=(90,)
    )  # five outputs, two names: no order
    reasons = [
        r["reason"] for r in sorted(table.to_pylist(), key=lambda r: r["id"]) if r["score"] == "misclassified"
    ]
    assert reasons == [
        "label 'b' is none of the model's 5 classes",
        *["label 'a' is none of the model's 5 classes"] * 2,
        None,
    ]


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_interrupted_evaluation_resumes_with_the_same_rows(small, folder, tmp_path, monkeypatch, ahead):
    module = import_module("equicam.evaluate.evaluate")
    monkeypatch.setattr(module, "finish_in_order", lambda started, _ahead: finish_in_order(started, ahead))
    monkeypatch.setattr(import_module("equicam.evaluate.evaluate"), "IMAGES_PER_SHARD", 2)
    options = {"methods": ["grad-cam", "equigrad-cam"], "angles": ANGLES_2, "views": 4}
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
    assert [p.name for p in sorted((tmp_path / "cut.parquet.shards").iterdir())] == [
        "fingerprint.json",
        "shard-000000.parquet",
    ]
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


def test_changed_weights_are_not_resumed(small, folder, tmp_path):
    out = tmp_path / "rows.parquet"
    equicam.evaluate(small, folder, methods=["grad-cam"], angles=(90,), out=out)
    with torch.no_grad():
        next(small.module.parameters()).add_(1e-3)
    with pytest.raises(EquicamError, match="weights was"):
        equicam.evaluate(small, folder, methods=["grad-cam"], angles=(90,), out=out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["grad-kam"]}, "method needs one of"),
        (
            {"methods": ["grad-cam@blurred"]},
            "control of 'grad-cam@blurred' needs one of coverage, blur-SIGMA",
        ),
        ({"scores": ["eqq"]}, "scores needs a list of eq,"),
        ({"methods": ["grad-cam"], "scores": ["peum"]}, "score 'peum' needs a method of several views"),
        ({"methods": ["equigrad-cam"], "scores": ["stages"]}, "score 'stages' needs a method of one view"),
        ({"angles": (0, 90)}, "angles needs rotations other than 0°"),
        ({"angles": (float("nan"),)}, "angles needs rotations other than 0°"),
        ({"angles": (90, 450)}, "angles needs each one once"),
        ({"scores": ["eq", "eq"]}, "scores needs each one once, got 'eq' twice"),
        ({"methods": ["grad-cam@blur-0"]}, "control of 'grad-cam@blur-0' needs one of"),
        (
            {"methods": ["coverage", "equigrad-cam"], "scores": ["stages"]},
            "a method of one view that starts at features",
        ),
        (
            {"methods": ["grad-cam@blur-3"], "scores": ["stages"]},
            "a method of one view that starts at features",
        ),
        ({"methods": []}, "methods needs a list of names"),
        ({"split": "test"}, "split needs a folder or manifest"),
        ({"n": 0}, "n"),
    ],
)
def test_impossible_options_are_refused_before_the_model_runs(cnn, options, message):
    cnn.module.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(EquicamError, match=message.replace("(", r"\(")):
        equicam.evaluate(cnn, pictures(2), **options)


def test_an_image_has_the_same_values_in_any_batch(cnn):
    x = pictures(4)
    options = {
        "methods": ["grad-cam", "equigrad-cam"],
        "scores": ["eq", "insertion", "eq-spearman"],
        "angles": ANGLES_2,
        "views": 6,
    }
    together, apart = equicam.evaluate(cnn, x, **options), equicam.evaluate(cnn, x[2:3], **options)
    for score, region in (("eq", "disc"), ("eq-spearman", "full"), ("insertion", None)):
        for method in ("grad-cam", "equigrad-cam"):
            alone, floor = value(apart, score, method, region)
            close = (
                1e-4 if score == "eq-spearman" else 1e-9
            )  # ranks tell values apart that differ by rounding
            assert alone["0"] == pytest.approx(value(together, score, method, region)[0]["2"], abs=close)
            assert score == "insertion" or np.isnan(floor["0"])


def test_the_sample_is_spread_over_classes_and_its_digest_kept(small, folder):
    table = equicam.evaluate(small, folder, methods=["grad-cam"], angles=(90,), n=2)
    assert set(value(table, "presented-confidence")[0]) == {"0.png", "1.png"}  # one of each class
    about = json.loads(table.schema.metadata[b"equicam"])
    assert about["images"] == 2
    assert len(about["sample"]) == 64


def test_summaries_by_hand(vit):
    table = equicam.evaluate(
        vit, pictures(6), methods=["grad-cam", "equigrad-cam"], scores=["eq", "peum", "disagreement"], views=4
    )
    rows = [
        r
        for r in table.to_pylist()
        if r["score"] == "eq" and r["method"] == "grad-cam" and r["region"] == "disc"
    ]
    pairs = {(r["id"], r["angle"]): r["value"] for r in rows if r["angle"] is not None}
    keeps = {
        (r["id"], r["angle"]): r["value"]
        for r in table.to_pylist()
        if r["score"] == "consistent" and r["angle"] is not None
    }
    weight = {
        (r["id"], r["angle"]): r["value"]
        for r in table.to_pylist()
        if r["score"] == "confidence-kept" and r["angle"] is not None
    }
    found = summary.conditional(table, "grad-cam")
    assert 0 < np.mean(list(keeps.values())) < 1
    assert found.all.value == pytest.approx(np.mean(list(pairs.values())))
    assert found.consistent.value == pytest.approx(np.mean([v for k, v in pairs.items() if keeps[k]]))
    assert found.weighted.value == pytest.approx(
        np.average([pairs[k] for k in pairs], weights=[weight[k] for k in pairs])
    )
    assert found.consistency_rate.value == pytest.approx(np.mean(list(keeps.values())))
    by_angle = dict(summary.by_angle(table, "grad-cam"))
    assert by_angle[45.0].value == pytest.approx(np.mean([v for (_, a), v in pairs.items() if a == 45]))
    presented, confidence = value(table, "presented-confidence")[0], {}
    for angle in ANGLES:
        confidence |= {(i, angle): v for i, v in value(table, "confidence", angle=angle)[0].items()}
    lost = [presented[i] - confidence[i, a] for i, a in pairs if keeps[i, a]]
    drift = [1 - v for k, v in pairs.items() if keeps[k]]
    r, *_ = summary.drift_and_confidence(table, "grad-cam")
    assert r.r == pytest.approx(np.corrcoef(drift, lost)[0, 1])
    better = summary.contrast(table, "equigrad-cam", "grad-cam")
    a, b = (np.array(list(value(table, "eq", m, "disc")[0].values())) for m in ("equigrad-cam", "grad-cam"))
    assert better.mean == pytest.approx((a - b).mean())
    assert better.wins == pytest.approx((a > b).mean())
    signals = {s.name: s for s in summary.signals(table, resamples=50)}
    peum = np.array(list(value(table, "peum", "equigrad-cam", "full")[0].values()))
    assert signals["peum (full)"].pearson.r == pytest.approx(np.corrcoef(peum, 1 - b)[0, 1])
    assert set(signals) == {"peum (full)", "peum (disc)", "disagreement", "flip-rate", "confidence-drop"}
    with pytest.raises(EquicamError, match="needs an evaluation that has them"):
        summary.pick(table, "insertion", "grad-cam")


def test_rows_of_constant_maps_count_zero_and_are_reported(cnn):
    def some_flat(x, target):
        maps = equicam.explain(cnn, x, method="grad-cam", target=target).map
        return torch.where(x.mean((1, 2, 3))[:, None, None] > x.mean(), maps, 0)

    table = equicam.evaluate(cnn, pictures(4), methods={"flat": some_flat}, angles=ANGLES_2)
    rows = [
        r
        for r in table.to_pylist()
        if r["score"] == "eq" and r["region"] == "disc" and r["angle"] is not None
    ]
    constant = [r for r in rows if r["reason"] == "constant map"]
    assert 0 < len(constant) < len(rows)
    assert all(r["value"] == 0 for r in constant)
    (line,) = [s for s in summary.summarise(table, resamples=20) if s.score == "eq" and s.region == "disc"]
    assert line.constant == pytest.approx(len(constant) / len(rows))
    assert line.without_constant == pytest.approx(
        np.mean([r["value"] for r in rows if r["reason"] != "constant map"])
    )
    assert line.value.value == pytest.approx(np.mean([r["value"] for r in rows]))


def test_other_images_of_the_same_names_are_not_resumed(small, folder, tmp_path):
    out = tmp_path / "rows.parquet"
    options = {"methods": ["grad-cam"], "angles": (90,), "out": out}
    equicam.evaluate(small, folder, **options)
    Image.fromarray(np.full((40, 50, 3), 90, np.uint8)).save(folder / "3.png")
    with pytest.raises(EquicamError, match="content was"):
        equicam.evaluate(small, folder, **options)
    for given in (
        lambda v: torch.full((2, 3, 32, 32), v),
        lambda v: [Image.new("RGB", (40, 40), (int(9 * v),) * 3)] * 2,
    ):
        out.unlink()
        equicam.evaluate(small, given(1.0), **options)
        equicam.evaluate(small, given(1.0), **options)
        with pytest.raises(EquicamError, match="content was"):
            equicam.evaluate(small, given(2.0), **options)


def test_other_preprocessing_and_other_explainers_are_not_resumed(small, folder, tmp_path):
    out = tmp_path / "rows.parquet"
    equicam.evaluate(small, folder, methods=["grad-cam"], angles=(90,), out=out)
    other = replace(small, preprocess=lambda image: small.preprocess(image).flip(-1))
    with pytest.raises(EquicamError, match="preprocessing was"):
        equicam.evaluate(other, folder, methods=["grad-cam"], angles=(90,), out=out)
    out.unlink()
    equicam.evaluate(small, folder, methods={"mine": lambda x, _: x.mean(1)}, angles=(90,), out=out)
    equicam.evaluate(small, folder, methods={"mine": lambda x, _: x.mean(1)}, angles=(90,), out=out)
    with pytest.raises(EquicamError, match="explainers was"):
        equicam.evaluate(small, folder, methods={"mine": lambda x, _: x.amax(1)}, angles=(90,), out=out)


def test_out_must_be_a_file_that_can_be_written(small, folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    small.module.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    for out, words in (
        (tmp_path / "notes.txt", "not one of ours"),
        (tmp_path, "got a folder"),
        (tmp_path / "a" / "b", "no such folder"),
    ):
        with pytest.raises(EquicamError, match=words):
            equicam.evaluate(small, folder, methods=["grad-cam"], out=out)
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
    table = equicam.evaluate(small, items, methods=["grad-cam"], scores=["energy", "pointing"], angles=(90,))
    rows = {(r["id"], r["score"], r["angle"]): r for r in table.to_pylist()}
    assert np.isnan(rows["away", "energy", 90.0]["value"])
    assert rows["away", "energy-drop", None]["reason"] == "label region outside the model's input"
    assert rows["away", "pointing", None]["reason"] == "boxes outside the model's input"
    assert rows["wild", "pointing", None]["value"] in (0.0, 1.0)


def test_names_that_do_not_match_are_no_labels(small, folder):
    items = [Item(id=str(i), path=folder / f"{i}.png", label=name) for i, name in enumerate("abcde"[:5])]
    model = equicam.wrap(
        small.module, layer="trunk", preprocess=small.preprocess, classes=["v", "w", "x", "y", "z"]
    )
    rows = equicam.evaluate(model, items, methods=["grad-cam"], angles=(90,)).to_pylist()
    assert all("none of the model's 5 classes" in r["reason"] for r in rows if r["score"] == "misclassified")
    rows = equicam.evaluate(
        small, items, methods=["grad-cam"], angles=(90,)
    ).to_pylist()  # no names: by their order
    assert all(r["reason"] is None for r in rows if r["score"] == "misclassified")
    digits = [replace(item, label=str(i)) for i, item in enumerate(items)]
    rows = equicam.evaluate(model, digits, methods=["grad-cam"], angles=(90,)).to_pylist()
    assert all(r["reason"] is None for r in rows if r["score"] == "misclassified")


def test_rows_are_in_the_callers_order_of_images(small, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(import_module("equicam.evaluate.evaluate"), "IMAGES_PER_SHARD", 3)
    paths = sorted(folder.glob("*.png"), reverse=True)
    options = {"methods": ["grad-cam"], "angles": (90,)}
    for more in ({}, {"out": tmp_path / "rows.parquet"}, {"n": 5}):
        ids = equicam.evaluate(small, paths, **options, **more)["id"].to_pylist()
        listed = [str(path) for path in paths if str(path) in ids]
        assert list(dict.fromkeys(ids)) == listed
        assert sorted(ids, key=listed.index) == ids
        assert len(listed) == more.get("n", len(paths))


def test_a_plain_function_may_differentiate(cnn):
    def gradient(x, target):
        x = x.clone().requires_grad_()
        chosen = cnn.module(x).gather(1, target[:, None]).sum()
        return torch.autograd.grad(chosen, x)[0].abs().sum(1)

    with torch.no_grad():
        table = equicam.evaluate(cnn, pictures(2), methods={"mine": gradient}, angles=(90,))
    assert np.std(list(value(table, "eq", "mine", "disc")[0].values())) > 0


def test_no_image_is_alone_in_a_shard(cnn, monkeypatch):
    monkeypatch.setattr(import_module("equicam.evaluate.evaluate"), "IMAGES_PER_SHARD", 4)
    table = equicam.evaluate(cnn, pictures(9), methods=["grad-cam"], angles=(90,))
    _, floor = value(table, "eq", "grad-cam", "disc")
    assert len(floor) == 9
    assert not np.isnan(list(floor.values())).any()


def test_controls_with_their_own_predictions_are_conditioned_on_those(vit):
    table = equicam.evaluate(
        vit, pictures(6), methods=["grad-cam", "grad-cam@shuffled"], scores=["eq", "eq-consistent"]
    )
    rows = table.to_pylist()
    kept = [
        r["value"]
        for r in rows
        if r["score"] == "eq-consistent"
        and r["method"] == "grad-cam@shuffled"
        and r["region"] == "disc"
        and r["angle"] is not None
    ]
    assert 0 < np.isfinite(kept).sum() < len(kept)
    found = summary.conditional(table, "grad-cam@shuffled")
    assert found.consistent.value == pytest.approx(np.nanmean(kept))
    assert found.consistency_rate.value == pytest.approx(np.isfinite(kept).mean())


def test_causal_rows_are_compared_with_their_controls(cnn):
    table = equicam.evaluate(cnn, pictures(4), methods=["grad-cam"], scores=["causal"], angles=ANGLES_2)
    lines = {line.region: line for line in summary.occlusion_effects(table, "grad-cam")}
    assert next(iter(lines)) == "drift"
    drift, control = (
        np.array(list(value(table, f"causal-{r}", "grad-cam", "disc")[0].values()))
        for r in ("drift", "same-saliency")
    )
    assert lines["same-saliency"].drift_above.mean == pytest.approx((drift - control).mean())
    assert lines["drift"].presented.value == pytest.approx(drift.mean())


def test_an_explainer_that_cannot_be_hashed_is_accepted(cnn):
    from dataclasses import dataclass

    @dataclass
    class Mine:
        power: int = 1

        def __call__(self, x, target):
            return x.mean(1) ** self.power

    table = equicam.evaluate(cnn, pictures(2), methods={"one": Mine(), "three": Mine(3)}, angles=(90,))
    assert value(table, "eq", "one", "disc") != value(table, "eq", "three", "disc")


@pytest.mark.parametrize(
    "wrong", [lambda b: 0.5, lambda b: MetricRows("mine", "grad-cam", torch.zeros(b + 1))]
)
def test_a_custom_metric_that_yields_something_else_is_refused(cnn, monkeypatch, wrong):
    monkeypatch.setitem(METRICS, "mine", Metric("mine", lambda batch: iter([wrong(len(batch.ids))])))
    with pytest.raises(equicam.EquicamError, match=r"a metric needs to yield MetricRows with \[2\] values"):
        equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], scores=["mine"])


def test_a_metric_may_fill_the_same_tensor_again(cnn, monkeypatch):
    def rows(batch):
        values = torch.zeros(len(batch.ids), dtype=torch.float64, requires_grad=True)
        for name in ("one", "two"):
            with torch.no_grad():
                values += 1
            yield MetricRows(name, "grad-cam", values)

    monkeypatch.setitem(METRICS, "mine", Metric("mine", rows))
    table = equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], scores=["mine"]).to_pylist()
    assert {(r["score"], r["value"]) for r in table if r["score"] in ("one", "two")} == {
        ("one", 1),
        ("two", 2),
    }


def test_a_floor_over_angles_needs_a_floor(cnn, monkeypatch):
    def rows(batch):
        values = torch.zeros(len(batch.presentations), len(batch.ids))
        yield MetricRows(
            "mine", "grad-cam", values, presentations=batch.presentations, floor_over_angles=values[0]
        )

    monkeypatch.setitem(METRICS, "mine", Metric("mine", rows))
    with pytest.raises(EquicamError, match="with floor_over_angles and no floor"):
        equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], scores=["mine"])


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


@pytest.mark.parametrize(
    "name",
    [m.name for m in pkgutil.walk_packages(import_module("equicam.evaluate").__path__, "equicam.evaluate.")],
)
def test_every_module_can_be_imported_from_its_package(name):
    """The function `equicam.evaluate` hides the package of that name, and nothing hides a module in it."""
    assert callable(equicam.evaluate)
    assert callable(equicam.scores)
    names: dict = {}
    package, _, module = name.rpartition(".")
    exec(f"from {package} import {module} as m", names)
    assert names["m"] is sys.modules[name]


def test_any_error_of_preprocessing_is_a_row(small, folder):
    def divide_by_zero(image):
        return small.preprocess(image) if image.getpixel((0, 0)) != first else 1 / 0

    first = Image.open(folder / "2.png").convert("RGB").getpixel((0, 0))
    model = replace(small, preprocess=divide_by_zero)
    table = equicam.evaluate(
        model, [folder / f"{i}.png" for i in range(4)], methods=["grad-cam"], angles=(90,)
    )
    (bad,) = table.filter(pc.is_null(table["score"])).to_pylist()
    assert bad["id"].endswith("2.png")
    assert bad["reason"].startswith(
        "the model's preprocessing needs to take an image of 48×48, got ZeroDivisionError: division by zero ("
    )
    assert "in divide_by_zero" in bad["reason"]
