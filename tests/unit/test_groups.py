"""Images mirrored, scaled and shifted: `evaluate` under groups other than rotations."""

import json

import numpy as np
import pytest
import torch

import equicam
from equicam.core.views import transform_all
from equicam.errors import EquicamError
from equicam.evaluate.equivariance import GROUPS
from equicam.evaluate.rows import pick
from tests.conftest import assert_alive, pictures

EVERY = tuple(GROUPS)
FIXED = torch.rand(32, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def moves_with_the_image(x, _target):
    return x.mean(1).sigmoid()


def ignores_the_image(x, _target):
    return FIXED.expand(len(x), -1, -1)


def smooth(count):
    coarse = pictures(count)
    return torch.nn.functional.avg_pool2d(coarse, 3, stride=1, padding=1)


def eq(table, method, region="disc"):
    return [
        r
        for r in table.to_pylist()
        if (r["score"], r["method"], r["region"]) == ("eq", method, region) and r["angle"] is not None
    ]


@pytest.mark.parametrize("group", EVERY)
def test_a_map_that_moves_with_its_image_scores_one_and_a_fixed_map_its_floor(cnn, group):
    x = smooth(4)
    assert_alive(moves_with_the_image(x, None), FIXED[None])
    assert (transform_all(x, GROUPS[group]) - x).abs().amax((1, 2, 3, 4)).min() > 0.1
    methods = {"moves": moves_with_the_image, "fixed": ignores_the_image}
    table = equicam.evaluate(cnn, x, methods=methods, group=group)
    moves, fixed = eq(table, "moves"), eq(table, "fixed")
    assert len(moves) == len(fixed) == 4 * len(GROUPS[group])
    assert min(r["value"] for r in moves) > 0.99
    assert max(r["floor"] for r in moves) < 0.9
    assert np.mean([r["floor"] for r in moves]) < 0.4
    assert np.mean([r["value"] for r in fixed]) < 0.6
    for r in fixed:
        assert r["value"] == pytest.approx(r["floor"], abs=1e-9)


@pytest.mark.parametrize(
    ("group", "angles", "labels"),
    [
        ("dihedral", [0, 15, 30, 45, 60, 90, 135, 180], ("0° mirrored", "180° mirrored")),
        ("scale", [0.8, 0.9, 1.1, 1.25], ("× 0.8", "× 1.25")),
        ("shift", range(8), ("shifted 5 % right", "shifted 10 % up")),
    ],
)
def test_rows_say_how_the_image_was_presented(cnn, group, angles, labels):
    table = equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], group=group)
    rows = eq(table, "grad-cam")
    assert [r["angle"] for r in rows] == [*angles] * 2  # image by image
    assert (rows[0]["presentation"], rows[-1]["presentation"]) == labels
    assert len({r["presentation"] for r in rows}) == len(angles)
    about = json.loads(table.schema.metadata[b"equicam"])
    assert about["group"] == group
    assert len(about["angles"]) == len(angles)
    rotations = equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], angles=(45, 90))
    about = json.loads(rotations.schema.metadata[b"equicam"])
    assert about["angles"] == [45.0, 90.0]
    assert about["group"] == "rotation"


@pytest.mark.parametrize("group", ["dihedral", "scale", "shift"])
def test_every_other_metric_runs_and_undefined_rows_have_a_reason(cnn, group):
    scores = [name for name in equicam.scores() if name != "energy"]
    table = equicam.evaluate(
        cnn, pictures(3), methods=["grad-cam", "equigrad-cam"], scores=scores, views=4, group=group
    )
    rows = table.to_pylist()
    assert all(r["reason"] for r in rows if np.isnan(r["value"]))
    found = {r["score"] for r in rows if not np.isnan(r["value"])}
    assert found >= {"eq-ssim", "stage-activations", "stage-map", "causal-drift-rotated", "calibration"}
    assert all((r["angle"] is None) == (r["presentation"] is None) for r in rows)


def test_the_angles_of_reflections_can_be_chosen(cnn):
    table = equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], group="dihedral", angles=(0, 90))
    assert {r["presentation"] for r in eq(table, "grad-cam")} == {"0° mirrored", "90° mirrored"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "mirror"}, "group needs one of rotation, dihedral, scale, shift, got 'mirror'"),
        (
            {"group": "scale", "protocol": "paper"},
            "protocol paper needs group rotation, its only one, got scale",
        ),
        ({"group": "scale", "angles": (15,)}, "angles needs group rotation or dihedral, got scale"),
        ({"group": "dihedral", "angles": ()}, "angles needs finite numbers of degrees"),
        ({"group": "dihedral", "angles": (0, float("inf"))}, "angles needs finite numbers of degrees"),
        ({"group": "dihedral", "angles": (0, 360)}, "angles needs each one once"),
        ({"group": "dihedral", "scores": ["energy"]}, "score 'energy' needs group rotation, got dihedral"),
        ({"group": "shift", "scores": ["eq", "energy"]}, "score 'energy' needs group rotation, got shift"),
    ],
)
def test_what_a_group_cannot_do_is_refused_before_the_model_runs(cnn, options, message):
    cnn.module.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(EquicamError, match=message):
        equicam.evaluate(cnn, pictures(2), **options)


def test_another_group_is_not_resumed(cnn, tmp_path):
    options = {"methods": ["grad-cam"], "out": tmp_path / "rows.parquet"}
    equicam.evaluate(cnn, pictures(4), **options)
    with pytest.raises(EquicamError, match='group was "rotation", is "scale"'):
        equicam.evaluate(cnn, pictures(4), group="scale", **options)


def test_views_that_scale_are_compared_where_all_of_them_show_something(cnn):
    views = equicam.Views.scales(0.5, 1, 2)
    x = pictures(3)
    e = equicam.explain(cnn, x, method="equigrad-cam-out", views=views)
    rows = equicam.evaluate(
        cnn, x, methods=["equigrad-cam-out"], scores=["stability"], views=views, angles=[90]
    )
    found = pick(rows, "stability", "equigrad-cam-out", "disc").value
    assert found == pytest.approx(e.stability.double().numpy(), abs=1e-5)
    assert np.std(found) > 1e-4


def test_the_fill_of_views_does_not_change_the_rotated_reference(cnn):
    x, options = pictures(3), {"methods": ["grad-cam"], "scores": ["eq"], "angles": [45]}
    plain = pick(equicam.evaluate(cnn, x, **options), "eq", "grad-cam", "full").value
    for more in ({"views": equicam.Views.scales(0.8, 1)}, {"fill": "coverage"}):
        found = pick(equicam.evaluate(cnn, x, **options, **more), "eq", "grad-cam", "full").value
        assert found == pytest.approx(plain, abs=1e-9)


def test_a_fusion_that_scales_has_the_fill_that_explain_gives_it(cnn):
    fusion = equicam.Fusion(equicam.Views.scales(0.7, 1, 1.4), "map", "map")
    x = pictures(2)
    peum = equicam.explain(cnn, x, method=fusion).peum_score.double().numpy()
    rows = equicam.evaluate(cnn, x, methods={"mine": fusion}, scores=["peum"], angles=[90])
    assert pick(rows, "peum", "mine", "full").value == pytest.approx(peum, rel=1e-4)
    assert equicam.explain(
        cnn, x, method=fusion, fill="reflect"
    ).peum_score.double().numpy() != pytest.approx(peum, rel=1e-2)
