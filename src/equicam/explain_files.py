"""Explain image files into a folder: overlay, PEUM and view strip as PNGs, and a JSON file next to them."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
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
from equicam.overlay import MAX_DEVIATION, heat, overlay, panel, stretch
from equicam.readers.model import Model
from equicam.readers.names import output_name
from equicam.reasons import describe

VIEWS_PER_ROW = 9
LONGEST_IN_LINE = 8  # letters of a label before the probability
IMAGES_PER_BATCH = 8


@dataclass(frozen=True)
class ExplainedFile:
    """One image file: the stem and facts of the files written for it, or the error that prevented them."""

    path: Path
    stem: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    error: EquicamError | None = None


def explain_files(
    model: Model,
    paths: Sequence[Path],
    out: Path,
    *,
    method: str = "equigrad-cam",
    context: str = "none",
    voi: tuple[float, float] | None = None,
    **options: Any,
) -> Iterator[ExplainedFile]:
    """Explain images and write each to `out`; a file that cannot be opened yields its error. Options as in `explain`.

    `voi` is the window (centre and width) of DICOM images, instead of their own.
    """
    # a file we write must not replace an image we read
    taken = {
        p.name.split(".")[0].lower()
        for p in paths
        if p.resolve().parent == out.resolve() and p.name.count(".") > 1
    }
    out.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(paths), IMAGES_PER_BATCH):
        opened: list[tuple[Path, Any]] = []
        load = preprocess_image if context == "none" else preprocess_surround
        for path in paths[start : start + IMAGES_PER_BATCH]:
            try:
                decoded = open_image(path, voi)
                opened.append((path, load(model, decoded)))
            except EquicamError as error:
                yield ExplainedFile(path, error=error)
        if not opened:
            continue
        loaded = [one for _, one in opened]
        if context == "none":
            x, window = stack_images(loaded), None
            explanation = explain(model, x, method=method, **options)
        else:
            x, size = stack_surrounds(loaded)
            window = Window(size)
            explanation = explain(model, loaded, method=method, context=context, **options)
        for i, (path, _) in enumerate(opened):
            stem, one = safe_stem(str(path), taken), explanation[i]
            facts = {"image": str(path), "method": method} | _facts(model, one)
            facts["files"] = _draw_files(model, x[i : i + 1], one, facts, window, out / stem)
            (out / f"{stem}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=True) + "\n")
            yield ExplainedFile(path, stem, facts)


def _facts(model: Model, one: Explanation) -> dict[str, Any]:
    """What the JSON file says of one image."""
    target, steadiness = int(one.target), one.steadiness[0]
    name = model.classes[target] if model.classes else str(target)
    if not model.has_probabilities:
        name = output_name(target, model.classes, model.task, is_only=one.is_only_output)
    return {
        "model": model.name,
        "layer": model.layer,
        "target": target,
        "class": name,
        "confidence": _number_or_none(float(one.confidence)),
        "output": None if one.output is None else _number_or_none(float(one.output)),
        "views": list(one.views.labels),
        "view_confidence": list(map(_number_or_none, one.view_confidence[0].tolist())),
        "view_flips": one.view_flips[0].tolist(),
        "view_kept": one.view_kept[0].tolist(),
        "peum_score": float(one.peum_score) if one.has_peum[0] else None,
        "stability": _number_or_none(float(one.stability)),
        "steadiness": steadiness.word,
        "steadiness_reason": describe(steadiness.reason),
        "flags": sorted(one.flags[0]),
        "equicam": __version__,
    }


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
    strip = [
        (_caption(*of_view), overlay(shown, values))
        for shown, values, *of_view in zip(
            inputs,
            maps,
            views.labels,
            one.view_confidence[0].tolist(),
            facts["view_flips"],
            facts["view_kept"],
            strict=True,
        )
    ]
    figures["views"] = [strip[i : i + VIEWS_PER_ROW] for i in range(0, len(strip), VIEWS_PER_ROW)]
    if several:
        # one scale for every image, so that two can be compared by eye
        deviation = heat(np.sqrt(one.peum[0].cpu().numpy()) / MAX_DEVIATION)
        caption = f"standard deviation of views, 0 to {MAX_DEVIATION}"
        figures["peum"] = [[("image", image), (caption, deviation)]]
    files = {kind: path.with_name(f"{path.name}.{kind}.png") for kind in figures}
    for kind, rows in figures.items():
        alone = kind == "views"
        text = f"each view alone: {title}" if alone else title
        panel(rows, files[kind], title=text, inches=1.7 if alone else 3)
    return {kind: file.name for kind, file in files.items()}


def _caption(label: str, confidence: float, flips: bool, kept: bool) -> str:
    remark = "\nother class" if flips else "" if kept else "\nleft out"
    separator = ", " if len(label) <= LONGEST_IN_LINE else "\n"
    p = "" if math.isnan(confidence) else f"{separator}p = {confidence:.2f}"  # a value has none
    return f"{label}{p}{remark}"


def _number_or_none(value: float) -> float | None:
    """JSON has no NaN: stability is undefined for one view, confidence for a value."""
    return None if math.isnan(value) else value


def safe_stem(path: str, taken: set[str]) -> str:
    """A short plain file stem for any path, unlike all in `taken` whatever the case of letters; it joins them."""
    own = Path(path).stem
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", own).strip("._-")[:80] or "image"
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
    tries = (
        plain if n == 0 and plain == own else f"{plain}-{digest[:8]}{f'-{n}' if n > 1 else ''}"
        for n in range(len(taken) + 3)
    )
    stem = next(s for s in tries if s.lower() not in taken)
    taken.add(stem.lower())
    return stem
