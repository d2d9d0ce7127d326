"""What `views="auto"` costs and gives: Eq and the ranking by stability, compared with fixed numbers of views.

    python benchmarks/auto_views.py imagenet-val --model mobilenet_v2 --weights mobilenet_v2.safetensors --n 200

Each image is presented at 0°, at the seven evaluation angles and at six angles between the views, and every view of the grids of 24 and 18
is read once for each presentation; all fusions below are made from these readings. Evaluation angles that are multiples of a grid's step favour that
grid: its views of the rotated image are views of the image itself. The last line is a bound: for each image the number of views of
the same grids that is best when its true Eq is known, at the loss of `"auto"`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

import equicam
from equicam.core.fusion import AdaptiveViews, fuse
from equicam.core.uncertainty import correlate_views, mean_converged
from equicam.core.views import Views, rotate
from equicam.data.items import open_item, sample_by_class
from equicam.data.sources import find_items
from equicam.evaluation.equivariance import ANGLES, equivariance
from equicam.methods import resolve
from equicam.models.images import preprocess_image
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor

COUNTS = (6, 12, 18, 24)
BETWEEN = (42, 106, 187, 219, 269, 304)
"""Angles that are as far from multiples of 15°, 20°, 30° and 60° as angles are on average: no grid is favoured."""
GOAL = {"eq": -0.004, "views": 8.0, "spearman": 0.95}


def measure(model: equicam.Model, data: str, n: int | None, method: str) -> dict[str, np.ndarray]:
    """By image: Eq [angle, views of the presented map, views of the rotated one], stability and the number that auto uses."""
    recipe = Recipe(method)
    of, executor = resolve(recipe), Executor(model, recipe)
    every, rule = Views.evenly(24).union(Views.evenly(18)), AdaptiveViews()
    found: dict[str, list[np.ndarray]] = {"eq": [], "stability": [], "auto": []}
    for item in sample_by_class(find_items(data), n):
        x = preprocess_image(model, open_item(item))[None].to(model.device)
        target, maps, stability, auto = None, [], [], []
        with executor.context(x.device):
            for angle in (0, *ANGLES, *BETWEEN):
                reader = executor.view_reader(of.reader, len(every))
                readings = reader.read(rotate(x, angle) if angle else x, every, target)
                target = readings.target
                fused = [
                    fuse(readings, of.combine, replace(of.fusion, views=Views.evenly(count)), "reflect")
                    for count in COUNTS
                ]
                own = [correlate_views(one.maps_in_presented_frame) for one in fused]
                done = [
                    bool(mean_converged(one.aligned_maps, one.alignment, rule.tolerance))
                    or (count >= rule.unstable_from and bool(r.below(rule.unstable_below)))
                    for one, r, count in zip(fused, own, COUNTS, strict=True)
                ]
                auto.append(next((i for i in (0, 1) if done[i]), 3))
                stability.append([float(r.stability) for r in own])
                maps.append(torch.cat([one.map for one in fused]))
        eq = [
            [equivariance(maps[a + 1][None], maps[0][i].expand_as(maps[0]), [angle]).value[0].tolist() for i in range(len(COUNTS))]
            for a, angle in enumerate((*ANGLES, *BETWEEN))
        ]  # fmt: skip
        for name, value in (("eq", eq), ("stability", stability), ("auto", auto)):
            found[name].append(np.array(value))
    return {name: np.stack(values) for name, values in found.items()}


def summarise(found: dict[str, np.ndarray]) -> list[dict[str, float | str]]:
    """A line for each fixed number, for auto, and for the bound."""
    eq, stability, images = found["eq"], found["stability"], len(found["eq"])
    last = COUNTS.index(18)

    def line(name: str, chosen: np.ndarray) -> dict[str, float | str]:
        rows = np.arange(images)
        every = np.stack([eq[rows, a, chosen[:, 0], chosen[:, a + 1]] for a in range(eq.shape[1])], 1)
        own, between = np.split(every, [len(ANGLES)], axis=1)
        ranked, reference = stability[rows, 0, chosen[:, 0]], stability[:, 0, last]
        tenth = max(1, images // 10)
        same = set(np.argsort(ranked)[:tenth]) & set(np.argsort(reference)[:tenth])
        return {
            "name": name,
            "eq": float(own.mean()),
            "loss": float(own.mean() - eq[:, : len(ANGLES), last, last].mean()),
            "between": float(between.mean()),
            "between_loss": float(between.mean() - eq[:, len(ANGLES) :, last, last].mean()),
            "views": float(np.array(COUNTS)[chosen[:, 0]].mean()),
            "spearman": float(spearmanr(ranked, reference).statistic),
            "same_tenth": len(same) / tenth,
        }

    presentations = eq.shape[1] + 1
    lines = [line(f"{count} views", np.full((images, presentations), i)) for i, count in enumerate(COUNTS)]
    auto = line('"auto"', found["auto"])
    best = [eq[:, : len(ANGLES), i, i].mean(1) for i in range(len(COUNTS))]
    bounds = []
    for price in np.linspace(0, 0.02, 400):
        chosen = np.argmax([best[i] - price * COUNTS[i] for i in (0, 1, 3)], axis=0)
        bounds.append(
            line("the best choice", np.repeat(np.array([0, 1, 3])[chosen][:, None], presentations, 1))
        )
    enough = [one for one in bounds if float(one["loss"]) >= GOAL["eq"]]
    return [*lines, auto, min(enough, key=lambda one: float(one["views"]))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights")
    parser.add_argument("--method", default="equigrad-cam")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int)
    parser.add_argument("--json", type=Path, help="also keep the figures here")
    given = parser.parse_args()
    model = equicam.load(given.model, weights=given.weights, device=given.device)
    lines = summarise(measure(model, given.data, given.n, given.method))
    print(
        "| views | disc Eq | minus that of 18 | between the views | minus that of 18 | views on average "
        "| Spearman of stability with 18 views | same lowest tenth |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for one in lines:
        print(
            f"| {one['name']} | {one['eq']:.4f} | {one['loss']:+.4f} | {one['between']:.4f} | {one['between_loss']:+.4f} | {one['views']:.1f} | {one['spearman']:.3f} | {one['same_tenth']:.0%} |"
        )
    auto = lines[-2]
    goals = (auto["loss"] >= GOAL["eq"], auto["views"] <= GOAL["views"], auto["spearman"] >= GOAL["spearman"])
    print(
        f"goals: loss at most {-GOAL['eq']}, at most {GOAL['views']:g} views, Spearman from {GOAL['spearman']}: {goals}"
    )
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
