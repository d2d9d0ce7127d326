"""Images of one row of a run for a page: the model's input, maps over it, and the views' aligned maps."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from scipy import ndimage

from equicam import overlay as overlays
from equicam.core.transforms import Transform, inner_radius, presented_index
from equicam.images import limited
from equicam.images.files import as_path, file_stat, is_url
from equicam.images.items import Item, ItemContent, read_item
from equicam.overlay import MAX_DEVIATION, RgbImage, enlarge, overlay
from equicam.rasters.windows import show_original, show_window
from equicam.runs.manifest import Manifest
from equicam.runs.store import StoredMaps

IMAGE_PX = 224  # the longer side of an image in the page
TILE_PX = 96  # of one view in the strip
MAX_TILES = 24  # in a strip
MAX_ORIGINAL_PX = 2048  # the longer side of the original that a page can zoom into
PAPER = 255
RING = (143, 59, 0)  # around a view whose prediction flips; dark in grey too
OUTLINE, OUTLINE_EDGE = (255, 255, 255), (34, 31, 42)  # around a window: visible on light and on dark
UNREADABLE = "The file can no longer be read as an image."
NO_IMAGE_GREY = 214  # the background of maps whose image is missing
FLAT_BELOW = 2 * float(np.finfo(np.float16).eps)  # smaller relative ranges are float16 rounding of the store

Size = tuple[int, int]
"""Height and width."""

stretch = partial(overlays.stretch, flat_below=FLAT_BELOW)


@dataclass(frozen=True)
class ViewTile:
    """One view in the strip: its aligned map and its prediction."""

    label: str
    confidence: float | None
    other_class: int | None  # where the prediction flips
    image: str


@dataclass(frozen=True)
class RenderedImages:
    """All images of one row, as data URLs."""

    input: str | None
    missing: str | None  # why the input cannot be shown
    presented: str | None  # the presented view's own map; None: it is not among the views
    fused: str | None  # None: the run holds no map
    spread: str | None  # None: one view has no spread
    blank: bool
    strip: tuple[ViewTile, ...]
    grey: float | None = None  # the mean grey of the input


def render_images(
    row: Mapping[str, Any],
    maps: StoredMaps | None,
    transforms: Sequence[Transform],
    manifest: Manifest | None = None,
    *,
    fetch: bool = False,
) -> RenderedImages:
    """Render one image's row and maps; the manifest says how windows of rasters are read."""
    grid = (1, 1) if maps is None else (maps.map.shape[0], maps.map.shape[1])
    size = fit(grid, IMAGE_PX)
    image = read_input(row, size, manifest, fetch=fetch)
    url, missing = (None, image) if isinstance(image, str) else (data_url(image), None)
    if maps is None:
        return RenderedImages(url, missing, None, None, None, False, ())
    under, fused = background(image, size), stretch(maps.map, size)
    index, several = presented_index(transforms), len(transforms) > 1
    presented = None if index is None or index >= len(maps.view_maps) else maps.view_maps[index]
    return RenderedImages(
        input=url,
        missing=missing,
        presented=None if presented is None else data_url(overlay(under, stretch(presented, size))),
        fused=data_url(overlay(under, fused)),
        spread=data_url(overlay(under, deviation(maps.peum, size))) if several else None,
        blank=not fused.any(),
        strip=view_strip(row, maps, transforms, background(image, fit(grid, TILE_PX))) if several else (),
        grey=None if isinstance(image, str) else float(image.mean()),
    )


