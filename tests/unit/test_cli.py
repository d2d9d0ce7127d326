import json
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from PIL import Image
from typer.main import get_command
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.console import Output, as_typed, exit_on_error
from equicam.demo import synthetic_patches
from equicam.explain_files import safe_stem
from equicam.readers.names import absolute_model, absolute_weights
from tests.conftest import recipe

RUN = CliRunner(env={"COLUMNS": "200"})


def run(*arguments, code=0, columns=300):
    """What a command prints, which must end with this code."""
    result = RUN.invoke(app, list(map(str, arguments)), env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture
def patch(tmp_path):
    synthetic_patches(1)[0].save(tmp_path / "patch.png")
    return tmp_path / "patch.png"


def written(folder, stem):
    return {p.name for p in folder.glob(f"{stem}.*")}


def test_explain_writes_three_images_and_the_facts(tmp_path, patch):
    out = tmp_path / "out"
    run("explain", patch, "--out", out, "--views", 6)
    assert written(out, "patch") == {"patch.overlay.png", "patch.peum.png", "patch.views.png", "patch.json"}
    for kind in ("overlay", "peum", "views"):
        with Image.open(out / f"patch.{kind}.png") as image:
            assert len(set(image.convert("L").tobytes())) > 100  # something is drawn
    facts = json.loads((out / "patch.json").read_text())
    model = equicam.load("embedded")
    e = equicam.explain(model, patch, views=6)
    assert (facts["target"], facts["class"]) == (int(e.target), model.classes[int(e.target)])
    assert facts["views"] == list(e.views.labels)
    for name, atol in (("confidence", 1e-5), ("view_confidence", 1e-5), ("peum_score", 1e-6)):
        np.testing.assert_allclose(facts[name], getattr(e, name)[0], atol=atol, err_msg=name)
    assert (facts["flags"], facts["layer"]) == (sorted(e.flags[0]), "layer4")
    assert facts["files"]["views"] == "patch.views.png"


@pytest.mark.parametrize(
    ("typed", "labels"),
    [
        ("dihedral:4", ["0°", "0° mirrored", "180°", "180° mirrored"]),
        ("scales:0.8,1,1.25", ["× 0.8", "0°", "× 1.25"]),
        ("shifts:0.05", ["0°", *(f"shifted 5 % {where}" for where in ("right", "left", "down", "up"))]),
    ],
)
def test_views_have_names(tmp_path, patch, typed, labels):
    run("explain", patch, "--out", tmp_path, "--views", typed)
    assert json.loads((tmp_path / "patch.json").read_text())["views"] == labels


def test_one_view_has_no_uncertainty_to_draw(tmp_path, patch):
    output = run("explain", patch, "--out", tmp_path / "out", "--method", "grad-cam", columns=200)
    assert written(tmp_path / "out", "patch") == {"patch.overlay.png", "patch.views.png", "patch.json"}
    facts = json.loads((tmp_path / "out" / "patch.json").read_text())
    assert (facts["peum_score"], facts["steadiness"]) == (None, "cannot say")
    assert re.search(r"cannot say +│ – +│", output)
    assert "cannot say: too few views" in output


def test_an_input_image_is_never_overwritten(tmp_path, patch):
    own = tmp_path / "s.overlay.png"
    own.write_bytes(patch.read_bytes())
    (tmp_path / "s.png").write_bytes(patch.read_bytes())
    run("explain", tmp_path / "s.png", own, "--out", tmp_path, "--views", 2)
    assert own.read_bytes() == patch.read_bytes()


def test_bad_and_hostile_files_are_named_and_the_rest_is_explained(tmp_path, patch):
    (tmp_path / "folder").mkdir()
    names = ("a$b^{<script>\n[red]é.png", "folder/patch.png", f"{'x' * 240}.png", "broken[bold]\x1b[31m.png")
    for name in names:
        (tmp_path / name).write_bytes(patch.read_bytes()[: 500 if "broken" in name else None])
    out = tmp_path / "out"
    files = [str(tmp_path / name) for name in ("patch.png", *names, "missing.png")]
    output = run("explain", *files, "--out", out, "--views", 2, code=1)
    assert "2 of 6 images skipped" in output
    assert "broken[bold]" in output
    assert "\x1b[31m" not in output
    made = sorted(out.glob("*.json"))
    assert len(made) == 4
    assert {json.loads(p.read_text())["image"] for p in made} == set(files[:4])
    assert all(p.parent == out and len(p.name) < 120 and p.name.isascii() for p in out.iterdir())


def test_safe_stems_are_short_plain_and_never_twice():
    taken: set[str] = set()
    paths = ["a/x.png", *["b/x.png"] * 3, "X.png", "../../etc/passwd", "-rf.png", ".png", "é" * 300]
    stems = [safe_stem(path, taken) for path in paths]
    assert (stems[0], len({s.lower() for s in stems})) == ("x", len(stems))
    assert all(s[0].isalnum() and "/" not in s and len(s) < 100 for s in stems)


@pytest.mark.slow
def test_the_default_demo_finds_three_times_as_many_of_the_worst_as_chance(tmp_path):
    from equicam.demo import run_demo

    quality = run_demo(tmp_path)[1].quality
    assert quality.n == 100
    assert quality.signals["stability"].captured.value >= 0.3
    assert quality.auroc.low > 0.5


def test_a_demo_with_differences_ends_with_1(tmp_path, monkeypatch):
    from equicam.audit.run import Run
    from equicam.audit.verify import Verification

    differs = Verification(files=1, events=1, recomputed=0, problems=("queue.csv is not as it was written",))
    monkeypatch.setattr(Run, "verify", lambda *_args, **_options: differs)
    output = run("demo", "--out", tmp_path / "demo", "--count", 10, code=1)
    assert "0 recomputed images: 1 difference" in output


def test_names_are_listed_and_the_doctor_finds_what_is_missing(monkeypatch):
    from equicam import doctor

    assert all(name in run("methods") for name in equicam.methods())
    assert all(name in run("scores") for name in (*equicam.scores(), "METHOD@random-weights"))
    assert "open_clip:ViT-B-16/openai" in run("models")
    assert run("models", "embedded").strip() == "embedded"
    assert "timm:vit_small_patch16_224" in run("models", "vit_small_patch16_224").split()
    assert "no name contains" in run("models", "zzz")
    found = ("Python", "torch", "timm", "CPU", "TORCH_HOME cache", "HF_HOME cache", "[clip]", "[hf]", "[ray]")
    report = run("doctor")
    assert all(what in report for what in (*found, "[review]"))
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda n: None if n == "open_clip" else find(n))
    assert "pip install 'equicam[clip]'" in run("doctor")


