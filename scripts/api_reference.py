"""Write docs/api.md: the public names by task, a line each, from their signatures and docstrings.

python scripts/api_reference.py [--check]
"""

import ast
import sys
from importlib import import_module
from inspect import getsourcefile
from pathlib import Path

import equicam

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
HEAD = """# Python

The public names by task, written by `scripts/api_reference.py`; `help(equicam.explain)` has the whole signature of one. PEUM is the per-image explanation uncertainty ([glossary](glossary.md)). Options of `explain` are in
[method.md](method.md#options-of-explain), those of `evaluate` in [scores.md](scores.md).

"""
GROUPS = {
    "Load a model": ["load", "wrap", "Model", "Layout", "Input"],
    "Explain images": ["explain", "Explanation", "Recipe", "equivariant", "methods"],
    "Choose views": ["rotate", "Views", "Transform"],
    "Make a method": ["Method", "Fusion", "uniform", "KeepConfident", "SoftGate"],
    "Measure methods": ["evaluate", "scores"],
    "Audit a source": ["audit", "open_run", "Run", "compare", "Tiling"],
    "Catch errors": ["EquicamError"],
}
MEMBERS = ("Explanation", "Run")
"""Classes whose members are listed too: what people work with after a call."""


def main() -> None:
    """Write the page, or check that it is up to date."""
    text = page()
    if "--check" in sys.argv:
        sys.exit(None if PAGE.read_text() == text else f"{PAGE} is out of date; run {sys.argv[0]}")
    PAGE.write_text(text)


def page() -> str:
    """The whole reference."""
    listed = [name for names in GROUPS.values() for name in names]
    if forgotten := set(equicam.__all__) - {*listed, "__version__"}:
        sys.exit(f"GROUPS has no {', '.join(sorted(forgotten))}")
    text = HEAD
    for title, names in GROUPS.items():
        text += f"## {title}\n\n| name | |\n|---|---|\n" + "".join(line(name) for name in names) + "\n"
        text += "".join(members(name) for name in names if name in MEMBERS)
    return text.rstrip("\n") + "\n"


def definition(name: str) -> tuple[ast.FunctionDef | ast.ClassDef, list[str]]:
    """Where a public name is defined, and the lines of that file."""
    source = getsourcefile(import_module(getattr(equicam, name).__module__))
    text = Path(source or "").read_text()
    return next(n for n in ast.parse(text).body if getattr(n, "name", None) == name), text.splitlines()  # type: ignore[return-value]


def line(name: str) -> str:
    """A name with the arguments that it must be given, and what it does."""
    node, _ = definition(name)
    call = arguments(node) if isinstance(node, ast.FunctionDef) else ""
    return f"| `equicam.{name}{call}` | {escaped(first_line(node))} |\n"


def members(name: str) -> str:
    """Fields with the remarks at their ends, then properties and methods."""
    node, lines = definition(name)
    rows = ""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id[0] != "_":
            _, _, remark = lines[(one.end_lineno or 1) - 1][one.end_col_offset or 0 :].partition("# ")
            rows += f"- `.{one.target.id}`: {remark}\n" if remark else ""
        if isinstance(one, ast.FunctionDef) and one.name[0] != "_":
            is_value = {ast.unparse(d) for d in one.decorator_list} & {"property", "cached_property"}
            rows += f"- `.{one.name}{'' if is_value else arguments(one)}`: {first_line(one)}\n"
    return f"Of `{name}`:\n\n{rows}\n"


def arguments(node: ast.FunctionDef) -> str:
    """Those without a default, and dots for the others."""
    given = node.args.args[: len(node.args.args) - len(node.args.defaults)]
    names = [one.arg for one in given if one.arg not in ("self", "cls")]
    required = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    names += [f"{one.arg}=" for one, default in required if default is None]
    more = node.args.defaults or any(node.args.kw_defaults) or node.args.vararg or node.args.kwarg
    return f"({', '.join([*names, *(['…'] if more else [])])})"


def first_line(node: ast.FunctionDef | ast.ClassDef) -> str:
    """What its docstring begins with."""
    return (ast.get_docstring(node) or "").partition("\n")[0]


def escaped(text: str) -> str:
    """Safe in a table cell."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
