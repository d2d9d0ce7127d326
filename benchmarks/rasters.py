"""Windows a second of our readers next to the bare libraries, and what share of an audit reading is.

    python benchmarks/rasters.py slide.svs scene.tif --bands 4,3,2 --scale 10000

Windows of 224 pixels in scan order, each with the 318 that rotations need, from one process and a warm disk; a second is one of the CPU, because machines are shared. The bare
library reads the same boxes of its finest level into an array [height, width, bands] of its own type, and no more.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np

from equicam.images.items import Item
from equicam.rasters import raster as opening
from equicam.rasters.options import Input, Tiling
from equicam.rasters.raster import open_raster
from equicam.rasters.tiling import cut_windows
from equicam.rasters.windows import read_window

TILE, MARGIN = 224, 47


def windows_of(path: Path, given: Input) -> list:
    items, _ = cut_windows([Item(path.name, path)], Tiling(TILE, "disc", input=given), MARGIN)
    raster = open_raster(path).info
    return [
        item.window for item in items
        if min(item.window.x, item.window.y) >= MARGIN and item.window.x + TILE + MARGIN <= raster.width
        and item.window.y + TILE + MARGIN <= raster.height
    ]  # fmt: skip


def ours(path: Path, windows: list) -> float:
    opening._opened.clear()  # as cold as the bare library's handle
    open_raster(path)
    start = time.process_time()
    for window in windows:
        read_window(path, window)
    return time.process_time() - start


def bare(path: Path, windows: list, bands: list[int]) -> float:
    side = TILE + 2 * MARGIN
    if open_raster(path).info.kind == "slide":
        import openslide

        slide = openslide.OpenSlide(str(path))
        start = time.process_time()
        for window in windows:
            place = (int(window.x) - MARGIN, int(window.y) - MARGIN)
            np.asarray(slide.read_region(place, 0, (side, side)).convert("RGB"))
        return time.process_time() - start
    import rasterio
    from rasterio.windows import Window

    with rasterio.open(path) as data:
        start = time.process_time()
        for window in windows:
            data.read(bands, window=Window(int(window.x) - MARGIN, int(window.y) - MARGIN, side, side))
        return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rasters", nargs="+", type=Path)
    parser.add_argument("--bands")
    parser.add_argument("--scale", type=float)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    for path in given.rasters:
        raster = open_raster(path)
        chosen = Input(given.bands, given.scale) if raster.info.dtype != "uint8" else Input()
        windows = windows_of(path, chosen)
        bands = [b + 1 for b in raster.band_indices(chosen.bands or raster.info.bands[:3])]
        pairs = [(bare(path, windows, bands), ours(path, windows)) for _ in range(given.repeats + 1)][1:]
        theirs, own = (len(windows) / median(column) for column in zip(*pairs, strict=True))
        print(
            f"{path.name} ({raster.info.reader}): {len(windows)} windows, bare {theirs:.0f}/s, ours {own:.0f}/s, "
            f"ratio {median(a / b for a, b in pairs):.2f}"
        )


if __name__ == "__main__":
    main()
