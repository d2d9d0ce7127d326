"""The rows of an experiment as CSV and as a LaTeX table."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from equicam.evaluate.statistics import Estimate
from equicam_paper.plots import random_weights_panels
from equicam_paper.rows import Row

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "−": "$-$", "–": "--", "—": "---", "×": r"$\times$", "±": r"$\pm$", "°": r"$^\circ$", "≥": r"$\geq$", "≤": r"$\leq$",
    "γ": r"$\gamma$", "τ": r"$\tau$", "σ": r"$\sigma$", "θ": r"$\theta$", "₀": "$_0$", "²": "$^2$", "…": r"\ldots{}", "→": r"$\to$", "·": r"$\cdot$",
    "“": "``", "”": "''", "’": "'", "½": r"$\frac12$", "∈": r"$\in$", "‘": "`",
}  # fmt: skip


def interval(found: Estimate | None, digits: int = 3) -> str:
    """A number with its interval; empty without one."""
    if found is None or math.isnan(found.value):
        return ""
    value = f"{found.value:.{digits}f}"
    if math.isnan(found.low) and 0 < abs(found.value) < 0.5 * 10**-digits:
        return f"{found.value:.1g}"
    return value if math.isnan(found.low) else f"{value} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def as_csv(rows: Sequence[Row]) -> str:
    """Every row, also those that were not run, with six digits."""
    buffer = io.StringIO()
    write = csv.writer(buffer, lineterminator="\n")
    numbers = [(name, field) for name in ("as_published", "clean") for field in ("value", "low", "high", "n")]
    write.writerow(["claim", "what", "published", *map("_".join, numbers), "margin", "verdict", "note"])
    for row in rows:
        cells = [_cell(getattr(row, name), field) for name, field in numbers]
        margin = "" if row.margin is None else f"{row.margin:g}"
        texts = map(_text, (row.claim, row.label, row.published))
        write.writerow([*texts, *cells, margin, row.verdict, _text(row.note)])
    return buffer.getvalue()


@dataclass(frozen=True)
class Matrix:
    """A number for every method and column."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]


def random_weights_tables(rows: Sequence[Row]) -> list[Matrix]:
    """The tables of `sanity`: one for each measure, a line per method; none for the rows of another experiment."""
    panels = random_weights_panels(rows)
    networks = {row.label: row.reason.values for row in rows if row.reason and row.reason.code == "networks"}
    found = []
    for panel in (one for one in panels if one.label != "SSIM"):  # which is in the plot
        cells = {
            name: [
                _with_seeds(e, networks.get(f"{name}, {column}: {panel.label}", {}))
                for column, e in zip(panel.columns, row, strict=True)
            ]
            for name, row in panel.rows
        }
        with_given = "" if panel is panels[0] else " with those of the weights as given"
        found.append(Matrix(f"{panel.title}{with_given}, {panel.images} images", panel.columns, cells))
    for panel in panels[:1]:
        floors = {
            name: [_floor(**networks.get(f"{name}, {column}: Eq", {})) for column in panel.columns]
            for name, _ in panel.rows
        }
        title = "Eq of unrelated images, and the share of constant maps, which count 0"
        found.append(Matrix(title, panel.columns, floors))
    return found


def _with_seeds(found: Estimate | None, networks: Mapping[str, Any]) -> str:
    """A number with its interval, and that of each network where it is a mean of several."""
    by_seed = networks.get("by_seed", ())
    if found is None or math.isnan(found.value):
        return "refused" if networks else ""
    return interval(found) + (f", by seed {', '.join(f'{eq:.3f}' for eq in by_seed)}" if by_seed else "")


def _floor(floor: float = math.nan, constant: float = 0.0, **_: object) -> str:
    """Eq of unrelated images, and the share of constant maps where there are any."""
    parts = [] if math.isnan(floor) else [f"{floor:.3f}"]
    return ", ".join(parts + ([f"{constant:.0%}"] if constant > 0 else []))


def as_latex(rows: Sequence[Row], title: str, provenance: str) -> str:
    """The rows that were run, as a table for booktabs, those of `sanity` as several; where they come from is a comment."""
    comment = provenance.replace("\n", " ")
    start = f"% {comment}\n% needs \\usepackage{{booktabs}}\n"
    if matrices := random_weights_tables(rows):
        return start + "".join(
            _latex_table(
                f"{title}. {of.title}", ["", *of.columns], [[n, *cells] for n, cells in of.rows.items()]
            )
            for of in matrices
        )
    lines = [
        [row.label, row.published, interval(row.as_published), interval(row.clean), row.verdict]
        for row in rows
        if row.verdict != "not run" and row.label != "figure"
    ]
    head = ["", "published", "their protocol", "our protocol", "verdict"]
    return start + _latex_table(f"{title}. Means with 95 % intervals", head, lines)


def _latex_table(caption: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    body = "\n".join(f"{' & '.join(map(escape, line))} \\\\" for line in lines)
    return (
        f"\\begin{{table}}[t]\n\\centering\\footnotesize\n"
        f"\\caption{{{escape(caption)}.}}\n\\begin{{tabular}}{{@{{}}{'l' * len(head)}@{{}}}}\n\\toprule\n{' & '.join(map(escape, head))} \\\\\n\\midrule\n"
        f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def escape(text: str) -> str:
    """Text for LaTeX: its special characters, and signs that need mathematics."""
    return "".join(LATEX.get(sign, sign) for sign in text)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    text = "".join(f"| {' | '.join(line)} |\n" for line in cells)
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{text}\n"


def _cell(found: Estimate | None, field: str) -> str:
    value = "" if found is None else getattr(found, field)
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def _text(value: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t") else value
