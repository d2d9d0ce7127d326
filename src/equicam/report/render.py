"""A run's arrays as small pictures in a page: what the model saw, maps over it, and views turned back."""

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image
from scipy import ndimage

from equicam.auditing.stored_maps import StoredMaps
from equicam.data.digests import file_digest
from equicam.data.items import Item, open_item, prefetch
from equicam.data.remote import as_path, file_stat, is_url
from equicam.errors import EquicamError
from equicam.report.explanation_files import MOST_SPREAD
from equicam.report.overlay import Picture, overlay

SIDE = 224  # the longer side of a picture in the page
TILE = 96  # of one view in a strip
MOST_VIEWS = 24  # in a strip
PAPER = 255
RING = (143, 59, 0)  # around a view whose prediction flips; dark in grey too
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


def pictured(
    row: Mapping[str, Any], arrays: StoredMaps | None, angles: Sequence[float], *, fetch: bool = False
) -> Pictures:
    """Draw one picture's row and maps."""
    grid = (1, 1) if arrays is None else (arrays.map.shape[0], arrays.map.shape[1])
    size, small = fitted(grid, SIDE), fitted(grid, TILE)
    photo = photograph(row, size, fetch=fetch)
    seen, missing = (None, photo) if isinstance(photo, str) else (inline(photo), None)
    if arrays is None:
        return Pictures(seen, missing, None, None, None, False, ())
    under, tile = ground(photo, size), ground(photo, small)
    fused = stretched(arrays.map, size)
    alone = next((p for a, p in zip(angles, arrays.view_maps, strict=False) if a % 360 == 0), None)
    nothing = [None] * len(angles)
    views = list(
        zip(
            angles,
            arrays.view_maps,
            row["view_confidence"] or nothing,
            row["view_top1"] or nothing,
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
                inline(
                    view_tile(tile, plane, degrees, size=small, ringed=top1 not in (None, row["target"])),
                    quality=75,
                ),
            )
            for degrees, plane, prob, top1 in strip
        ),
    )


def fitted(grid: Size, side: int) -> Size:
    """The size in the proportions of the grid, which are those of the model's input."""
    longer = max(grid)
    return max(1, round(side * grid[0] / longer)), max(1, round(side * grid[1] / longer))


def photograph(row: Mapping[str, Any], size: Size, *, fetch: bool = False) -> Picture | str:
    """What the model saw of the file, or why it cannot be shown; never another picture than the one explained.

    A URL in a run is asked for only where the caller lets it (`fetch`): a run may come from anybody.
    """
    if is_url(row["path"]) and not fetch:
        return "The picture is at a URL; --source with where it is lets it be fetched."
    try:
        path = as_path(row["path"] or "")
        if not path.is_file():
            return "The file is no longer where it was when it was explained."
        if file_stat(path).bytes != row["bytes"]:
            return "The file has changed since it was explained, so it is not shown."
        item = prefetch(Item(row["id"], path, index=row.get("index")))
        path, picture = item.path, open_item(item)
    except (EquicamError, OSError, ValueError, MemoryError, RuntimeError):
        return "The file can no longer be read as a picture."
    pixels = None if item.index is None else picture.tobytes()
    digest = file_digest(path) if pixels is None else hashlib.sha256(pixels).hexdigest()
    if digest != row["sha256"]:
        return "The file has changed since it was explained, so it is not shown."
    return _cropped(picture, row["input_box"], size)


def _cropped(picture: Image.Image, frame: Sequence[Any] | None, size: Size) -> Picture | str:
    """The frame of the picture at this size; black where it reaches beyond, as padding does."""
    box = [0.0, 0.0, *map(float, picture.size)] if frame is None else list(frame)
    if len(box) != 4 or not all(isinstance(v, float) and math.isfinite(v) for v in box):
        return "The part of it that the model saw was not recorded."
    spans = [
        _span(box[i], box[i + 2], of=picture.size[i], onto=length)
        for i, length in enumerate((size[1], size[0]))
    ]
    if None in spans:
        return "The part of it that the model saw does not lie in it."
    ((x0, x1), (left, right)), ((y0, y1), (top, bottom)) = (span for span in spans if span)
    seen = picture.resize(
        (right - left, bottom - top), Image.Resampling.BICUBIC, box=(x0, y0, x1, y1), reducing_gap=3
    )
    canvas = Image.new("RGB", (size[1], size[0]))
    canvas.paste(seen, (left, top))
    return np.asarray(canvas)


def _span(
    low: float, high: float, *, of: int, onto: int
) -> tuple[tuple[float, float], tuple[int, int]] | None:
    """The part of low … high that lies in 0 … of, and where it comes to lie in 0 … onto; None: it has no pixel."""
    near = 0.02 * of  # a frame is measured, not known: what misses the border by a little ends at it
    low = 0.0 if -near <= low < 0 else low
    high = float(of) if of < high <= of + near else high
    inside = max(low, 0.0), min(high, float(of))
    if not inside[0] < inside[1]:
        return None
    first, last = (round((v - low) / (high - low) * onto) for v in inside)
    return (inside, (first, last)) if first < last else None


def ground(photo: Picture | str, size: Size) -> UInt8[np.ndarray, "h w 3"]:
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
    under: Picture,
    plane: Float[np.ndarray, "h w"],
    degrees: int | float,
    *,
    size: Size,
    ringed: bool = False,
) -> Picture:
    """One view's map turned back over the picture, inside the disc that every view has seen; paper outside."""
    values = np.clip(turned_back(stretched(plane, size), degrees), 0, 1)
    drawn: Float[np.ndarray, "H W 3"] = overlay(under, values).astype(np.float64)
    if ringed:
        drawn = _laid(drawn, np.full_like(drawn, RING), _disc(size, inset=3))
    return np.asarray(_laid(drawn, np.full_like(drawn, PAPER), _disc(size)).round().astype(np.uint8))


def _laid(
    over: Float[np.ndarray, "H W 3"], under: Float[np.ndarray, "H W 3"], share: Float[np.ndarray, "H W"]
) -> Float[np.ndarray, "H W 3"]:
    return np.asarray(share[..., None] * over + (1 - share[..., None]) * under)


def _disc(size: Size, *, inset: int = 0) -> Float[np.ndarray, "H W"]:
    """1 within half the shorter side of the centre, 0 outside, soft over the pixel at its edge."""
    y = np.arange(size[0])[:, None] - (size[0] - 1) / 2
    x = np.arange(size[1])[None, :] - (size[1] - 1) / 2
    return np.asarray(np.clip(min(size) / 2 - inset - np.hypot(x, y), 0.0, 1.0))


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
