"""The live look: its routes, hostile uploads, maps that are computed and not rotated, and the page in a real Chromium."""

import base64
import io
import os
import signal
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import equicam
from equicam.core.views import rotate
from equicam.demo import synthetic_patches
from equicam.evaluate.equivariance import equivariance
from equicam.images import decoding
from equicam.live import app
from equicam.live.frames import LIVE_METHODS, FrameComputer, Settings, SupersededError, single_view_method
from equicam.live.images import MAX_UPLOADS, OpenedImages
from equicam.runs.review.auth import Access
from equicam.steadiness import WORDS
from tests.audit.conftest import equicam_command
from tests.unit.test_image_files import bomb
from tests.web.conftest import PORT, Client
from tests.web.server_process import ServerProcess
from tests.web.test_browser import chromium, is_visible, until, watched  # noqa: F401

# the texts of both charts with their sizes on the screen, in pixels
CHART_TEXTS = """Object.fromEntries(['#chart', '#curve svg'].map((at) => {
  const drawn = document.querySelector(at);
  const scale = drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width;
  const size = (text) => scale * parseFloat(getComputedStyle(text).fontSize);
  return [at, Object.fromEntries([...drawn.querySelectorAll('text')].map((text) => [text.textContent, size(text)]))];
}))"""
BOTH_AT = "['single','fused'].every((side) => document.querySelector(`#${side} [data-at]`).textContent === 'at ANGLE')"
LAYER = "layer4"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"


def png(index=0):
    buffer = io.BytesIO()
    synthetic_patches()[index].save(buffer, "PNG")
    return buffer.getvalue()


class Page(Client):
    """The application with a client that came with the token."""

    def __init__(self, model, paths=()):
        self.computer = FrameComputer(model, paths)
        access = Access(PORT, command="open")
        super().__init__(access, app.make_app(self.computer, access, method="equigrad-cam", views=6))

    def send(self, data, name="image.png"):
        headers = {"x-equicam-csrf": self.csrf, "content-type": "application/octet-stream"}
        return self.http.post("/api/image", params={"name": name}, content=data, headers=headers)

    def frame(self, image, **query):
        usual = {"target": 0, "layer": LAYER, "method": "equigrad-cam", "views": 6, "angle": 0}
        return self.get("/api/frame", params={"image": image} | usual | query)

    def facts_at(self, image, **query):
        answer = self.frame(image, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def model():
    return equicam.load("embedded")


@pytest.fixture(scope="module")
def page(model):
    return Page(model)


@pytest.fixture(scope="module")
def image(page):
    answer = page.send(png(), "patch.png")
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def test_an_image_and_what_the_page_offers_are_described(page, model, image):
    facts = page.get(f"/api/image/{image}").json()
    assert (facts["name"], facts["size"], facts["input"]) == ("patch.png", [96, 96], [96, 96])
    assert sum(one["confidence"] for one in facts["top"]) == pytest.approx(1, abs=1e-5)
    assert {one["name"] for one in facts["top"]} == set(model.classes) != set()
    offered = page.get("/api/setup").json()
    assert LAYER in offered["layers"]
    assert "avgpool" not in offered["layers"]
    assert (offered["explains"], offered["classes"]) == ("class", list(model.classes))
    assert {one["name"]: one["single"] for one in offered["methods"]}["equigrad-cam+pcf"] == "grad-cam"
    assert "rise" not in LIVE_METHODS  # thousands of passes do not follow a dial


def test_maps_are_computed_on_the_rotated_image(page, model, image):
    x = page.computer.images.find(image).x
    for views, method in ((1, "grad-cam"), (6, "equigrad-cam")):
        facts = page.facts_at(image, views=views, angle=130)
        assert facts["method"] == method
        options = {"method": method, "views": views, "target": 0}
        expected, presented = (equicam.explain(model, one, **options).map for one in (rotate(x, 130), x))
        shown = page.computer.find(facts["key"]).map
        assert shown.std() > 0.01
        np.testing.assert_allclose(shown, expected[0].numpy(), atol=2e-3)
        eq = equivariance(expected[None], presented, [130]).value.item()
        assert facts["eq"] == pytest.approx(eq, abs=1e-5)
        copy = rotate(presented, 130)[0].numpy()
        assert np.abs(shown - copy).max() > 0.01  # never a rotated copy of the map at 0°
    assert page.facts_at(image, views=1, angle=130)["eq"] < facts["eq"] - 0.1


def test_facts_of_several_views_and_images_of_maps(page, image):
    facts = page.facts_at(image)
    assert (facts["eq"], facts["views"]) == (1, 6)
    assert 0 < facts["peum_score"] < 0.25
    assert -1 <= facts["stability"] <= 1
    assert facts["curve"].startswith("<svg")
    assert facts["steadiness"].keys() == {"word", "reason"}
    assert facts["steadiness"]["word"] in WORDS
    assert "peum_score" not in page.facts_at(image, views=1)
    for kind in ("map", "peum"):
        shown = Image.open(io.BytesIO(page.get(f"/image/{facts['key']}/{kind}").content))
        assert (shown.size, shown.mode) == ((96, 96), "RGBA")
    upright, rotated = (page.image("input", f"{image}/{angle}") for angle in (0, 90))
    assert upright.std() > 10
    np.testing.assert_array_equal(rotated, np.rot90(upright))


@pytest.mark.parametrize("method", LIVE_METHODS)
def test_every_method_offered_works(page, image, method):
    assert page.facts_at(image, method=method, views=4)["views"] == 4
    assert page.facts_at(image, method=method, views=1)["method"] == single_view_method(method)


@pytest.mark.parametrize(
    "change",
    [
        {"angle": 360}, {"angle": -1}, {"angle": "x"}, {"views": 0}, {"views": 10_000}, {"method": "rise"}, {"method": "none"},
        {"layer": "fc"}, {"layer": "../x"}, {"target": 2}, {"target": -1}, {"image": "none"},
    ],
)  # fmt: skip
def test_frames_that_do_not_exist_are_refused(page, image, change):
    answer = page.frame(**({"image": image} | change))
    assert (answer.status_code, bool(answer.json()["error"])) == (422, True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        *[(data, "no known format") for data in (b"", b"<script>alert(1)</script>", EPS)],
        (png()[:700], "read whole"),
        (bomb(), "pixels"),
    ],
)
def test_bytes_that_are_no_image_are_refused_with_the_reason(page, data, message):
    answer = page.send(data, "<img src=x onerror=alert(1)>.png")
    assert (answer.status_code, message in answer.json()["error"]) == (422, True)


