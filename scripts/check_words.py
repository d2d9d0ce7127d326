"""One language: retired words, abbreviations and the tree of docs/architecture.md; `make lint` runs this.

    python scripts/check_words.py [PATH …]

Every line that it prints says what to write instead. Retired words stay out of names, comments, messages, help texts, pages and docs.
PEUM and Eq are spelled out where a page, a help text or a template first uses them. The tree of docs/architecture.md has
every package, in the order of the import rules, and what its table names exists.
"""

import ast
import io
import json
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "equicam"

# Everywhere: comments, docstrings, messages, help texts, templates, scripts of the page and Markdown.
PROSE = {
    r"pictures?": "image",
    r"turn(s|ed|ing)?(?! ?[^.;]{0,60} into\b)": "rotate, rotation; align for bringing a view back; flip for a prediction",
    r"undo(es|ne|ing)?": "align; restore for a model's state",
    r"sh(elf|elves)": "queue",
    r"doors?": "auth",
    r"aside": "side stream",
    r"insist(s|ed|ing)?": "check, require",
    r"gathered": "deferred for checks, collected for anything else",
    r"settle[sd]?": "converge, converged; checked for checks",
    r"pinned": "fixed",
    r"anew": "again",
    r"told": "recorded, known, distinguished",
    r"asked": "requested, given",
    r"said": "logits; stated for a sentence",
    r"worth": "signal quality for a queue; how well it finds unstable maps",
    r"beside": "next to, and",
    r"drawn (patch(es)?|images?|tissue)": "synthetic",
    r"(blind|human|second|two|both|several) readers?": "reviewer (a reader reads a network)",
    r"blind (reading|arm|controls?|control arm)": "blinded review, control arm",
    r"(?<=[,;] )for (it|they|there|we|nobody|nothing) (is|are|was|were|has|have|does|do|would|can|could)": "because",
}

# Each word of an identifier: read_views is read, views.
NAME_WORDS = {
    "picture": "image", "pictures": "images",
    "turn": "rotate", "turned": "rotated", "turns": "rotations", "turning": "rotating",
    "undo": "align", "undone": "aligned",
    "shelf": "queue", "door": "auth", "stranger": "foreign origin",
    "aside": "side stream", "beside": "compare", "bench": "Context",
    "insist": "check", "insisted": "checked", "gathered": "deferred", "settle": "raise_failed", "settled": "converged",
    "pin": "the target and logits of the presented view as data", "pinned": "fixed",
    "seen": "ViewReadings", "said": "logits", "asked": "spec", "told": "a noun for the data", "drawn": "StoredMaps",
    "worth": "signal_quality", "tells": "finds", "likeness": "similarity", "look": "predict, maps", "looked": "read",
    "anew": "again", "sure": "confidence", "tapped": "capture_layer", "undisturbed": "frozen",
}  # fmt: skip

# Identifiers as a whole, too common as words of longer ones.
NAMES = {
    "ask": "predict", "ask_at": "predict_from", "see": "read_views", "tap": "capture_layer",
    "channels_first": "contract_then_warp", "views_a_pass": "max_views_per_forward", "write_whole": "write_atomic",
    "Readings": "ReviewLog", "MOST": "a name with what and unit", "FEW": "a name with what and unit",
    "ENOUGH": "a name with what and unit", "WARM": "WARMUP_RUNS", "SMALL": "a name with what and unit",
    "AHEAD": "a name with what and unit", "Home": "WorkerContext", "Sent": "WorkerContext", "Opened": "DecodedImage",
}  # fmt: skip

# A shard is the unit of resuming; elsewhere a part is a part.
SHARDED = re.compile(r"src/equicam/(runs/\w+\.py|audit/|engines/|shards\.py)|docs/(scale|audit)\.md")
SHARD_PROSE = {
    r"(a|each|every|one|whole|fixed|pending|next|last|missing|same|finished) parts?(?! of|-)": "shard"
}
SHARD_NAMES = {"part": "shard", "parts": "shards"}

# (file, text, why it stays)
EXCEPTIONS = (
    ("", "in turn", "one after the other"),
    ("", "turned off", "a switch"),
    ("", "turned on", "a switch"),
    ("", "pinned memory", "PyTorch's term"),
    ("", "pin_memory", "PyTorch's name"),
    (".j2", "<aside", "an HTML element"),
    (".j2", "</aside", "an HTML element"),
)

