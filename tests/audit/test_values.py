"""A run of a regression speaks of outputs and values everywhere, and never of class 0."""

import json
import re

import numpy as np
import pytest
import torch

import equicam
from equicam.demo import synthetic_patches
from equicam.errors import EquicamError
from tests.audit.conftest import equicam_answer, run_command
from tests.web.conftest import Server, key_of

MODEL = """
import torch
from torch import nn
import equicam

def build(outputs={outputs}, classes={classes}):
    torch.manual_seed(3)
    features = nn.Conv2d(3, 6, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()
    net = nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, outputs))
    return equicam.wrap(net, layer="3", task="regression", classes=classes)
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("values") / "photos"
    folder.mkdir()
    for i, patch in enumerate(synthetic_patches(6)):
        patch.save(folder / f"{i}.png")
    return folder


def regressor(outputs=1, classes=None):
    made: dict[str, object] = {}
    exec(MODEL.format(outputs=outputs, classes=classes), made)
    return made["build"]()


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    found = equicam.audit(photos, regressor(), tmp_path_factory.mktemp("runs") / "run", views=6)
    found.triage(budget="100%")
    return found


def test_rows_have_the_value(run, photos):
    rows = {row["id"]: row for row in run.items.to_pylist()}
    for name, row in rows.items():
        found = equicam.explain(regressor(), photos / name, views=1, method="grad-cam")
        assert row["output"] == pytest.approx(float(found.output[0]), rel=1e-3)
        assert row["confidence"] is None
    assert np.std([row["output"] for row in rows.values()]) > 0


def test_the_queue_names_the_output_and_a_signal_of_confidence_is_refused_by_name(run):
    queue = run.queue()
    assert {row["class"] for row in queue} == {"the output"}
    assert all(row["output"] is not None for row in queue)
    output = run_command("triage", run.folder, "--budget", "100%")
    assert re.search(r"rank +image +output +value +stability", output)
    assert f"{queue[0]['output']:.4g}" in output
    assert "class" not in output
    with pytest.raises(EquicamError, match="by='risk' needs the confidence of classes, got none in this run"):
        run.triage(by="risk")
    output = run_command("triage", run.folder, "--by", "risk", code=2)
    assert "try --by stability, or peum" in " ".join(output.split())


def test_the_report_shows_outputs_and_values(run):
    page, row = run.report().read_text(), run.queue()[0]
    header = '<th scope="col">Output</th><th scope="col">Value</th>'
    for text in (header, f"<dt>Value</dt><dd>{row['output']:.4g}</dd>", "the model’s output depends on"):
        assert text in page
    for text in ("class 0", "<dt>Probability</dt>"):
        assert text not in page
    facts = json.loads((run.folder / "report.json").read_text())
    assert facts["queue"][0]["output"] == pytest.approx(row["output"])
    assert facts["images"][0]["class"] == "the output"


def test_the_review_page_asks_what_the_output_depends_on(run):
    row = run.queue()[0]

    def page(**options):
        return Server(run.store, **options).client().get(f"/item/{key_of(run.store, row['id'])}").text

    blinded, shown = page(), page(blind=False)
    assert re.search(r"Does this map show what <em>.*the output.*</em> depends on\?", blinded)
    assert "evidence for" not in blinded
    assert "Does this map show what the output depends on?" in page(blind_class=True)
    assert f"<dt>Value</dt><dd>{row['output']:.4g}" in shown
    assert "should depend on" in shown
    assert "p = " not in shown


@pytest.mark.parametrize(
    ("given", "target", "name"), [((3,), 2, "output 2"), ((2, ["age", "grade"]), "grade", "grade")]
)
def test_an_output_has_its_number_or_name(photos, tmp_path, given, target, name):
    found = equicam.audit(photos, regressor(*given), tmp_path / "run", views=2, target=target, n=2)
    found.triage(budget="100%")
    assert {row["class"] for row in found.queue()} == {name}


NAMED = {"the output": (1, None, []), "output 2": (3, None, ["--target", "2"])}
NAMED["grade"] = 2, ["age", "grade"], ["--target", "grade"]


@pytest.mark.parametrize("name", NAMED)
def test_explain_prints_and_writes_the_value(photos, tmp_path, name):
    outputs, classes, more = NAMED[name]
    (tmp_path / "mine.py").write_text(MODEL.format(outputs=outputs, classes=classes))
    model = f"{tmp_path / 'mine.py'}:build"
    options = [photos / "0.png", "--model", model, "--views", 2, "--out", tmp_path / "out", *more]
    output = run_command("explain", *options)
    (found,) = equicam_answer("explain", *options)["images"]
    assert (found["class"], found["confidence"]) == (name, None)
    assert re.search(r"image +┃ output +┃ value", output)
    value = f"{found['output']:.4g}"
    assert re.search(rf"│ {name} +│ {re.escape(value)} ", output)
    assert "class 0" not in output
    stored = json.loads(next((tmp_path / "out").glob("*.json")).read_text())
    assert stored["output"] == found["output"]


def test_an_explanation_names_it():
    x = torch.rand(2, 3, 32, 32)
    assert re.search(r"  0  the output = -?\d", str(equicam.explain(regressor(), x, views=2)))
    assert "  1  output 0 = " in str(equicam.explain(regressor(3), x, views=2, target=0))
    of_a_function = equicam.explain(regressor(3), x, views=2, target=lambda y: y.mean(1))
    assert "  0  the output = " in str(of_a_function)
