"""The ImageNet tables on stand-ins, and the verdicts that follow from numbers."""

import json
from collections import Counter

import pytest
from PIL import Image
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.data.synthetic import draw_many
from equicam.evaluation.statistics import Estimate
from equicam.paper import NAMES, named
from equicam.paper.context import Bench, Claim, Line, beside, claims, line, not_run, number
from equicam.paper.cost import _over_one

FIRST = (
    "main", "alignment", "decomposition", "conditional", "strata", "drift-confidence", "causal", "blur", "soft-gate",
    "t-sweep", "angles", "faithfulness", "peum-audit",
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    """The embedded model on three drawn patches, standing for ResNet-50 on ImageNet."""
    folder = tmp_path_factory.mktemp("bench")
    for i, patch in enumerate(draw_many(3, seed=7)):
        (folder / "data" / str(patch.label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(patch.image).save(folder / "data" / str(patch.label) / f"{i}.png")
    return Bench(equicam.load("embedded"), folder / "data", folder / "out")


@pytest.mark.parametrize("name", FIRST)
def test_every_claim_of_a_table_has_its_line(bench, name):
    lines = list(named(name).run(bench))
    found = Counter(one.claim for one in lines if one.claim)
    wanted = {claim for claim in claims() if claim.startswith(named(name).answers)}
    assert set(found) >= wanted
    assert max(found.values()) == 1
    assert any(one.verdict not in ("not run", "measured") for one in lines)
    for one in lines:
        assert one.verdict in ("matches", "differs", "artefact", "undecided", "measured", "not run")
        assert (one.verdict == "not run") <= bool(one.reason)
        json.dumps(one.as_json(), allow_nan=False)


def test_all_claims_are_answered_somewhere():
    prefixes = [p for name in NAMES for p in named(name).answers]
    assert not [claim for claim in claims() if not claim.startswith(tuple(prefixes))]
    assert len(claims()) == 371


def test_rows_are_kept_and_taken_from_a_larger_evaluation(bench, monkeypatch):
    whole = bench.rows(["grad-cam", "equigrad-cam", "layer-cam"])
    monkeypatch.setattr("equicam.paper.context.evaluate", lambda *_a, **_k: pytest.fail("computed again"))
    some = bench.rows(["grad-cam", "layer-cam"])
    assert set(some["method"].to_pylist()) == {"grad-cam", "layer-cam", None}
    assert some.num_rows < whole.num_rows


def test_other_weights_are_not_taken_from_there(bench):
    from dataclasses import replace

    other = replace(bench, model=equicam.load("embedded", weights="random"))
    a, b = (x.rows(["grad-cam"]).to_pylist() for x in (bench, other))
    assert str(a) != str(b)


def test_pictures_that_have_come_are_seen(bench, tmp_path):
    from dataclasses import replace
    from shutil import copytree

    mine = replace(bench, data=copytree(bench.data, tmp_path / "data"), out=tmp_path / "out")
    before = mine.rows(["grad-cam"]).num_rows
    (first,) = list(mine.data.rglob("0.png"))
    Image.open(first).rotate(90).save(first.with_name("later.png"))
    after = mine.rows(["grad-cam"])
    assert after.num_rows > before
    Image.open(first).rotate(180).save(first)  # another picture by the same name
    assert not mine.rows(["grad-cam"]).equals(after)


def test_what_is_published_of_one_network_is_no_claim_about_another(bench):
    from dataclasses import replace

    for network, claimed in (("resnet50", True), ("mobilenet_v2", False)):
        found = list(named("decomposition").lines(replace(bench, backbone=network)))
        turned = next(one for one in found if one.what == "feature, turned")
        assert (turned.claim == "cos.feature.rot") == claimed
        assert (turned.verdict == "measured") != claimed
        if not claimed:
            assert turned.published == "0.9 (n = 14,000), of resnet50"
            assert {one.claim: one.verdict for one in found}["cos.feature.rot"] == "not run"


def estimate(value: float, half: float, n: int = 1000) -> Estimate:
    return Estimate(value, value - half, value + half, n)


NAME = "main.Grad-CAM.resnet50.eq"  # published .703


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (estimate(0.72, 0.001), "matches"),
        (estimate(0.75, 0.06), "matches"),
        (estimate(0.75, 0.06, n=20), "undecided"),
        (estimate(0.75, 0.01), "differs"),
        (number(float("nan")), "undecided"),
    ],
)
def test_the_verdict_is_on_the_authors_protocol(found, verdict):
    assert claims()[NAME].value == 0.703
    assert line(NAME, as_published=found, clean=estimate(0.1, 0.01)).verdict == verdict
    assert line(NAME, clean=found).verdict == verdict
    if verdict == "differs":
        assert "off by 0.047, allowed 0.03" in line(NAME, clean=found).reason


def test_artefacts_need_a_number_that_comes_out():
    assert line(NAME, as_published=estimate(0.7, 0.01), artefact="why").verdict == "artefact"
    assert line(NAME, as_published=estimate(0.5, 0.01), artefact="why").verdict == "differs"


def test_ranges_words_and_networks_the_paper_does_not_have():
    assert line("softgate.range", as_published=number(0.964)).verdict == "matches"
    assert line("softgate.range", as_published=number(0.9)).verdict == "differs"
    assert (
        beside("main.Grad-CAM.mobilenet_v2.eq", clean=number(0.5), what="grad-cam").published
        == "not in the paper"
    )
    assert not_run(NAME, "why").verdict == "not run"
    assert isinstance(claims()[NAME], Claim)
    assert isinstance(not_run(NAME, "why"), Line)


def test_the_command_lists_runs_and_refuses(bench, tmp_path):
    run = CliRunner(env={"COLUMNS": "200"})
    listing = run.invoke(app, ["reproduce", "--list"])
    assert listing.exit_code == 0
    assert all(name in listing.output for name in NAMES)
    result = run.invoke(
        app,
        [
            "reproduce",
            "alignment",
            "--data",
            str(bench.data),
            "--model",
            "embedded",
            "--backbone",
            "resnet50",
            "--out",
            str(tmp_path),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "equigrad-cam-out" in result.output
    assert "claims not run" in result.output
    kept = json.loads((tmp_path / "alignment.json").read_text())
    assert kept["experiment"] == "alignment"
    assert run.invoke(app, ["reproduce", "tables"]).exit_code == 2
    assert "no --data" in run.invoke(app, ["reproduce", "main"]).output


def test_the_command_refuses_weights_that_are_not_there_and_says_what_stands_alone(bench, tmp_path):
    run = CliRunner(env={"COLUMNS": "300"})
    asked = ["reproduce", "cost", "--data", str(bench.data), "--model", "embedded", "--out", str(tmp_path)]
    for wrong in ("turnt=weights.safetensors", f"turned={tmp_path / 'none.safetensors'}", "turned"):
        result = run.invoke(app, [*asked, "--extra", wrong])
        assert result.exit_code == 2
        assert wrong in result.output
        assert "seed2" in result.output
    result = run.invoke(app, [*asked, "--backbone", "resnet5", "--domain", "RESISC"])
    assert result.exit_code == 0, result.output
    assert "resnet5 is no network of the paper's (resnet50, vgg16, vit_b_16)" in result.output
    assert "RESISC is no domain of the paper's (PatchCamelyon, RESISC45)" in result.output
    result = run.invoke(
        app, ["reproduce", "main", "--data", str(tmp_path / "nowhere"), "--model", "nonsense"]
    )
    assert "nowhere" in result.output
    assert "nonsense" not in result.output


@pytest.mark.parametrize(
    ("found", "verdict"), [(7.1, "matches"), (6.6, "matches"), (5.7, "differs"), (7.6, "differs")]
)
def test_both_ends_of_a_published_range_have_one_verdict(found, verdict):
    """Six views are published at 6.4 to 6.9 times one Grad-CAM, and 0.6 is allowed."""
    lines = list(_over_one(6, found, 3.0, 8, "here"))
    assert [one.claim for one in lines] == ["cost.T6 lo", "cost.T6 hi"]
    assert {one.verdict for one in lines} == {verdict}