@pytest.fixture
def patches(tmp_path):
    """Four drawn patches in two classes, and one file that is not an image."""
    for i, patch in enumerate(synthetic_patches(4)):
        folder = tmp_path / "source" / ("normal", "tumour")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        patch.save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"no")
    return tmp_path / "source"


def test_evaluate_prints_values_floors_and_skill_and_keeps_rows(tmp_path, patches):
    out = tmp_path / "rows.parquet"
    options = ("--methods", "grad-cam,equigrad-cam,grad-cam@blur-4", "--scores", "eq,peum", "--out", out)
    command = ("evaluate", patches, *options)
    output = run(*command, "--views", 4, "--details")
    words = ("equigrad-cam", "skill", "grad-cam@blur-4", "1 of 5 images could not be read", "Holm")
    assert [one for one in (*words, "drift ~ p lost") if one not in output] == []
    assert out.is_file()
    run(*command, "--views", 4)
    assert "methods was" in run(*command, "--views", 6, code=2)


def test_evaluate_under_another_group(tmp_path):
    (tmp_path / "source").mkdir()
    for i, patch in enumerate(synthetic_patches(6)):
        patch.save(tmp_path / "source" / f"{i}.png")
    command = ("evaluate", tmp_path / "source", "--methods", "grad-cam", "--group", "dihedral")
    output = run(*command, "--out", tmp_path / "rows.parquet", "--details")
    assert "skill" in output
    assert "45° mirrored" in output
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    rows = [r for r in rows if (r["score"], r["region"]) == ("eq", "disc")]
    values = [r["value"] for r in rows if r["presentation"] == "45° mirrored"]
    assert len(values) == 6
    assert np.std([r["value"] for r in rows]) > 0.01
    assert 0.2 < np.mean(values) < 1