def view_strip(
    row: Mapping[str, Any],
    maps: StoredMaps,
    transforms: Sequence[Transform],
    image: RgbImage,
    *,
    most: int = MAX_TILES,
) -> tuple[ViewTile, ...]:
    """A tile for each view, or for every n-th where there are too many."""
    empty, radius = [None] * len(transforms), inner_radius(transforms)
    columns = (row["view_confidence"] or empty, row["view_top1"] or empty)
    views = list(zip(transforms, maps.view_maps, *columns, strict=False))
    presented = presented_index(transforms)
    predicted = row["target"] if presented is None else columns[1][presented]
    return tuple(
        ViewTile(
            one.label,
            confidence,
            None if top1 == predicted else top1,
            data_url(
                view_tile(image, plane, one, radius=radius, ringed=top1 not in (None, predicted)),
                quality=75,
            ),
        )
        for one, plane, confidence, top1 in views[:: -(-len(views) // most)]
    )


def fit(grid: Size, side: int) -> Size:
    """The size with this longer side and the proportions of the grid, which are those of the model's input."""
    longer = max(grid)
    return max(1, round(side * grid[0] / longer)), max(1, round(side * grid[1] / longer))


def read_input(
    row: Mapping[str, Any], size: Size, manifest: Manifest | None = None, *, fetch: bool = False
) -> RgbImage | str:
    """The part of the file that the model saw, or why it cannot be shown; never another image than the one explained.

    A URL in a run is opened only if the caller allows it (`fetch`), because anybody may have written the run.
    """
    return _in_child(_input, row, size, manifest, fetch)


def read_original(
    row: Mapping[str, Any], manifest: Manifest | None = None, *, fetch: bool = False
) -> RgbImage | str:
    """The pixels of the file in the part that the model saw, reduced only beyond MAX_ORIGINAL_PX, or why there are none."""
    return _in_child(_original, row, manifest, fetch)


def read_surroundings(row: Mapping[str, Any], manifest: Manifest) -> RgbImage | str:
    """A window with its side around it and its outline, or why it cannot be shown: the window has to be the one explained."""
    return _in_child(_surroundings, row, manifest)


def _in_child(read: Callable[..., RgbImage | str], row: Mapping[str, Any], *arguments: Any) -> RgbImage | str:
    call = limited.call_connected if is_url(row["path"]) else limited.call
    try:
        return call(read, row, *arguments)
    except Exception:  # noqa: BLE001  # readers raise exceptions of every kind on damaged files, or end their process
        return UNREADABLE


def _input(row: Mapping[str, Any], size: Size, manifest: Manifest | None, fetch: bool) -> RgbImage | str:
    content = _read_explained(row, manifest, fetch=fetch)
    return content if isinstance(content, str) else _crop(content.decode().image, row["input_box"], size)


def _original(row: Mapping[str, Any], manifest: Manifest | None, fetch: bool) -> RgbImage | str:
    content = _read_explained(row, manifest, fetch=fetch)
    if isinstance(content, str):
        return content
    window, path = content.item.window, content.item.path
    scale = 1.0
    if window is not None and isinstance(path, Path):
        image = show_original(path, window, MAX_ORIGINAL_PX)
        scale = image.width / window.tiling.tile  # the box is in pixels of the tile
    else:
        image = content.decode().image
    box = [scale * v for v in row["input_box"]] if row["input_box"] else [0, 0, *image.size]
    box = [float(round(v)) for v in box]  # whole pixels stay as they are
    height, width = max(1.0, box[3] - box[1]), max(1.0, box[2] - box[0])
    scale = min(1.0, MAX_ORIGINAL_PX / max(height, width))
    return _crop(image, box, (max(1, round(scale * height)), max(1, round(scale * width))))


def _surroundings(row: Mapping[str, Any], manifest: Manifest) -> RgbImage | str:
    content = _read_explained(row, manifest, fetch=False)  # rasters lie on a disk
    if isinstance(content, str):
        return content
    window, path = content.item.window, content.item.path
    if window is None or not isinstance(path, Path):
        return "Only windows of rasters have surroundings."
    image = show_window(path, window, around=1.0)
    low, high = round(image.width / 3), round(image.width * 2 / 3) - 1
    draw, line = ImageDraw.Draw(image), max(1, round(image.width / 160))
    draw.rectangle(
        (low - 2 * line, low - 2 * line, high + 2 * line, high + 2 * line),
        outline=OUTLINE_EDGE,
        width=3 * line,
    )
    draw.rectangle((low - line, low - line, high + line, high + line), outline=OUTLINE, width=line)
    return np.asarray(image)


def _read_explained(row: Mapping[str, Any], manifest: Manifest | None, *, fetch: bool) -> ItemContent | str:
    """The image that was explained, or why there is none: its size and digest are those of the row."""
    if is_url(row["path"]) and not fetch:
        return "The image is at a URL; --source with its present place allows fetching it."
    path = as_path(row["path"] or "")
    if not path.is_file():
        return "The file is no longer where it was when it was explained."
    if file_stat(path).bytes != row["bytes"]:
        return "The file has changed since it was explained, so it is not shown."
    item = Item(row["id"], path, index=row.get("index")) if manifest is None else manifest.item_of(row, path)
    content = read_item(item)
    if content.sha256 != row["sha256"]:
        return "The file has changed since it was explained, so it is not shown."
    return content


def _crop(image: Image.Image, box: Sequence[Any] | None, size: Size) -> RgbImage | str:
    """The box of the image at this size; black where it extends beyond the image, as padding is."""
    box = [0.0, 0.0, *map(float, image.size)] if box is None else list(box)
    if len(box) != 4 or not all(isinstance(v, float) and math.isfinite(v) for v in box):
        return "The part of it that the model saw was not recorded."
    spans = [
        _overlap(box[i], box[i + 2], length=image.size[i], target_length=target)
        for i, target in enumerate((size[1], size[0]))
    ]
    if None in spans:
        return "The part of it that the model saw does not lie in it."
    ((x0, x1), (left, right)), ((y0, y1), (top, bottom)) = (span for span in spans if span)
    resized = image.resize(
        (right - left, bottom - top), Image.Resampling.BICUBIC, box=(x0, y0, x1, y1), reducing_gap=3
    )
    canvas = Image.new("RGB", (size[1], size[0]))
    canvas.paste(resized, (left, top))
    return np.asarray(canvas)


def _overlap(
    low: float, high: float, *, length: int, target_length: int
) -> tuple[tuple[float, float], tuple[int, int]] | None:
    """The overlap of low … high with 0 … length, and the pixels it fills in 0 … target_length; None if it fills none."""
    tolerance = 0.02 * length  # the box is measured, so one that misses the border by a little ends at it
    low = 0.0 if -tolerance <= low < 0 else low
    high = float(length) if length < high <= length + tolerance else high
    inside = max(low, 0.0), min(high, float(length))
    if not inside[0] < inside[1]:
        return None
    first, last = (round((v - low) / (high - low) * target_length) for v in inside)
    return (inside, (first, last)) if first < last else None


def background(image: RgbImage | str, size: Size) -> UInt8[np.ndarray, "h w 3"]:
    """What lies under a map: the image at this size, or plain grey where it is missing."""
    if isinstance(image, str):
        return np.full((*size, 3), NO_IMAGE_GREY, np.uint8)
    if image.shape[:2] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.LANCZOS))


