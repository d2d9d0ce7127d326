"""PEUM of reference images, by number of views: the quantiles in src/equicam/peum_reference.json.

    python scripts/peum_reference.py imagenet-val 'ResNet-50=nets.py:original,resnet50.safetensors' \
        'MobileNetV2=mobilenet_v2,mobilenet_v2.safetensors'

Networks are written NAME=MODEL,WEIGHTS. They come first in the file, in this order, before those it had: its first network
is the one that places are named by. Every image is read in the views
of 36 and 24, which contain those of 3, 4, 6, 8, 9, 12 and 18; PEUM is as `equicam.explain` gives it by default. Images with a flat map are left
out. Only quantiles are written, and their medians to docs/method.md; without arguments, only that table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import equicam
from equicam.core.fusion import fuse
from equicam.core.uncertainty import peum
from equicam.core.views import Views
from equicam.data.items import open_item, sample_by_class
from equicam.data.sources import find_items
from equicam.methods import resolve, resolve_fill
from equicam.models.images import as_batch, preprocess_image, stack_images
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor
from equicam.runtime.view_reader import ViewReader

COUNTS = (3, 4, 6, 8, 9, 12, 18, 24, 36)
VIEWS = Views.evenly(36).union(Views.evenly(24))  # with those of every other number
FILE = Path(__file__).parent.parent / "src/equicam/peum_reference.json"
PAGE = FILE.parents[2] / "docs/method.md"
BEGIN, END = "<!-- scripts/peum_reference.py writes from here -->", "<!-- to here -->"
METHOD, FILL = resolve(Recipe()), resolve_fill(Recipe())


def peum_by_count(
    reader: ViewReader, x: torch.Tensor, target: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """PEUM of every image for each number of views, all of them read once; NaN where the map is flat."""
    readings, found = reader.read(x, VIEWS, target), {}
    for count in COUNTS:
        fusion = equicam.Fusion(Views.evenly(count), METHOD.fusion.align_at, METHOD.fusion.mean_at)
        fused = fuse(readings, METHOD.combine, fusion, FILL)
        flat = fused.map.flatten(1).std(1) == 0
        score = peum(fused.aligned_maps, fused.alignment).mean((-2, -1))
        found[str(count)] = torch.where(flat, torch.nan, score)
    return found


def measure(model: equicam.Model, source: str, n: int | None, batch: int) -> dict[str, np.ndarray]:
    """PEUM of every image that has one, by number of views."""
    items, executor = sample_by_class(find_items(source), n), Executor(model, Recipe())
    scores: dict[str, list[float]] = {str(count): [] for count in COUNTS}
    for start in range(0, len(items), batch):
        some = [preprocess_image(model, open_item(item)) for item in items[start : start + batch]]
        x = as_batch(model, stack_images(some))
        found = executor.run(METHOD.reader, peum_by_count, x, views_per_image=len(VIEWS))
        for count, values in found.items():
            scores[count] += values.tolist()
        print(f"{min(start + batch, len(items))} of {len(items)}", flush=True)
    return {count: np.array(values)[np.isfinite(values)] for count, values in scores.items()}


def write_medians(networks: dict[str, Any]) -> None:
    """The table of medians on the page."""
    columns = sorted({int(count) for of in networks.values() for count in of["quantiles"]})
    rows = ["| views | " + " | ".join(map(str, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, of in networks.items():
        known = [of["quantiles"].get(str(count)) for count in columns]
        cells = ["" if values is None else f"{values[50]:.4f}".removeprefix("0") for values in known]
        rows.append(f"| {name}, {of['images']:,} images | " + " | ".join(cells) + " |")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(rows) + "\n\n" + END + after)


def main() -> None:
    """Measure the networks given, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", help="ImageNet validation images")
    parser.add_argument("networks", nargs="*", metavar="NAME=MODEL,WEIGHTS")
    parser.add_argument("--n", type=int, help="so many images, spread over the classes")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=FILE)
    given = parser.parse_args()
    before = json.loads(given.out.read_text()) if given.out.exists() else {}
    kept, found = before, {}
    for spec in given.networks:
        name, _, rest = spec.partition("=")
        architecture, _, weights = rest.partition(",")
        model = equicam.load(architecture, weights=weights or None, device=given.device)
        scores = measure(model, given.source, given.n, given.batch)
        levels = np.linspace(0, 1, 101)
        found[name] = {
            "images": min(map(len, scores.values())),
            "quantiles": {
                count: [float(f"{v:.4g}") for v in np.quantile(values, levels)] for count, values in scores.items()
            },
        }  # fmt: skip
        medians = {count: round(float(np.median(values)), 5) for count, values in scores.items()}
        print(f"{name}: {found[name]['images']} images, medians by number of views {medians}")
        kept = found | {key: value for key, value in before.items() if key not in found}
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in kept.items())
        given.out.write_text("{\n" + lines + "\n}\n")
    if given.out == FILE:
        write_medians(kept)


if __name__ == "__main__":
    main()
