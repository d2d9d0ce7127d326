"""The script behind `make lint` finds what it is for."""

import re
import runpy
from pathlib import Path

import pytest

CHECK = runpy.run_path(str(Path(__file__).parents[2] / "scripts/check_words.py"))


def test_retired_words_are_found(tmp_path, monkeypatch):
    monkeypatch.setitem(CHECK["retired"].__globals__, "ROOT", tmp_path)
    page = tmp_path / "page.py"
    page.write_text('"""A picture."""\nundoTurn = told_by = 1  # asked anew\nx = f"{told_by} turned"\n')
    found = "\n".join(CHECK["retired"](page))
    for line, hit in ((1, "'picture'"), (2, "undoTurn"), (2, "told_by"), (2, "'asked'"), (2, "'anew'")):
        assert re.search(rf"page.py:{line}: .*{hit}", found)
    for hit in ("told_by", "'turned'"):
        assert re.search(rf"page.py:3: .*{hit}", found)
    page.write_text('"""An image, read in turn; a return value."""\nensure = returned = lookup = 1\n')
    assert CHECK["retired"](page) == []


@pytest.mark.parametrize(
    ("text", "glossary", "ok"),
    [
        ("PEUM (per-image explanation uncertainty) is 0.02, and PEUM depends on views", False, True),
        ("Eq by angle", False, False),
        (f"PEUM {'and so on ' * 9} uncertainty", False, False),
        ("[Eq](glossary.md#how-far-to-trust-a-map)", True, True),
        ("[Eq](glossary.md#how-far-to-trust-a-map)", False, False),
        ("Equal, peum_score", False, True),
    ],
)
def test_unspelled_abbreviations_are_found(text, glossary, ok):
    assert (CHECK["unspelled"](text, glossary=glossary) == []) is ok
