import json
import resource
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.cli.shared import as_typed
from equicam.data.synthetic import draw
from equicam.report.explanation_files import safe_stem

RUN = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def patch(tmp_path):
    Image.fromarray(draw(0, seed=7).image).save(tmp_path / "patch.png")
    return tmp_path / "patch.png"


def written(folder, stem):
    return {p.name for p in folder.glob(f"{stem}.*")}


def test_methods_are_listed():
    result = RUN.invoke(app, ["methods"])
    assert result.exit_code == 0
    assert all(name in result.output for name in equicam.methods())


def test_explain_writes_three_pictures_and_the_facts(tmp_path, patch):
    out = tmp_path / "out"
    result = RUN.invoke(app, ["explain", str(patch), "--out", str(out), "--views", "6"])
    assert result.exit_code == 0, result.output
    assert written(out, "patch") == {
        f"patch.{kind}" for kind in ("overlay.png", "peum.png", "views.png", "json")
    }
    for kind in ("overlay", "peum", "views"):
        with Image.open(out / f"patch.{kind}.png") as picture:
            assert len(set(picture.convert("L").tobytes())) > 100  # something is drawn
    facts = json.loads((out / "patch.json").read_text())
    model = equicam.load("embedded")
    e = equicam.explain(model, patch, views=6)
    assert facts["target"] == int(e.target)
    assert facts["class"] == model.classes[int(e.target)]
    assert facts["angles"] == list(e.angles)
    np.testing.assert_allclose(facts["probability"], e.sure[0], atol=1e-5)
    np.testing.assert_allclose(facts["probability_per_view"], e.prob[0], atol=1e-5)
    np.testing.assert_allclose(facts["peum"], e.score[0], atol=1e-6)
    assert facts["flags"] == sorted(e.flags[0])
    assert facts["layer"] == "layer4"
    assert facts["files"]["views"] == "patch.views.png"


def test_the_authors_grid_still_tells_the_presented_probability(tmp_path, patch):
    for views in ("6", "3"):
        RUN.invoke(app, ["explain", str(patch), "--out", str(tmp_path), "--views", views, "--as-published"])
        facts = json.loads((tmp_path / "patch.json").read_text())
        e = equicam.explain(equicam.load("embedded"), patch, views=1)
        np.testing.assert_allclose(facts["probability"], e.sure[0], atol=1e-5)


def test_one_view_has_no_uncertainty_to_draw(tmp_path, patch):
    RUN.invoke(app, ["explain", str(patch), "--out", str(tmp_path / "out"), "--method", "grad-cam"])
    assert written(tmp_path / "out", "patch") == {
        f"patch.{kind}" for kind in ("overlay.png", "views.png", "json")
    }


def test_a_picture_given_is_never_overwritten(tmp_path, patch):
    own = tmp_path / "s.overlay.png"
    own.write_bytes(patch.read_bytes())
    (tmp_path / "s.png").write_bytes(patch.read_bytes())
    result = RUN.invoke(
        app, ["explain", str(tmp_path / "s.png"), str(own), "--out", str(tmp_path), "--views", "2"]
    )
    assert result.exit_code == 0, result.output
    assert own.read_bytes() == patch.read_bytes()


