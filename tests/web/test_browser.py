"""The page in a real Chromium: keyboard, touch targets, and hostile names."""

import io
import json
import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equicam.drawing.text import VERDICT_MEANINGS
from equicam.runs.report.page import write_report
from equicam.runs.review.queue import QueueLoader
from equicam.shards import read_table
from tests.audit.faked import CHANGED, HOSTILE, MISSING, triaged
from tests.audit.faked_rasters import fake_raster_run
from tests.web.conftest import events, key_of, large_run, rank
from tests.web.server_process import ServerProcess, free_port

pytestmark = pytest.mark.browser
CHROMIUM = Path("/usr/bin/chromium")


@pytest.fixture(scope="module")
def chromium():
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as playwright:
        path = str(CHROMIUM) if CHROMIUM.exists() else None
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Watched:
    """A page whose console messages and foreign requests fail the test."""

    def __init__(self, browser, **options):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 860}} | options))
        self.context.set_default_timeout(15_000)
        self.page = self.context.new_page()
        self.messages, self.allowed = [], ()
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.messages.append(m.text))
        self.page.on("pageerror", lambda e: self.messages.append(str(e)))
        self.page.on("dialog", lambda d: (self.messages.append(f"dialog {d.message}"), d.dismiss()))
        self.page.on("request", self._watch)
        self.foreign = []

    def _watch(self, request):
        if not request.url.startswith("http://127.0.0.1:"):
            self.foreign.append(request.url)

    def check(self):
        assert [c for c in self.messages if not any(a in c for a in self.allowed)] == []
        assert self.foreign == []
        self.context.close()


@pytest.fixture
def watched(chromium):
    made = []

    def make(**options):
        made.append(Watched(chromium, **options))
        return made[-1]

    yield make
    for one in made:
        one.check()


def until(page, expression):
    """Poll from outside: the page's policy forbids the evaluation inside the page that Playwright's own waiting needs."""
    end = time.monotonic() + 15
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(30)


@pytest.fixture
def opened(run, watched):
    """Opens the list of a run, as ana if nothing else is given; the server ends with the test."""
    with ExitStack() as stack:

        def open_list(*options, run=run, **browser):
            server = stack.enter_context(ServerProcess(run, *(options or ("--reviewer", "ana"))))
            page = watched(**browser).page
            page.goto(server.address)
            assert "token" not in page.url
            wait_until_ready(page)
            return server, page

        yield open_list


def is_visible(page, selector):
    return page.locator(selector).evaluate("e => getComputedStyle(e).visibility") == "visible"


def read_pixels(data, mode="L"):
    return np.asarray(Image.open(io.BytesIO(data)).convert(mode))


def turn_page(page, key):
    with page.expect_navigation():
        page.keyboard.press(key)


def open_item(page):
    page.keyboard.press("Enter")
    page.wait_for_url("**/item/**")


def wait_for_place(page, number):
    until(page, f"document.activeElement.closest('li')?.getAttribute('aria-posinset') === '{number}'")


def wait_for_reviewed(page, count=1):
    until(page, f"document.getElementById('reviewed').textContent === '{count}'")


def wait_until_ready(page):
    page.wait_for_selector("#list .thumb img[src]")


def test_queue_item_verdict_next_export_by_keyboard(run, opened):
    _, page = opened()
    page.keyboard.press("ArrowRight")
    wait_for_place(page, 2)
    open_item(page)
    assert page.title().startswith("Image 2")
    rows = {row["id"]: row for row in run.read_items().to_pylist()}
    name = next(i for i in rows if key_of(run, i) in page.url)
    before = page.content()
    assert page.get_by_text("shown after your verdict").count() == 2
    assert f"{rows[name]['confidence']:.3f}" not in before
    page.keyboard.press("o")
    assert not is_visible(page, "#layer-map")
    page.keyboard.press("o")
    assert is_visible(page, "#layer-map")
    assert page.locator("#strip, #layer-peum, #layer-view, .flag").count() == 0
    page.keyboard.press("]")  # there are no views yet
    page.keyboard.press("-")
    assert page.locator("#layer-map").evaluate("e => e.style.opacity") == "0.65"
    page.keyboard.press("r")
    page.keyboard.type("vessel wall 12 ")
    page.keyboard.press("Enter")
    turn_page(page, "2")
    page.wait_for_selector(".facts")
    assert page.locator("#live").inner_text() in ("", "Saved: Shortcut or artefact.")
    until(page, "document.getElementById('live').textContent.startsWith('Saved')")
    assert f"{rows[name]['confidence']:.3f}" in page.content()
    assert page.locator('.verdict[aria-pressed="true"]').inner_text().startswith("Shortcut or artefact")
    page.keyboard.press("]")
    assert page.locator("#view-title").inner_text() == "View 20°"
    assert page.locator("#layer-view").get_attribute("src").endswith("view-1")
    turn_page(page, "Enter")
    assert page.title().startswith("Image 3")
    turn_page(page, "ArrowLeft")
    assert page.title().startswith("Image 2")
    # a change needs a reason, and the earlier verdict stays
    page.keyboard.press("1")
    assert page.evaluate("document.activeElement.id") == "reason"
    page.keyboard.type("second look")
    turn_page(page, "Enter")
    page.wait_for_selector(".history li:nth-child(2)")
    turn_page(page, "q")
    wait_until_ready(page)
    assert page.locator("#reviewed").inner_text() == "1"
    page.locator("summary", has_text="Export").click()
    with page.expect_download() as caught:
        page.get_by_text("Verdicts, JSON").click()
    exported = json.loads(Path(caught.value.path()).read_text())
    given = [(v["verdict"], v["reason"]) for v in exported["verdicts"]]
    assert given == [("shortcut", "vessel wall 12"), ("supports", "second look")]
    assert [e.payload["verdict"] for e in events(run)] == ["shortcut", "supports"]


