"""Maps drawn over pictures, and panels of them, for people to look at."""

from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Picture = UInt8[np.ndarray, "H W 3"]
SCALE = "inferno"  # even steps look even, also to the colour-blind and in grey


def heat(values: Float[np.ndarray, "H W"]) -> Picture:
    """Values in [0, 1] as colours."""
    return np.asarray(colormaps[SCALE](values)[..., :3] * 255).round().astype(np.uint8)


def overlay(picture: Picture, values: Float[np.ndarray, "H W"], *, strength: float = 0.75) -> Picture:
    """The map over the picture: where it is low the picture stays itself, greyed so that colour means saliency."""
    grey = picture @ np.array([0.299, 0.587, 0.114])
    ground = 0.35 * picture + 0.65 * grey[..., None]
    alpha = strength * np.clip(values, 0, 1)[..., None] ** 0.7
    blended: np.ndarray = (1 - alpha) * ground + alpha * heat(values)
    return blended.round().astype(np.uint8)


def panel(
    rows: list[list[tuple[str, Picture]]], path: Path, *, title: str = "", inches: int | float = 2.2
) -> None:
    """Titled pictures in rows, written as one PNG."""
    columns = max(map(len, rows))
    figure = Figure(figsize=(inches * columns, (inches + 0.3) * len(rows)), layout="compressed")
    FigureCanvasAgg(figure)
    cells = figure.subplots(len(rows), columns, squeeze=False)
    for cell in cells.flat:
        cell.axis("off")
    for row, entries in zip(cells, rows, strict=True):
        for cell, (name, picture) in zip(row, entries, strict=False):
            cell.imshow(picture, interpolation="nearest")
            cell.set_title(name, fontsize=9, parse_math=False)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.08)