MEANINGS = {"PEUM": "uncertainty", "Eq": "equivariance"}
NEAR_LETTERS = 80
"""How far from an abbreviation its meaning may stand, before or after."""
WRITTEN_BY_A_COMMAND = ("reproduce.md",)
"""Pages in the words of the paper."""
MAX_HELP_LETTERS = 130
MAX_FLOORS = 10


def main() -> None:
    """Check everything, or retired words in some files."""
    below = [Path(p).resolve() for p in sys.argv[1:]]
    chosen = [p for p in sources() if not below or any(p.is_relative_to(folder) for folder in below)]
    found = [line for path in chosen for line in retired(path)]
    if not below:
        found += [*retired_in_helps(), *unspelled_everywhere(), *tree_errors(), *import_errors()]
    print("\n".join(found))
    sys.exit(1 if found else 0)


def sources() -> list[Path]:
    """Every file that speaks to somebody."""
    found = [
        ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile")
    ]
    found += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]
    found += ROOT.glob("examples/*.ipynb")
    for ending in ("py", "j2", "js", "css"):
        found += SOURCE.glob(f"**/*.{ending}")
    found += [*ROOT.glob("paper/*.md"), *ROOT.glob("paper/src/**/*.py")]
    return sorted(p for p in found if p != Path(__file__))


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and every other string, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, line


def python_names(source: str) -> Iterator[tuple[int, str]]:
    """Every identifier: of variables, arguments, attributes, functions, classes and imports."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from ((getattr(node, "lineno", 0), part) for part in name.split("."))


def words(name: str) -> list[str]:
    """read_views and ReadViews: read, views."""
    return [w.lower() for w in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of prose; names in templates and scripts are split into words."""
    source = path.read_text()
    if path.suffix == ".py":
        yield from python_texts(source)
        return
    for number, line in enumerate(source.splitlines(), 1):
        if path.name == "CHANGELOG.md" and line.startswith("|"):
            continue  # the table of renamed names quotes the old ones
        if path.suffix in (".js", ".j2", ".css"):
            line = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", line)
        yield number, line


def excused(file: str, text: str) -> bool:
    """Whether this use of a word stays."""
    return any(file.endswith(end) and kept in text for end, kept, _ in EXCEPTIONS)


def retired_words(file: str, text: str, rules: dict[str, str]) -> Iterator[str]:
    """Retired words of a text, each with what to write instead."""
    for pattern, instead in rules.items():
        for hit in re.finditer(rf"(?<![\w/]){pattern}(?!\w)", text, re.IGNORECASE):
            around = text[max(0, hit.start() - 12) : hit.end() + 12]
            if not excused(file, around):
                yield f"{hit[0]!r} in {around.strip()!r}; write {instead}"


def retired(path: Path) -> list[str]:
    """What a file still says in retired words."""
    file = str(path.relative_to(ROOT))
    is_sharded = SHARDED.match(file) is not None
    prose = PROSE | (SHARD_PROSE if is_sharded else {})
    found = [
        f"{file}:{number}: {hit}" for number, text in texts(path) for hit in retired_words(file, text, prose)
    ]
    if path.suffix == ".py":
        rules = NAME_WORDS | (SHARD_NAMES if is_sharded else {})
        for number, name in [(0, path.stem), *python_names(path.read_text())]:
            instead = NAMES.get(name) or next((rules[w] for w in words(name) if w in rules), None)
            if instead and not excused(file, name):
                found.append(f"{file}:{number}: the name {name}; write {instead}")
    return list(dict.fromkeys(found))


