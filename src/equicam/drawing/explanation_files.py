"""The files of one explained image: overlay, PEUM and view strip as PNGs, and the facts as JSON."""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from equicam.overlay import MAX_DEVIATION, RgbImage, heat, overlay, panel, stretch

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
