"""docs/architecture.md and the decisions name modules and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

import equicam

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "equicam"
PACKAGES = {"equicam": SOURCE, "equicam_paper": ROOT / "paper/src/equicam_paper"}
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(
    r"^\|[^|]*\| (`[^|]+`) \| \[([\w/]+\.py)\]\(\.\./src/equicam/([\w/]+\.py)\) \|$", re.MULTILINE
)


def defined(path: Path) -> set[str]:
    """Names a module defines at its top level, and Class.member for the members of its classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


STEPS = [
    (file, name, link) for names, file, link in ROW.findall(PAGE) for name in re.findall(r"`([\w.]+)`", names)
]


def test_both_walks_are_found():
    assert len(STEPS) > 50


@pytest.mark.parametrize(("file", "name", "link"), STEPS, ids=lambda value: str(value))
def test_every_function_named_exists(file, name, link):
    assert file == link
    assert name in defined(SOURCE / file)


def test_every_package_stands_in_the_diagram():
    house = PAGE.split("```")[1]
    for path in SOURCE.iterdir():
        if path.suffix == ".py" and not path.name.startswith("_"):
            assert path.name in house, path.name
        if (path / "__init__.py").is_file():
            assert f"{path.name}/" in house, path.name


def test_the_diagram_agrees_with_the_import_rules():
    """Of two names on different floors of the house, the upper one comes first in import-linter's layers too."""
    import tomllib

    house = PAGE.split("```")[1]
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [
        [name.strip().removeprefix("equicam.") for name in layer.split(":")]
        for layer in next(r for r in rules if r["type"] == "layers")["layers"]
    ]
    names = re.compile(r"(\w+)(?:/|\.py)")
    floors = [
        [name for line in part.splitlines() for name in names.findall(line[:40])] for part in house.split("▼")
    ]
    floor = {name: number for number, here in enumerate(floors) for name in here}
    ranks = {name: rank for rank, names in enumerate(layers) for name in names}
    known = sorted((n for n in ranks if n in floor), key=lambda n: ranks[n])
    assert len(known) >= 15
    for upper, lower in ((a, b) for a in known for b in known if ranks[a] < ranks[b]):
        assert floor[upper] <= floor[lower], (upper, lower)


@pytest.mark.parametrize(
    "script",
    [*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")],
    ids=lambda p: f"{p.parent.name}/{p.name}",
)
def test_scripts_and_benchmarks_import_what_exists(script):
    missing = []
    for node in ast.walk(ast.parse(script.read_text())):
        package, *parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else [""]
        if package not in PACKAGES:
            continue
        path = PACKAGES[package].joinpath(*parts)
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        known = defined(source) | imported(source) if source.exists() else set()
        known |= {p.stem for p in path.glob("*")} | (set(equicam.__all__) if path == SOURCE else set())
        missing += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in known]
    assert not missing


def imported(path: Path) -> set[str]:
    """Names a module imports from others."""
    nodes = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in nodes for alias in node.names}
