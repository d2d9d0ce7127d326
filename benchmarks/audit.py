"""An audit from files to rows next to `explain` on images that are on the device already.

    python benchmarks/audit.py [--images 32] [--views 6] [--rounds 3]
    python benchmarks/audit.py --device cuda --fast --images 8192 --shard-size 64 --views 18 --workers 10
    python benchmarks/audit.py --device cuda --fast --images 8192 --shard-size 64 --views 18 --workers 10 --slide

ResNet-50, random weights, JPEG images of 640×480; with --slide, windows of a slide (a tiled pyramid in JPEG) with their context. `explain` gets batches of
the shards' size. An audit is timed from its call to its return: listing, digests of weights and files, decoding, computing and storing,
the first shard included. The first round of both warms up, and is printed apart; a ratio is the median over rounds of the ratio within a round.
"""

import argparse
import io
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from rich.console import Console
from rich.table import Table

import equicam
from equicam.core.transforms import canvas_size

TILE = 224
LIMIT = {False: 0.90, True: 0.85}
"""By whether the images are windows of a slide."""


def save_image(folder: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8))
    coarse.resize((640, 480), Image.Resampling.BICUBIC).save(folder / f"{number:05d}.jpg", quality=92)


def save_slide(path: Path, windows: int) -> None:
    """A tiled pyramid of at least as many windows, smooth noise in JPEG; a few tiles come again and again."""
    import tifffile

    side = TILE * (round(windows**0.5) + 2)
    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(61):
        coarse = Image.fromarray(rng.integers(60, 200, (16, 16, 3), dtype=np.uint8))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG", quality=85)
        encoded.append(file.getvalue())
    with tifffile.TiffWriter(path, bigtiff=True) as slide:
        for level in range(3):
            size = side >> (2 * level)
            tiles = (encoded[i % len(encoded)] for i in range((-(-size // 256)) ** 2))
            slide.write(
                tiles, shape=(size, size, 3), dtype=np.uint8, tile=(256, 256), compression="jpeg", photometric="ycbcr",
                subsampling=(2, 2), resolution=(20000 >> (2 * level),) * 2, resolutionunit="CENTIMETER",
                subfiletype=int(level > 0), metadata=None,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--shard-size", type=int, default=8)
    parser.add_argument("--views", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="processes that decode images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--fast", action="store_true", help="bfloat16 and compiled")
    parser.add_argument("--slide", action="store_true", help="windows of a slide instead of image files")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.fast else None
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, tiling = folder / "images", None
        if options.slide:
            source, tiling = folder / "slide.tif", equicam.Tiling(TILE)
            save_slide(source, options.images)
        else:
            source.mkdir()
            with ProcessPoolExecutor(os.cpu_count()) as pool:  # before CUDA starts: its processes are forked
                list(pool.map(partial(save_image, source), range(options.images), chunksize=64))
        net = torchvision.models.resnet50().eval().to(options.device, memory_format=torch.channels_last)
        model = equicam.wrap(net, layer="layer4")
        side = canvas_size((TILE, TILE))[0] if options.slide else TILE
        x = torch.randn(options.shard_size, 3, side, side, device=options.device)
        recipe = equicam.Recipe(views=options.views, dtype=dtype, compiled=options.fast)

        def explain() -> float:
            start = time.perf_counter()
            for _ in range(options.images // options.shard_size):
                found = equicam.explain(model, x, recipe=recipe, window=TILE if options.slide else None)
            found.target.tolist()
            return time.perf_counter() - start

        seconds: dict[str, list[float]] = {"explain": [], "audit": []}
        images = stored = 0
        for round_ in range(options.rounds + 1):  # the first warms up
            of_explain, start = explain(), time.perf_counter()
            run = equicam.audit(
                source, model, folder / f"run{round_}", tiling=tiling, n=options.images, shard_size=options.shard_size, workers=options.workers, recipe=recipe
            )  # fmt: skip
            of_audit = time.perf_counter() - start
            images = run.manifest.images
            stored = sum(p.stat().st_size for p in run.folder.rglob("shard-*.parquet"))
            print(f"round {round_}: explain {of_explain:.2f} s, audit {of_audit:.2f} s", flush=True)
            if round_:
                seconds["explain"].append(
                    of_explain * images / (options.images // options.shard_size * options.shard_size)
                )
                seconds["audit"].append(of_audit)
    kind = "windows" if options.slide else "images"
    table = Table(
        f"ResNet-50, {images:,} {kind}, {options.views} views, {options.device}",
        f"{kind}/s",
        "of explain",
        "limit",
    )
    ratio = statistics.median(b / a for a, b in zip(seconds["audit"], seconds["explain"], strict=True))
    for name, taken in seconds.items():
        limits = ("", "") if name == "explain" else (f"{ratio:.3f}", f"≥ {LIMIT[options.slide]:.2f}")
        table.add_row(name, f"{images / statistics.median(taken):.2f}", *limits)
    table.add_row(f"stored for one of the {kind}", f"{stored / images / 1000:.1f} kB", "", "< 10 kB")
    Console().print(table)


if __name__ == "__main__":
    main()
