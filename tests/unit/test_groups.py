"""Images mirrored, scaled and shifted: `evaluate` under groups other than rotations."""

import json

import numpy as np
import pytest
import torch

import equicam
from equicam.core.views import transform_all
from equicam.evaluate.equivariance import GROUPS
from equicam.evaluate.rows import pick
from tests.conftest import assert_alive, pictures
from tests.unit.test_evaluate import rows_of

FIXED = torch.rand(32, 32, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def eq(table, method):
    return [r for r in rows_of(table, "eq", method, "disc") if r["angle"] is not None]


@pytest.mark.parametrize("group", GROUPS)
def test_a_map_that_moves_with_its_image_scores_one_and_a_fixed_map_its_floor(cnn, group):
    methods = {
        "moves": lambda x, _target: x.mean(1).sigmoid(),
        "fixed": lambda x, _target: FIXED.expand(len(x), -1, -1),
    }
    x = torch.nn.functional.avg_pool2d(pictures(4), 3, stride=1, padding=1)
    assert_alive(methods["moves"](x, None), FIXED[None])
    assert (transform_all(x, GROUPS[group]) - x).abs().amax((1, 2, 3, 4)).min() > 0.1
    table = equicam.evaluate(cnn, x, methods=methods, group=group)
    moves, fixed = eq(table, "moves"), eq(table, "fixed")
    assert len(moves) == len(fixed) == 4 * len(GROUPS[group])
    assert min(r["value"] for r in moves) > 0.99
    assert max(r["floor"] for r in moves) < 0.9
    assert np.mean([r["floor"] for r in moves]) < 0.4
    assert np.mean([r["value"] for r in fixed]) < 0.6
    assert [r["value"] for r in fixed] == pytest.approx([r["floor"] for r in fixed], abs=1e-9)


@pytest.mark.parametrize(
    ("options", "angles", "labels"),
    [
        ({"angles": (45, 90)}, [45, 90], ("45°", "90°")),
        ({"group": "dihedral"}, [0, 15, 30, 45, 60, 90, 135, 180], ("0° mirrored", "180° mirrored")),
        ({"group": "dihedral", "angles": (0, 90)}, [0, 90], ("0° mirrored", "90° mirrored")),
        ({"group": "scale"}, [0.8, 0.9, 1.1, 1.25], ("× 0.8", "× 1.25")),
        ({"group": "shift"}, range(8), ("shifted 5 % right", "shifted 10 % up")),
    ],
)
def test_rows_say_how_the_image_was_presented(cnn, options, angles, labels):
    table = equicam.evaluate(cnn, pictures(2), methods=["grad-cam"], **options)
    rows = eq(table, "grad-cam")
    assert [r["angle"] for r in rows] == [*angles] * 2  # image by image
    assert (rows[0]["presentation"], rows[-1]["presentation"]) == labels
    assert len({r["presentation"] for r in rows}) == len(angles)
    about = json.loads(table.schema.metadata[b"equicam"])
    assert about["group"] == options.get("group", "rotation")
    assert len(about["angles"]) == len(angles)
    assert about["angles"] == [45.0, 90.0] or about["group"] != "rotation"


@pytest.mark.parametrize("group", ["dihedral", "scale", "shift"])
def test_every_other_metric_runs_and_undefined_rows_have_a_reason(cnn, group):
    scores = [name for name in equicam.scores() if name != "energy"]
    options = {"methods": ["grad-cam", "equigrad-cam"], "scores": scores, "views": 4, "group": group}
    rows = equicam.evaluate(cnn, pictures(3), **options).to_pylist()
    assert all(r["reason"] for r in rows if np.isnan(r["value"]))
    found = {r["score"] for r in rows if not np.isnan(r["value"])}
    assert found >= {"eq-ssim", "stage-activations", "stage-map", "causal-drift-rotated", "calibration"}
    assert all((r["angle"] is None) == (r["presentation"] is None) for r in rows)


def test_views_that_scale_are_compared_where_all_of_them_show_something(cnn):
    x, options = pictures(3), {"views": equicam.Views.scales(0.5, 1, 2)}
    e = equicam.explain(cnn, x, method="equigrad-cam-out", **options)
    scored = {"methods": ["equigrad-cam-out"], "scores": ["stability"], "angles": [90]}
    rows = equicam.evaluate(cnn, x, **scored, **options)
    found = pick(rows, "stability", "equigrad-cam-out", "disc").value
    assert found == pytest.approx(e.stability.double().numpy(), abs=1e-5)
    assert np.std(found) > 1e-4


def test_the_fill_of_views_does_not_change_the_rotated_reference(cnn):
    x, options = pictures(3), {"methods": ["grad-cam"], "scores": ["eq"], "angles": [45]}
    plain, *others = (
        pick(equicam.evaluate(cnn, x, **options, **more), "eq", "grad-cam", "full").value
        for more in ({}, {"views": equicam.Views.scales(0.8, 1)}, {"recipe": equicam.Recipe(fill="coverage")})
    )
    for found in others:
        assert found == pytest.approx(plain, abs=1e-9)


def test_a_fusion_that_scales_has_the_fill_that_explain_gives_it(cnn):
    x, fusion = pictures(2), equicam.Fusion(equicam.Views.scales(0.7, 1, 1.4), "map", "map")
    peum, reflected = (
        equicam.explain(cnn, x, method=fusion, **more).peum_score.double().numpy()
        for more in ({}, {"recipe": equicam.Recipe(fill="reflect")})
    )
    rows = equicam.evaluate(cnn, x, methods={"mine": fusion}, scores=["peum"], angles=[90])
    assert pick(rows, "peum", "mine", "full").value == pytest.approx(peum, rel=1e-4)
    assert reflected != pytest.approx(peum, rel=1e-2)
