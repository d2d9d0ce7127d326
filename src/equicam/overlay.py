"""Maps as colours over images, for people to look at."""

from functools import cache

import numpy as np
from jaxtyping import Float, UInt8
from matplotlib import colormaps
from PIL import Image

RgbImage = UInt8[np.ndarray, "H W 3"]
COLOURMAP = "inferno"  # perceptually uniform, also in grey and to the colour-blind
MAX_DEVIATION = 0.5  # the largest standard deviation of values in [0, 1]


def heat(values: Float[np.ndarray, "H W"]) -> RgbImage:
    """Values in [0, 1] as colours, interpolated between those of the colour map: no steps."""
    table, known = _colour_table(), np.nan_to_num(values)
    places = np.linspace(0, 1, len(table))
    return np.stack([np.interp(known, places, one) for one in table.T], axis=-1).round().astype(np.uint8)


@cache
def _colour_table() -> Float[np.ndarray, "n 3"]:
    return np.asarray(colormaps[COLOURMAP](np.linspace(0, 1, 256))[:, :3] * 255)


def opacity(values: Float[np.ndarray, "H W"]) -> Float[np.ndarray, "H W"]:
    """How opaque a map's colours are: none at 0 and all at 1, rising steadily, so that no edge shows where a map begins."""
    return np.asarray(1 - (1 - np.clip(values, 0, 1)) ** 1.6)


def overlay(image: RgbImage, values: Float[np.ndarray, "H W"]) -> RgbImage:
    """The map over the image; the image is greyed, so that colour means saliency, and shows where the map is low."""
    grey = image @ np.array([0.299, 0.587, 0.114])
    background = 0.35 * image + 0.65 * grey[..., None]
    alpha = 0.75 * opacity(values)[..., None]
    return np.asarray((1 - alpha) * background + alpha * heat(values)).round().astype(np.uint8)


def enlarge(plane: Float[np.ndarray, "h w"], size: tuple[int, int]) -> Float[np.ndarray, "H W"]:
    """Bilinear to a height and width, pixel areas aligned, as the chain upsamples."""
    finite = np.nan_to_num(plane.astype(np.float32), posinf=0.0, neginf=0.0)
    return np.asarray(Image.fromarray(finite).resize((size[1], size[0]), Image.Resampling.BILINEAR))


def stretch(
    plane: Float[np.ndarray, "h w"], size: tuple[int, int], *, flat_below: float = 0.0
) -> Float[np.ndarray, "H W"]:
    """A plane enlarged and scaled to 0 … 1; all 0 where its range is at most `flat_below` of its largest magnitude."""
    large = enlarge(plane, size)
    low, high = float(large.min()), float(large.max())
    flat = high - low <= flat_below * max(abs(low), abs(high))
    return np.zeros_like(large) if flat else (large - low) / (high - low)
