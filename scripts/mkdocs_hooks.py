"""Hooks of the documentation site: links to files outside docs/, the list of decisions, and pages of every kept row.

On a code host, pages link to ../src and ../README.md. The site has no such pages, so these links lead to the repository
if pyproject.toml has its address (`project.urls`), and are plain text otherwise. Rows in docs/reproduce/rows become a
page for each network, as `equicam-paper reproduce --page` counts and judges them.
"""

import re
import tomllib
from functools import cache
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File

from equicam_paper.page import site_pages

ROOT = Path(__file__).parents[1]
REPRODUCED = ROOT / "docs" / "reproduce"
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)\s]+)\)")


def repository() -> str | None:
    """The address of the repository, if the project publishes one."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    return next((url for name, url in urls.items() if name.lower() in ("repository", "source")), None)


def rewrite_links(markdown: str, folder: str, address: str | None) -> str:
    """The text of a page in a folder of docs/, with links that leave docs/ rewritten."""

    def rewrite(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = normpath(str(PurePosixPath("docs", folder, target)))
        if path.startswith("docs/"):
            return link[0]
        return f"[{text}]({address.rstrip('/')}/blob/main/{path})" if address else text

    return LINK.sub(rewrite, markdown)


@cache
def reproduced() -> list[tuple[str, str, str]]:
    """Path, title and text of the pages that are made of kept rows."""
    return [(f"reproduce/{name}.md", *more) for name, *more in site_pages(REPRODUCED / "rows", REPRODUCED)]


def on_config(config: Any) -> Any:
    """Put every decision, and every page of kept rows, into the navigation."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    _replace(config["nav"], "decisions", [f"decisions/{page.name}" for page in pages])
    _replace(
        config["nav"], "reproduce", ["reproduce.md", *({title: path} for path, title, _ in reproduced())]
    )
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of kept rows."""
    for path, _, text in reproduced():
        files.append(File.generated(config, path, content=text))
    return files


def _replace(nav: list[Any], name: str, pages: list[Any]) -> None:
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if below == [name]:
                entry[title] = pages
            elif isinstance(below, list):
                _replace(below, name, pages)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links before they are checked."""
    return rewrite_links(markdown, str(PurePosixPath(page.file.src_uri).parent), repository())
