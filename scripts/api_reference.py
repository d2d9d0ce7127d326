"""Write docs/api.md from the signatures and docstrings of the public names.

python scripts/api_reference.py [--check]
"""

import ast
import sys
from pathlib import Path

import equicam

ROOT = Path(__file__).parents[1]
PAGE, SOURCE = ROOT / "docs" / "api.md", ROOT / "src" / "equicam"
HEAD = """# API reference

Written by `scripts/api_reference.py` from the source; a test compares the two. Axes in the types: `t` view · `b` image ·
`c` colour · `k` channel · `y` class · `h w` feature grid · `H W` pixels. The method itself is in [method.md](method.md).

"""
# Public names of the package, and others with their module.
GROUPS = {
    "Explain": ["explain", "Explanation", "equivariant", "methods", "rotate", "Views", "Transform"],
    "Models": ["load", "wrap", "Model", "Layout"],
    "Methods of your own": ["Method", "Fusion", "recipe.Recipe", "uniform", "KeepConfident", "SoftGate"],
    "Evaluate": [
        "evaluate",
        "scores",
        "evaluation.summary.summarise",
        "evaluation.summary.contrast",
        "evaluation.summary.signals",
    ],
    "Audit": [
        "audit",
        "open_run",
        "Run",
        "compare",
        "report.comparison.Comparison",
        "Tiling",
        "Input",
        "engines.devices.Devices",
        "engines.ray.Cluster",
    ],
    "Errors": ["EquicamError"],
}


def main() -> None:
    """Write the page, or check that it is up to date."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == text else f"{PAGE} is out of date; run {sys.argv[0]}")
    PAGE.write_text(text)


def page() -> str:
    """The whole reference."""
    text = HEAD
    for title, names in GROUPS.items():
        text += f"## {title}\n\n" + "".join(entry(name) for name in names)
    return text.rstrip("\n") + "\n"


def entry(full: str) -> str:
    """One name: its signature, its docstring and its members."""
    module, _, name = full.rpartition(".")
    source = (SOURCE / f"{(module or equicam._HOME[name]).replace('.', '/')}.py").read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    if isinstance(node, ast.FunctionDef):
        return f"### `equicam.{full}`\n\n```python\n{signature(node)}\n```\n\n{docstring(node)}\n\n"
    return f"### `equicam.{full}`\n\n{docstring(node)}\n\n" + members(node, source.splitlines())


def members(node: ast.ClassDef, lines: list[str]) -> str:
    """Fields with the comments at their ends, then public methods."""
    fields, methods = "", ""
    for one in node.body:
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and not one.target.id.startswith("_")
        ):
            _, _, remark = lines[(one.end_lineno or 1) - 1][one.end_col_offset or 0 :].partition("# ")
            default = (
                f" = {ast.unparse(one.value)}"
                if one.value is not None and "field(" not in ast.unparse(one.value)
                else ""
            )
            fields += f"| `{one.target.id}` | `{escaped(ast.unparse(one.annotation) + default)}` | {escaped(remark)} |\n"
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            kind = {ast.unparse(d) for d in one.decorator_list}
            shown = (
                one.name if {"property", "cached_property"} & kind else signature(one).removeprefix("def ")
            )
            methods += f"- `{' '.join(shown.split())}`: {docstring(one).splitlines()[0]}\n"
    table = f"| field | type | |\n|---|---|---|\n{fields}\n" if fields else ""
    return table + (f"{methods}\n" if methods else "")


def signature(node: ast.FunctionDef) -> str:
    """As in the source, with one argument per line where one line is too long."""
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    short = f"def {node.name}({ast.unparse(node.args)}){returned}"
    if len(short) <= 110:
        return short
    given, arguments = ast.unparse(node.args), []
    depth, start = 0, 0
    for i, letter in enumerate(given):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            arguments.append(given[start:i].strip())
            start = i + 1
    arguments.append(given[start:].strip())
    return f"def {node.name}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){returned}"


def docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """Its docstring, or nothing."""
    return ast.get_docstring(node) or ""


def escaped(text: str) -> str:
    """Safe in a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
