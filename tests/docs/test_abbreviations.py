"""PEUM and Eq are spelled out where a page, a help text or a template first uses them."""

import json
import re
from pathlib import Path

import pytest
import typer

from equicam.cli.app import app
from equicam.runs.report.comparison import METRICS

ROOT = Path(__file__).parents[2]
MEANINGS = {"PEUM": "uncertainty", "Eq": "equivariance"}
NEAR_LETTERS = 80
"""How far from an abbreviation its meaning may stand, before or after."""
EXEMPT = {"reproduce.md"}  # a command writes it, in the words of the paper
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(ROOT.glob("docs/*.md")) if page.name not in EXEMPT),
    *sorted(ROOT.glob("examples/*.ipynb")),
]
TEMPLATES = sorted(found for ending in ("j2", "js") for found in ROOT.glob(f"src/equicam/**/*.{ending}"))


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


def readable(source: str) -> str:
    """A template without what nobody reads: its comments and its style."""
    return re.sub(r"{#.*?#}|<style>.*?</style>", "", source, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_spell_abbreviations_out(page):
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert unspelled(text, glossary=True) == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda p: p.name)
def test_templates_spell_abbreviations_out(template):
    assert unspelled(readable(template.read_text())) == []


def test_what_templates_are_given_is_spelled_out():
    assert unspelled(" ".join(f"{name} {meaning}" for name, meaning in METRICS.values())) == []


def command_helps() -> dict[str, str]:
    """What --help prints: of equicam a line for each command, of a command its options too."""
    group = typer.main.get_command(app)
    lines = [(command.help or "").partition("\n\n")[0] for command in group.commands.values()]
    found = {"equicam": "\n".join([group.help or "", *lines])}
    for name, command in group.commands.items():
        options = [getattr(option, "help", None) or "" for option in command.params]
        found[name] = "\n".join([command.help or "", *options])
    return found


@pytest.mark.parametrize("name", command_helps())
def test_helps_spell_abbreviations_out(name):
    assert unspelled(command_helps()[name]) == []


def test_what_is_checked_has_abbreviations():
    texts = [*(p.read_text() for p in (*PAGES, *TEMPLATES)), *command_helps().values()]
    for word in MEANINGS:
        assert sum(bool(re.search(rf"\b{word}\b", text)) for text in texts) >= 8


@pytest.mark.parametrize(
    ("text", "glossary", "ok"),
    [
        ("PEUM (per-image explanation uncertainty) is 0.02, and PEUM depends on views", False, True),
        ("Eq by angle", False, False),
        (f"PEUM {'and so on ' * 9} uncertainty", False, False),
        ("[Eq](glossary.md#how-far-to-trust-a-map)", True, True),
        ("[Eq](glossary.md#how-far-to-trust-a-map)", False, False),
        ("Equal, peum_score", False, True),
    ],
)
def test_unspelled_abbreviations_are_found(text, glossary, ok):
    assert (unspelled(text, glossary=glossary) == []) is ok