def deviation(peum: Float[np.ndarray, "h w"], size: Size) -> Float[np.ndarray, "H W"]:
    """Standard deviation of the views; 1 is the most that maps in [0, 1] can have, so two images compare by eye."""
    return np.asarray(np.clip(np.sqrt(np.maximum(enlarge(peum, size), 0)) / MAX_DEVIATION, 0, 1))


def align(values: Float[np.ndarray, "H W"], view: Transform) -> Float[np.ndarray, "H W"]:
    """A view's map in the presented frame: each pixel is read from where the view has put it."""
    height, width = values.shape
    down, right = np.arange(height)[:, None] - (height - 1) / 2, np.arange(width) - (width - 1) / 2
    x, y = view.move(right, down, side=min(height, width))
    places = np.stack([y + (height - 1) / 2, x + (width - 1) / 2])
    return np.asarray(np.clip(ndimage.map_coordinates(values, places, order=1, mode="mirror"), 0, 1))


def view_tile(
    image: RgbImage,
    plane: Float[np.ndarray, "h w"],
    view: Transform,
    *,
    radius: float = 1.0,
    ringed: bool = False,
) -> RgbImage:
    """One view's aligned map over the image, inside the disc that every view covers, a share of the largest; white outside."""
    size = image.shape[0], image.shape[1]
    pixels: Float[np.ndarray, "H W 3"] = overlay(image, align(stretch(plane, size), view)).astype(np.float64)
    if ringed:
        pixels = _blend(pixels, np.full_like(pixels, RING), _disc(size, radius, inset=3))
    return np.asarray(
        _blend(pixels, np.full_like(pixels, PAPER), _disc(size, radius)).round().astype(np.uint8)
    )


def _blend(
    over: Float[np.ndarray, "H W 3"], under: Float[np.ndarray, "H W 3"], alpha: Float[np.ndarray, "H W"]
) -> Float[np.ndarray, "H W 3"]:
    return np.asarray(alpha[..., None] * over + (1 - alpha[..., None]) * under)


def _disc(size: Size, radius: float, *, inset: int = 0) -> Float[np.ndarray, "H W"]:
    """1 within this share of half the shorter side of the centre, 0 outside, soft over the pixel at its edge."""
    y = np.arange(size[0])[:, None] - (size[0] - 1) / 2
    x = np.arange(size[1])[None, :] - (size[1] - 1) / 2
    return np.asarray(np.clip(radius * min(size) / 2 - inset - np.hypot(x, y), 0.0, 1.0))


def colour_scale(grey: int | float = NO_IMAGE_GREY) -> RgbImage:
    """The colours of overlays from 0 to 1, as they look over this grey."""
    size = (16, 512)
    ramp = np.broadcast_to(np.linspace(0, 1, size[1]), size).copy()
    return overlay(np.full((*size, 3), round(grey), np.uint8), ramp)


def data_url(image: RgbImage, *, quality: int = 80) -> str:
    """An image as a JPEG in a data URL."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality, optimize=True, progressive=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