def test_reload_and_return_keep_the_place_and_the_filters(run, opened):
    _, page = opened()
    page.select_option("select[name=verdict]", "unreviewed")
    until(page, "document.getElementById('matching').textContent !== ''")
    wait_until_ready(page)
    for _ in range(5):
        page.keyboard.press("j")
    assert page.url.endswith("?verdict=unreviewed#at=5")
    page.reload()
    wait_until_ready(page)
    wait_for_place(page, 6)
    assert page.locator("select[name=verdict]").input_value() == "unreviewed"
    page.keyboard.press("Enter")
    page.wait_for_url("**/item/**verdict=unreviewed")
    address = page.url
    page.reload()
    assert page.url == address
    assert page.title().startswith("Image 6")
    turn_page(page, "q")
    wait_until_ready(page)
    wait_for_place(page, 6)


def test_verdicts_and_angles_from_the_queue(run, opened):
    _, page = opened()
    page.keyboard.press("4")
    wait_for_reviewed(page)
    until(page, "document.querySelector('#list .v-unsure')")
    for key, image in (("]", "thumb-0"), ("o", "thumb-plain")):
        page.keyboard.press(key)
        page.wait_for_selector(f'#list img[src$="/{image}"]')
    page.keyboard.press("u")
    wait_for_place(page, 2)
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("1")  # the dialog takes no verdicts
    page.keyboard.press("Escape")
    assert not page.locator("#help").is_visible()
    assert [e.payload["verdict"] for e in events(run)] == ["unsure"]


@pytest.mark.slow
def test_a_hundred_thousand_scroll_with_a_small_page(tmp_path, watched):
    with ServerProcess(large_run(tmp_path), "--reviewer", "ana") as server:
        one = watched()
        one.allowed = ("503",)  # there are no maps behind these names
        page = one.page
        requests = []
        page.on("request", lambda r: "/api/queue" in r.url and requests.append(r.url))
        page.goto(server.address)
        page.wait_for_selector("#list .thumb")
        assert page.locator("#matching").inner_text() == "100,000 images"
        page.keyboard.press("End")
        until(
            page, "[...document.querySelectorAll('#list bdi')].some(e => e.textContent.startsWith('100,000'))"
        )
        assert page.locator("#list li").count() < 80
        for share in (0.25, 0.5, 0.75):
            page.evaluate(f"scrollTo(0, document.documentElement.scrollHeight * {share})")
            until(
                page,
                f"Math.abs(parseInt([...document.querySelectorAll('#list bdi')].at(-1).textContent.replace(',', '')) - {share} * 1e5) < 200",
            )
            assert 0 < page.locator("#list li").count() < 80
        assert page.evaluate("document.querySelectorAll('*').length") < 900
        assert len(requests) < 25


def test_hostile_names_do_nothing(run, opened):
    table = read_table(run.folder / "triage.parquet")
    ids = [name for name in table["id"].to_pylist() if name in HOSTILE]
    assert ids
    server, page = opened("--no-blinding", "--reviewer", '"><img src=x onerror=alert(1)>')
    page.wait_for_timeout(300)
    for name in ids:
        page.goto(f"{server.home}/item/{key_of(run, name)}")
        page.keyboard.press("n")
        page.keyboard.type("<script>alert(2)</script>")
        turn_page(page, "Control+Enter")
        assert page.locator(".free-text").first.inner_text() == "<script>alert(2)</script>"
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("main script").count() == 0
        assert "\u202e" not in page.content()


