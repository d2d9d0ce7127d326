"""Explain image files into a folder: overlay, PEUM and view strip as PNGs, and a JSON file next to them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from equicam import __version__
from equicam.core.transforms import presented_index
from equicam.core.views import Window, crop_centre
from equicam.drawing.explanation_files import ExplainedImage, ViewImage, safe_stem, write_files
from equicam.errors import EquicamError
from equicam.explain import explain
from equicam.explanation import Explanation, describe_images
from equicam.images.items import open_image
from equicam.models.images import preprocess_image, stack_images, to_display_images
from equicam.models.surround import preprocess_surround, stack_surrounds
from equicam.readers.model import Model
from equicam.readers.names import output_name
from equicam.reasons import describe

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
