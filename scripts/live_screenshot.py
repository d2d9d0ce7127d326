"""A screenshot of the live look for docs/live.md: the scene and the network of the README's animation.

    python scripts/live_screenshot.py [--out docs/live.png] [--all FOLDER]

`--all` also takes the dark scheme and a phone's width. Needs Chromium. Takes a few minutes: it trains the network.
"""

import tempfile
import threading
from pathlib import Path
from queue import SimpleQueue

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from readme_animation import parse_out, train_and_choose
from review_screenshots import CHROMIUM

from equicam.live.app import serve_live
from equicam.runs.review.server import Links

SCREENS = {"": ((1280, 936), "light"), "-dark": ((1280, 936), "dark"), "-phone": ((390, 2600), "light")}


def main() -> None:
    """Train the network, serve the page with the scene, rotate it, and take screenshots."""
    args = parse_out(__doc__, "live.png", "--all", "a folder for the screenshots of every screen")
    model, scene, _ = train_and_choose()
    addresses: SimpleQueue[Links] = SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "lorry.png"
        Image.fromarray(scene.image).save(image)
        threading.Thread(
            target=serve_live, args=(model, [image]), kwargs={"announce": addresses.put}, daemon=True
        ).start()
        address = addresses.get(timeout=60)[None]
        with sync_playwright() as playwright:
            path = str(CHROMIUM) if CHROMIUM.exists() else None
            browser = playwright.chromium.launch(executable_path=path)
            for name, (size, scheme) in SCREENS.items():
                if not name:
                    rotate_and_take(browser, address, size, scheme, args.out)
                elif args.all:
                    rotate_and_take(browser, address, size, scheme, args.all / f"live{name}.png")
            browser.close()


def rotate_and_take(browser: Browser, address: str, size: tuple[int, int], scheme: str, path: Path) -> None:
    """The page at 135°, with all angles computed."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#fused .layer[src]", timeout=60_000)
    page.focus("#dial")
    for _ in range(3):
        page.keyboard.press("PageUp")
    page.wait_for_selector("#ring[hidden]", state="attached", timeout=300_000)
    page.locator("#dial").blur()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(400)
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path)
    context.close()


if __name__ == "__main__":
    main()
