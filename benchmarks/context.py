"""Views of the scene against views of the crop, and views with reflections: Eq, insertion and deletion.

    python benchmarks/context.py imagenet-val --model nets.py:original --weights resnet50.safetensors --device cuda
    python benchmarks/context.py aerial --split test --window 180 --model nets.py:original --weights … --device cuda
    python benchmarks/context.py none --time 64 1 --device cuda --dtype bfloat16 --compile

With the preprocessing's resize to 256 and crop to 224 the margin of 16 pixels is real and the rest of what rotated views
need is reflected; with `--window 180` of 256-pixel tiles all of it is real. Eq is disc Eq over the seven angles, and apart
over those that no grid of 18 views has; under mirrored rotations, over eight presentations. 95 % intervals by image.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torchvision

import equicam
from equicam.core.views import Window, crop_centre
from equicam.evaluate import statistics
from equicam.evaluate.rows import pick
from equicam.explain import explain_batch
from equicam.models.images import standard_preprocessing
from equicam.recipe import Recipe
from equicam.runtime.executor import Executor

METHODS = ("grad-cam", "equigrad-cam", "equigrad-cam-fine")
OFF_GRID = (15.0, 30.0, 45.0, 135.0)
DIHEDRAL = equicam.Views.dihedral(18)
EVENLY, SCENE = "18 rotations, reflected", "18 rotations, context"
MIRRORED, MIRRORED_SCENE = (
    "9 rotations and 9 reflections, reflected",
    "9 rotations and 9 reflections, context",
)
SETTINGS: dict[str, dict[str, Any]] = {
    EVENLY: {"views": None, "context": "none"},
    SCENE: {"views": None, "context": "auto"},
    MIRRORED: {"views": DIHEDRAL, "context": "none"},
    MIRRORED_SCENE: {"views": DIHEDRAL, "context": "auto"},
}


def measure(model: equicam.Model, given: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Figures of every setting, kept as they come."""
    for setting, options in SETTINGS.items():
        methods = METHODS if options["views"] is None else METHODS[1:]
        for group in given.groups:
            key = f"{setting}; {group}"
            if key in figures:
                continue
            start = time.perf_counter()
            rows = equicam.evaluate(
                model, given.data, split=given.split, n=given.n, methods=list(methods), scores=["eq"], group=group, **options
            )  # fmt: skip
            seconds = time.perf_counter() - start
            figures[key] = {"seconds": seconds} | {m: _eq(rows, m) for m in methods}
            _keep(given, figures)
            print(
                f"{key}: {seconds:.0f} s",
                {m: round(figures[key][m]["eq"]["value"], 4) for m in methods},
                flush=True,
            )
    for setting, options in SETTINGS.items():
        key = f"{setting}; faithfulness"
        if key in figures or not given.faithfulness:
            continue
        methods = METHODS if options["views"] is None else METHODS[1:]
        rows = equicam.evaluate(
            model, given.data, split=given.split, n=given.faithfulness, methods=list(methods),
            scores=["insertion", "deletion"], angles=[90], **options,
        )  # fmt: skip
        figures[key] = {
            m: {score: _mean(pick(rows, score, m)) for score in ("insertion", "deletion")} for m in methods
        }
        _keep(given, figures)
        print(
            key,
            {m: {s: round(v["value"], 4) for s, v in of.items()} for m, of in figures[key].items()},
            flush=True,
        )


def measure_time(given: argparse.Namespace) -> None:
    """Milliseconds of explanations of as many images, with and without context, ResNet-50 and 18 views."""
    net = torchvision.models.resnet50().eval().to(given.device)
    model = equicam.wrap(net, layer="layer4")
    for count in given.time:
        whole = torch.randn(count, 3, 318, 318, device=given.device)
        x = crop_centre(whole, (224, 224)).contiguous()
        for method in METHODS[1:]:
            options = {"method": method, "dtype": given.dtype, "compiled": given.compile}
            none, scene = (
                Executor(model, Recipe(context=context, **options)) for context in ("none", "auto")
            )
            pairs = [
                (
                    _seconds(explain_batch, none, x),
                    _seconds(explain_batch, scene, whole, None, Window((224, 224)), [(47, 47)] * count),
                )
                for _ in range(given.repeats + 3)
            ][3:]
            plain, context = (1000 * median(column) for column in zip(*pairs, strict=True))
            ratio = median(b / a for a, b in pairs)
            print(
                f"{count} images, {method}: {plain:.2f} ms, with context {context:.2f} ms, ratio {ratio:.3f}"
            )


def _seconds(call: Any, *args: Any) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    call(*args)
    wait()
    return time.perf_counter() - start


def _eq(rows: Any, method: str) -> dict[str, Any]:
    every = pick(rows, "eq", method, "disc", each_angle=True)
    off = np.isin(every.angles, OFF_GRID)
    return {"eq": _estimate(every.value, every.ids), "off_grid": _estimate(every.value[off], every.ids[off])}


def _mean(column: Any) -> dict[str, float]:
    return _estimate(column.value, column.ids)


def _estimate(values: Any, ids: Any) -> dict[str, float]:
    found = statistics.bootstrap(statistics.mean, values, cluster=ids)
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}


def _keep(given: argparse.Namespace, figures: dict[str, Any]) -> None:
    if given.figures:
        given.figures.write_text(json.dumps(figures, indent=1))


def table(figures: dict[str, Any]) -> list[str]:
    """Settings down, methods and figures across."""
    head = [
        "views",
        "method",
        "Eq, rotations",
        "off the grid",
        "Eq, mirrored rotations",
        "insertion",
        "deletion",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting in SETTINGS:
        for method in METHODS:
            cells = [
                _cell(figures, f"{setting}; rotation", method, "eq"),
                _cell(figures, f"{setting}; rotation", method, "off_grid"),
                _cell(figures, f"{setting}; dihedral", method, "eq"),
                _cell(figures, f"{setting}; faithfulness", method, "insertion"),
                _cell(figures, f"{setting}; faithfulness", method, "deletion"),
            ]
            if any(cells):
                lines.append(f"| {setting} | `{method}` | " + " | ".join(cells) + " |")
    return lines


def _cell(figures: dict[str, Any], key: str, method: str, what: str) -> str:
    of = figures.get(key, {}).get(method, {}).get(what)
    if of is None:
        return ""
    value, low, high = (f"{of[name]:.4f}".replace("0.", ".") for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data")
    parser.add_argument("--split")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights")
    parser.add_argument(
        "--window", type=int, help="the part of 256 pixels that the model sees, instead of its own"
    )
    parser.add_argument("--groups", nargs="*", default=["rotation", "dihedral"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, help="a class-spread sample of the images")
    parser.add_argument(
        "--faithfulness", type=int, default=250, help="images for insertion and deletion; 0: none"
    )
    parser.add_argument("--figures", type=Path, help="figures are kept here, and not measured again")
    parser.add_argument("--time", type=int, nargs="*", help="time explanations of as many images instead")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    if given.time:
        measure_time(given)
        return
    kept = given.figures is not None and given.figures.is_file()
    figures: dict[str, Any] = json.loads(given.figures.read_text()) if kept else {}
    if given.model != "none":
        model = equicam.load(given.model, weights=given.weights, device=given.device)
        if given.window:
            model = replace(
                model, preprocess=standard_preprocessing(256, given.window, model.mean, model.std)
            )
        measure(model, given, figures)
    print("\n".join(table(figures)))


if __name__ == "__main__":
    main()
