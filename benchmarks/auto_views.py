"""What `views="auto"` costs and gives: Eq and the ranking by stability, compared with fixed numbers of views.

    python benchmarks/auto_views.py imagenet-val --model mobilenet_v2 --weights mobilenet_v2.safetensors --n 200

Each image is presented at 0°, at the seven evaluation angles and at six angles between the views, and every view of the grids of 24 and 18
is read once for each presentation; all fusions below are made from these readings. Losses are next to the paper's EquiGrad-CAM of 18 views, which
aligns features; `equigrad-cam-fine` aligns maps at the image's resolution, and needs fewer views for the same Eq. Evaluation angles that are multiples
of a grid's step favour that grid: its views of the rotated image are views of the image itself. The last line of a method is a bound: for each
image the number of views of the same grids that is best when its true Eq is known, at the loss of `"auto"`. With `--window 180` the network sees
the centre of images of 256 pixels, and views and presentations are cut from all of them: context, where a view's corners are real.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

import equicam
from equicam.core.fusion import AdaptiveViews, fuse
from equicam.core.transforms import Transform
from equicam.core.uncertainty import correlate_views, mean_error
from equicam.core.views import Views, Window, rotate
from equicam.data.items import open_item, sample_by_class
from equicam.data.sources import find_items
from equicam.evaluation.equivariance import ANGLES, equivariance
from equicam.methods import resolve
from equicam.models.images import standard_preprocessing
from equicam.models.surround import preprocess_pixels
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor

METHODS = ("equigrad-cam", "equigrad-cam-fine")
"""The first with 18 views is what all are compared with."""
COUNTS = (6, 12, 18, 24)
BETWEEN = (42, 106, 187, 219, 269, 304)
"""Angles that are as far from multiples of 15°, 20°, 30° and 60° as angles are on average: no grid is favoured."""
TOLERANCES = (0.08, 0.09, 0.10, 0.11, 0.12, 0.13, 0.14, 0.15)
GOAL = {"eq": -0.004, "views": 8.0, "spearman": 0.95}
Found = dict[str, dict[str, np.ndarray]]


def measure(model: equicam.Model, data: str, n: int | None, images: int, window: int | None) -> Found:
    """By method and image: Eq [angle, views of the presented map, views of the rotated one]; [presentation, views] for the rest."""
    executor = Executor(model, Recipe(METHODS[0]))
    items = sample_by_class(find_items(data), n)
    context = "none" if window is None else "auto"
    found: dict[str, dict[str, list[np.ndarray]]] = {m: defaultdict(list) for m in METHODS}
    with executor.context(model.device):
        for start in range(0, len(items), images):
            some = [
                preprocess_pixels(model, open_item(item), context) for item in items[start : start + images]
            ]
            for method, values in measure_batch(executor, torch.stack(some).to(model.device), window).items():
                for name, value in values.items():
                    found[method][name].append(value)
    return {m: {name: np.concatenate(values) for name, values in of.items()} for m, of in found.items()}


def measure_batch(executor: Executor, x: Tensor, window: int | None) -> Found:
    """The same for one batch of images."""
    methods = {name: resolve(Recipe(name, views="auto")) for name in METHODS}
    every, target = Views.evenly(24).union(Views.evenly(18)), None
    maps: dict[str, list[list[Tensor]]] = {m: [] for m in METHODS}  # [presentation][count]
    stability: dict[str, list[np.ndarray]] = {m: [] for m in METHODS}
    error: dict[str, list[np.ndarray]] = {m: [] for m in METHODS}
    unstable: dict[str, list[np.ndarray]] = {m: [] for m in METHODS}
    for angle in (0, *ANGLES, *BETWEEN):
        presented = None if window is None else Window((window, window), Transform(angle))
        reader = executor.view_reader(methods[METHODS[0]].reader, len(every) * len(x), window=presented)
        readings = reader.read(rotate(x, angle) if angle and presented is None else x, every, target)
        target = readings.target
        for name, of in methods.items():
            fused = [
                fuse(
                    readings,
                    of.combine,
                    replace(of.fusion, adaptive=None, views=Views.evenly(count)),
                    "reflect" if window is None else "coverage",
                )
                for count in COUNTS
            ]
            own = [correlate_views(one.maps_in_presented_frame) for one in fused]
            error[name].append(stack(mean_error(one.aligned_maps, one.alignment) for one in fused))
            unstable[name].append(stack(r.below(AdaptiveViews.unstable_below) for r in own))
            stability[name].append(stack(r.stability for r in own))
            maps[name].append([one.map for one in fused])
    return {
        name: {
            "eq": np.stack(
                [
                    [
                        [
                            equivariance(rotated[None], own, [angle]).value[0].cpu().numpy()
                            for rotated in maps[name][a + 1]
                        ]
                        for own in maps[name][0]
                    ]
                    for a, angle in enumerate((*ANGLES, *BETWEEN))
                ]
            ).transpose(3, 0, 1, 2),
            "stability": np.stack(stability[name], 1),
            "error": np.stack(error[name], 1),
            "unstable": np.stack(unstable[name], 1),
        }
        for name in METHODS
    }


def stack(values: Iterable[Tensor]) -> np.ndarray:
    """[image, views] from a tensor for each number of views."""
    return torch.stack(list(values), 1).cpu().numpy()


def choose(of: dict[str, np.ndarray], rule: AdaptiveViews) -> np.ndarray:
    """The index of the number of views that the rule uses, by image and presentation."""
    used = np.full(of["error"].shape[:2], COUNTS.index(rule.counts[-1]))
    for count in reversed(rule.counts[:-1]):
        i = COUNTS.index(count)
        done = of["error"][..., i] <= rule.tolerance
        if count >= rule.unstable_from:
            done |= of["unstable"][..., i]
        used[done] = i
    return used


def summarise(found: Found, method: str) -> list[dict[str, float | str]]:
    """A line for each fixed number, for auto, and for the bound."""
    of, reference = found[method], found[METHODS[0]]
    eq, stability, images = of["eq"], of["stability"], len(of["eq"])
    last = COUNTS.index(18)
    own_angles = slice(0, len(ANGLES))
    wanted = {
        "eq": reference["eq"][:, own_angles, last, last].mean(),
        "between": reference["eq"][:, len(ANGLES) :, last, last].mean(),
    }

    def line(name: str, chosen: np.ndarray) -> dict[str, float | str]:
        rows = np.arange(images)
        every = np.stack([eq[rows, a, chosen[:, 0], chosen[:, a + 1]] for a in range(eq.shape[1])], 1)
        own, between = np.split(every, [len(ANGLES)], axis=1)
        ranked, full = stability[rows, 0, chosen[:, 0]], reference["stability"][:, 0, last]
        tenth = max(1, images // 10)
        same = set(np.argsort(ranked)[:tenth]) & set(np.argsort(full)[:tenth])
        return {
            "name": name,
            "eq": float(own.mean()),
            "loss": float(own.mean() - wanted["eq"]),
            "between": float(between.mean()),
            "between_loss": float(between.mean() - wanted["between"]),
            "views": float(np.array(COUNTS)[chosen].mean()),
            "spearman": float(spearmanr(ranked, full).statistic),
            "same_tenth": len(same) / tenth,
        }

    presentations = eq.shape[1] + 1
    lines = [line(f"{count} views", np.full((images, presentations), i)) for i, count in enumerate(COUNTS)]
    rule = resolve(Recipe(method, views="auto")).fusion.adaptive
    assert rule is not None
    tried = [
        line(f"tolerance {tolerance:.2f}", choose(of, replace(rule, tolerance=tolerance)))
        for tolerance in TOLERANCES
    ]
    auto = line(f'"auto", tolerance {rule.tolerance:.2f}', choose(of, rule))
    best = [eq[:, own_angles, i, i].mean(1) for i in range(len(COUNTS))]
    bounds = []
    for price in np.linspace(0, 0.02, 400):
        chosen = np.argmax([best[i] - price * COUNTS[i] for i in (0, 1, 3)], axis=0)
        bounds.append(
            line("the best choice", np.repeat(np.array([0, 1, 3])[chosen][:, None], presentations, 1))
        )
    enough = [one for one in bounds if float(one["loss"]) >= GOAL["eq"]]
    return [*lines, *tried, auto, min(enough, key=lambda one: float(one["views"]))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights")
    parser.add_argument(
        "--window",
        type=int,
        help="the part of 256 pixels that the model sees; views are cut from all of them",
    )
    parser.add_argument("--images", type=int, default=8, help="images in a batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int)
    parser.add_argument("--json", type=Path, help="also keep the figures here")
    parser.add_argument("--readings", type=Path, help="also keep what was measured of every image here (npz)")
    given = parser.parse_args()
    model = equicam.load(given.model, weights=given.weights, device=given.device)
    if given.window is not None:
        model = replace(model, preprocess=standard_preprocessing(256, given.window, model.mean, model.std))
    found = measure(model, given.data, given.n, given.images, given.window)
    if given.readings:
        np.savez_compressed(
            given.readings, **{f"{m}/{name}": value for m, of in found.items() for name, value in of.items()}
        )
    lines = {method: summarise(found, method) for method in METHODS}
    for method, of in lines.items():
        print(
            f"\n| {method} | disc Eq | minus that of 18 | between the views | minus that of 18 | views on average "
            "| Spearman of stability with 18 views | same lowest tenth |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for one in of:
            print(
                f"| {one['name']} | {one['eq']:.4f} | {one['loss']:+.4f} | {one['between']:.4f} | {one['between_loss']:+.4f} | {one['views']:.1f} | {one['spearman']:.3f} | {one['same_tenth']:.0%} |"
            )
        auto = of[-2]
        goals = (
            auto["loss"] >= GOAL["eq"],
            auto["views"] <= GOAL["views"],
            auto["spearman"] >= GOAL["spearman"],
        )
        print(
            f"goals: loss at most {-GOAL['eq']}, at most {GOAL['views']:g} views, Spearman from {GOAL['spearman']}: {goals}"
        )
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
