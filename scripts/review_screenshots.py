"""Photograph the review page for the docs: the queue and one picture, of the embedded model and drawn patches.

    python scripts/review_screenshots.py [--out docs] [--all FOLDER]

`--all` also takes the dark scheme and a tablet's width, to look at. Needs Chromium.
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

from equicam import web
from equicam.auditing.review_log import VERDICTS, ReviewLog
from equicam.auditing.store import RunStore
from equicam.data.synthetic import draw_many
from equicam.report.overlay import heat
from equicam.review.queue import Shelves

COMMAND = [sys.executable, "-c", "from equicam.cli.app import app; app()"]
CHROMIUM = Path("/usr/bin/chromium")
PATCHES = 160
READ = "0102-0-31-0-2400--01---2--0---3-1--0"  # the first verdicts of a plausible morning; -: none yet
OURS = [
    ImageColor.getrgb(colour)
    for colour in re.findall(
        r"#[0-9a-f]{6}", (Path(web.__file__).parent / "static" / "review.css").read_text()
    )
]
RAMP = [tuple(map(int, colour)) for colour in heat(np.linspace(0, 1, 24)[None])[0]]
LOOKS = {
    "review": ((1280, 760), "light"),
    "dark": ((1280, 800), "dark"),
    "tablet": ((820, 1180), "light"),
    "phone": ((420, 860), "dark"),
}


def main() -> None:
    """A demo run, a few verdicts, and pictures of both pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    parser.add_argument("--all", type=Path, help="a folder for every look")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = made(Path(folder))
        with served(run) as address, sync_playwright() as playwright:
            path = str(CHROMIUM) if CHROMIUM.exists() else None
            browser = playwright.chromium.launch(executable_path=path)
            for name, (size, scheme) in LOOKS.items():
                if name == "review" or args.all:
                    taken(browser, address, size, scheme, (args.out if name == "review" else args.all) / name)
            browser.close()


def made(folder: Path) -> Path:
    """An audited, ranked and half-read run of drawn patches."""
    pictures, run = folder / "patches", folder / "demo"
    for i, patch in enumerate(draw_many(PATCHES, seed=7)):
        label = ("normal", "tumour")[patch.label]
        (pictures / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(patch.image).save(pictures / label / f"patch-{i:03d}.png")
    for words in (
        ["audit", str(pictures), "--model", "embedded", "--calibrate", "80", "--out", str(run)],
        ["triage", str(run), "--budget", "60%", "--evidence", "4"],
    ):
        subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.DEVNULL)
    readings, names = ReviewLog(run), list(VERDICTS)
    for number, entry in zip(READ, Shelves(RunStore(run), blind=True).newest().entries, strict=False):
        if number != "-":
            readings.add_verdict(
                entry.id, "ana", names[int(number)], blind=True, previous=0, mark=f"shown-{entry.key}"
            )
    return run


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The page's address while it runs."""
    words = [*COMMAND, "review", str(run), "--no-browser", "--reviewer", "ana"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "200"})
    try:
        yield next(
            found[1] for line in process.stdout or () if (found := re.search(r"review: (http\S+)", line))
        )
    finally:
        process.terminate()
        process.wait(10)


def taken(browser: Browser, address: str, size: tuple[int, int], scheme: str, stem: Path) -> None:
    """The queue, and a picture that has its verdict."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if scheme == "dark" else "light",
    )
    page = context.new_page()
    page.goto(address)
    shot(page, stem.with_name(f"{stem.name}-queue.png"))
    page.locator("#list .thumb").nth(3).click()
    page.wait_for_url("**/item/**")
    shot(page, stem.with_name(f"{stem.name}-item.png"))
    context.close()


def shot(page: Page, path: Path) -> None:
    """What is in sight, in 256 colours."""
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    sure = [v for colour in (*OURS, *RAMP) for v in colour]
    colours = picture.quantize(256 - len(sure) // 3).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(colours[: 768 - len(sure)] + sure)
    picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