def test_uploads_are_limited_in_size_and_number(page, model, monkeypatch):
    monkeypatch.setitem(app.UPLOADS, "/api/image", 5000)
    answer = Page(model).send(bytes(5001))
    assert (answer.status_code, "at most 5,000 bytes" in answer.json()["error"]) == (413, True)
    opened, data = OpenedImages(model, []), png()
    ids = [opened.add(f"{i}.png", data).id for i in range(MAX_UPLOADS + 2)]
    assert [one["id"] for one in opened.listed()] == ids[2:]
    with pytest.raises(equicam.EquicamError, match="no longer kept"):
        opened.find(ids[0])


@pytest.mark.parametrize(
    ("work", "message"),
    [(lambda _: time.sleep(30), r"more than 0\.2 s"), (lambda _: os.kill(os.getpid(), signal.SIGKILL), "killed the process")],
    ids=["hangs", "dies"],
)  # fmt: skip
def test_a_decoder_that_hangs_or_dies_is_a_reason(model, monkeypatch, work, message):
    monkeypatch.setattr(decoding, "MAX_UPLOAD_SECONDS", 0.2)
    with pytest.raises(equicam.EquicamError, match=message):
        OpenedImages(replace(model, preprocess=work), []).add("image.png", png())


watch_writes = False


def _refuse_writes(event, arguments):
    if watch_writes and event == "open":
        path, _mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and str(path) != os.devnull:
            raise PermissionError(f"{path} opened to write")


def test_nothing_is_written_to_disk(model, page):
    """Neither by the server nor by the process that decodes, which inherits the hook."""
    global watch_writes
    sys.addaudithook(_refuse_writes)
    try:
        watch_writes = True
        with pytest.raises(PermissionError):
            open("/tmp/never", "w")  # noqa: PTH123, SIM115
        answer = page.send(png(3))
        facts = page.frame(answer.json()["id"], angle=30)
    finally:
        watch_writes = False
    assert (answer.status_code, facts.status_code) == (200, 200)


def test_files_of_the_command_line_open_when_they_are_shown(model, tmp_path):
    (tmp_path / "good.png").write_bytes(png())
    (tmp_path / "bad.png").write_bytes(b"none")
    served = Page(model, [tmp_path / "good.png", tmp_path / "bad.png"])
    good, bad = served.get("/api/setup").json()["images"]
    assert (good["name"], served.computer.images.find(good["id"]).x) == ("good.png", None)
    assert served.get(f"/image/input/{good['id']}/0").status_code == 422  # no pixels yet
    assert served.facts_at(good["id"])
    answer = served.get(f"/api/image/{bad['id']}")
    assert (answer.status_code, "no known format" in answer.json()["error"]) == (422, True)


