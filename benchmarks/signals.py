"""Which signal finds which maps: every signal of a queue, by network, for three questions, from audits of real images.

    python benchmarks/signals.py 'ResNet-50, ImageNet=nets.py:original,resnet50.safetensors,imagenet-val' \
        'ViT-S/14, histology=nets.py:vit_small,plain0/weights.safetensors,histology,test,patient' --device cuda --figures signals.json

An audit with Eq measured at the seven angles on every image gives the rows that `equicam triage` ranks by. Which signal finds maps that are unstable
(Grad-CAM's Eq; off the grid at the five angles that neither 18 nor 6 views have), maps of EquiGrad-CAM whose maximum lies outside every box of the
object, and wrong predictions? Tables without a column of views are of 18. Intervals are 95 %, by image, or by patient where there are patients;
those of shares found are Wilson's where images are not grouped. Flat maps are counted and left out.

Networks that are in the file of figures already are not measured again; `--page docs/measurements.md` writes the section.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import equicam
from equicam.evaluate import statistics
from equicam.evaluate.rows import pick
from equicam.evaluate.statistics import Floats
from equicam.images.sources import find_items
from equicam.runs.signals import COLUMNS, FLAT, flagged, ranking_scores
from equicam_paper.signals import IN_TENTH, Pair, over_seeds

NAMES = {"stability": "low stability", "peum": "PEUM", "risk": "risk", "confidence": "1 − confidence"}
QUESTIONS = {
    "r": "unstable: r with 1 − Eq",
    "off_grid": "unstable, off the grid of views: r with 1 − Eq at 15°, 30°, 45°, 90° and 135°",
    "found": "unstable: share of the worst tenth found in a tenth",
    "unstable": "unstable: AUROC for Eq < .5",
    "outside": "maximum outside every box: AUROC",
    "wrong": "prediction wrong: AUROC",
}
CORRELATIONS = ("r", "off_grid")
"""Tabled for every number of views; the other questions for the largest."""
OFF_GRID = (15, 30, 45, 90, 135)
"""Evaluation angles that are no multiples of 20° or of 60°."""
UNKNOWN = {"value": np.nan, "low": np.nan, "high": np.nan}
# what we promise: (network begins with, views, signal, question, at least)
PROMISES = (
    *((name, 18, "stability", *goal) for name in ("ResNet-50, ImageNet", "MobileNetV2, ImageNet")
      for goal in (("r", 0.93), ("found", 0.72), ("unstable", 0.97))),
    *((name, 6, "stability", "r", 0.90) for name in ("ResNet-50, ImageNet", "MobileNetV2, ImageNet")),
    ("ViT-S/14, aerial", 18, "stability", "r", 0.90),
    ("ViT-S/14, aerial", 18, "stability", "found", 0.60),
    ("ResNet-50, ImageNet", 18, "risk", "outside", 0.73),
)  # fmt: skip
BEGIN, END = "<!-- benchmarks/signals.py writes from here -->", "<!-- to here -->"


def measure(spec: str, views: tuple[int, ...], device: str, n: int | None) -> dict[str, Any]:
    """The figures of one network."""
    architecture, weights, data, *rest = spec.split(",")
    split, group_by = (*rest, None, None)[:2]
    model = equicam.load(architecture, weights=weights or None, device=device)
    of = {"split": split, "n": n}
    truth = equicam.evaluate(model, data, methods=["equigrad-cam"], scores=["pointing"], angles=[90], **of)
    other = equicam.evaluate(model, data, methods=["grad-cam"], angles=OFF_GRID, **of)
    groups = (
        {i.id: i.group or i.id for i in find_items(data, split=split, group_by=group_by)}
        if group_by
        else None
    )
    found: dict[str, Any] = {"views": {}}
    for count in views:
        with tempfile.TemporaryDirectory() as folder:
            every = 1 << 20  # calibrate every image
            run = equicam.audit(data, model, folder, views=count, calibrate=every, **of)
            items = run.items.sort_by("id")
            if items["status"].to_pylist() != ["ok"] * items.num_rows:
                raise SystemExit(f"{spec}: images that cannot be read or explained")
            flat = flagged(items, FLAT)
            found |= {"images": items.num_rows, "mean_eq": float(np.mean(items["eq"].to_numpy()))}
            items = items.filter(pa.array(~flat))
            found["views"][str(count)] = _figures(items, truth, other, groups) | {"flat": int(flat.sum())}
    return found


def _figures(
    items: pa.Table, truth: pa.Table, other: pa.Table, groups: dict[str, str] | None
) -> dict[str, Any]:
    ids = np.array(items["id"].to_pylist(), dtype=object)
    eq = items["eq"].to_numpy()
    drift, unstable = 1 - eq, (eq < 0.5).astype(np.float64)
    outside = 1 - pick(truth, "pointing", "equigrad-cam", "boxes").by_id(ids)
    drift_off_grid = 1 - pick(other, "eq", "grad-cam", "disc").by_id(ids)
    wrong = pick(truth, "misclassified").by_id(ids)
    group = None if groups is None else np.array([groups[i] for i in ids], dtype=object)
    signals = {name: ranking_scores(items, name) for name in COLUMNS}
    signals["confidence"] = 1 - items["confidence"].to_numpy().astype(np.float64)
    found: dict[str, Any] = {"unstable": float(unstable.mean()), "signals": {}}
    found |= {"outside": statistics.mean(outside), "wrong": statistics.mean(wrong)}
    for name, values in signals.items():
        known = np.isfinite(values)
        first = np.where(known, values, 2 * np.abs(values[known]).max() + 1)  # undefined stands first
        found["signals"][name] = {
            "r": _r(np.where(known, values, np.nan), drift, group),
            "off_grid": _r(np.where(known, values, np.nan), drift_off_grid, group),
            "found": _share_found(first, drift, group),
            "unstable": _auroc(first, unstable, group),
            "outside": _auroc(first, outside, group),
            "wrong": _auroc(first, wrong, group),
        }
    return found


def _r(signal: Floats, drift: Floats, group: NDArray[np.object_] | None) -> dict[str, float]:
    r = statistics.pearson(signal, drift, group=group)
    return {"value": r.r, "low": r.low, "high": r.high}


def _share_found(signal: Floats, drift: Floats, group: NDArray[np.object_] | None) -> dict[str, Any]:
    """By group, or by image with Wilson's interval, because a bootstrap of no finds is [0, 0]; ties give fractions, which are rounded."""
    if group is not None:
        return asdict(over_seeds([Pair(signal, drift, group)], IN_TENTH))
    share, n = statistics.capture(signal, drift), len(drift)
    worst = max(1, round(0.1 * n))
    return asdict(statistics.proportion(round(worst * share), worst)) | {"n": n}


