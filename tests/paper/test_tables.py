"""The ImageNet tables on stand-ins, and the verdicts that follow from numbers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import jsonschema
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.evaluation.statistics import Estimate
from equicam.paper import EXPERIMENTS, load_experiment
from equicam.paper.claims import Claim, claims
from equicam.paper.cost import _over_one
from equicam.paper.margins import margin
from equicam.paper.rows import VERDICTS, Both, Remark, Row, compare, judge, not_run, number
from tests.conftest import Cnn, seeded
from tests.paper.conftest import LEVELS

FIRST = (
    "main", "alignment", "decomposition", "conditional", "strata", "drift-confidence", "causal", "blur", "soft-gate",
    "t-sweep", "angles", "faithfulness", "peum-audit",
)  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_every_claim_of_a_table_has_its_row(context, name):
    rows = list(load_experiment(name).run(context))
    found = Counter(row.claim for row in rows if row.claim)
    wanted = {claim for claim in claims() if claim.startswith(load_experiment(name).answers)}
    assert set(found) >= wanted
    assert max(found.values()) == 1
    assert any(row.verdict not in ("not run", "measured") for row in rows)
    for row in rows:
        assert row.verdict in VERDICTS
        assert (row.verdict == "not run") <= bool(row.note)
        assert row.note != "not answered by this run"  # a claim of this network that no row answers
        json.dumps(row.as_json(), allow_nan=False)


def test_all_claims_are_answered_somewhere():
    prefixes = [p for name in EXPERIMENTS for p in load_experiment(name).answers]
    assert not [claim for claim in claims() if not claim.startswith(tuple(prefixes))]
    assert len(claims()) == 371


def test_evaluations_are_kept_and_a_larger_one_is_reused(context, monkeypatch):
    whole = context.evaluate(["grad-cam", "equigrad-cam", "layer-cam"]).table
    monkeypatch.setattr("equicam.paper.context.evaluate", lambda *_a, **_k: pytest.fail("computed again"))
    some = context.evaluate(["grad-cam", "layer-cam"]).table
    assert set(some["method"].to_pylist()) == {"grad-cam", "layer-cam", None}
    assert some.num_rows < whole.num_rows


def test_other_weights_are_evaluated_again(context):
    other = replace(context, model=equicam.wrap(seeded(Cnn, seed=2), layer="trunk", **LEVELS))
    a, b = (x.evaluate(["grad-cam"]).table.to_pylist() for x in (context, other))
    assert str(a) != str(b)


def test_new_and_changed_images_are_evaluated(context, tmp_path):
    data = copytree(context.data, tmp_path / "data")
    one = replace(context, data=data, out=tmp_path / "out", n=None)
    before = one.evaluate(["grad-cam"]).table.num_rows
    (first,) = list(data.rglob("0.png"))
    Image.open(first).rotate(90).save(first.with_name("later.png"))
    after = replace(one).evaluate(["grad-cam"]).table
    assert after.num_rows > before
    Image.open(first).rotate(180).save(first)  # another image of the same name
    assert not replace(one).evaluate(["grad-cam"]).table.equals(after)


def test_the_source_is_listed_once(context, tmp_path, monkeypatch):
    from equicam.paper.context import find_items

    listed = []
    monkeypatch.setattr(
        "equicam.paper.context.find_items", lambda *a, **k: listed.append(a) or find_items(*a, **k)
    )
    fresh = replace(context)
    for method in ("grad-cam", "layer-cam"):
        fresh.evaluate([method])
    fresh.open_some(2)
    assert len(listed) == 1


def test_a_number_published_for_one_network_is_no_claim_about_another(context):
    for network, claimed in (("resnet50", True), ("mobilenet_v2", False)):
        found = list(load_experiment("decomposition").rows(replace(context, backbone=network)))
        rotated = next(row for row in found if row.label == "feature, rotated")
        assert (rotated.claim == "cos.feature.rot") == claimed
        assert (rotated.verdict == "measured") != claimed
        if not claimed:
            assert rotated.published == "0.9 (n = 14,000), of resnet50"
            assert {row.claim: row.verdict for row in found}["cos.feature.rot"] == "not run"
            assert rotated.reason is None  # the distance to another network's number says nothing


def estimate(value: float, half: float, n: int = 1000) -> Estimate:
    return Estimate(value, value - half, value + half, n)


NAME = "main.Grad-CAM.resnet50.eq"  # published .703


@pytest.mark.parametrize(
    ("found", "verdict", "code"),
    [
        (
            estimate(0.72, 0.001),
            "matches",
            None,
        ),  # the margin is .03, half of Grad-CAM's distance to EquiGrad-CAM at most
        (estimate(0.703, 0.029), "matches", None),
        (estimate(0.703, 0.031), "undecided", "wide"),
        (estimate(0.75, 0.06), "undecided", "wide"),
        (estimate(0.72, 0.001, n=20), "undecided", "few"),
        (estimate(0.95, 0.001, n=20), "undecided", "few"),
        (estimate(0.75, 0.01), "differs", "off"),
        (estimate(0.735, 0.003), "undecided", "wide"),
        (number(0.703, 1000), "undecided", "no-interval"),
        (number(float("nan")), "undecided", "no-interval"),
    ],
)
def test_the_verdict_is_on_the_authors_protocol(found, verdict, code):
    assert claims()[NAME].value == 0.703
    assert compare(NAME, Both(estimate(0.1, 0.01), found)).verdict == verdict
    row = compare(NAME, Both(found, None))
    assert row.verdict == verdict
    assert (row.reason and row.reason.code) == code
    assert row.margin == 0.03


def test_a_published_interval_counts():
    name = "causal.resnet50.drift.asym"
    assert claims()[name].ci95 == (0.142, 0.151)
    assert "[0.142, 0.151]" in claims()[name].text
    found = estimate(0.146, 0.0298)  # inside the margin of .03 alone, not with the published error
    assert judge(0.146, found, 0.03)[0] == "matches"
    assert judge(0.146, found, 0.03, (0.142, 0.151))[0] == "undecided"


def test_one_number_has_one_margin_in_every_table():
    printed = {
        "main.Grad-CAM.resnet50.eq": "align.Grad-CAM single view.resnet50.eq",
        "app.RESISC45.Grad-CAM.Eq": "rotaug.RESISC45.GC Eq no aug",
        "app.PatchCamelyon.EquiGrad-CAM.Eq": "rotaug.PatchCamelyon.EG Eq no aug",
        "main.AugCAM unaligned.vgg16.eq": "align.Unaligned output-space.vgg16.eq",
    }
    for one, other in printed.items():
        assert claims()[one].values == claims()[other].values
        assert margin(one) == margin(other) < 0.05


def test_margins_are_smaller_than_the_effect():
    """Half of what the paper's comparison rests on, so that no value on the other side of the comparison can match."""
    pairs = {
        "faith.r50.Ins.gc": "faith.r50.Ins.eg",
        "main.AugCAM unaligned.resnet50.eq": "main.Grad-CAM.resnet50.eq",
        "causal.resnet50.drift.d0": "causal.resnet50.random.d0",
        "audit.r.PEUM": "audit.r.pairwise CAM disagreement",
        "tsweep.resnet50.T4": "tsweep.resnet50.T3",
    }
    for one, other in pairs.items():
        (a,), (b,) = claims()[one].values, claims()[other].values
        assert margin(one) <= abs(a - b) / 2 + 1e-12
        assert compare(one, Both(None, estimate(b, margin(one) / 10))).verdict == "differs"


