"""How large the house is: lines, bytes, modules and public names of the tracked Python files, next to their limits."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHORT = 60  # lines; a module with fewer needs a reason


def main() -> None:
    """Print each measure next to its limit, and fail if one is passed."""
    source, paper = tracked("src"), tracked("paper/src")
    tests = tracked("tests") + tracked("paper/tests")
    modules = [path for path in source if path.name not in ("__init__.py", "__main__.py")]
    measures = [
        ("lines in src", lines(source), 27_500),
        ("bytes in src", sum(path.stat().st_size for path in source), 1_200_000),
        ("modules in src", len(source), 170),
        (f"of them under {SHORT} lines", sum(lines([path]) < SHORT for path in modules), 20),
        ("lines of the longest", max(lines([path]) for path in source), 600),
        ("lines in src and paper/src", lines(source + paper), 33_500),
        ("lines in tests", lines(tests), 24_000),
        ("public functions and classes", sum(1 for _ in public_names(source)), 800),
        ("modules that explain imports", imported_by_explain(), 60),
    ]
    for what, value, limit in measures:
        print(f"{what:32}{value:12,}{'' if value <= limit else '  above'} of {limit:,}")
    sys.exit(any(value > limit for _, value, limit in measures))


def tracked(folder: str) -> list[Path]:
    """The Python files of a folder that git knows."""
    command = ["git", "ls-files", folder]
    named = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in named.split() if name.endswith(".py") and (ROOT / name).exists()]


def lines(paths: list[Path]) -> int:
    """Lines of files together, as `cat` and `wc -l` count them."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def public_names(paths: list[Path]) -> Iterator[str]:
    """Functions and classes at top level without an underscore, or that another module imports."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    imported = {
        (node.module, name.name)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    for path, tree in trees.items():
        module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            if not node.name.startswith("_") or (module, node.name) in imported:
                yield f"{module}.{node.name}"


def imported_by_explain() -> int:
    """Our modules in memory after an image was explained."""
    code = (
        "import sys, numpy as np, equicam\n"
        "equicam.explain(equicam.load('embedded'), np.zeros((64, 64, 3), np.uint8), views=2)\n"
        "print('modules:', sum(name.split('.')[0] == 'equicam' for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    found = re.search(r"modules: (\d+)", done)
    return int(found[1]) if found else sys.maxsize


if __name__ == "__main__":
    main()
