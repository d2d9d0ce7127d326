"""CSV that is safe to open in a spreadsheet."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def as_csv(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> bytes:
    """These columns of the rows as CSV; text that a spreadsheet would run as a formula gets a leading apostrophe."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(names)
    table.writerows([_cell(row[name]) for name in names] for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    if isinstance(value, list):
        value = "; ".join(value)
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value