def test_negative_control_unrelated_numbers_hardly_match():
    """Numbers drawn at random, as precise as a thousand images are, match few claims; a tolerance of .03 was met by many."""
    rng = np.random.default_rng(0)
    judged = [
        compare(name, Both(None, estimate(float(rng.uniform()), 0.015))).verdict
        for name, claim in claims().items()
        if len(claim.values) == 1 and 0 < claim.values[0] < 1
    ]
    assert len(judged) > 200
    assert judged.count("matches") / len(judged) < 0.05
    assert judged.count("differs") / len(judged) > 0.7


def test_negative_control_few_images_decide_nothing(context):
    """Another network on four patches: nothing may match, and nothing may differ."""
    for name in ("main", "conditional", "t-sweep", "causal"):
        rows = list(load_experiment(name).run(context))
        decided = [row.claim for row in rows if row.verdict in ("matches", "differs", "artefact")]
        assert rows
        assert decided == []


def test_artefacts_need_a_number_that_comes_out():
    assert compare(NAME, Both(None, estimate(0.7, 0.01)), artefact="why").verdict == "artefact"
    assert compare(NAME, Both(None, estimate(0.5, 0.01)), artefact="why").verdict == "differs"


def test_ranges_words_and_networks_the_paper_does_not_have():
    assert compare("softgate.range", Both(None, estimate(0.964, 0.001))).verdict == "matches"
    assert compare("softgate.range", Both(None, estimate(0.9, 0.001))).verdict == "differs"
    alone = compare("main.Grad-CAM.mobilenet_v2.eq", Both(number(0.5), None), label="grad-cam")
    assert (alone.claim, alone.published) == ("", "not in the paper")
    assert not_run(NAME, "why").verdict == "not run"
    assert isinstance(claims()[NAME], Claim)
    assert isinstance(not_run(NAME, "why"), Row)


