"""One language: words that were retired stay out of names, comments, messages, help texts, pages and docs.

`python tests/docs/test_vocabulary.py [PATH …]` lists what is left, with what to write instead.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

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
SHARDED = (
    "src/equicam/runs",
    "src/equicam/engines",
    "src/equicam/shards.py",
    "docs/scale.md",
    "docs/audit.md",
)
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


def sources() -> list[Path]:
    """Every file that speaks to somebody."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "Makefile"]
    found += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("scripts/*.py"), *ROOT.glob("benchmarks/*.py")]
    found += ROOT.glob("examples/*.ipynb")
    for ending in ("py", "j2", "js", "css"):
        found += ROOT.glob(f"src/equicam/**/*.{ending}")
    found += [*ROOT.glob("paper/*.md"), *ROOT.glob("paper/src/**/*.py")]
    return sorted(found)


def prose_rules(path: str) -> dict[str, str]:
    return PROSE | (SHARD_PROSE if path.startswith(SHARDED) else {})


def name_rules(path: str) -> dict[str, str]:
    return NAME_WORDS | (SHARD_NAMES if path.startswith(SHARDED) else {})


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
            continue  # the tables of renamed names quote the old ones
        if path.suffix in (".js", ".j2", ".css"):
            line = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", line)
        yield number, line


def excused(path: str, text: str) -> bool:
    return any(path.endswith(file) and kept in text for file, kept, _ in EXCEPTIONS)


def retired(path: Path) -> list[str]:
    """What a file still says in retired words, and what to write instead."""
    file = str(path.relative_to(ROOT))
    found = []
    for number, text in texts(path):
        for pattern, instead in prose_rules(file).items():
            for hit in re.finditer(rf"(?<![\w/]){pattern}(?!\w)", text, re.IGNORECASE):
                around = text[max(0, hit.start() - 12) : hit.end() + 12]
                if not excused(file, around):
                    found.append(f"{file}:{number}: {hit[0]!r} in {around.strip()!r}; write {instead}")
    if path.suffix == ".py":
        rules = name_rules(file)
        names = [(0, path.stem), *python_names(path.read_text())]
        for number, name in names:
            instead = NAMES.get(name) or next((rules[w] for w in words(name) if w in rules), None)
            if instead and not excused(file, name):
                found.append(f"{file}:{number}: the name {name}; write {instead}")
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_retired_word_is_left(path):
    found = retired(path)
    assert not found, "\n" + "\n".join(found)


def help_texts() -> Iterator[tuple[str, str]]:
    """Every command with its own help and that of each option and argument."""
    import typer

    from equicam.cli.app import app

    group = typer.main.get_command(app)
    for name, command in {"equicam": group, **group.commands}.items():
        yield name, command.help or ""
        yield from (
            (f"{name} {option.name}", getattr(option, "help", None) or "") for option in command.params
        )


def test_no_retired_word_is_in_a_help_text():
    """What users read, wherever the text was put together."""
    texts = list(help_texts())
    assert len(texts) > 150
    found = [
        f"{name}: {hit[0]!r}; write {instead}"
        for name, text in texts
        for pattern, instead in PROSE.items()
        for hit in re.finditer(rf"(?<![\w/]){pattern}(?!\w)", text, re.IGNORECASE)
        if not excused("", text[max(0, hit.start() - 12) : hit.end() + 12])
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_option_has_a_short_help():
    lengths = {name: len(text) for name, text in help_texts() if " " in name}
    assert all(lengths.values()), [name for name, length in lengths.items() if not length]
    assert not [name for name, length in lengths.items() if length > 130]


def test_retired_words_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    page = tmp_path / "page.py"
    page.write_text('"""A picture."""\nundoTurn = told_by = 1  # asked anew\nx = f"{told_by} turned"\n')
    found = "\n".join(retired(page))
    for line, hit in ((1, "'picture'"), (2, "undoTurn"), (2, "told_by"), (2, "'asked'"), (2, "'anew'")):
        assert re.search(rf"page.py:{line}: .*{hit}", found)
    for hit in ("told_by", "'turned'"):
        assert re.search(rf"page.py:3: .*{hit}", found)
    page.write_text('"""An image, read in turn; a return value."""\nensure = returned = lookup = 1\n')
    assert retired(page) == []


if __name__ == "__main__":
    below = [Path(p).resolve() for p in sys.argv[1:]] or [ROOT]
    chosen = [p for p in sources() if any(p.is_relative_to(folder) for folder in below)]
    print("\n".join(line for p in chosen for line in retired(p)))