def test_a_killed_server_loses_no_verdict(run, watched):
    port = free_port()
    server = ServerProcess(run, "--reviewer", "ana", "--port", port)
    one = watched()
    one.allowed = ("ERR_CONNECTION_REFUSED", "Failed to load", "401")
    page = one.page
    page.goto(server.address)
    wait_until_ready(page)
    open_item(page)
    os.kill(server.process.pid, signal.SIGKILL)
    server.stop()
    page.keyboard.press("3")
    page.wait_for_selector("#error:not([hidden])")
    assert "kept in this browser" in page.locator("#error").inner_text()
    assert events(run) == []
    with ServerProcess(run, "--reviewer", "ana", "--port", port) as again:
        page.goto(again.address)
        wait_until_ready(page)
        wait_for_reviewed(page, 1)
        page.reload()
        wait_until_ready(page)
    assert [e.payload["verdict"] for e in events(run)] == ["wrong-region"]


@pytest.mark.parametrize("size", [(820, 1180), (1180, 820), (1440, 900)])
def test_it_fits_and_can_be_touched(run, opened, size):
    _, page = opened(viewport={"width": size[0], "height": size[1]}, has_touch=True)
    for step in ("queue", "item"):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        small = page.evaluate(
            """[...document.querySelectorAll('button, select, .button, input:not([type=checkbox]), summary, .step')]
            .filter(e => e.getClientRects().length && e.getBoundingClientRect().height < 43.5).map(e => e.outerHTML)"""
        )
        assert small == []
        if step == "queue":
            page.locator("#list .thumb").first.tap()
            page.wait_for_url("**/item/**")
    verdict = page.locator('.verdict[data-verdict="unsure"]')
    box = verdict.bounding_box()
    assert box["y"] + box["height"] <= size[1]  # in reach without scrolling
    with page.expect_navigation():
        verdict.tap()
    page.wait_for_selector(".facts")


def test_a_second_name_in_the_same_browser_is_known(run, opened):
    server, page = opened()
    page.keyboard.press("1")
    wait_for_reviewed(page, 1)
    page.goto(f"{server.home}/reviewer")
    assert "names used in one browser count as one person" in page.inner_text("main")
    page.fill("#name", "bo")
    turn_page(page, "Enter")
    wait_until_ready(page)
    page.keyboard.press("2")
    wait_for_reviewed(page, 1)
    kinds = [(e.kind, e.actor) for e in events(run, "reviewer registered", "also known as")]
    assert kinds == [("reviewer registered", "ana"), ("also known as", "bo")]
    assert [(e.actor, e.payload["blind"]) for e in events(run)] == [("ana", True), ("bo", False)]


def test_surroundings_and_the_windows_beside_it_by_keyboard(tmp_path, opened):
    run = rank(fake_raster_run(tmp_path / "rasters"))
    _, page = opened(run=run)
    home = page.url.partition("/#")[0].rstrip("/")
    for key in QueueLoader(run, blind=True).current().position:
        page.goto(f"{home}/item/{key}")
        if all(
            page.locator(one).count() for one in ("#adjacent-right[href]", "[id^=adjacent][aria-disabled]")
        ):
            break
    assert page.locator("#panel-surroundings").is_hidden()
    assert page.locator("#surroundings-image").get_attribute("src") is None  # loaded when it is wanted
    page.keyboard.press("s")
    assert page.locator("#panel-surroundings").is_visible()
    assert page.locator("#surroundings").get_attribute("aria-pressed") == "true"
    until(page, "document.getElementById('surroundings-image').naturalWidth === 144")
    assert page.locator("#panel-surroundings .layer").count() == 0
    boxes = [page.locator(f"#panel-{name}").bounding_box() for name in ("input", "surroundings", "map")]
    assert len({round(box["y"]) for box in boxes}) == 1  # side by side
    closed = page.locator("[id^=adjacent][aria-disabled]").first
    assert "not in the queue" in closed.get_attribute("title")
    arrow = {"left": "ArrowLeft", "right": "ArrowRight", "above": "ArrowUp", "below": "ArrowDown"}
    before = page.url
    page.keyboard.press(f"Shift+{arrow[closed.get_attribute('id').removeprefix('adjacent-')]}")
    until(page, "document.getElementById('live').textContent.includes('not in the queue')")
    assert page.url == before
    turn_page(page, "Shift+ArrowRight")
    assert page.url != before
    assert page.locator("#panel-surroundings").is_visible()  # it stays on
    turn_page(page, "Shift+ArrowLeft")
    assert page.url == before
    with page.expect_navigation():
        page.locator("#adjacent-right").click()
    page.keyboard.press("s")
    assert page.locator("#panel-surroundings").is_hidden()


