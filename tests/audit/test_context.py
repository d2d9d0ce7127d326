"""Audits, evaluations and files of explanations with context: views cut from what the preprocessing crops away."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

import equicam
from equicam.errors import EquicamError
from equicam.evaluate.rows import pick
from equicam.explain_files import explain_files
from equicam.models.images import standard_preprocessing
from tests.audit.conftest import run_command
from tests.conftest import recipe


@pytest.fixture(scope="module")
def model():
    """The embedded model, with a crop of 96 from 136 pixels: as much margin as every rotation needs."""
    embedded = equicam.load("embedded")
    return replace(embedded, preprocess=standard_preprocessing(136, 96, embedded.mean, embedded.std))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("scenes"), np.random.default_rng(1)
    for i, shape in enumerate([(136, 136), (136, 180), (200, 136), (160, 160), (136, 136), (140, 300)]):
        smooth = ndimage.gaussian_filter(rng.standard_normal((*shape, 3)), (3, 3, 0))
        pixels = (128 + 60 * smooth / smooth.std()).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return folder


def test_an_audit_with_context_is_that_of_explain_and_can_be_verified(model, images, tmp_path):
    options = {"views": 6, "calibrate": 6, "shard_size": 4, "workers": 1}
    run = equicam.audit(images, model, tmp_path / "run", recipe=equicam.Recipe(context="auto"), **options)
    assert (run.manifest.recipe.context, run.manifest.recipe.fill) == ("auto", "coverage")
    rows = run.items.to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    assert not any("edge" in row["flags"] for row in rows)
    paths = sorted(images.iterdir())
    found = equicam.explain(model, paths, views=6, context="auto")
    plain = equicam.explain(model, paths, views=6)
    assert found.confidence.tolist() == pytest.approx(plain.confidence.tolist(), abs=1e-6)  # the same input
    assert not np.allclose(found.peum_score, plain.peum_score, rtol=1e-2)
    assert [row["stability"] for row in rows] == pytest.approx(found.stability.tolist(), abs=1e-3)
    assert [row["peum_score"] for row in rows] == pytest.approx(found.peum_score.tolist(), rel=1e-3, abs=1e-6)
    assert all(-1 <= row["eq"] <= 1 for row in rows)
    checked = run.verify(6, model=model)
    assert (checked.problems, checked.recomputed) == ((), 6)
    with pytest.raises(EquicamError, match=r"context was \"auto\", is \"none\""):
        equicam.audit(images, model, tmp_path / "run", **options)
    run.triage(budget="50%")
    assert run.report().is_file()


def test_without_a_crop_every_image_is_an_edge(images, tmp_path):
    options = {"views": 6, "recipe": equicam.Recipe(context="auto"), "n": 3, "workers": 1}
    run = equicam.audit(images, equicam.load("embedded"), tmp_path / "run", **options)
    assert all("edge" in row["flags"] for row in run.items.to_pylist())


def test_an_evaluation_with_context_is_more_equivariant(model, images):
    eq = {}
    for context in ("none", "auto"):
        rows = equicam.evaluate(
            model, images, methods=["equigrad-cam-fine"], scores=["eq", "insertion"], views=18, angles=[10, 50], context=context
        )  # fmt: skip
        eq[context] = pick(rows, "eq", "equigrad-cam-fine", "disc").value.mean()
        assert np.isfinite(pick(rows, "insertion", "equigrad-cam-fine").value).all()
    assert eq["none"] > 0.9
    assert 1 - eq["auto"] < 0.95 * (1 - eq["none"])
    with pytest.raises(EquicamError, match=r"score 'causal' needs context"):
        equicam.evaluate(model, images, scores=["causal"], context="auto")
    with pytest.raises(EquicamError, match="context needs images"):
        equicam.evaluate(model, torch.zeros(2, 3, 96, 96), context="auto")


def test_files_and_commands(model, images, tmp_path):
    first = sorted(images.iterdir())[:1]
    auto = equicam.Recipe(views=4, context="auto")
    (found, *_) = explain_files(model, first, tmp_path / "out", recipe=auto)
    assert found.error is None
    assert len(found.facts["views"]) == 4
    run_command("explain", images / "0.png", "--views", 4, "--context", "auto", "--out", tmp_path / "files")
    facts = json.loads(next((tmp_path / "files").glob("*.json")).read_text())
    assert facts["flags"] == sorted(facts["flags"])
    said = run_command("audit", images, "--out", tmp_path / "bad", *recipe("recipe.context = 'some'"), code=2)
    assert "needs one of none, auto" in said
