"""The cost of an audit above the bare engine: decoding and storing behind compute, and bytes stored an image.

    python benchmarks/audit.py [--images 32] [--views 6] [--rounds 3]
    python benchmarks/audit.py --device cuda --bf16 --compile --images 2048 --shard-size 64 --views 18 --workers 12

ResNet-50, random weights, JPEG images of 640×480. The bare engine explains the same images, decoded beforehand, in
the same batches; a ratio is the median over rounds of the ratio within a round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image
from rich.console import Console
from rich.table import Table

import equicam
from equicam.auditing.compute import AuditContext, compute_shard, preprocess_to_array
from equicam.data.decoding import decode_image
from equicam.data.sources import find_items
from equicam.models.images import VisibleBoxes
from equicam.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--shard-size", type=int, default=8)
    parser.add_argument("--views", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1, help="processes that decode images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.bf16 else None
    torch.set_num_threads(options.threads)
    net = torchvision.models.resnet50().eval().to(options.device, memory_format=torch.channels_last)
    model = equicam.wrap(net, layer="layer4")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "images"
        source.mkdir()
        rng = np.random.default_rng(0)
        for i in range(options.images):
            coarse = Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8))
            coarse.resize((640, 480), Image.Resampling.BICUBIC).save(source / f"{i:04d}.jpg", quality=92)
        items = find_items(source)
        recipe = Recipe(views=options.views, fill="reflect", dtype=dtype, compiled=options.compile)
        context = AuditContext(model, recipe, frozenset())
        decoded = [
            decode_image(i, lambda p: preprocess_to_array(model, p), VisibleBoxes(model)) for i in items
        ]
        size = options.shard_size
        shards = [decoded[i : i + size] for i in range(0, len(decoded), size)]
        seconds: dict[str, list[float]] = {"bare engine": [], "audit": []}
        stored = 0
        for round_ in range(options.rounds + 1):  # the first warms up
            start = time.perf_counter()
            for shard in shards:
                compute_shard(context, shard)
            bare = time.perf_counter() - start
            start = time.perf_counter()
            run = equicam.audit(
                source,
                model,
                Path(folder) / f"run{round_}",
                views=options.views,
                shard_size=options.shard_size,
                workers=options.workers,
                dtype=dtype,
                compiled=options.compile,
            )
            whole = time.perf_counter() - start
            stored = sum(p.stat().st_size for p in run.folder.rglob("shard-*.parquet"))
            if round_:
                seconds["bare engine"].append(bare)
                seconds["audit"].append(whole)
    table = Table(
        f"ResNet-50, {options.views} views, {options.device}", "images/s", "of the bare engine", "limit"
    )
    ratio = statistics.median(b / a for a, b in zip(seconds["audit"], seconds["bare engine"], strict=True))
    for name, taken in seconds.items():
        rate = options.images / statistics.median(taken)
        table.add_row(
            name,
            f"{rate:.2f}",
            f"{ratio:.3f}" if name == "audit" else "1",
            "≥ 0.90" if name == "audit" else "",
        )
    table.add_row("stored an image", f"{stored / options.images / 1000:.1f} kB", "", "< 10 kB")
    Console().print(table)


if __name__ == "__main__":
    main()
