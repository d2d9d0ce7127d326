"""Write docs/api.md from the signatures and docstrings of the public names.

python scripts/api_reference.py [--check]
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, SOURCE = ROOT / "docs" / "api.md", ROOT / "src" / "equicam"
HEAD = """# API reference

Made by `scripts/api_reference.py` from the source; a test holds it to that. Axes in the types: `t` view · `b` image · `c` colour ·
`k` channel · `y` class · `h w` feature grid · `H W` pixels. The method itself is in [method.md](method.md).

"""
GROUPS = {
    "Explain": [
        ("equicam", "explain.explain"),
        ("equicam", "explain.Explanation"),
        ("equicam", "explain.equivariant"),
        ("equicam", "methods.methods"),
        ("equicam", "geometry.rotate"),
        ("equicam", "geometry.Views"),
    ],
    "Models": [
        ("equicam", "models.load.load"),
        ("equicam", "models.wrap.wrap"),
        ("equicam", "readers.model.Model"),
        ("equicam", "readers.layout.Layout"),
    ],
    "Methods of your own": [
        ("equicam", "methods.Method"),
        ("equicam", "methods.Fusion"),
        ("equicam", "weigh.uniform"),
        ("equicam", "weigh.KeepConfident"),
        ("equicam", "weigh.SoftGate"),
    ],
    "Evaluate": [
        ("equicam", "evaluate.evaluate"),
        ("equicam", "scores.protocol.scores"),
        ("equicam.evaluation.summary", "evaluation.summary.summarise"),
        ("equicam.evaluation.summary", "evaluation.summary.contrast"),
        ("equicam.evaluation.summary", "evaluation.summary.signals"),
    ],
    "Audit": [
        ("equicam.auditing.audit", "auditing.audit.audit"),
        ("equicam.auditing.store", "auditing.store.Run"),
        ("equicam.auditing.triage", "auditing.triage.triage"),
        ("equicam.engines.devices", "engines.devices.Devices"),
        ("equicam.engines.ray", "engines.ray.Cluster"),
    ],
    "Train": [("equicam.finetune", "finetune.finetune")],
    "Errors": [("equicam", "errors.EquicamError")],
}


def main() -> None:
    """Write the page, or say whether it is what the source says."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(
            None if PAGE.read_text() == text else f"{PAGE} is not what the source says; run {sys.argv[0]}"
        )
    PAGE.write_text(text)


def page() -> str:
    """The whole reference."""
    text = HEAD
    for title, names in GROUPS.items():
        text += f"## {title}\n\n" + "".join(entry(*name) for name in names)
    return text.rstrip("\n") + "\n"


def entry(home: str, where: str) -> str:
    """One name: what it takes and what it is for."""
    module, _, name = where.rpartition(".")
    source = (SOURCE / f"{module.replace('.', '/')}.py").read_text()
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == name)
    full = f"{home}.{name}"
    if isinstance(node, ast.FunctionDef):
        return f"### `{full}`\n\n```python\n{signature(node)}\n```\n\n{docstring(node)}\n\n"
    return f"### `{full}`\n\n{docstring(node)}\n\n" + members(node, source.splitlines())


def members(node: ast.ClassDef, lines: list[str]) -> str:
    """Fields with what is remarked beside them, then public methods."""
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
            shown = one.name if "property" in kind else signature(one).removeprefix("def ")
            methods += f"- `{' '.join(shown.split())}`: {docstring(one).splitlines()[0]}\n"
    table = f"| field | type | |\n|---|---|---|\n{fields}\n" if fields else ""
    return table + (f"{methods}\n" if methods else "")


def signature(node: ast.FunctionDef) -> str:
    """As in the source, a line an argument where one line is too long."""
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    short = f"def {node.name}({ast.unparse(node.args)}){returned}"
    if len(short) <= 110:
        return short
    given, rest = ast.unparse(node.args), []
    depth, start = 0, 0
    for i, letter in enumerate(given):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            rest.append(given[start:i].strip())
            start = i + 1
    rest.append(given[start:].strip())
    return f"def {node.name}(\n" + "".join(f"    {one},\n" for one in rest) + f"){returned}"


def docstring(node: ast.FunctionDef | ast.ClassDef) -> str:
    """What it says of itself."""
    return ast.get_docstring(node) or ""


def escaped(text: str) -> str:
    """For a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