def test_a_row_keeps_its_reason_as_data():
    row = not_run(NAME, Remark("network", {"network": "vgg16"}))
    assert row.as_json()["reason"] == {"code": "network", "values": {"network": "vgg16"}}
    assert row.as_json()["note"] == "of vgg16: --model vgg16"


def test_the_command_lists_runs_and_refuses(context, tmp_path):
    run = CliRunner(env={"COLUMNS": "200"})
    listing = run.invoke(app, ["reproduce", "--list"])
    assert listing.exit_code == 0
    assert all(name in listing.output for name in EXPERIMENTS)
    command = ["reproduce", "alignment", "--data", str(context.data), "--n", "2", "--model", "embedded"]
    command += ["--backbone", "resnet50", "--out", str(tmp_path)]
    result = run.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "equigrad-cam-out" in result.output
    assert "claims not run" in result.output
    again = run.invoke(app, [*command, "--json", "--quiet"])  # resumed
    found = json.loads(again.stdout)
    jsonschema.validate(
        found, json.loads((Path(equicam.__file__).parent / "schemas/reproduce.json").read_text())
    )
    assert any(row["verdict"] != "not run" for row in found["rows"])
    kept = json.loads((tmp_path / "alignment.json").read_text())
    assert kept["experiment"] == "alignment"
    assert run.invoke(app, ["reproduce", "tables"]).exit_code == 2
    assert "no --data" in run.invoke(app, ["reproduce", "main"]).output


def test_the_command_refuses_weights_that_are_not_there_and_says_what_stands_alone(context, tmp_path):
    run = CliRunner(env={"COLUMNS": "300"})
    command = ["reproduce", "cost", "--data", str(context.data), "--model", "embedded", "--n", "1"]
    command += ["--out", str(tmp_path)]
    for wrong in ("rotatd=weights.safetensors", f"rotated={tmp_path / 'none.safetensors'}", "rotated"):
        result = run.invoke(app, [*command, "--extra", wrong])
        assert result.exit_code == 2
        assert wrong in result.output
        assert "seed2" in result.output
    result = run.invoke(app, [*command, "--backbone", "resnet5", "--domain", "RESISC"])
    assert result.exit_code == 0, result.output
    assert "the paper has no network resnet5 (resnet50, vgg16, vit_b_16)" in result.output
    assert "the paper has no domain RESISC (PatchCamelyon, RESISC45)" in result.output
    result = run.invoke(
        app, ["reproduce", "main", "--data", str(tmp_path / "nowhere"), "--model", "nonsense"]
    )
    assert "nowhere" in result.output
    assert "nonsense" not in result.output


@pytest.mark.parametrize(
    ("found", "verdict"),
    [(6.6, "matches"), (7.2, "matches"), (5.7, "differs"), (7.6, "differs"), (7.4, "undecided")],
)
def test_both_ends_of_a_published_range_have_one_verdict(found, verdict):
    """Six views are published at 6.4 to 6.9 times one Grad-CAM, and the margin is 0.5."""
    rows = list(_over_one(6, Both(estimate(3.0, 0.1), estimate(found, 0.1)), "here", on_gpu=True))
    assert [row.claim for row in rows] == ["cost.T6 lo", "cost.T6 hi"]
    assert {row.verdict for row in rows} == {verdict}


def test_a_cpu_decides_nothing_about_an_a100():
    rows = list(_over_one(6, Both(estimate(3.0, 0.1), estimate(6.6, 0.1)), "on a CPU", on_gpu=False))
    assert {row.verdict for row in rows if row.claim} == {"not run"}