def _auroc(signal: Floats, positive: Floats, group: NDArray[np.object_] | None) -> dict[str, Any]:
    return asdict(statistics.bootstrap(statistics.auroc, signal, positive, group=group))


def table(figures: dict[str, Any], question: str) -> list[str]:
    """A table of one question: networks down, signals across; correlations with every number of views, the rest with the most."""
    several = question in CORRELATIONS
    heads = ["network", *(["views"] if several else []), *NAMES.values()]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for network, of in figures.items():
        most = max(of["views"], key=int)
        for views, found in of["views"].items():
            if views != most and not several:
                continue
            cells = [_cell(found["signals"][signal].get(question, UNKNOWN), question) for signal in NAMES]
            if any(cells):
                lines.append("| " + " | ".join([network, *([views] if several else []), *cells]) + " |")
    return lines


def _cell(of: dict[str, float], question: str) -> str:
    numbers = [of[name] for name in ("value", "low", "high")]
    if not np.isfinite(numbers[0]):
        return ""
    digits = 2 if question == "found" else 3
    value, low, high = (f"{v:.{digits}f}".replace("0.", ".") for v in numbers)
    return f"{value} [{low}, {high}]"


def promises(figures: dict[str, Any]) -> list[str]:
    """What we promise, and what was measured."""
    lines = ["| promised | measured | |", "|---|---|---|"]
    for network, views, signal, question, least in PROMISES:
        of = figures.get(network, {"views": {}})["views"].get(str(views))
        if of is not None:
            value = of["signals"][signal][question]["value"]
            promised = (
                f"{network}, {views} views, {NAMES[signal]}, {QUESTIONS[question]}: at least {least:.2f}"
            )
            lines.append(f"| {promised} | {value:.3f} | {'holds' if value >= least else '**fails**'} |")
    return lines


def section(figures: dict[str, Any]) -> str:
    """All of it in Markdown."""
    parts = ["## Which signal finds which maps", "", __doc__.split("\n\n")[2].strip(), ""]
    for network, of in figures.items():
        most = of["views"][max(of["views"], key=int)]
        known = [f"mean Eq {of['mean_eq']:.3f}", f"flat maps: {most['flat']}"]
        known += [f"of the others {100 * most['unstable']:.0f} % unstable (Eq < .5)"]
        known += [
            f"{100 * most[name]:.0f} % {words}"
            for name, words in (("outside", "with the maximum outside every box"), ("wrong", "wrong"))
            if np.isfinite(most[name])
        ]
        parts.append(f"- {network}: {of['images']:,} images, {', '.join(known)}")
    parts.append("")
    for question, title in QUESTIONS.items():
        parts += [f"### {title[0].upper()}{title[1:]}", "", *table(figures, question), ""]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", help="NAME=MODEL,WEIGHTS,DATA[,SPLIT[,COLUMN OF GROUPS]]")
    parser.add_argument("--views", type=int, nargs="+", default=[18, 6])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, help="a class-spread sample of the images")
    parser.add_argument("--figures", type=Path, help="figures are kept here")
    parser.add_argument("--page", type=Path, help="write the section into this page, between its marks")
    given = parser.parse_args()
    kept = given.figures is not None and given.figures.is_file()
    figures: dict[str, Any] = json.loads(given.figures.read_text()) if kept else {}
    for network in given.networks:
        name, spec = network.split("=", 1)
        if name not in figures:
            figures[name] = measure(spec, tuple(given.views), given.device, given.n)
            if given.figures:
                given.figures.write_text(json.dumps(figures, indent=1))
    text = section(figures)
    print("\n".join([text, *promises(figures)]))
    if given.page:
        before, rest = given.page.read_text().split(BEGIN)
        given.page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