def test_the_question_names_the_class_and_each_verdict_its_meaning(run, opened):
    _, page = opened()
    first = QueueLoader(run, blind=True).current().items[0]
    assert page.locator("#list .caption bdi").first.inner_text() == f"1 · {first.predicted}"
    open_item(page)
    assert page.locator(".decide h2").inner_text() == f"Does this map show evidence for {first.predicted}?"
    for value, meaning in VERDICT_MEANINGS.items():
        button = page.locator(f'.verdict[data-verdict="{value}"]')
        assert button.locator("small").is_visible()
        assert meaning in button.inner_text()
    assert page.get_by_role("button", name="Wrong region", exact=True).count() == 1  # no key glued to it
    wide = [page.locator(f"#panel-{name}").bounding_box()["width"] for name in ("input", "map")]
    assert min(wide) > 400  # in a window of 1280
    assert "steadiness" in page.locator(".hidden-facts").inner_text()
    assert page.locator(".steadiness").count() == 0
    turn_page(page, "1")
    assert page.locator(".steadiness b").inner_text() == run.rows([first.id])[first.id]["steadiness"]


def test_the_colour_bar_is_true_and_zoom_shows_the_original(run, opened):
    ids = read_table(run.folder / "triage.parquet")["id"].to_pylist()
    name = next(one for one in ids if one not in {MISSING, CHANGED, *HOSTILE})
    server, page = opened()
    page.goto(f"{server.home}/item/{key_of(run, name)}")
    until(page, "document.getElementById('grey').style.background !== ''")
    colour = "e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)"
    grey = page.locator("#grey").evaluate(colour)
    source = page.locator("#panel-input .input").evaluate("e => e.src")
    pixels = read_pixels(page.request.get(source).body(), "RGB")
    assert pixels.std() > 10
    np.testing.assert_allclose(grey, pixels.mean((0, 1)), atol=4)
    page.keyboard.press("-")
    assert page.locator(".ramp .layer").evaluate("e => e.style.opacity") == "0.65"
    image = page.locator("#zoom-image")
    assert image.get_attribute("src") is None  # loaded when it is wanted
    page.keyboard.press("z")
    until(page, "document.getElementById('zoom-image').naturalWidth === 96")
    assert page.locator("#zoom").is_visible()
    until(page, "document.getElementById('zoom-scale').textContent !== '100 %'")
    before = image.bounding_box()["width"]
    assert before > 500  # it fills the dialog
    page.keyboard.press("+")
    assert image.bounding_box()["width"] == pytest.approx(1.5 * before, rel=0.01)
    assert image.evaluate("e => getComputedStyle(e).imageRendering") == "pixelated"
    layer = page.locator("#zoom-layer")
    assert layer.is_hidden()
    page.keyboard.press("o")
    assert layer.is_visible()
    boxes = [one.bounding_box() for one in (image, layer)]
    assert boxes[0] == pytest.approx(boxes[1], abs=1)
    page.keyboard.press("2")
    page.keyboard.press("z")
    assert page.locator("#zoom").is_hidden()
    page.locator("#panel-map .stack").click()
    assert layer.is_visible()  # the map of the panel that was clicked
    page.keyboard.press("Escape")
    assert page.locator("#zoom").is_hidden()
    assert page.url.count("/item/") == 1
    assert events(run) == []


def test_dark_colours_are_the_systems_until_chosen_and_then_stay(run, watched, opened):
    paper = "getComputedStyle(document.querySelector('.bar')).backgroundColor"
    server, page = opened(color_scheme="dark")
    dark = page.evaluate(paper)
    assert page.locator("#theme").inner_text().startswith("Light")
    page.keyboard.press("d")
    light = page.evaluate(paper)
    assert (dark, light) == ("rgb(33, 30, 40)", "rgb(255, 255, 255)")
    page.reload()
    page.wait_for_load_state("networkidle")
    assert page.evaluate(paper) == light
    page.locator("#theme").click()
    assert page.evaluate(paper) == dark
    bright = watched(color_scheme="light").page
    bright.goto(server.address)
    bright.wait_for_load_state("networkidle")
    assert bright.evaluate(paper) == light


def test_the_report_is_readable_in_the_dark_and_filters_without_scripts(shared_run, chromium, tmp_path):
    path = write_report(shared_run, triaged(shared_run, queue=2), out=tmp_path / "report.html")
    for scheme in ("light", "dark"):
        context = chromium.new_context(color_scheme=scheme, java_script_enabled=False)
        page = context.new_page()
        page.goto(path.as_uri())
        shot, plot = page.screenshot(), page.locator(".plots figure").first.screenshot()
        assert (np.median(read_pixels(shot)) < 60) == (scheme == "dark")
        assert min(np.ptp(read_pixels(one)) for one in (shot, plot)) > 180  # text stands out
        rows, counts = page.locator(".images tbody tr").filter(visible=True), []
        whole = rows.count()
        for name in ("unsteady", "unjudged", "steady"):
            page.locator(f"label[for=show-{name}]").click()
            counts.append(rows.count())
        context.close()
        assert whole == sum(counts)
        assert min(counts) > 0
