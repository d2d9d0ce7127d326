"""Explain image files into a folder: overlay, PEUM and view strip as PNGs, and a JSON file next to them."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from equicam import __version__
from equicam.core.transforms import presented_index
from equicam.core.views import Window, crop_centre
from equicam.errors import EquicamError
from equicam.explain import explain
from equicam.explanation import Explanation, describe_images
from equicam.images.items import open_image
from equicam.models.images import denormalise, preprocess_image, stack_images
from equicam.models.surround import preprocess_surround, stack_surrounds
from equicam.overlay import MAX_DEVIATION, RgbImage, heat, overlay, stretch
from equicam.readers.model import Model
from equicam.readers.names import output_name
from equicam.reasons import describe
from equicam.recipe import Recipe
from equicam.shards import json_ready

VIEWS_PER_ROW = 9
LONGEST_IN_LINE = 8  # letters of a label before the probability
IMAGES_PER_BATCH = 8


@dataclass(frozen=True)
class ExplainedFile:
    """One image file: the facts written for it, or the error that prevented them."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    error: EquicamError | None = None


def explain_files(
    model: Model,
    paths: Sequence[Path],
    out: Path,
    *,
    recipe: Recipe,
    target: int | None = None,
    voi: tuple[float, float] | None = None,
) -> Iterator[ExplainedFile]:
    """Explain images and write each to `out`; a file that cannot be opened yields its error.

    `voi` is the window (centre and width) of DICOM images, instead of their own.
    """
    # a file we write must not replace an image we read
    inside = [path.name for path in paths if path.resolve().parent == out.resolve()]
    taken = {name.split(".")[0].lower() for name in inside if name.count(".") > 1}
    out.mkdir(parents=True, exist_ok=True)
    load = preprocess_surround if recipe.context == "auto" else preprocess_image
    for start in range(0, len(paths), IMAGES_PER_BATCH):
        opened: list[tuple[Path, Any]] = []
        for path in paths[start : start + IMAGES_PER_BATCH]:
            try:
                opened.append((path, load(model, open_image(path, voi))))
            except EquicamError as error:
                yield ExplainedFile(path, error=error)
        if not opened:
            continue
        loaded = [one for _, one in opened]
        if recipe.context == "auto":
            x, size = stack_surrounds(loaded)
            window = Window(size)
        else:
            x, window = stack_images(loaded), None
        explanation = explain(model, x if window is None else loaded, recipe=recipe, target=target)
        for i, (path, _) in enumerate(opened):
            stem, one = safe_stem(str(path), taken), explanation[i]
            facts = {"image": str(path), "method": recipe.method} | _facts(model, one)
            facts["files"] = _draw_files(model, x[i : i + 1], one, facts, window, out / stem)
            (out / f"{stem}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=True) + "\n")
            yield ExplainedFile(path, facts)


def _facts(model: Model, one: Explanation) -> dict[str, Any]:
    """What the JSON file says of one image."""
    target, steadiness = int(one.target), one.steadiness[0]
    name = model.classes[target] if model.classes else str(target)
    if not model.has_probabilities:
        name = output_name(target, model.classes, model.task, is_only=one.is_only_output)
    found = {
        "model": model.name,
        "layer": model.layer,
        "target": target,
        "class": name,
        "confidence": float(one.confidence),
        "output": None if one.output is None else float(one.output),
        "views": list(one.views.labels),
        "view_confidence": one.view_confidence[0].tolist(),
        "view_flips": one.view_flips[0].tolist(),
        "view_kept": one.view_kept[0].tolist(),
        "peum_score": float(one.peum_score) if one.has_peum[0] else None,
        "stability": float(one.stability),
        "steadiness": steadiness.word,
        "steadiness_reason": describe(steadiness.reason),
        "flags": sorted(one.flags[0]),
        "equicam": __version__,
    }
    ready: dict[str, Any] = json_ready(found)
    return ready


def _draw_files(
    model: Model,
    x: Float[Tensor, "one c H W"],
    one: Explanation,
    facts: dict[str, Any],
    window: Window | None,
    path: Path,
) -> dict[str, str]:
    """PATH.overlay.png, PATH.views.png, and PATH.peum.png where there is more than one view; their names."""
    views, several = one.views, len(one.views) > 1
    presented = x if window is None else crop_centre(x, window.size)
    image = denormalise(presented, model.mean, model.std)[0]
    inputs = denormalise(views.act(x.float(), window)[:, 0], model.mean, model.std)
    size = (image.shape[0], image.shape[1])
    maps = [stretch(plane, size) for plane in one.view_maps[0].cpu().numpy()]
    title = describe_images(one)[0][0]
    if not several:  # of several, the word stands above the network's own map
        title += f", {facts['steadiness']}"
    if facts["peum_score"] is not None:
        title += f"\nPEUM (per-image explanation uncertainty) {facts['peum_score']:.4f}"
    figures = {"overlay": [[("image", image), (facts["method"], overlay(image, one.map[0].cpu().numpy()))]]}
    at = presented_index(views.transforms)
    if at is not None and several:
        own = (f"the network's own map: {facts['steadiness']}", overlay(image, maps[at]))
        figures["overlay"][0].insert(1, own)
    captions = map(_caption, views.labels, facts["view_confidence"], facts["view_flips"], facts["view_kept"])
    strip = [
        (caption, overlay(shown, values))
        for caption, shown, values in zip(captions, inputs, maps, strict=True)
    ]
    figures["views"] = [strip[i : i + VIEWS_PER_ROW] for i in range(0, len(strip), VIEWS_PER_ROW)]
    if several:
        # one scale for every image, so that two can be compared by eye
        deviation = heat(np.sqrt(one.peum[0].cpu().numpy()) / MAX_DEVIATION)
        caption = f"standard deviation of views, 0 to {MAX_DEVIATION}"
        figures["peum"] = [[("image", image), (caption, deviation)]]
    files = {kind: f"{path.name}.{kind}.png" for kind in figures}
    for kind, rows in figures.items():
        text, inches = (f"each view alone: {title}", 1.7) if kind == "views" else (title, 3.0)
        _draw_panel(rows, path.with_name(files[kind]), text, inches)
    return files


def _draw_panel(rows: list[list[tuple[str, RgbImage]]], path: Path, title: str, inches: float) -> None:
    """Titled images in rows, written as one PNG."""
    columns = max(map(len, rows))
    figure = Figure(figsize=(inches * columns, (inches + 0.3) * len(rows)), layout="compressed")
    FigureCanvasAgg(figure)
    cells = figure.subplots(len(rows), columns, squeeze=False)
    for cell in cells.flat:
        cell.axis("off")
    for row, entries in zip(cells, rows, strict=True):
        for cell, (name, image) in zip(row, entries, strict=False):
            cell.imshow(image, interpolation="nearest")
            cell.set_title(name, fontsize=9, parse_math=False)
    figure.suptitle(title, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.08)


def _caption(label: str, confidence: float | None, flips: bool, kept: bool) -> str:
    remark = "\nother class" if flips else "" if kept else "\nleft out"
    separator = ", " if len(label) <= LONGEST_IN_LINE else "\n"
    p = "" if confidence is None else f"{separator}p = {confidence:.2f}"  # a value has none
    return f"{label}{p}{remark}"


def safe_stem(path: str, taken: set[str]) -> str:
    """A short plain file stem for any path, unlike all in `taken` whatever the case of letters; it joins them."""
    own = Path(path).stem
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", own).strip("._-")[:80] or "image"
    marked = f"{plain}-{hashlib.sha256(path.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
    tries = [*([plain] if plain == own else []), marked, *(f"{marked}-{n}" for n in range(2, len(taken) + 3))]
    stem = next(s for s in tries if s.lower() not in taken)
    taken.add(stem.lower())
    return stem