def help_texts() -> dict[str, list[str]]:
    """What --help prints: of equicam its own help and a line for each command, of a command its help and its options."""
    import typer

    from equicam.cli.app import app

    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    found = {"equicam": [group.help or "", *((c.help or "").partition("\n\n")[0] for c in commands.values())]}
    for name, command in commands.items():
        found[name] = [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
    return found


def retired_in_helps() -> Iterator[str]:
    """Retired words of help texts, wherever these were put together, and options without a short help."""
    for name, lines in help_texts().items():
        yield from (f"{name} --help: {hit}" for line in lines for hit in retired_words("", line, PROSE))
        if name != "equicam":
            yield from (
                f"{name} --help: an option's help needs 1 to {MAX_HELP_LETTERS} letters, got {line!r}"
                for line in lines[1:]
                if not 0 < len(line) <= MAX_HELP_LETTERS
            )


def unspelled(text: str, *, glossary: bool = False) -> list[str]:
    """The first uses of abbreviations that are not spelled out, nor linked to the glossary where that will do."""
    text, found = " ".join(text.split()), []
    for word, meaning in MEANINGS.items():
        first = re.search(rf"\b{word}\b", text)
        if first is None:
            continue
        near = text[max(0, first.start() - NEAR_LETTERS) : first.end() + NEAR_LETTERS]
        if meaning not in near and not (glossary and "glossary.md" in near):
            found.append(f"{word}: write {meaning} next to it, in {near!r}")
    return found


def unspelled_everywhere() -> Iterator[str]:
    """Abbreviations that a page, a template or a help text does not spell out."""
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.ipynb")]:
        if page.name not in WRITTEN_BY_A_COMMAND:
            text = page.read_text()
            if page.suffix == ".ipynb":
                text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
            yield from (f"{page.relative_to(ROOT)}: {one}" for one in unspelled(text, glossary=True))
    for template in (path for ending in ("j2", "js") for path in SOURCE.glob(f"**/*.{ending}")):
        text = re.sub(r"{#.*?#}|<style>.*?</style>", "", template.read_text(), flags=re.DOTALL)
        yield from (f"{template.relative_to(ROOT)}: {one}" for one in unspelled(text))
    for name, lines in help_texts().items():
        yield from (f"{name} --help: {one}" for one in unspelled("\n".join(lines)))


def tree_errors() -> Iterator[str]:
    """What docs/architecture.md says that is not so."""
    page = (ROOT / "docs/architecture.md").read_text()
    floors = [
        re.findall(r"(\w+)(?:/|\.py)(?=\s|$)", _names(part)) for part in page.split("```")[1].split("▼")
    ]
    if len(floors) > MAX_FLOORS:
        yield f"docs/architecture.md: at most {MAX_FLOORS} floors, got {len(floors)}"
    floor = {name: number for number, names in enumerate(floors) for name in names}
    here = {p.stem for p in SOURCE.glob("*.py") if p.stem[0] != "_"}
    here |= {p.parent.name for p in SOURCE.glob("*/__init__.py")}
    yield from (f"docs/architecture.md: the tree needs {name}" for name in sorted(here - set(floor)))
    yield from (
        f"docs/architecture.md: the tree has {name}, which is gone" for name in sorted(set(floor) - here)
    )
    yield from _floors_against_the_import_rules(floor)
    for name, place in re.findall(r"^\|[^|]*\| (.*?) \| `([\w.]+)` \|$", page, re.MULTILINE):
        path = SOURCE / place
        known = {n for file in ([path] if path.is_file() else path.glob("**/*.py")) for n in defined(file)}
        missing = set(re.findall(r"`([\w.]+)`", name)) - known
        yield from (f"docs/architecture.md: {place} has no {one}" for one in sorted(missing))


def _names(part: str) -> str:
    """The left column of a part of the tree."""
    return "\n".join(line[:50].rstrip() for line in part.splitlines())


def _floors_against_the_import_rules(floor: dict[str, int]) -> Iterator[str]:
    """Of two names on different floors, the upper one comes first in import-linter's layers too."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(rule for rule in rules if rule["type"] == "layers")["layers"]
    layered = [
        (name, rank)
        for rank, layer in enumerate(layers)
        for name in re.findall(r"equicam\.(\w+)", layer)
        if name in floor
    ]
    for upper, rank in layered:
        for lower, other in layered:
            if rank < other and floor[upper] > floor[lower]:
                yield f"docs/architecture.md: {upper} stands above {lower} in the import rules"


def import_errors() -> Iterator[str]:
    """What scripts and benchmarks import from us that is not there: no test runs most of them."""
    packages = {"equicam": SOURCE, "equicam_paper": ROOT / "paper/src/equicam_paper"}
    for script in (*ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")):
        for node in ast.walk(ast.parse(script.read_text())):
            package, *parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else [""]
            if package not in packages:
                continue
            path = packages[package].joinpath(*parts)
            source = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
            known = {p.stem for p in path.glob("*")} | (defined(source) if source.exists() else set())
            for alias in node.names:
                if alias.name not in known:
                    yield f"{script.relative_to(ROOT)}: no {alias.name} in {node.module}"


def defined(path: Path) -> set[str]:
    """Names a module imports, or defines at its top level, and Class.member for the members of its classes."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    for node in tree.body:
        names |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)}
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


if __name__ == "__main__":
    main()
