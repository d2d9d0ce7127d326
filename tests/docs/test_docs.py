"""The documentation is complete, and its code runs."""

import inspect
import re
import runpy
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

import equicam
from equicam.cli.app import app
from equicam.demo import synthetic_patches
from equicam.drawing.text import RANDOM_EQ
from equicam.evaluate.causal import CONTROLS as REGIONS
from equicam.evaluate.controls import CONTROLS
from equicam.methods import METHODS
from equicam_paper import cli as paper
from equicam_paper.kept import read_rows

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("paper/*.md")]
TEXT = "\n".join(p.read_text() for p in PAGES)


def run_page(page: str, names: dict, replaced: Mapping[str, str] = {}) -> None:
    """Run a page's Python blocks and its indented commands, in order; the review page would wait for a browser."""
    steps = re.compile(r"```python\n(.*?)```|^    equicam ([^#\n]+)", re.DOTALL | re.MULTILINE)
    for step in steps.findall((ROOT / page).read_text()):
        code, command = step
        for before, after in replaced.items():
            code, command = code.replace(before, after), command.replace(before, after)
        if code:
            exec(compile(code, page, "exec"), names)
        elif not command.startswith(("review", "compare")):  # a server, and a second run
            result = CliRunner().invoke(app, command.split())
            assert result.exit_code == 0, f"{command}\n{result.output}"


