"""The documentation site builds offline and strictly, and loads nothing from elsewhere."""

import os
import re
import runpy
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTERNAL = re.compile(r"(https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Resources(HTMLParser):
    """Addresses that a browser loads with a page; links that a reader follows are none."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        names = ("href",) if tag == "link" else ("src", "srcset", "data", "poster")
        self.found += [given[name] for name in names if given.get(name)] if tag != "a" else []

    def handle_data(self, data):
        self.text += data


def test_every_page_is_on_the_site(site):
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in ROOT.glob("docs/**/*.md")]
    assert len(pages) > 30
    assert not [page for page in pages if not (site / page).is_file()]
    rows = [folder.name for folder in (ROOT / "docs/reproduce/rows").iterdir()]
    assert not [name for name in (*rows, "not-run") if not (site / f"reproduce/{name}.html").is_file()]
    assert "Steady does not mean right" in Resources((site / "glossary.html").read_text()).text


def test_nothing_is_loaded_from_elsewhere(site):
    resources = {p: Resources(p.read_text()).found for p in site.rglob("*.html")}
    assert sum(map(len, resources.values())) > 100
    assert not {p: r for p, found in resources.items() for r in found if EXTERNAL.match(r)}
    styles = "".join(p.read_text() for p in site.rglob("*.css"))
    addresses = re.findall(r"url\(([^)]*)\)|@import ([^;]*)", styles)
    assert addresses
    assert not [a for a in addresses if EXTERNAL.match("".join(a).strip("\"'"))]


def test_links_that_leave_docs_are_text_without_a_repository():
    rewrite = runpy.run_path(str(ROOT / "scripts/mkdocs_hooks.py"))["rewrite_links"]
    page = "See [`explain.py`](../src/equicam/explain.py) and [audit](audit.md)."
    inside = f"{page} [Method](../method.md#peum)."  # docs/src/…, too: mkdocs reports it as missing
    assert rewrite(inside, "decisions", None) == inside
    assert rewrite(page, "", None) == "See `explain.py` and [audit](audit.md)."
    address = "https://code.example/equicam/"
    assert f"({address}blob/main/src/equicam/explain.py)" in rewrite(page, "", address)


@pytest.mark.browser
def test_a_browser_searches_the_site_without_a_network(site):
    from playwright.sync_api import sync_playwright

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = f"http://127.0.0.1:{server.server_port}"
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            requested: list[str] = []
            page.on("request", lambda request: requested.append(request.url))
            page.goto(f"{home}/index.html", wait_until="networkidle")
            box = page.locator("input.md-search__input").first
            box.click()
            page.wait_for_load_state("networkidle")  # the index is fetched when the box is entered
            box.press_sequentially("control arm", delay=20)
            page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
            page.goto(f"{home}/method.html")
            browser.close()
    finally:
        server.shutdown()
    assert len(requested) > 5
    assert [url for url in requested if not url.startswith((home, "data:", "blob:"))] == []
