"""An audit on Ray with one and with two CPU actors, and without Ray: images per second, and how well it scales.

    python benchmarks/scaling.py --images 64 --views 6

The model is ResNet-50 with random weights, one thread a worker. Starting Ray, importing torch and loading the
model are not scaling: time is taken from the first shard written to the last.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from equicam.audit.compute import preprocess_to_array
from equicam.engines.ray import Cluster
from equicam.engines.worker import ModelFromName
from equicam.images.decoding import decode_image
from equicam.images.sources import find_items
from equicam.models.images import VisibleBoxes
from equicam.readers.model import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--views", type=int, default=6)
    parser.add_argument("--shard-size", type=int, default=4)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    import ray

    torch.set_num_threads(1)
    recipe = ModelFromName(given.model, None if given.model == "embedded" else "random")
    model = recipe("cpu")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "images"
        _draw(source, given.images)
        decode = _decode_rate(model, source)
        rates: dict[str, list[float]] = {"one process": [], "Ray, 1 actor": [], "Ray, 2 actors": []}
        ray.init(
            "local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=500_000_000
        )
        engines = (None, Cluster(actors=1, model_source=recipe), Cluster(actors=2, model_source=recipe))
        for round_ in range(given.rounds):
            for (name, found), engine in zip(rates.items(), engines, strict=True):
                finished: list[tuple[float, int]] = []
                equicam.audit(
                    source, model, Path(folder) / f"{name}-{round_}", views=given.views, shard_size=given.shard_size, workers=1,
                    engine=engine, progress=lambda done, _all, _now, finished=finished: finished.append((time.perf_counter(), done)),
                )  # fmt: skip
                # shards computed together end together: the clock starts with the first of each actor
                warm = engine.actors if engine else 1
                (start, before), (end, after) = finished[warm - 1], finished[-1]
                found.append((after - before) / (end - start))
        ray.shutdown()
    _print(given, rates, decode)


def _draw(source: Path, count: int) -> None:
    source.mkdir()
    rng = np.random.default_rng(0)
    for i in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        coarse.resize((256, 256), Image.Resampling.BICUBIC).save(source / f"{i:04d}.jpg", quality=90)


def _decode_rate(model: Model, source: Path) -> float:
    items, visible = find_items(source), VisibleBoxes(model)
    start = time.perf_counter()
    for item in items:
        decode_image(item, lambda p: preprocess_to_array(model, p), visible)
    return len(items) / (time.perf_counter() - start)


def _print(given: argparse.Namespace, rates: dict[str, list[float]], decode: float) -> None:
    middle = {name: statistics.median(found) for name, found in rates.items()}
    one = middle["Ray, 1 actor"]
    table = Table(f"{given.model}, {given.views} views", "images/s", "of one actor's", "efficiency")
    for name, rate in middle.items():
        actors = 2 if "2" in name else 1
        ray_row = name.startswith("Ray")
        table.add_row(
            name, f"{rate:.2f}", f"{rate / one:.2f}", f"{rate / one / actors:.2f}" if ray_row else ""
        )
    table.add_row("decoding 256 × 256 JPEG, one core", f"{decode:.0f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
