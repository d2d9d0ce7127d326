"""One explained picture on disk: overlay, PEUM and view strip as PNGs, and the facts as JSON beside them."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from equicam.report.overlay import Picture, heat, overlay, panel

A_ROW = 9  # views in a row of the strip
MOST_SPREAD = 0.5  # the largest standard deviation values in [0, 1] can have


@dataclass(frozen=True)
class View:
    """One turned view: what the model saw and where it looked."""

    degrees: float
    picture: Picture
    plane: Float[np.ndarray, "h w"]
    prob: float
    flipped: bool
    kept: bool


@dataclass(frozen=True)
class Explained:
    """One picture's explanation, ready to be drawn; `facts` is what the JSON says."""

    picture: Picture
    map: Float[np.ndarray, "H W"]
    peum: Float[np.ndarray, "H W"]
    views: tuple[View, ...]
    title: str
    facts: dict[str, Any]


def write(explained: Explained, folder: Path, stem: str) -> None:
    """STEM.overlay.png, STEM.views.png, STEM.json, and STEM.peum.png where there are views to disagree."""
    names = {"overlay": f"{stem}.overlay.png", "views": f"{stem}.views.png"}
    both = [
        ("picture", explained.picture),
        (explained.facts["method"], overlay(explained.picture, explained.map)),
    ]
    panel([both], folder / names["overlay"], title=explained.title, inches=3)
    if len(explained.views) > 1:
        names["peum"] = f"{stem}.peum.png"
        # one scale for every picture, so that two can be compared by eye
        spread = heat(np.sqrt(explained.peum) / MOST_SPREAD)
        caption = f"standard deviation of views, 0 to {MOST_SPREAD}"
        panel(
            [[("picture", explained.picture), (caption, spread)]],
            folder / names["peum"],
            title=explained.title,
            inches=3,
        )
    strip = [
        (_caption(v), overlay(v.picture, _stretched(v.plane, (v.picture.shape[0], v.picture.shape[1]))))
        for v in explained.views
    ]
    rows = [strip[i : i + A_ROW] for i in range(0, len(strip), A_ROW)]
    panel(rows, folder / names["views"], title=f"each view alone: {explained.title}", inches=1.7)
    facts = explained.facts | {"files": names}
    (folder / f"{stem}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=True) + "\n")


def safe_stem(path: str, taken: set[str]) -> str:
    """A file name of our own for a path of anybody's: plain letters, short, and in no case used yet."""
    own = Path(path).stem
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", own).strip("._-")[:80] or "picture"
    digest = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()
    tries = (
        plain if n == 0 and plain == own else f"{plain}-{digest[:8]}{f'-{n}' if n > 1 else ''}"
        for n in range(len(taken) + 3)
    )
    stem = next(s for s in tries if s.lower() not in taken)
    taken.add(stem.lower())
    return stem


def _caption(view: View) -> str:
    mark = "\nother class" if view.flipped else "" if view.kept else "\nleft out"
    return f"{view.degrees:g}°, p = {view.prob:.2f}{mark}"


def _stretched(plane: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Float[np.ndarray, "H W"]:
    """A plane at the picture's size, from 0 to 1 of its own range."""
    large = np.asarray(
        Image.fromarray(plane.astype(np.float32)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    )
    span = float(large.max() - large.min())
    return (large - large.min()) / span if span > 0 else np.zeros_like(large)