PAPER = recipe("recipe.protocol = 'paper'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "IMAGE", "--model", "resnet51"], "got 'resnet51'; try 'resnet50'"),
        (["explain", "IMAGE", "--method", "gradcam"], "one of grad-cam"),
        (["explain", "IMAGE", "--method", "gradcam"], "try 'grad-cam'"),
        (["explain", "IMAGE", "--layer", "layer9"], "got 'layer9'; try 'layer"),
        (["explain", "IMAGE", "--target", "7"], "classes from 0 to 1, got"),
        (["explain", "IMAGE", "--target", "99"], "try no --target"),
        (["explain", "IMAGE", "--classes", "only one"], "one for each of 2 classes, got 1"),
        (["explain", "IMAGE", "--weights", "nothing"], "an existing file or"),
        (["explain", "IMAGE", *recipe("recipe.tau = 0.5")], "tau needs"),
        (["explain", "IMAGE", *PAPER, "--context", "auto"], 'try protocol = "ours" in the recipe file'),
        (["explain", "IMAGE", *recipe("recipe.fill = 'white'")], 'try fill = "reflect" in the recipe file'),
        (["explain", "IMAGE", *recipe("recipe.dtype = 'int8'")], 'try dtype = "bfloat16" in the recipe file'),
        (["explain", "IMAGE", "--views", "0"], "got '0'; try --views 18"),
        (["explain", "IMAGE", "--views", "10001"], "got '10001'; try --views 18"),
        (["explain", "IMAGE", "--views", "some"], "got 'some'; try --views 18"),
        (["explain", "IMAGE", "--views", "dihedral:7"], "got 'dihedral:7'; try --views dihedral:18"),
        (["explain", "IMAGE", "--views", "dihedral"], "got 'dihedral'; try --views dihedral:18"),
        (["explain", "IMAGE", "--views", "scales:1,0"], "got 'scales:1,0'; try --views scales:0.8,1,1.25"),
        (["explain", "IMAGE", "--views", "scales:1,,2"], "try --views scales:0.8,1,1.25"),
        (["explain", "IMAGE", "--views", "scales:inf"], "try --views scales:0.8,1,1.25"),
        (["explain", "IMAGE", "--views", "shifts:0.5"], "got 'shifts:0.5'; try --views shifts:0.05"),
        (["explain", "IMAGE", "--views", "shifts:nan"], "try --views shifts:0.05"),
        (["explain", "IMAGE", "--views", "18:"], "got '18:'; try --views 18"),
        (["explain", "FOLDER"], "got a folder; try its images one by one, or equicam audit"),
        (["evaluate", "FOLDER", "--group", "mirror"], "shift, got 'mirror'; try --group rotation"),
        (["evaluate", "FOLDER", "--group", "shift", *PAPER], 'got shift; try protocol = "ours" in the'),
        (["evaluate", "FOLDER", "--scores", "eqq"], "scores needs a list of"),
        (["evaluate", "FOLDER", "--methods", "grad-kam"], "method needs one of"),
        (["evaluate", "FOLDER", "--split", "test"], "split"),
        (["evaluate", "FOLDER", "--n", "0"], "n"),
        (["triage", "FOLDER/none"], "got no such folder"),
        (["triage", "FOLDER"], "got no manifest.json in it"),
        (["audit", "FOLDER", "--out", "FOLDER/run", "--views", "auto"], "got 'auto'; try --views 18"),
    ],
)
def test_refusals_advise_in_options(tmp_path, arguments, message):
    image = tmp_path / "p.png"
    Image.fromarray(np.full((96, 96, 3), 90, np.uint8)).save(image)
    words = [word.replace("IMAGE", str(image)).replace("FOLDER", str(tmp_path)) for word in arguments]
    output = run(*words, code=1 if arguments == ["explain", "FOLDER"] else 2)
    assert message in output


