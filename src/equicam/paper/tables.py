"""The rows of an experiment as CSV and as a LaTeX table."""

import csv
import io
import math
from collections.abc import Sequence

from equicam.evaluation.statistics import Estimate
from equicam.paper.rows import Row

PROTOCOLS = (("as_published", "their protocol"), ("clean", "our protocol"))
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
    numbers = [f"{name}_{field}" for name, _ in PROTOCOLS for field in ("value", "low", "high", "n")]
    write.writerow(["claim", "what", "published", *numbers, "margin", "verdict", "note"])
    for row in rows:
        cells = [
            _cell(getattr(row, name), field)
            for name, _ in PROTOCOLS
            for field in ("value", "low", "high", "n")
        ]
        texts = [_text(value) for value in (row.claim, row.label, row.published)]
        margin = "" if row.margin is None else f"{row.margin:g}"
        write.writerow([*texts, *cells, margin, row.verdict, _text(row.note)])
    return buffer.getvalue()


def as_latex(rows: Sequence[Row], title: str, provenance: str) -> str:
    """The rows that were run, as a table for booktabs; where they come from is a comment."""
    lines = [
        rf"{escape(row.label)} & {escape(row.published)} & {escape(interval(row.as_published))} & {escape(interval(row.clean))} & {row.verdict} \\"
        for row in rows
        if row.verdict != "not run" and row.label != "figure"
    ]
    head = " & ".join(("", "published", "their protocol", "our protocol", "verdict"))
    body = "\n".join(lines)
    comment = provenance.replace("\n", " ")
    return (
        f"% {comment}\n% needs \\usepackage{{booktabs}}\n\\begin{{table}}[t]\n\\centering\\footnotesize\n"
        f"\\caption{{{escape(title)}. Means with 95\\,\\% intervals.}}\n\\begin{{tabular}}{{@{{}}lllll@{{}}}}\n\\toprule\n{head} \\\\\n\\midrule\n"
        f"{body}\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
    )


def escape(text: str) -> str:
    """Text for LaTeX: its special characters, and signs that need mathematics."""
    return "".join(LATEX.get(sign, sign) for sign in text)


def _cell(found: Estimate | None, field: str) -> str:
    if found is None:
        return ""
    value = getattr(found, field)
    return (
        ""
        if isinstance(value, float) and math.isnan(value)
        else f"{value:.6g}"
        if isinstance(value, float)
        else str(value)
    )


def _text(value: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t") else value
