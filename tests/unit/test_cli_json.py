"""--json prints one document that its published schema accepts, and stdout holds nothing else."""

import json
import logging
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

import equicam
from equicam.cli import app as cli
from equicam.cli.audit import failed_gate, parse_gates, refuse_unreachable
from equicam.cli.run_output import causal_command
from equicam.console import console, notices
from equicam.demo import synthetic_patches
from equicam.reasons import from_rows
from equicam.runs.log import Log
from tests.conftest import recipe

SCHEMAS = Path(equicam.__file__).parent / "schemas"
RUN = CliRunner(env={"COLUMNS": "200"})
CALIBRATE = recipe("run.calibrate = 2")
COMMANDS = {command.callback.__name__ for command in cli.app.registered_commands}


def invoke(*arguments, code=0):
    result = RUN.invoke(cli.app, list(map(str, arguments)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def answer(*arguments, code=0):
    """The document of a command, which its schema accepts."""
    result = invoke(*arguments, "--json", "--quiet", code=code)
    document = json.loads(result.stdout)
    schema = json.loads((SCHEMAS / f"{arguments[0]}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    assert document["equicam"] == equicam.__version__
    if code == 0:
        assert result.stderr == ""
    return document


@pytest.fixture(scope="module")
def patches(tmp_path_factory):
    """Six synthetic images, and a file that is none."""
    folder = tmp_path_factory.mktemp("patches")
    for i, patch in enumerate(synthetic_patches(6)):
        patch.save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"no")
    return folder


@pytest.fixture(scope="module")
def run(patches, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    document = answer("audit", patches, "--out", out, "--views", 6, *CALIBRATE)
    assert (document["images"], document["explained"], document["bad"]) == (7, 6, 1)
    assert document["steady"] + document["unsteady"] + document["cannot_say"] == 6
    assert (document["reasons"], document["first_bad"]["id"]) == ({"unreadable": 1}, "broken.png")
    assert "an image file" in document["first_bad"]["reason"]
    return out


def test_every_command_that_answers_has_a_schema():
    assert {path.stem for path in SCHEMAS.glob("*.json")} == COMMANDS - {"open"}
    for path in SCHEMAS.glob("*.json"):
        schema = json.loads(path.read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["title"] == f"equicam {path.stem}"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema).validate({"command": path.stem})


def test_the_demo_audits_ranks_verifies_and_reports(tmp_path):
    document = answer("demo", "--out", tmp_path, "--count", 10)
    assert document["explained"] == document["images"] == 10
    assert document["verified"]
    assert "patch-" in Path(document["report"]).read_text()
    assert len(list((tmp_path / "images-10").iterdir())) == 10
    output = " ".join(invoke("demo", "--out", tmp_path, "--count", 10).output.split())  # resumed
    words = ("in the queue:", "5 recomputed images", "no differences", "Synthetic", document["report"])
    assert all(one in output for one in (*words, "the first tenth by stability holds "))


def test_explain_answers(tmp_path, patches):
    options = ("--views", 2, "--out", tmp_path / "out")
    document = answer("explain", patches / "0.png", *options)
    (image,) = document["images"]
    assert (tmp_path / "out" / image["files"]["overlay"]).is_file()
    assert (document["preprocessing"]["crop"], document["skipped"]) == ([96, 96], [])
    assert f"{image['peum_score']:.4f}" in invoke("explain", patches / "0.png", *options).stdout
    partly = answer("explain", patches / "0.png", patches / "broken.png", *options, code=1)
    assert [Path(one["image"]).name for one in partly["skipped"]] == ["broken.png"]
    assert len(partly["images"]) == 1


def test_the_commands_of_a_run_answer(run, tmp_path):
    ranked = answer("triage", run, "--budget", 3)
    assert ranked["queue"][0]["rank"] == 1
    assert len(ranked["queue"]) + ranked["controls"] == ranked["budget"] == 3
    tested = answer("causal", run)
    assert (len(tested["images"]), tested["explained"], tested["left_out"]) == (6, 6, 0)
    compared = answer("compare", run, run)
    assert (compared["direction"], compared["images"]) == ("no difference shown", 6)
    found = answer("report", run)
    assert Path(found["report"]).is_file()
    assert (found["last_hash"], found["ok"], found["bad"]) == (Log(run).last(), 6, 1)
    verified = answer("verify", run, "--sample", 1, "--device", "cpu")
    assert (verified["ok"], verified["recomputed"], verified["last_hash"]) == (True, 1, Log(run).last())
    exported = answer("review", run, "--export", tmp_path / "verdicts.csv")
    assert exported["exported"]["verdicts"] == 0
    for command, message in (
        (("review", run), "--json needs --import or --export"),
        (("triage", tmp_path / "none"), "got no such folder"),
    ):
        result = invoke(*command, "--json", code=2)
        assert message in result.stderr
        assert result.stdout == ""


def test_verify_answers_also_where_something_differs(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "copy")
    shard = next(copy.glob("items/*.parquet"))
    shard.write_bytes(shard.read_bytes() + b"x")
    found = answer("verify", copy, code=1)
    assert not found["ok"]
    assert found["problems"]


def test_a_run_with_a_weights_file_needs_it_named_and_says_so(patches, tmp_path):
    weights, out = tmp_path / "my weights.safetensors", tmp_path / "run"
    save_file(dict(equicam.load("embedded").module.state_dict()), weights)
    options = ("--out", out, "--views", 6, "--n", 3, "--weights", weights)
    explained = answer("audit", patches, *options)["explained"]
    hint = invoke("triage", out, "--budget", 2).stderr
    command = shlex.split(hint.strip().splitlines()[-1].partition("noise: ")[2])
    assert command[:4] == ["equicam", "causal", str(out), "--weights"]
    assert invoke(*command[1:]).stdout.count("images (fewer than 100)") == 1
    found = answer("verify", out, "--sample", 20, code=1)
    assert [found[name] for name in ("ok", "problems", "recomputed", "left_out")] == [False, [], 0, explained]
    assert "needs --weights" in found["left_out_reason"]
    said = invoke("verify", out, "--sample", 1, code=1).stdout
    assert "1 map was NOT recomputed: " in said
    assert f"try --weights '{weights}'" in said
    assert answer("verify", out, "--sample", 1, "--weights", weights)["ok"]
    invoke("report", out)
    assert f"equicam verify {out} --weights &#39;{weights}&#39;" in (out / "report.html").read_text()
    weights.unlink()
    assert "equicam causal" not in invoke("triage", out, "--budget", 2).stderr


def test_a_hint_names_what_must_be_named_or_nothing(run, tmp_path):
    opened = equicam.open_run(run)
    manifest = opened.manifest
    assert (manifest.reload_options(), causal_command(opened)) == ({}, f"equicam causal {run}")
    factory = tmp_path / "nets.py"
    for changed, named in [
        ({"model": None}, None),
        ({"model": f"{factory}:build"}, {"--model": f"{factory}:build"}),
        ({"weights_from": "IMAGENET1K_V2"}, {}),
        ({"source": "s3://bucket/images"}, {"--source": "s3://bucket/images"}),
    ]:
        assert replace(manifest, **changed).reload_options() == named
    copy = shutil.copytree(run, tmp_path / "copy")
    for changed in ({"model": None}, {"model": f"{factory}:build"}, {"task": "regression"}):
        (copy / "manifest.json").write_text(replace(manifest, **changed).dumps())
        assert causal_command(equicam.open_run(copy)) is None
    factory.touch()
    (copy / "manifest.json").write_text(replace(manifest, model=f"{factory}:build").dumps())
    assert causal_command(equicam.open_run(copy)) == f"equicam causal {copy} --model {factory}:build"


def test_evaluate_answers(patches):
    document = answer("evaluate", patches, "--methods", "grad-cam,equigrad-cam", "--views", 2, "--n", 2)
    values = {row["method"]: row["value"]["value"] for row in document["summary"] if row["score"] == "eq"}
    assert set(values) == {"grad-cam", "equigrad-cam"}
    assert all(0 < value < 1 for value in values.values())


def test_lists_answer():
    names = [one["name"] for one in answer("methods")["methods"]]
    assert names == list(equicam.methods())
    assert [one["name"] for one in answer("scores")["scores"]] == list(equicam.scores())
    assert answer("models", "vit_small_patch16_224")["models"][0]["name"].startswith("timm:")
    assert answer("models")["models"][0]["name"] == "embedded"
    assert answer("models", "no such name")["models"] == []
    assert "torch" in {one["name"] for one in answer("doctor")["findings"]}


def test_results_go_to_stdout_and_everything_else_to_stderr(patches, tmp_path):
    out = tmp_path / "run"
    result = invoke("audit", patches, "--out", out, "--views", 2)
    assert "6 images explained, 1 could not be" in result.stdout
    assert "that is broken.png: image " in result.stdout
    assert "next: equicam triage" in result.stderr
    assert "preprocessing: short side resized to 96; centre crop 96×96; mean 0.77" in result.stderr
    assert "the model sees 100 % of a square image, 75 % of one of 4:3" in result.stderr
    assert "next" not in result.stdout
    quiet = invoke("audit", patches, "--out", out, "--views", 2, "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")
    assert not console.quiet
    assert not notices.quiet


def test_files_that_are_no_images_are_a_notice(patches, tmp_path):
    shutil.copytree(patches, tmp_path / "images", ignore=shutil.ignore_patterns("[2-9].png", "broken*"))
    (tmp_path / "images" / "notes.txt").write_text("hello")
    command = ("audit", tmp_path / "images", "--out", tmp_path / "run", "--views", 2)
    assert "1 left out, hidden or not an image by the name: " in invoke(*command).stderr
    assert invoke(*command, "--quiet").stderr == ""


def test_verbose_prints_the_log(patches, tmp_path):
    result = invoke("audit", patches, "--out", tmp_path / "run", "--views", 2, "--verbose")
    words = ("equicam.audit.audit: shard 0: 7 images, ", "in a forward pass", "'broken.png' could not be")
    assert all(one in result.stderr for one in words)
    assert not logging.getLogger("equicam").handlers
    both = RUN.invoke(cli.app, ["methods", "--quiet", "--verbose"])
    assert both.exit_code == 2


def test_nothing_explained_is_a_failure(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"no")
    found = answer("audit", tmp_path / "images", "--out", tmp_path / "run", code=1)
    assert (found["explained"], found["bad"]) == (0, 1)
    result = invoke("audit", tmp_path / "images", "--out", tmp_path / "run", code=1)
    assert "no image could be explained, of 1" in result.stderr
    assert "next" not in result.output


def test_an_evaluation_of_nothing_is_a_failure(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no")
    found = answer("evaluate", tmp_path, "--n", 1, "--methods", "grad-cam", code=1)
    assert (found["images"], found["unreadable"], found["summary"]) == (1, 1, [])
    result = invoke("evaluate", tmp_path, "--n", 1, "--methods", "grad-cam", code=1)
    assert "no image could be read; the first:" in result.stderr


def test_predictions_are_compared_with_each_other_and_not_with_the_explained_class(patches, tmp_path):
    """A class that is not the top-1 is explained: the prediction changes only where it does."""
    out, names = tmp_path / "run", equicam.load("embedded").classes
    invoke("audit", patches, "--out", out, "--views", 6, "--target", names[0])
    invoke("triage", out, "--budget", "100%", "--control", 0)
    opened = equicam.open_run(out)
    rows = {row["id"]: row for row in opened.items.to_pylist() if row["status"] == "ok"}
    assert any(row["view_top1"][0] != row["target"] and row["flip_rate"] == 0 for row in rows.values())
    for row in opened.queue():
        flips = [reason for reason in from_rows(row["reasons"]) if reason.code == "prediction-changes"]
        counted = len(flips[0].values["views"]) if flips else 0
        assert counted == round(rows[row["id"]]["flip_rate"] * 6), row["id"]


def test_gates_decide_the_exit_code(patches, run):
    command = ("audit", patches, "--out", run, "--views", 6, *CALIBRATE)
    assert answer(*command, "--max-bad", "20%", "--min-steady", "0%")["gates"][0]["holds"]
    found = answer(*command, "--max-bad", "5%", code=3)["gates"]
    assert found == [{"option": "--max-bad", "limit": "5%", "count": 1, "of": 7, "holds": False}]
    result = invoke(*command, "--max-bad", 0, "--min-steady", "100%", code=3)
    assert "the gate --max-bad 0 failed: 1 of 7 images could not be explained (14.3 %)" in result.stderr
    assert "next" not in result.output
    for wrong in ("-1", "5 percent", "101%", "0.5", "nan"):
        assert "a share from 0% to 100%" in invoke(*command, f"--max-bad={wrong}", code=2).stderr


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("equicam.cli.audit.load_on_engine", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.usefixtures("no_model")
def test_a_gate_above_the_number_of_images_is_refused_before_anything_is_loaded(patches, tmp_path):
    command = ("audit", patches, "--out", tmp_path / "run")
    for options, words in (
        (("--min-steady", 80), "up to 7, as many as there are, or a share, got 80; try --min-steady 80%"),
        (("--max-bad", 800), "got 800; try --max-bad 5%"),
        (("--n", 3, "--min-steady", 4), "up to 3, as"),
    ):
        assert words in invoke(*command, *options, code=2).stderr
    refuse_unreachable(parse_gates("7", "7"), 7)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("none", [], "needs an existing file or folder"),
        ("empty", [], "needs images"),
        (".", recipe("run.split = 'test'"), "split 'test' needs a folder of that name"),
        (".", ["--views", "many"], "try --views 18"),
        (".", recipe("recipe.dtype = 'int8'"), "dtype needs"),
        (".", ["--mpp", 0.5], "mpp needs tile"),
        (".", ["--tile", 96, *recipe("preprocessing.size = 9")], "size and crop needs images, got tile"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(source, options, message, patches, tmp_path):
    (tmp_path / "empty").mkdir()
    where = {"none": tmp_path / "none", "empty": tmp_path / "empty", ".": patches}[source]
    assert message in invoke("audit", where, "--out", tmp_path / "run", *options, code=2).stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("max_bad", "min_steady", "holds"),
    [("5%", "80%", [True, True]), ("4.9%", "81%", [False, False]), ("5", "76", [True, True]), ("4", "77", [False, False])],
)  # fmt: skip
def test_gates_hold_at_their_limit(max_bad, min_steady, holds):
    counts = {"images": 100, "bad": 5, "explained": 95, "steady": 76}
    checked = [gate.check(counts) for gate in parse_gates(max_bad, min_steady)]
    assert ([one["holds"] for one in checked], failed_gate(checked) is None) == (holds, all(holds))


@pytest.mark.parametrize("command", ["explain", "audit", "evaluate"])
def test_preprocessing_can_be_set(command, patches, tmp_path):
    given = {"explain": [patches / "0.png", "--out", tmp_path], "audit": [patches, "--out", tmp_path / "run"]}
    given["evaluate"] = [patches, "--n", 2, "--methods", "grad-cam"]
    options = recipe("[preprocessing]", "size = 80", "crop = 64", "mean = 0.5", "std = [0.2, 0.2, 0.25]")
    views = [] if command == "evaluate" else ["--views", 2]
    result = invoke(command, *given[command], *views, *options)
    assert "resized to 80; centre crop 64×64; mean 0.5,0.5,0.5; std 0.2,0.2,0.25" in result.stderr
    assert "the model sees 64 % of a square" in result.stderr


def test_a_run_with_other_preprocessing_keeps_it(patches, tmp_path):
    out = tmp_path / "run"
    invoke("audit", patches, "--out", out, "--views", 2, *recipe("preprocessing.crop = 64"))
    given = json.loads((out / "manifest.json").read_text())["given_preprocessing"]
    assert (given["size"], given["crop"]) == (96, 64)
    assert answer("verify", out, "--sample", 2, "--device", "cpu")["recomputed"] == 2
    invoke("audit", patches, "--out", tmp_path / "plain", "--views", 2)
    both = [equicam.open_run(folder).items.to_pylist() for folder in (out, tmp_path / "plain")]
    first, second = ([row["confidence"] for row in rows if row["status"] == "ok"] for rows in both)
    assert np.abs(np.subtract(first, second)).max() > 0.01
    refused = invoke("audit", patches, "--out", out, "--views", 2, code=2)
    assert "given_preprocessing was" in refused.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("crop = 200", "crop needs at most the size, 96, got 200; try size = 200 in the recipe file as well"),
        ("size = 64", "size needs at least the model's crop, 96, got 64; try crop = 64 in the recipe file"),
        ("std = [0, 1, 1]", "std needs three numbers, of red, green and blue, above 0"),
        ("crop = 160", "AssertionError: Input height (160)"),
    ],
)
def test_preprocessing_is_refused_with_advice(patches, tmp_path, line, message):
    model = ("--model", "timm:vit_tiny_patch16_224", "--weights", "random") if "160" in line else ()
    options = (*model, *recipe(f"preprocessing.{line}"))
    result = invoke("explain", patches / "0.png", "--out", tmp_path, *options, code=2)
    assert message in result.stderr


FACTORIES = """
from torch import nn

def four():
    return nn.Sequential(nn.Conv2d(4, 8, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.calls = nn.Conv2d(3, 2, 3, 4), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            raise KeyError("lost")
        return self.trunk(x).mean((2, 3))

def broken():
    return {}["nothing"]
"""


@pytest.mark.parametrize("command", ["explain", "audit"])
@pytest.mark.parametrize(
    ("factory", "code", "message"),
    [
        ("four", 2, "needs inputs with 4 channels, got 3 channels (images are read as RGB); try"),
        ("Net", 1, "got KeyError: 'lost' (FILE:15, in forward); try mending it there; --verbose prints the"),
        ("broken", 1, "'broken' needs to return a model, got KeyError: 'nothing' (FILE:19, in broken)"),
    ],
)
def test_a_models_own_failure_is_a_sentence(tmp_path, patches, command, factory, code, message):
    file = tmp_path / "mine.py"
    file.write_text(FACTORIES)
    source = patches / "0.png" if command == "explain" else patches
    arguments = [command, source, "--out", tmp_path / "out", "--model", f"{file}:{factory}", "--views", 2]
    result = invoke(*arguments, code=code)
    assert message.replace("FILE", str(file)) in result.stderr
    assert "Traceback" not in result.output
    assert "next" not in result.output
    if command == "audit":  # nothing was explained: no folder is left
        assert not (tmp_path / "out").exists()
    if code == 1 and command == "explain":
        assert "Traceback" in invoke(*arguments, "--verbose", code=code).stderr


def test_commands_are_grouped_in_order_of_use():
    page = RUN.invoke(cli.app, ["--help"]).output
    places = [page.index(f"─ {panel} ─") for panel in cli.PANELS]
    assert places == sorted(places)
    assert "--install-completion" in page
    listed = typer.main.get_command(cli.app).commands
    assert [name for panel in cli.PANELS.values() for name in (f.__name__ for f in panel)] == list(listed)
