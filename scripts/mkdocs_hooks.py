"""Hooks of the documentation site: links to files outside docs/, and the list of decisions.

On a code host, pages link to ../src and ../README.md. The site has no such pages, so these links lead to the repository
if pyproject.toml has its address (`project.urls`), and are plain text otherwise.
"""

import re
import tomllib
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

ROOT = Path(__file__).parents[1]
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


def on_config(config: Any) -> Any:
    """Put every decision into the navigation, in order."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    _replace(config["nav"], [f"decisions/{page.name}" for page in pages])
    return config


def _replace(nav: list[Any], pages: list[str]) -> None:
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if below == ["decisions"]:
                entry[title] = pages
            elif isinstance(below, list):
                _replace(below, pages)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links before they are checked."""
    return rewrite_links(markdown, str(PurePosixPath(page.file.src_uri).parent), repository())