def code_of(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def draw_patches(folder: Path, count: int, names: str) -> None:
    folder.mkdir(exist_ok=True)
    for i, patch in enumerate(synthetic_patches(count)):
        patch.save(folder / names.format(i))


def test_the_readme_ends_in_an_image_of_the_map(tmp_path, monkeypatch, capsys):
    """With the embedded model where it says resnet50, whose weights would be downloaded."""
    monkeypatch.chdir(tmp_path)
    draw_patches(tmp_path, 1, "photo.jpg")
    draw_patches(tmp_path / "photos", 10, "{}.jpg")
    names: dict = {}
    run_page("README.md", names, {"resnet50": "embedded"})
    assert names["e"].map.std() > 0.01
    overlays = list(Path("explained").glob("*.overlay.png"))  # by the command and in Python
    assert overlays
    assert all(np.asarray(Image.open(one)).std() > 10 for one in overlays)
    assert re.search("(steady|unsteady|cannot say): ", capsys.readouterr().out)
    assert "<html" in Path("run/report.html").read_text()


def test_the_readme_takes_eight_lines_of_python():
    assert len([line for line in code_of("README.md")[0].splitlines() if line.strip()]) <= 8


def test_the_tutorial_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    run_page("docs/tutorial.md", names)
    shown = capsys.readouterr().out
    for line in re.findall(r"^      (0  .*), …$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE):
        assert line in shown
    assert "unsteady" in shown
    assert Path("first.png").stat().st_size > 10_000
    assert Path("run/report.html").is_file()
    assert len(names["items"]) == 24


def test_the_code_about_explainers_runs():
    code = code_of("docs/explainers.md")
    assert len(code) == 5
    names: dict = {}
    for block in code:
        exec(compile(block, "explainers.md", "exec"), names)
        assert names["e"].map.shape == (2, 96, 96)
        assert (names["e"].peum_score > 0).all()


def test_the_code_about_extending_runs(monkeypatch):
    from equicam.evaluate.metrics import METRICS

    before = dict(METRICS)
    code = code_of("docs/extending.md")
    assert len(code) == 3
    names: dict = {}
    try:
        for block in code:
            exec(compile(block, "extending.md", "exec"), names)
            if "def hires_cam" in block:
                assert set(names["rows"]["method"].to_pylist()) >= {"hires", "hires, aligned"}
            assert names["e"].map.std() > 0.01
    finally:
        METRICS.clear()
        METRICS.update(before)
    rows = [r for r in names["rows"].to_pylist() if r["score"] == "wander"]
    assert len(rows) == 2 * 2 * 8
    assert max(r["value"] for r in rows) > 1


def test_the_reference_agrees_with_the_source():
    made = runpy.run_path(str(ROOT / "scripts/api_reference.py"))
    text = made["page"]()
    assert (ROOT / "docs/api.md").read_text() == text, "run scripts/api_reference.py"
    for name in equicam.__all__:
        assert name == "__version__" or f"`equicam.{name}" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(page):
    missing = []
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        target = page.parent / link if link else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{link}#{anchor}")
    assert not missing


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_method_is_described():
    """By its row of the table, which `equicam methods` prints; the page has no other methods."""
    page = (ROOT / "docs/method.md").read_text().partition("## Methods")[2].partition("\n## ")[0]
    assert len(on_page := re.findall(r"^\| `(\S+)` \|", page, re.MULTILINE)) > 20
    assert set(on_page) <= METHODS.keys()
    assert all(method.about for method in METHODS.values())


@pytest.mark.parametrize(
    ("page", "row", "names"),
    [
        (
            "docs/method.md",
            r"^\| `{}` \|",
            ["blank", "constant", "flipped", "none-kept", "low-coverage", "odd-size", "edge"],
        ),
        ("docs/method.md", "`{}`", list(inspect.signature(equicam.explain).parameters)[2:]),
        ("docs/scores.md", r"^\| .*`{}`", equicam.scores()),
        ("docs/scores.md", "`{}`", list(inspect.signature(equicam.evaluate).parameters)[1:]),
        ("docs/scores.md", "@{}`", [name.replace("SIGMA", "16") for name in CONTROLS]),
        ("docs/scores.md", "{}", REGIONS),
    ],
    ids=["flags", "options of explain", "scores", "options of evaluate", "controls", "regions"],
)
def test_every_name_is_documented(page, row, names):
    text = (ROOT / page).read_text()
    assert names
    assert [one for one in names if not re.search(row.format(re.escape(one)), text, re.MULTILINE)] == []


def test_every_page_has_the_same_number_of_random_weights():
    rows = {row.label: row for row in read_rows(ROOT / "docs/reproduce/rows/mobilenet_v2/sanity.json").ran}
    measured = {
        kind: f"{rows[f'equigrad-cam, {label}: Eq'].clean.value:.3f}".removeprefix("0")
        for kind, label in (("random", "all random"), ("trained", "weights as given"))
    }
    assert measured == RANDOM_EQ
    readme, method = ((ROOT / name).read_text() for name in ("README.md", "docs/method.md"))
    random, trained = measured["random"], measured["trained"]
    assert f"random weights to an Eq of {random}, where the trained one reaches {trained}" in readme
    table = method.split("## Random weights")[1]
    assert f"| equigrad-cam | {measured['trained']} [" in table
    assert f"**{measured['random']} [" in table


def test_floors_in_the_documentation_are_those_of_the_kept_rows():
    def of(experiment):
        kept = read_rows(ROOT / f"docs/reproduce/rows/resnet50/{experiment}.json")
        return {row.label: row for row in kept.ran}

    def short(value):
        return f"{value:.3f}".removeprefix("0")

    page = (ROOT / "docs/scores.md").read_text()
    rows = of("alignment")
    for method in ("grad-cam", "aug-cam", "equigrad-cam", "equigrad-cam-out"):
        skill = rows[f"{method}: skill above the floor"]
        ours, theirs = re.findall(r"score (\S+) by ours, (\S+) by theirs", skill.note)[0]
        cells = []
        for found, above, floor in (
            (rows[method].as_published, skill.as_published, theirs),
            (rows[method].clean, skill.clean, ours),
        ):
            eq, low, high = (short(one) for one in (found.value, found.low, found.high))
            cells += [f"{eq} [{low}, {high}]", floor.removeprefix("0"), short(above.value)]
        line = next(line for line in page.splitlines() if re.match(rf"\| {method}( \(.*\))? \|", line))
        assert line.endswith(f"| {' | '.join(cells)} |")
    ignores = of("main")["coverage: a map that ignores the image"]
    theirs, ours = short(ignores.as_published.value), short(ignores.clean.value)
    assert f"| | **{theirs}** | {theirs} | .000 | {ours} | {ours} | .000 |" in page


def test_the_code_about_scores_runs(capsys):
    (code,) = code_of("docs/scores.md")
    exec(compile(code, "scores.md", "exec"), {})
    assert "'floor'" in capsys.readouterr().out


@pytest.mark.parametrize("name", [n for n in equicam.__all__ if n[0].islower() and not n.startswith("_")])
def test_every_public_function_is_documented(name):
    assert re.search(rf"\b{name}\(|`equicam\.{name}`|`{name}`", TEXT)


APPS = {"equicam": app, "equicam-paper": paper.app}
COMMANDS = [(name, one) for name, of in APPS.items() for one in sorted(typer.main.get_command(of).commands)]


@pytest.mark.parametrize(("program", "command"), COMMANDS)
def test_every_command_has_help_and_stands_in_the_docs(program, command):
    result = CliRunner().invoke(APPS[program], [command, "--help"])
    assert result.exit_code == 0
    assert f"{program} {command}" in TEXT


def test_every_make_target_is_in_its_help():
    lines = (ROOT / "Makefile").read_text().splitlines()
    targets = [line for line in lines if re.match(r"^[a-z-]+:", line)]
    assert all("##" in line for line in targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_and_names_in_the_text_exist(page):
    """`package/module.py`, `equicam.package.module` and `equicam.package.module.name`; not the tables of old names."""
    text = page.read_text().split("## 0.1.0")[0]
    if page.name == "CHANGELOG.md":
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    missing = [
        path
        for path in re.findall(r"`([\w/]+\.py)`", text)
        if not any((base / path).exists() for base in (ROOT, ROOT / "src/equicam")) and "/" in path
    ]
    for name in re.findall(r"`equicam((?:\.\w+)+)", text):
        parts = name.strip(".").split(".")
        if not any(resolves(parts, depth) for depth in range(len(parts) + 1)):
            missing.append(f"equicam{name}")
    assert not missing


def resolves(parts: list[str], depth: int) -> bool:
    """Whether the first `depth` parts are a module of ours that has the rest."""
    module = ROOT / "src" / "equicam" / Path(*parts[:depth])
    source = module.with_suffix(".py") if module.with_suffix(".py").exists() else module / "__init__.py"
    if not source.exists():
        return False
    if depth == len(parts):
        return True
    if depth == 0:
        return parts[0] in equicam.__all__
    name = parts[depth]
    return bool(re.search(rf"^(def|class) {name}\b|^{name}\b.*=", source.read_text(), re.MULTILINE))