def test_bad_and_hostile_files_are_named_and_the_rest_is_done(tmp_path, patch):
    good = tmp_path / "a$b^{<script>\n[red]é.png"
    good.write_bytes(patch.read_bytes())
    same_stem = tmp_path / "folder" / "patch.png"
    same_stem.parent.mkdir()
    same_stem.write_bytes(patch.read_bytes())
    long = tmp_path / f"{'x' * 240}.png"
    long.write_bytes(patch.read_bytes())
    broken = tmp_path / "broken[bold]\x1b[31m.png"
    broken.write_bytes(patch.read_bytes()[:500])
    out = tmp_path / "out"
    files = [str(p) for p in (patch, good, same_stem, long, broken, tmp_path / "missing.png")]
    result = RUN.invoke(app, ["explain", *files, "--out", str(out), "--views", "2"])
    assert result.exit_code == 1
    assert "2 of 6 pictures left out" in result.output
    assert "broken[bold]" in result.output
    assert "\x1b[31m" not in result.output
    made = sorted(out.glob("*.json"))
    assert len(made) == 4
    assert {json.loads(p.read_text())["picture"] for p in made} == set(files[:4])
    assert all(p.parent == out and len(p.name) < 120 and p.name.isascii() for p in out.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet51"], "got 'resnet51'; try 'resnet50'"),
        (["--method", "gradcam"], "one of grad-cam"),
        (["--layer", "layer9"], "got 'layer9'; try 'layer"),
        (["--target", "7"], "classes from 0 to 1, got"),
        (["--views", "0"], "a number from 1 on, or auto, got"),
        (["--classes", "only one"], "one for each of 2 classes, got 1"),
        (["--weights", "nothing"], "an existing file or"),
        (["--tau", "0.5"], "tau needs"),
    ],
)
def test_mistakes_end_with_a_sentence_and_no_traceback(tmp_path, patch, arguments, message):
    result = RUN.invoke(app, ["explain", str(patch), "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_safe_stems_are_short_plain_and_never_twice():
    taken: set[str] = set()
    stems = [
        safe_stem(p, taken)
        for p in (
            "a/x.png",
            "b/x.png",
            "b/x.png",
            "b/x.png",
            "X.png",
            "../../etc/passwd",
            "-rf.png",
            ".png",
            "é" * 300,
        )
    ]
    assert stems[0] == "x"
    assert len({s.lower() for s in stems}) == len(stems)
    assert all(s[0].isalnum() and "/" not in s and len(s) < 100 for s in stems)


def test_the_demo_is_the_whole_job_and_says_where_the_report_is(tmp_path):
    result = RUN.invoke(app, ["demo", "--out", str(tmp_path / "demo"), "--count", "20"])
    assert result.exit_code == 0, result.output
    run = tmp_path / "demo" / "run-20"
    assert "first in the queue, " in result.output
    assert "5 pictures computed again" in result.output
    assert "all as it says" in result.output
    assert str(run / "report.html") in result.output
    assert "Synthetic" in result.output
    assert "patch-" in (run / "report.html").read_text()
    assert len(list((tmp_path / "demo" / "pictures-20").iterdir())) == 20
    assert (run / "evidence.json").is_file()


def test_models_and_their_search():
    assert "open_clip:ViT-B-16/openai" in RUN.invoke(app, ["models"]).output
    found = RUN.invoke(app, ["models", "vit_small_patch16_224"]).output.split()
    assert "timm:vit_small_patch16_224" in found
    assert "no name contains" in RUN.invoke(app, ["models", "zzz"]).output


def test_the_doctor_says_what_to_type(monkeypatch):
    from equicam import doctor

    well = RUN.invoke(app, ["doctor"])
    assert well.exit_code == 0
    for what in ("Python", "torch", "timm", "CPU", "TORCH_HOME cache", "HF_HOME cache", "extra [clip]"):
        assert what in well.output
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda n: None if n == "open_clip" else find(n))
    assert "pip install 'equicam[clip]'" in RUN.invoke(app, ["doctor"]).output


def seconds(code: str) -> float:
    """Processor time of a fresh interpreter, less what the interpreter itself takes; the best of three."""

    def spent(c: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", c], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(spent(code) for _ in range(3)) - min(spent("pass") for _ in range(3))


def test_importing_is_light():
    assert seconds("import sys, equicam; assert equicam.__version__; assert 'torch' not in sys.modules") < 0.3
    assert seconds("from equicam.cli.app import app; app(['--help'], standalone_mode=False)") < 1


def test_the_version_is_told():
    assert RUN.invoke(app, ["--version"]).output.strip() == f"equicam {equicam.__version__}"


def test_drawing_needs_no_torch():
    code = "import sys, equicam.report.explained, equicam.data.synthetic, equicam.data.pictures; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def patches(tmp_path):
    """Four drawn patches in two classes, and one file that is no picture."""
    for i in range(4):
        folder = tmp_path / "source" / ("normal", "tumour")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw(i, seed=7).image).save(folder / f"{i}.png")
    (folder / "broken.png").write_bytes(b"no")
    return tmp_path / "source"


def test_evaluate_prints_values_floors_and_skill_and_keeps_rows(tmp_path, patches):
    out = tmp_path / "rows.parquet"
    command = [
        "evaluate",
        str(patches),
        "--methods",
        "grad-cam,equigrad-cam,grad-cam@blur-4",
        "--scores",
        "eq,peum",
    ]
    result = RUN.invoke(app, [*command, "--views", "4", "--out", str(out), "--details"])
    assert result.exit_code == 0, result.output
    for words in (
        "equigrad-cam",
        "skill",
        "grad-cam@blur-4",
        "1 of 5 pictures could not be read",
        "drift ~ p lost",
    ):
        assert words in result.output
    assert "Holm" in result.output
    assert out.is_file()
    again = RUN.invoke(app, [*command, "--views", "4", "--out", str(out)])
    assert again.exit_code == 0
    other = RUN.invoke(app, [*command, "--views", "6", "--out", str(out)])
    assert other.exit_code == 2
    assert "methods was" in other.output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--scores", "eqq"], "scores needs a list of"),
        (["--methods", "grad-kam"], "method needs one of"),
        (["--dtype", "int8"], "dtype needs bfloat16 or float16"),
        (["--split", "test"], "split"),
        (["--n", "0"], "n"),
    ],
)
def test_evaluate_refuses_in_a_sentence(patches, more, message):
    result = RUN.invoke(app, ["evaluate", str(patches), *more])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_scores_and_controls_are_listed():
    result = RUN.invoke(app, ["scores"])
    assert result.exit_code == 0
    assert all(name in result.output for name in equicam.scores())
    assert "METHOD@random-weights" in result.output