def test_python_advice_becomes_an_option_or_a_line_of_the_recipe_file(monkeypatch):
    typed = {name: f"--{name}" for name in ("views", "target", "by")} | {"compiled": "--compile"}
    output = Output(options=typed, in_file={"fill", "dtype", "voi", "protocol", "tau"})
    monkeypatch.setattr("equicam.console.output", output)
    for fix, advice in (
        ("views=12", "--views 12"),
        ("compiled=False", "no --compile"),
        ("compiled=True", "--compile"),
        ("target=None", "no --target"),
        ('by="peum"', "--by peum"),
        ('fill="reflect"', 'fill = "reflect" in the recipe file'),
        ('views=6, or dtype="float16"', '--views 6, or dtype = "float16" in the recipe file'),
        ("voi=40,400", "voi = [40, 400] in the recipe file"),
        ('Recipe(protocol="ours")', 'protocol = "ours" in the recipe file'),
        ("tau=0.10", "tau = 0.10 in the recipe file"),
        ("dtype=None or other weights", "no dtype in the recipe file or other weights"),
        ("Recipe(gamma=1)", "Recipe(gamma=1)"),
        ("a=b", "a=b"),
    ):
        error = equicam.EquicamError("it", needs="this", got='fill="that"', fix=fix)
        assert as_typed(error) == f'it needs this, got fill="that"; try {advice}'
    assert as_typed(OSError("disk full")) == "disk full"


@pytest.mark.parametrize("command", ["explain", "audit", "evaluate", "demo"])
@pytest.mark.parametrize(
    ("out", "got"), [("/proc/x", "No such file"), ("a-file", "a file"), ("a-file/x", "Not a directory")]
)
def test_a_folder_that_cannot_be_made_is_refused(command, out, got, tmp_path, patches, monkeypatch):
    if command == "evaluate":  # it writes a file, and has sentences of its own for the others
        out, got = "/proc/x", "No such file"
    if command == "demo" and out == "a-file":  # it makes a folder in it
        got = "Not a directory"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").write_text("in the way")
    first = min(patches.rglob("*.png"))
    given = {"explain": [str(first)], "demo": []}.get(command, [str(first.parent)])
    more = ["--methods", "grad-cam"] if command == "evaluate" else []
    output = run(command, *given, *more, "--out", out, code=2, columns=400)
    assert re.search(rf"'{out}.*' needs to be a .*, got {got}.*; try another path", output)
    assert "Errno" not in output


def test_a_file_with_the_name_of_a_model_does_not_replace_it(tmp_path, patches, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("embedded", "resnet50", "IMAGENET1K_V1", "random"):
        (tmp_path / name).write_text("a file")
        assert (absolute_model(name), absolute_weights(name)) == (name, name)
    output = run("audit", patches, "--out", "run", "--model", "embedded", *recipe("recipe.tau = 0.2"), code=2)
    assert "equigrad-cam+pcf" in output  # refused only after the model was loaded
    assert absolute_model("models.py:build") == f"{tmp_path}/models.py:build"
    assert absolute_model("hf:google/vit-base-patch16-224") == "hf:google/vit-base-patch16-224"
    assert absolute_weights("mine.safetensors") == f"{tmp_path}/mine.safetensors"
    assert absolute_weights("./mine") == f"{tmp_path}/mine"
    assert absolute_weights(None) is None


@pytest.mark.parametrize("name", [command.callback.__name__ for command in app.registered_commands])
def test_every_command_has_an_example_and_help_for_every_option(name):
    command = get_command(app).commands[name]
    assert f"`equicam {name}" in command.help
    assert all(getattr(option, "help", "") for option in command.params), name
    assert RUN.invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize(("name", "most"), [("audit", 22), ("explain", 18), ("evaluate", 22)])
def test_commands_show_few_options(name, most):
    shown = re.findall(r"^│ \*? *(--[a-z-]+)", run(name, "--help"), re.MULTILINE)
    assert "--recipe" in shown
    assert len(shown) <= most
    assert name != "audit" or {"--tile", "--mpp", "--mpp-is", "--stride", "--bands"} <= set(shown)


def test_ctrl_c_ends_a_command_with_130(capsys):
    with pytest.raises(typer.Exit) as ended, exit_on_error(interrupted="; run it again"):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert "stopped; run it again" in capsys.readouterr().err


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "equicam", "--version"], capture_output=True, text=True)
    assert done.stdout.strip() == f"equicam {equicam.__version__}"
