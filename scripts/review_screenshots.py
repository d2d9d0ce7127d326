"""Screenshots of the review page for the docs: the queue and one image, of the embedded model on synthetic patches.

    python scripts/review_screenshots.py [--out docs] [--all FOLDER]

`--all` also takes the dark scheme, a tablet's and a phone's width. Needs Chromium.
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

from equicam import review
from equicam.auditing.review_log import VERDICTS, ReviewLog
from equicam.auditing.store import RunStore
from equicam.data.synthetic import draw_many
from equicam.report.overlay import heat
from equicam.review.queue import QueueLoader

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
MAP_COLOURS = [tuple(map(int, colour)) for colour in heat(np.linspace(0, 1, 24)[None])[0]]
SCREENS = {
    "review": ((1280, 760), "light"),
    "dark": ((1280, 800), "dark"),
    "tablet": ((820, 1180), "light"),
    "phone": ((420, 860), "dark"),
}


def main() -> None:
    """Make a demo run with a few verdicts, and take screenshots of both pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--all", type=Path, help="a folder for the screenshots of every screen")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder))
        with serve(run) as address, sync_playwright() as playwright:
            path = str(CHROMIUM) if CHROMIUM.exists() else None
            browser = playwright.chromium.launch(executable_path=path)
            for name, (size, scheme) in SCREENS.items():
                if name == "review" or args.all:
                    take_screenshots(
                        browser, address, size, scheme, (args.out if name == "review" else args.all) / name
                    )
            browser.close()


def make_run(folder: Path) -> Path:
    """An audited, ranked and partly reviewed run of synthetic patches."""
    images, run = folder / "patches", folder / "demo"
    for i, patch in enumerate(draw_many(PATCHES, seed=7)):
        label = ("normal", "tumour")[patch.label]
        (images / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(patch.image).save(images / label / f"patch-{i:03d}.png")
    for arguments in (
        ["audit", str(images), "--model", "embedded", "--calibrate", "80", "--out", str(run)],
        ["triage", str(run), "--budget", "60%", "--evidence", "4"],
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
    """The queue, and an image with its verdict."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = context.new_page()
    page.goto(address)
    take_screenshot(page, stem.with_name(f"{stem.name}-queue.png"))
    page.locator("#list .thumb").nth(3).click()
    page.wait_for_url("**/item/**")
    take_screenshot(page, stem.with_name(f"{stem.name}-item.png"))
    context.close()


def take_screenshot(page: Page, path: Path) -> None:
    """The visible part of the page, in 256 colours that include those of the page and of the maps."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    fixed = [v for colour in (*PAGE_COLOURS, *MAP_COLOURS) for v in colour]
    colours = image.quantize(256 - len(fixed) // 3).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours[: 768 - len(fixed)] + fixed)
    image.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