def test_printing_rows_needs_no_torch():
    code = "import sys, equicam.report.tables; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["explain", "PICTURE", "--target", "99"], "try no --target"),
        (["explain", "PICTURE", "--views", "0"], "got '0'; try --views 18"),
        (["explain", "PICTURE", "--views", "some"], "got 'some'; try --views 18"),
        (["explain", "FOLDER"], "got a folder; try its pictures one by one, or equicam audit"),
        (["explain", "PICTURE", "--method", "gradcam"], "try 'grad-cam'"),
        (["triage", "FOLDER/none"], "got no such folder"),
        (["triage", "FOLDER"], "got no manifest.json in it"),
        (["audit", "FOLDER", "--out", "FOLDER/run", "--views", "auto"], "try --views 12"),
    ],
)
def test_refusals_advise_what_one_types_here(tmp_path, asked, said):
    picture = tmp_path / "p.png"
    Image.fromarray(np.full((96, 96, 3), 90, np.uint8)).save(picture)
    words = [w.replace("PICTURE", str(picture)).replace("FOLDER", str(tmp_path)) for w in asked]
    result = RUN.invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code in (1, 2)
    assert said in result.output, result.output


def test_models_lists_the_embedded_one_and_doctor_every_extra():
    assert RUN.invoke(app, ["models", "embedded"]).output.strip() == "embedded"
    output = RUN.invoke(app, ["doctor"]).output
    assert all(f"[{extra}]" in output for extra in ("clip", "hf", "data", "ray", "review"))


def test_python_advice_becomes_an_option():
    for fix, said in (
        ('fill="reflect"', "--fill reflect"),
        ("views=12", "--views 12"),
        ("compiled=False", "no --compile"),
        ("a=b", "a=b"),
    ):
        error = equicam.EquicamError("it", needs="this", got='fill="that"', fix=fix)
        assert as_typed(error) == f'it needs this, got fill="that"; try {said}'
    assert as_typed(OSError("disk full")) == "disk full"
