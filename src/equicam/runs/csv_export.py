"""CSV that is safe to open in a spreadsheet."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FORMULA = r"'*[=+\-@＝＋－＠]"
# A spreadsheet that expects another separator, or no quotes, splits a cell at these and runs what follows.
_FORMULA_AHEAD = re.compile(rf"((?:\A|[;|\t\r\n])[\s\"]*)(?={_FORMULA})")
_CONTROL_FIRST = re.compile(r"'*[\t\r\n]")


def as_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """These columns of the rows as CSV; an apostrophe precedes whatever a spreadsheet would run as a formula."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(names)
    table.writerows([_cell(row[name]) for name in names] for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        value = "; ".join(value)
    return guard_formulas(value) if isinstance(value, str) else value


def guard_formulas(text: str) -> str:
    """Text with an apostrophe before every formula: where the cell begins, and after what may separate cells.

    Apostrophes that are already there get one more, so no two texts become the same.
    """
    guarded = _FORMULA_AHEAD.sub(r"\1'", text)
    return f"'{guarded}" if _CONTROL_FIRST.match(guarded) else guarded
