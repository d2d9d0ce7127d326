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


def write(explained: Explained, folder: Path, stem: str) -> dict[str, str]:
    """STEM.overlay.png, STEM.peum.png, STEM.views.png and STEM.json; returns their names."""
    names = {kind: f"{stem}.{kind}.png" for kind in ("overlay", "peum", "views")}
    both = [("picture", explained.picture), ("map", overlay(explained.picture, explained.map))]
    panel([both], folder / names["overlay"], title=explained.title, inches=3)
    highest = float(explained.peum.max())
    spread = heat(explained.peum / highest if highest > 0 else explained.peum)
    uncertain = [("picture", explained.picture), (f"PEUM: variance of views, 0 to {highest:.3g}", spread)]
    panel([uncertain], folder / names["peum"], title=explained.title, inches=3)
    strip = [
        (_caption(v), overlay(v.picture, _stretched(v.plane, (v.picture.shape[0], v.picture.shape[1]))))
        for v in explained.views
    ]
    rows = [strip[i : i + A_ROW] for i in range(0, len(strip), A_ROW)]
    panel(rows, folder / names["views"], title=f"each view alone: {explained.title}", inches=1.7)
    facts = explained.facts | {"files": names}
    (folder / f"{stem}.json").write_text(json.dumps(facts, indent=2, ensure_ascii=True) + "\n")
    return names


def safe_stem(path: str, taken: set[str]) -> str:
    """A file name of our own for a path of anybody's: plain letters, short, and not used yet."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(path).stem).strip("._-")[:80] or "picture"
    if plain != Path(path).stem or plain in taken:
        plain = f"{plain}-{hashlib.sha256(str(path).encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
    taken.add(plain)
    return plain


def _caption(view: View) -> str:
    mark = ", other class" if view.flipped else "" if view.kept else ", left out"
    return f"{view.degrees:g}°, p = {view.prob:.2f}{mark}"


def _stretched(plane: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Float[np.ndarray, "H W"]:
    """A plane at the picture's size, from 0 to 1 of its own range."""
    large = np.asarray(
        Image.fromarray(plane.astype(np.float32)).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    )
    span = float(large.max() - large.min())
    return (large - large.min()) / span if span > 0 else np.zeros_like(large)
