"""Signal or noise is told in degrees, from numbers that can be checked."""

import math

import numpy as np
import pytest
import torch

import equicam
from equicam.auditing.evidence import evidence, leaning, verdict
from equicam.core.views import rotate
from equicam.data.digests import file_digest
from equicam.data.sources import find_items
from equicam.evaluation import causal
from equicam.evaluation.controls import item_seed
from equicam.evaluation.equivariance import ANGLES
from equicam.evaluation.statistics import Estimate
from equicam.models.images import preprocess_image
from equicam.recipe import Recipe


def at(value: float, around: float = 0.01) -> Estimate:
    return Estimate(value, value - around, value + around, 7)


STEADY = Estimate(0.0, 0.0, 0.18, 18)
COSTS = {"drift": np.full(7, 0.2), "agreement": np.full(7, 0.3), "drift-of-another": np.full(7, np.nan)}


@pytest.mark.parametrize(
    ("shape", "saliency", "lean"),
    [
        (at(0.1), at(0.05), "Leans to signal"),
        (at(0.1), at(0.012, 0.001), "Undecided"),  # surely above 0, and too little to speak of
        (at(0.0), at(-0.02), "Leans to noise"),
        (at(0.1), at(0.0), "Undecided"),
        (at(0.02, 0.05), at(0.02, 0.05), "Undecided"),
        (Estimate(math.nan, math.nan, math.nan, 0), at(0.1), "Cannot be judged"),
    ],
)
def test_the_verdict_leans_as_the_intervals_do_and_shows_them(shape, saliency, lean):
    code = leaning(COSTS, shape, saliency)
    said = verdict(code, shape, saliency, STEADY, 0.9, 0.5)
    assert said.startswith(lean)
    assert "The prediction itself changes" not in said
    turning = verdict(code, shape, saliency, Estimate(0.6, 0.4, 0.8, 18), 0.9, 0.5)
    if not math.isnan(shape.value):
        assert f"{round(shape.value, 3) + 0.0:+.3f} [" in said
        assert "keeps 80% of its distance from other images" in said
        assert "The prediction itself changes" in turning


def test_where_hiding_changes_nothing_nothing_is_said():
    """A saturated prediction: neither signal nor noise can be told."""
    still = {name: values * 0.01 for name, values in COSTS.items()}
    code = leaning(still, at(1e-5, 1e-6), at(1e-5, 1e-6))
    said = verdict(code, at(1e-5, 1e-6), at(1e-5, 1e-6), STEADY, 0.9, 0.5)
    assert said.startswith(
        "Cannot be judged: hiding a tenth of the image, wherever, changes the probability by less than 0.02"
    )


def test_evidence_is_the_causal_test_on_this_picture(patches):
    model, items = equicam.load("embedded"), find_items(patches)[:4]
    x = torch.stack([preprocess_image(model, __import__("PIL.Image").Image.open(i.path)) for i in items])
    e = equicam.explain(model, x, method="grad-cam")
    rows = {
        item.id: {
            "sha256": file_digest(item.path),
            "target": int(e.target[i]),
            "view_top1": [int(e.target[i])] * 15 + [1 - int(e.target[i])] * 3,
        }
        for i, item in enumerate(items)
    }
    found = evidence(model, items, rows, Recipe(seed=3))
    maps = [
        equicam.explain(model, rotate(x, a) if a else x, method="grad-cam", target=e.target).map
        for a in (0, *ANGLES)
    ]
    drops = causal.occlusion(
        lambda v: model.module(v).softmax(1).detach(), x, torch.stack(maps), ANGLES, e.target,
        seeds=[item_seed(3, i.id, "causal") for i in items],
    )  # fmt: skip
    assert any(abs(one.moving.value) > 1e-3 for one in found.values())
    for i, item in enumerate(items):
        one = found[item.id]
        lost = {name: values[:, i].double().numpy() for name, values in drops.presented.items()}
        assert one.moving.value == pytest.approx(lost["drift"].mean(), abs=1e-5)
        assert one.staying.value == pytest.approx(lost["agreement"].mean(), abs=1e-5)
        assert one.above_shape.value == pytest.approx(
            (lost["drift"] - lost["drift-elsewhere"]).mean(), abs=1e-5
        )
        assert one.above_saliency.value == pytest.approx(
            (lost["drift"] - lost["same-saliency"]).mean(), abs=1e-5
        )
        assert one.above_shape.low <= one.above_shape.value <= one.above_shape.high
        assert one.flips.value == pytest.approx(3 / 18)
        assert -1 <= one.unrelated_cosine < one.feature_cosine <= 1
        assert len(one.lines) == 4
        plain = one.to_json()
        assert plain["id"] == item.id
        assert all(np.isfinite(v) for v in plain["moving"].values())


def test_a_picture_that_went_away_or_changed_is_left_out(patches, tmp_path):
    from dataclasses import replace

    items = find_items(patches)[:2]
    items = [items[0], replace(items[1], path=tmp_path / "gone.png"), find_items(patches)[2]]
    rows = {i.id: {"target": 0, "view_top1": [0], "sha256": file_digest(items[0].path)} for i in items}
    ticks = []
    found = evidence(equicam.load("embedded"), items, rows, tick=ticks.append)
    assert list(found) == [items[0].id]
    assert sum(ticks) == 3
