"""A run's arrays as small pictures in a page: what the model saw, maps over it, and views turned back."""

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image
from scipy import ndimage

from equicam.audit.store import Drawn, file_digest
from equicam.data.items import Item, open_item
from equicam.errors import EquicamError
from equicam.report.explained import MOST_SPREAD
from equicam.report.overlay import Picture, overlay

SIDE = 224  # the longer side of a picture in the page
TILE = 96  # of one view in a strip
MOST_VIEWS = 24  # in a strip
PAPER = 255
NO_PICTURE = 214  # the grey that maps lie on when their picture is not there
FLAT = 2 * float(np.finfo(np.float16).eps)  # spans below this share of the values are the store's rounding

Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class View:
    """One view in the strip: its map turned back, and what the model said there."""

    degrees: float
    prob: float | None
    turned_to: int | None  # the other class, where the prediction flips
    picture: str


@dataclass(frozen=True)
class Pictures:
    """All that is drawn of one picture, as data addresses."""

    photo: str | None
    missing: str | None  # why there is no photo
    single: str | None  # the presented view's own map; None: the views have no 0°
    fused: str | None  # None: the run holds no map
    spread: str | None  # None: one view has no spread
    blank: bool
    strip: tuple[View, ...]


def pictured(row: Mapping[str, Any], arrays: Drawn | None, angles: Sequence[float]) -> Pictures:
    """Draw one picture's row and maps."""
    grid = (1, 1) if arrays is None else (arrays.map.shape[0], arrays.map.shape[1])
    size, small = fitted(grid, SIDE), fitted(grid, TILE)
    photo = photograph(row, size)
    seen, missing = (None, photo) if isinstance(photo, str) else (inline(photo), None)
    if arrays is None:
        return Pictures(seen, missing, None, None, None, False, ())
    under, tile = ground(photo, size), ground(photo, small)
    fused = stretched(arrays.map, size)
    alone = next((p for a, p in zip(angles, arrays.planes, strict=False) if a % 360 == 0), None)
    nothing = [None] * len(angles)
    views = list(
        zip(
            angles,
            arrays.planes,
            row["prob_by_view"] or nothing,
            row["top1_by_view"] or nothing,
            strict=False,
        )
    )
    strip = views[:: -(-len(views) // MOST_VIEWS)] if len(views) > 1 else []
    return Pictures(
        photo=seen,
        missing=missing,
        single=None if alone is None else inline(overlay(under, stretched(alone, size))),
        fused=inline(overlay(under, fused)),
        spread=inline(overlay(under, deviation(arrays.peum, size))) if strip else None,
        blank=not fused.any(),
        strip=tuple(
            View(
                degrees,
                prob,
                None if top1 == row["target"] else top1,
                inline(view_tile(tile, plane, degrees, size=small), quality=75),
            )
            for degrees, plane, prob, top1 in strip
        ),
    )


def fitted(grid: Size, side: int) -> Size:
    """The size in the proportions of the grid, which are those of the model's input."""
    longer = max(grid)
    return max(1, round(side * grid[0] / longer)), max(1, round(side * grid[1] / longer))


def photograph(row: Mapping[str, Any], size: Size) -> Picture | str:
    """What the model saw of the file, or why it cannot be shown; never another picture than the one explained."""
    path = Path(row["path"] or "")
    item = Item(row["id"], path, index=row.get("index"))
    try:
        if not path.is_file():
            return "The file is no longer where it was when it was explained."
        if path.stat().st_size != row["bytes"]:
            return "The file has changed since it was explained, so it is not shown."
        picture = open_item(item)
    except (EquicamError, OSError, ValueError):
        return "The file can no longer be read as a picture."
    pixels = None if item.index is None else picture.tobytes()
    digest = file_digest(path) if pixels is None else hashlib.sha256(pixels).hexdigest()
    if digest != row["sha256"]:
        return "The file has changed since it was explained, so it is not shown."
    return _cropped(picture, row["frame"], size)


def _cropped(picture: Image.Image, frame: list[float] | None, size: Size) -> Picture | str:
    """The frame of the picture at this size; black where it reaches beyond, as padding does."""
    box = (0.0, 0.0, *map(float, picture.size)) if frame is None else tuple(map(float, frame))
    if len(box) != 4 or not all(map(math.isfinite, box)):
        return "The part of it that the model saw was not recorded."
    x0, y0, x1, y1 = box
    reach = 2 * max(picture.size)
    if not (-reach <= x0 < x1 <= 2 * reach and -reach <= y0 < y1 <= 2 * reach):
        return "The part of it that the model saw does not lie in it."
    left, top = math.floor(x0), math.floor(y0)
    whole = picture.crop((left, top, math.ceil(x1), math.ceil(y1)))
    inside = (x0 - left, y0 - top, x1 - left, y1 - top)
    return np.asarray(whole.resize((size[1], size[0]), Image.Resampling.BICUBIC, box=inside, reducing_gap=3))


def ground(photo: Picture | str, size: Size) -> Picture:
    """What maps are drawn over: the picture at this size, or plain grey where there is none to show."""
    if isinstance(photo, str):
        return np.full((*size, 3), NO_PICTURE, np.uint8)
    if photo.shape[:2] == size:
        return photo
    return np.asarray(Image.fromarray(photo).resize((size[1], size[0]), Image.Resampling.LANCZOS))


def enlarged(plane: Float[np.ndarray, "h w"], size: Size) -> Float[np.ndarray, "H W"]:
    """Bilinear to the picture's size, pixel areas aligned, as the chain does it."""
    finite = np.nan_to_num(plane.astype(np.float32), posinf=0.0, neginf=0.0)
    return np.asarray(Image.fromarray(finite).resize((size[1], size[0]), Image.Resampling.BILINEAR))


def stretched(plane: Float[np.ndarray, "h w"], size: Size) -> Float[np.ndarray, "H W"]:
    """A plane as a map: enlarged, then from 0 to 1 of its own range; 0 where it is flat up to the store's rounding."""
    large = enlarged(plane, size)
    low, high = float(large.min()), float(large.max())
    flat = high - low <= FLAT * max(abs(low), abs(high))
    return np.zeros_like(large) if flat else (large - low) / (high - low)


def deviation(peum: Float[np.ndarray, "h w"], size: Size) -> Float[np.ndarray, "H W"]:
    """Standard deviation of the views; 1 is the most that maps in [0, 1] can have, so two pictures compare by eye."""
    return np.asarray(np.clip(np.sqrt(np.maximum(enlarged(peum, size), 0)) / MOST_SPREAD, 0, 1))


def turned_back(values: Float[np.ndarray, "H W"], degrees: int | float) -> Float[np.ndarray, "H W"]:
    """A view's map in the presented frame: turned clockwise by the angle the view was turned by."""
    return np.asarray(ndimage.rotate(values, -degrees, reshape=False, order=1, mode="mirror"))


def view_tile(
    under: Picture, plane: Float[np.ndarray, "h w"], degrees: int | float, *, size: Size
) -> Picture:
    """One view's map turned back over the picture, inside the disc that every view has seen; paper outside."""
    drawn = overlay(under, np.clip(turned_back(stretched(plane, size), degrees), 0, 1))
    share = _disc(size)[..., None]
    return np.asarray((share * drawn + (1 - share) * PAPER).round().astype(np.uint8))


def _disc(size: Size) -> Float[np.ndarray, "H W"]:
    """1 within half the shorter side of the centre, 0 outside, soft over the pixel at its edge."""
    y = np.arange(size[0])[:, None] - (size[0] - 1) / 2
    x = np.arange(size[1])[None, :] - (size[1] - 1) / 2
    return np.asarray(np.clip(min(size) / 2 - np.hypot(x, y), 0.0, 1.0))


def scale_bar() -> Picture:
    """The colours from 0 to 1 as they look over a grey picture."""
    size = (16, 256)
    ramp = np.broadcast_to(np.linspace(0, 1, size[1]), size).copy()
    return overlay(ground("", size), ramp)


def inline(picture: Picture, *, quality: int = 80) -> str:
    """A picture as a JPEG in an address of its own."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=quality, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
