"""The cost of signal-or-noise evidence over its forward passes.

    python benchmarks/evidence.py [--model embedded] [--weights FILE] [--source FOLDER] [--images 16] [--rounds 3]

Seconds are of the CPU. A round measures the evidence on all images, from their files on, then bare forward passes of the
same batches; the ratio is the median over rounds. Without a source, synthetic images are drawn.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

import equicam
from equicam.auditing.evidence import IMAGES_PER_BATCH, evidence
from equicam.data.digests import file_digest
from equicam.data.sources import find_items
from equicam.data.synthetic import draw_many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--weights")
    parser.add_argument("--source", type=Path)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = equicam.load(options.model, weights=options.weights, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        if options.source is None:
            for i, patch in enumerate(draw_many(options.images, seed=7)):
                Image.fromarray(patch.image).save(Path(folder) / f"{i:03d}.png")
        items = find_items(options.source or folder)[: options.images]
        rows = {
            item.id: {"sha256": file_digest(item.path), "target": 0, "view_top1": [0] * 18} for item in items
        }

        def measure() -> None:
            for start in range(0, len(items), IMAGES_PER_BATCH):
                evidence(model, items[start : start + IMAGES_PER_BATCH], rows)

        inputs: list[torch.Tensor] = []
        handle = model.module.register_forward_pre_hook(lambda _, given: inputs.append(given[0].clone()))
        measure()
        handle.remove()

        def forward() -> None:
            with torch.inference_mode():
                for x in inputs:
                    model.module(x)

        rounds = [(_seconds(measure), _seconds(forward)) for _ in range(options.rounds)]
    ours, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
    passes = sum(len(x) for x in inputs) / len(items)
    table = Table(
        f"{options.model}, {len(items)} images", "CPU seconds an image", "of the forward passes", "limit"
    )
    table.add_row(
        "evidence", f"{ours / len(items):.2f}", f"{statistics.median(a / b for a, b in rounds):.2f}", "1.20"
    )
    table.add_row(f"{passes:.0f} forward passes an image", f"{bare / len(items):.2f}", "1.00", "")
    Console().print(table)


def _seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
