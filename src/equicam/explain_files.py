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
from equicam.models.images import preprocess_image, stack_images, to_display_images
from equicam.models.surround import preprocess_surround, stack_surrounds
from equicam.overlay import MAX_DEVIATION, RgbImage, heat, overlay, panel, stretch
from equicam.readers.model import Model
from equicam.readers.names import output_name
from equicam.reasons import describe

VIEWS_PER_ROW = 9
LONGEST_IN_LINE = 8  # letters of a label before the probability


@dataclass(frozen=True)
class ViewImage:
    """One view: the model's input and its map."""

    label: str
    image: RgbImage
    map: Float[np.ndarray, "h w"]
    confidence: float
    flips: bool
    kept: bool


@dataclass(frozen=True)
class ExplainedImage:
    """One image's explanation as arrays; `facts` becomes the JSON file."""

    image: RgbImage
    map: Float[np.ndarray, "H W"]
    peum: Float[np.ndarray, "H W"]
    views: tuple[ViewImage, ...]
    presented: int | None  # the view that is the image as given
    title: str
    facts: dict[str, Any]


def write_files(explained: ExplainedImage, folder: Path, stem: str) -> dict[str, Any]:
    """STEM.overlay.png, STEM.views.png, STEM.json, and STEM.peum.png where there is more than one view."""
    names = {"overlay": f"{stem}.overlay.png", "views": f"{stem}.views.png"}
    image, title = ("image", explained.image), explained.title
    fused = (explained.facts["method"], overlay(explained.image, explained.map))
    own = [] if explained.presented is None or len(explained.views) < 2 else [_own_map(explained)]
    panel([[image, *own, fused]], folder / names["overlay"], title=title, inches=3)
    if len(explained.views) > 1:
        names["peum"] = f"{stem}.peum.png"
        # one scale for every image, so that two can be compared by eye
        deviation = heat(np.sqrt(explained.peum) / MAX_DEVIATION)
        caption = f"standard deviation of views, 0 to {MAX_DEVIATION}"
        panel([[image, (caption, deviation)]], folder / names["peum"], title=title, inches=3)
    strip = [
        (_caption(view), overlay(view.image, stretch(view.map, (view.image.shape[0], view.image.shape[1]))))
        for view in explained.views
    ]
    rows = [strip[i : i + VIEWS_PER_ROW] for i in range(0, len(strip), VIEWS_PER_ROW)]
    panel(rows, folder / names["views"], title=f"each view alone: {title}", inches=1.7)
    facts = explained.facts | {"files": names}
    (folder / f"{stem}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=True) + "\n")
    return facts


def _own_map(explained: ExplainedImage) -> tuple[str, RgbImage]:
    """The map of the presented view alone, which the word in the title is about."""
    assert explained.presented is not None  # noqa: S101  # the caller checked
    size = (explained.image.shape[0], explained.image.shape[1])
    own = stretch(explained.views[explained.presented].map, size)
    return f"the network's own map: {explained.facts['steadiness']}", overlay(explained.image, own)


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


def _caption(view: ViewImage) -> str:
    remark = "\nother class" if view.flips else "" if view.kept else "\nleft out"
    separator = ", " if len(view.label) <= LONGEST_IN_LINE else "\n"
    p = "" if math.isnan(view.confidence) else f"{separator}p = {view.confidence:.2f}"  # a value has none
    return f"{view.label}{p}{remark}"


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
            facts = {"image": str(path), "method": method}
            image = explained_image(model, x, explanation, i, facts, window)
            stem = safe_stem(str(path), taken)
            yield ExplainedFile(path, stem, write_files(image, out, stem))


def explained_image(
    model: Model,
    x: Float[Tensor, "b c H W"],
    explanation: Explanation,
    i: int,
    facts: dict[str, Any],
    window: Window | None = None,
) -> ExplainedImage:
    """Image `i` of an explanation as arrays and plain values; `facts` come first in its JSON."""
    shown = explanation.views
    inputs = to_display_images(model, shown.act(x[i : i + 1].float(), window)[:, 0])
    confidences = explanation.view_confidence[i].tolist()
    flips, kept = explanation.view_flips[i].tolist(), explanation.view_kept[i].tolist()
    maps = explanation.view_maps[i].cpu().numpy()
    views = tuple(map(ViewImage, shown.labels, inputs, maps, confidences, flips, kept))
    target, confidence = int(explanation.target[i]), float(explanation.confidence[i])
    name = model.classes[target] if model.classes else str(target)
    if not model.has_probabilities:
        name = output_name(target, model.classes, model.task, is_only=explanation.is_only_output)
    facts = facts | {
        "model": model.name,
        "layer": model.layer,
        "target": target,
        "class": name,
        "confidence": _number_or_none(confidence),
        "output": None if explanation.output is None else _number_or_none(float(explanation.output[i])),
        "views": list(shown.labels),
        "view_confidence": list(map(_number_or_none, confidences)),
        "view_flips": flips,
        "view_kept": kept,
        "peum_score": float(explanation.peum_score[i]) if explanation.has_peum[i] else None,
        "stability": _number_or_none(float(explanation.stability[i])),
        "steadiness": explanation.steadiness[i].word,
        "steadiness_reason": describe(explanation.steadiness[i].reason),
        "flags": sorted(explanation.flags[i]),
        "equicam": __version__,
    }
    presented = x[i : i + 1] if window is None else crop_centre(x[i : i + 1], window.size)
    image = to_display_images(model, presented)[0]
    title = describe_images(explanation[i])[0][0]
    if len(shown) == 1:  # of several, the word stands above the network's own map
        title += f", {facts['steadiness']}"
    if facts["peum_score"] is not None:
        title += f"\nPEUM (per-image explanation uncertainty) {facts['peum_score']:.4f}"
    fused, peum = explanation.map[i].cpu().numpy(), explanation.peum[i].cpu().numpy()
    return ExplainedImage(image, fused, peum, views, presented_index(shown.transforms), title, facts)


def _number_or_none(value: float) -> float | None:
    """JSON has no NaN: stability is undefined for one view, confidence for a value."""
    return None if math.isnan(value) else value
