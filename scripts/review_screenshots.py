"""Screenshots of the review page and the report for the docs. Needs Chromium.

    python scripts/review_screenshots.py [--out docs] [--all FOLDER]
    python scripts/review_screenshots.py --run RUN --name slides

Without a run: the queue, one image before and one after its verdict, and the report's first lines, of the embedded model
on synthetic patches. `--all` also takes the dark scheme, a tablet's and a phone's width. With a ranked run of rasters: a
window of it with its surroundings, the first lines of its report and the rasters in it, as docs/slides-review.png,
slides-answer.png and slides-report.png.
"""

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor
from playwright.sync_api import Browser, Page, sync_playwright
from synthetic import draw_many

from equicam.overlay import heat
from equicam.runs import review
from equicam.runs.review.queue import QueueLoader
from equicam.runs.store import RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog

COMMAND = [sys.executable, "-c", "from equicam.cli.app import app; app()"]
CHROMIUM = Path("/usr/bin/chromium")
PATCHES = 160
VERDICTS_GIVEN = "0102-0-31-0-2400--01---2--0---3-1--0"  # numbers of verdicts in queue order; -: none yet
PAGE_COLOURS = [
    ImageColor.getrgb(colour)
    for colour in re.findall(
        r"#[0-9a-f]{6}", (Path(review.__file__).parent / "static" / "review.css").read_text()
    )
]
PAGE_COLOURS.append((255, 255, 255))  # written #fff
MAP_COLOURS = [tuple(map(int, colour)) for colour in heat(np.linspace(0, 1, 24)[None])[0]]
SCREENS = {
    "review": ((1280, 800), "light"),
    "dark": ((1280, 800), "dark"),
    "tablet": ((820, 1180), "light"),
    "phone": ((420, 860), "dark"),
}


def main() -> None:
    """Take the screenshots of a demo run, or of the run given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--all", type=Path, help="a folder for the screenshots of every screen")
    parser.add_argument("--run", type=Path, help="a ranked run of rasters")
    parser.add_argument("--name", default="slides", help="how its screenshots' names begin")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = str(CHROMIUM) if CHROMIUM.exists() else None
        browser = playwright.chromium.launch(executable_path=path)
        run = args.run or make_run(Path(folder))
        with serve(run) as address:
            if args.run:
                show_window(browser, address, args.out / f"{args.name}-review.png")
            else:
                for name, (size, scheme) in SCREENS.items():
                    if name == "review" or args.all:
                        out = args.out if name == "review" else args.all
                        take_screenshots(browser, address, size, scheme, out / name)
        subprocess.run([*COMMAND, "report", str(run), "--top", "1"], check=True, stdout=subprocess.DEVNULL)
        report = run / "report.html"
        if args.run:
            show_report(browser, report, args.out / f"{args.name}-answer.png", part="answer")
            show_report(browser, report, args.out / f"{args.name}-report.png", part="rasters")
        else:
            show_report(browser, report, args.out / "report.png", part="answer")
        browser.close()


def show_window(browser: Browser, address: str, path: Path) -> None:
    """A window of a raster in its surroundings, before the verdict."""
    page = browser.new_page(viewport={"width": 1280, "height": 760})
    page.goto(address)
    page.wait_for_load_state("networkidle")
    page.locator("#list .thumb").first.click()
    page.wait_for_url("**/item/**")
    for _ in range(20):  # to one with a neighbour
        if page.locator(".adjacent a[href]").count():
            break
        with page.expect_navigation():
            page.keyboard.press("ArrowRight")
    page.keyboard.press("s")
    take_screenshot(page, path)


def show_report(browser: Browser, report: Path, path: Path, *, part: str) -> None:
    """A section of the report, from its heading."""
    page = browser.new_page(viewport={"width": 1280, "height": 820})
    page.goto(report.as_uri())
    top, bottom = page.locator(f"section[aria-labelledby={part}]").evaluate(
        "e => [e.getBoundingClientRect().top, e.getBoundingClientRect().bottom]"
    )
    above, bottom = (0 if part == "answer" else top - 16), bottom + 16
    clip = {"x": 0, "y": above, "width": 1280, "height": min(2200, bottom - above)}
    save_small(page.screenshot(full_page=True, clip=clip), path, scale=1 if part == "answer" else 0.75)


def make_run(folder: Path) -> Path:
    """An audited, ranked and partly reviewed run of synthetic patches."""
    images, run = folder / "patches", folder / "demo"
    for i, patch in enumerate(draw_many(PATCHES, seed=7)):
        label = ("normal", "tumour")[patch.label]
        (images / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(patch.image).save(images / label / f"patch-{i:03d}.png")
    calibrate = folder / "calibrate.toml"
    calibrate.write_text("[run]\ncalibrate = 80\n")
    for arguments in (
        ["audit", str(images), "--model", "embedded", "--recipe", str(calibrate), "--out", str(run)],
        ["triage", str(run), "--budget", "60%"],
        ["causal", str(run)],
    ):
        subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    log, names = ReviewLog(run), list(VERDICTS)
    for number, item in zip(
        VERDICTS_GIVEN, QueueLoader(RunStore(run), blind=True).current().items, strict=False
    ):
        if number != "-":
            log.add_verdict(
                item.id, "ana", names[int(number)], blind=True, previous_event=0, mark=f"shown-{item.key}"
            )
    return run


@contextmanager
def serve(run: Path) -> Iterator[str]:
    """Run the review server and yield its address."""
    command = [*COMMAND, "review", str(run), "--no-browser", "--reviewer", "ana"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    try:
        yield next(
            found[1] for line in process.stdout or () if (found := re.search(r"review: (http\S+)", line))
        )
    finally:
        process.terminate()
        process.wait(10)


def take_screenshots(browser: Browser, address: str, size: tuple[int, int], scheme: str, stem: Path) -> None:
    """The queue, an image before its verdict, and one after it."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.goto(address)
    take_screenshot(page, stem.with_name(f"{stem.name}-queue.png"))
    for place, name in ((4, "question"), (3, "item")):
        page.locator("#list .thumb").nth(place).click()
        page.wait_for_url("**/item/**")
        take_screenshot(page, stem.with_name(f"{stem.name}-{name}.png"), whole=name == "item")
        page.keyboard.press("q")
        page.wait_for_selector("#list .thumb img[src]")
    context.close()


def take_screenshot(page: Page, path: Path, *, whole: bool = False) -> None:
    """The visible part of the page, or all of it."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    save_small(page.screenshot(full_page=whole), path, scale=0.75 if whole else 1)


def save_small(screenshot: bytes, path: Path, *, scale: int | float = 1) -> None:
    """In 256 colours that include those of the page and of the maps, dithered so that maps have no steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    image = image.resize((round(scale * image.width), round(scale * image.height)), Image.Resampling.LANCZOS)
    fixed = [v for colour in (*PAGE_COLOURS, *MAP_COLOURS) for v in colour]
    colours = image.quantize(256 - len(fixed) // 3).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours[: 768 - len(fixed)] + fixed)
    image.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