def test_values_are_shown_as_values(model):
    """A regression has no classes, confidence or flips."""
    values = Page(equicam.wrap(model.module, layer=LAYER, task="regression", preprocess=model.preprocess))
    setup = values.get("/api/setup").json()
    assert (setup["explains"], setup["classes"]) == ("output", [])
    added = values.send(png()).json()["id"]
    assert values.get(f"/api/image/{added}").json()["top"] == []
    facts = values.facts_at(added, target=1, angle=90)
    x = rotate(values.computer.images.find(added).x, 90)
    expected = equicam.explain(values.computer.model, x, views=6, target=1).output[0]
    assert facts["value"] == pytest.approx(float(expected), abs=1e-4)
    assert (facts["confidence"], facts["target"], facts["top1"]["name"]) == (None, "output 1", "output 1")


def test_a_model_that_fails_is_an_error_and_not_a_crash(model, image, page):
    handle = model.module.layer2.register_forward_hook(lambda *_: 1 / 0)
    try:
        answer = page.frame(image, angle=275)
    finally:
        handle.remove()
    assert (answer.status_code, "ZeroDivisionError" in answer.json()["error"]) == (422, True)
    assert page.frame(image, angle=275).status_code == 200


def test_a_newer_request_ends_an_older_one_of_many_views():
    model = equicam.load("embedded")
    passes = []
    model.module.stem.register_forward_hook(lambda *_: passes.append(time.sleep(0.05)))
    computer = FrameComputer(model)
    hooks = len(model.module._forward_pre_hooks)
    opened = computer.images.add("patch.png", png())
    older = computer.submit(Settings(opened.id, 0, LAYER, "equigrad-cam", 72), 0)
    while not passes:
        time.sleep(0.01)
    newer = computer.submit(Settings(opened.id, 0, LAYER, "grad-cam", 1), 40)
    assert newer.result(20).facts["angle"] == 40
    with pytest.raises(SupersededError):
        older.result(0)
    assert len(passes) < 15  # of 24 for the older alone
    assert len(model.module._forward_pre_hooks) == hooks
    computer.close()


def test_a_superseded_request_is_answered_and_is_no_error(page, image, monkeypatch):
    """Browsers log every error status; the page asks again instead."""
    ended = Future()
    ended.set_exception(SupersededError())
    monkeypatch.setattr(page.computer, "submit", lambda *_: ended)
    answer = page.frame(image, angle=45)
    assert (answer.status_code, answer.json()) == (200, {"superseded": True})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("absent.png",), "an existing file"), (("a.png", "--method", "rise"), "follow the dial")],
)
def test_the_command_refuses_what_cannot_be_served(tmp_path, arguments, message):
    (tmp_path / "a.png").write_bytes(png())
    code, text = equicam_command("open", tmp_path / arguments[0], *arguments[1:], "--no-browser")
    assert (code, message in " ".join(text.split())) == (2, True)


def serve(*arguments):
    return ServerProcess(*arguments, "--device", "cpu", command="open")


@pytest.fixture(scope="module")
def served():
    with serve("--views", 6) as process:
        yield process


def has_text(page, at, text):
    until(page, f"document.querySelector({at!r}).textContent.includes({text!r})")


DROP = """([data, name]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, { type: "image/png" }));
  for (const kind of ["dragenter", "dragover", "drop"])
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: files, bubbles: true, cancelable: true }));
}"""


def drop(page, data, name):
    page.evaluate(DROP, [base64.b64encode(data).decode(), name])


def eq_of(page, side):
    return float(page.locator(f"#{side} [data-eq]").inner_text().split()[0])


