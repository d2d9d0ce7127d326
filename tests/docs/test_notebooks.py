"""The notebooks in examples/ run on embedded data, from the first cell to the last."""

import ast
import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

BOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def cells(book: Path) -> list[dict]:
    return json.loads(book.read_text())["cells"]


def run_cell(source: str, names: dict, book: Path) -> str:
    """Execute a cell; its last expression is shown as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, book.name, "exec"), names)
    if last is None:
        return ""
    value = eval(compile(ast.Expression(last.value), book.name, "eval"), names)
    draw = getattr(value, "_repr_html_", None)
    return "" if value is None else draw() if draw else repr(value)


def test_there_are_four():
    assert [book.name[0] for book in BOOKS] == list("1234")


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_is_committed_without_outputs(book):
    found = json.loads(book.read_text())
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert book.stat().st_size < 50_000


@pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)
def test_it_runs(book, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    with mpl.rc_context():
        mpl.use("Agg")
        shown = [run_cell("".join(c["source"]), names, book) for c in cells(book) if c["cell_type"] == "code"]
        figures = len(plt.get_fignums())
        plt.close("all")
    printed = capsys.readouterr().out + "".join(shown)
    if book.name.startswith("1"):
        assert printed.count("steady: ") >= 4
        eqs = [float(line.split()[-1]) for line in printed.splitlines() if ": Eq " in line]
        assert eqs[0] < 0.9 < eqs[1]  # Grad-CAM drifts, EquiGrad-CAM does not
    if book.name.startswith("2"):
        assert len(names["items"]) == 24
        assert "patch-" in printed
        assert shown[-1] == "True"
    if book.name.startswith("3"):
        assert printed.count("mine, averaged") == 2
    if book.name.startswith("4"):
        assert figures == 1
        assert names["bands"][0].shape == names["bands"][2].shape
