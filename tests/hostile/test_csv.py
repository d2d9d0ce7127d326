"""No cell of a CSV file runs as a formula, however a spreadsheet splits it, and no text is lost."""

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equicam.runs.queue_files import _guard_formulas, as_csv

FORMULA_CHARACTERS = "=+-@＝＋－＠"
STARTS = (*FORMULA_CHARACTERS, "\t", "\r", "\n")
pieces = st.sampled_from([*FORMULA_CHARACTERS, *";|,\t\r\n '\"", "a", "1", "cmd|' /C calc'!A0", "é"])
texts = st.lists(pieces, max_size=12).map("".join)


def unguard(text):
    """The text before it was guarded: one apostrophe less at each place."""
    text = text[1:] if re.match(r"'+[\t\r\n]", text) else text
    return re.sub(r"((?:\A|[;|\t\r\n])[\s\"]*)'(?='*[=+\-@＝＋－＠])", r"\1", text)


@pytest.mark.parametrize("start", STARTS)
def test_a_cell_never_begins_with_a_formula(start):
    assert _guard_formulas(f"{start}1+1") == f"'{start}1+1"
    for separator in ";\t\r\n|":
        assert f"{separator}'{start}1" in _guard_formulas(f"x{separator}{start}1") or start in "\t\r\n"


@pytest.mark.parametrize("text", ["plain", "a-b", "2 - 1", "it's", "a; b", "x=1", "ünï ☃; 'q'", "a@b.c", ""])
def test_other_text_stays_as_it_is(text):
    assert _guard_formulas(text) == text


def csv_of(row):
    return as_csv(list(row), [row]).decode()


@given(texts.filter(bool))
def test_it_is_read_back_the_same(text):
    (row,) = csv.DictReader(io.StringIO(csv_of({"x": text}), newline=""))
    assert unguard(row["x"]) == text


@given(texts, texts)
def test_no_split_makes_a_formula(first, second):
    """Whatever the separator, and whether quotes count or not."""
    line = csv_of({"a": first, "b": [second, second], "c": -1.5}).partition("\r\n")[2]
    for cell in (cell for row in csv.reader(io.StringIO(line, newline="")) for cell in row):
        assert cell == "-1.5" or not cell.startswith(STARTS)
    for cell in re.split(r"[;|\t\r\n]", line):
        assert not cell.lstrip(' "').startswith(tuple(FORMULA_CHARACTERS)), line