@pytest.mark.browser
def test_drop_dial_and_class_in_the_browser(served, watched):  # noqa: F811
    made = watched()
    made.allowed = ("422",)  # Chromium logs the refused file
    page = made.page
    page.goto(served.address)
    assert "token" not in page.url
    page.wait_for_selector("#empty:not([hidden])")
    drop(page, b"no image", "<b>broken</b>.png")
    page.wait_for_selector("#error:not([hidden])")
    assert "<b>broken</b>.png" in page.locator("#error").inner_text()
    drop(page, png(), "patch.png")
    page.wait_for_selector("#fused .layer[src]")
    assert page.locator("#title").inner_text() == "patch.png"
    assert page.locator("#error").is_hidden()

    # the dial, by keyboard and by mouse: the hand, both maps and both images follow
    page.focus("#dial")
    page.keyboard.press("PageUp")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#dial").get_attribute("aria-valuenow") == "50"
    until(page, BOTH_AT.replace("ANGLE", "50°"))
    until(page, "document.querySelector('#fused img.input').src.endsWith('/50')")
    box = page.locator("#dial").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(middle[0], middle[1] - 50)
    page.mouse.down()
    page.mouse.move(middle[0] - 40, middle[1] - 40, steps=4)
    page.mouse.move(middle[0], middle[1] + 50, steps=6)
    page.mouse.up()
    has_text(page, "#degrees", "180°")
    until(page, BOTH_AT.replace("ANGLE", "180°"))
    assert eq_of(page, "single") < eq_of(page, "fused") - 0.1
    before = page.locator("#single img.layer").get_attribute("src")

    # another class, by typing a part of its name
    page.fill("#class", "tumour in")
    page.keyboard.press("Enter")
    pressed = page.locator("#top [aria-pressed=true]")
    assert pressed.inner_text().startswith("tumour in the centre")
    assert page.locator("#class").input_value() == "tumour in the centre"
    page.focus("#dial")
    page.keyboard.press("Home")
    has_text(page, "#fused [data-at]", "at 0°, the reference")
    assert page.locator("#single img.layer").get_attribute("src") != before
    until(page, "!document.getElementById('steadiness').hidden")

    # overlay, ring, and rotating by itself
    page.keyboard.press("o")
    assert not is_visible(page, "#single .layer")
    page.keyboard.press("o")
    has_text(page, "#progress", "24 of 24")
    page.keyboard.press("p")
    until(page, "Number(document.getElementById('dial').getAttribute('aria-valuenow')) >= 30")
    page.keyboard.press("p")


@pytest.mark.browser
def test_an_image_dropped_while_another_is_computed(watched):  # noqa: F811
    """The first image's map ends early, without an error, and the second's appears."""
    with serve("--views", 72) as process:
        page = watched().page
        answers = []
        page.on("response", lambda r: "/api/frame" in r.url and answers.append(r))
        page.goto(process.address)
        page.wait_for_selector("#empty:not([hidden])")
        drop(page, png(), "first.png")
        with page.expect_request(lambda r: "/api/frame" in r.url and "views=72" in r.url):
            pass
        drop(page, png(3), "second.png")
        has_text(page, "#title", "second.png")
        page.wait_for_selector("#fused .layer[src]")
        assert page.locator("#error").is_hidden()
        page.wait_for_timeout(100)
        assert [one.status for one in answers if one.status != 200] == []
        assert any(one.json().get("superseded") for one in answers)


REGRESSION = f"""
import equicam


def build():
    model = equicam.load("embedded")
    return equicam.wrap(model.module, layer="{LAYER}", task="regression", preprocess=model.preprocess)
"""


@pytest.mark.browser
def test_a_regression_in_the_browser(watched, tmp_path):  # noqa: F811
    (tmp_path / "values.py").write_text(REGRESSION)
    (tmp_path / "patch.png").write_bytes(png())
    model = f"{tmp_path / 'values.py'}:build"
    with serve(tmp_path / "patch.png", "--model", model, "--views", 6) as process:
        page = watched().page
        page.goto(process.address)
        page.wait_for_selector("#fused .layer[src]")
        has_text(page, "#facts", "Value")
        assert page.locator("#class-label").inner_text() == "Output"
        assert page.locator("#single [data-prediction]").inner_text().startswith("output 0 = ")
        assert "Flips" not in page.locator("#facts").inner_text()
        assert "NaN" not in page.content()


@pytest.mark.browser
def test_the_page_on_a_phone_and_in_the_dark(served, watched):  # noqa: F811
    page = watched(viewport={"width": 390, "height": 800}, color_scheme="dark").page
    page.goto(served.address)
    page.wait_for_selector("#dial", state="attached")
    has_text(page, "#model", "cpu")
    drop(page, png(), "<i>&a.png")
    page.wait_for_selector("#fused .layer[src]")
    has_text(page, "#title", "<i>&a.png")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    until(page, "document.querySelector('#curve svg') !== null")
    charts = page.evaluate(CHART_TEXTS)
    assert charts["#chart"].keys() >= {"angle of rotation (°)", "Eq (equivariance)", "0°", "360°"}
    assert charts["#curve svg"].keys() >= {"angle of rotation (°)", "correlation", "0°", "360°"}
    assert min(size for sizes in charts.values() for size in sizes.values()) >= 9.5
    assert "equivariance" in page.locator("#single .eq").inner_text()
    assert "per-image explanation uncertainty" in page.locator("#facts").inner_text()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 21, 28)"
    small = page.evaluate(
        "[...document.querySelectorAll('button, select, input[type=text], [role=slider]')].filter("
        "(e) => e.offsetParent && e.getBoundingClientRect().height < 34).map((e) => e.id)"
    )
    assert small == []
