"""Images of one row of a run for a page: the model's input, maps over it, and the views' aligned maps."""

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from scipy import ndimage

from equicam import overlay as overlays
from equicam.core.transforms import Transform, inner_radius
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
CHANGED = "The file has changed since it was explained, so it is not shown."
OUTSIDE = "The part of it that the model saw does not lie in it."
NO_IMAGE_GREY = 214  # the background of maps whose image is missing
FLAT_BELOW = 2 * float(np.finfo(np.float16).eps)  # smaller relative ranges are float16 rounding of the store

Size = tuple[int, int]
"""Height and width."""

stretch = partial(overlays.stretch, flat_below=FLAT_BELOW)


@dataclass(frozen=True)
class _ViewTile:
    """One view in the strip: its aligned map and its prediction."""

    label: str
    confidence: float | None
    other_class: int | None  # where the prediction flips
    image: str


@dataclass(frozen=True)
class ImageDrawing:
    """The images of one row as data URLs, each drawn when a page asks for it."""

    row: Mapping[str, Any]
    maps: StoredMaps | None  # None: the run holds none
    manifest: Manifest
    fetch: bool = False
    side: int = IMAGE_PX
    quality: int = 80
    tile: int = TILE_PX
    most: int = MAX_TILES  # views in the strip: every n-th where there are more

    @cached_property
    def pixels(self) -> RgbImage | str:
        """The image as the model saw it, or why it cannot be shown."""
        return read_input(self.row, self._size(self.side), self.manifest, fetch=self.fetch)

    @cached_property
    def input(self) -> str | None:
        """The image as the model saw it."""
        return None if isinstance(self.pixels, str) else data_url(self.pixels, quality=self.quality)

    @cached_property
    def presented(self) -> str | None:
        """The presented view's own map, if it is among the views."""
        index = self.manifest.presented
        if self.maps is None or index is None or index >= len(self.maps.view_maps):
            return None
        return self._over(stretch(self.maps.view_maps[index], self._size(self.side)))

    @cached_property
    def fused(self) -> str | None:
        """The map of all views."""
        return None if self.maps is None else self._over(stretch(self.maps.map, self._size(self.side)))

    @cached_property
    def blank(self) -> bool:
        """Whether that map marks nothing."""
        return self.maps is not None and not stretch(self.maps.map, self._size(self.side)).any()

    @cached_property
    def spread(self) -> str | None:
        """Where the views disagree; a single one has no spread."""
        if self.maps is None or len(self.manifest.transforms) < 2:
            return None
        return self._over(deviation(self.maps.peum, self._size(self.side)))

    @cached_property
    def strip(self) -> tuple[_ViewTile, ...]:
        """A tile for each view."""
        transforms, row = self.manifest.transforms, self.row
        if self.maps is None or len(transforms) < 2:
            return ()
        image, radius = background(self.pixels, self._size(self.tile)), inner_radius(transforms)
        empty, presented = [None] * len(transforms), self.manifest.presented
        columns = (row["view_confidence"] or empty, row["view_top1"] or empty)
        predicted = row["target"] if presented is None else columns[1][presented]
        views = list(zip(transforms, self.maps.view_maps, *columns, strict=False))
        return tuple(
            _ViewTile(one.label, confidence, None if top1 == predicted else top1, data_url(
                view_tile(image, plane, one, radius=radius, ringed=top1 not in (None, predicted)), quality=75
            ))
            for one, plane, confidence, top1 in views[:: -(-len(views) // self.most)]
        )  # fmt: skip

    def _size(self, side: int) -> Size:
        return fit((1, 1) if self.maps is None else self.maps.map.shape[:2], side)

    def _over(self, values: Float[np.ndarray, "H W"]) -> str:
        return data_url(overlay(background(self.pixels, self._size(self.side)), values), quality=self.quality)


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
    return _in_child(_input, row, manifest, fetch, size)


def read_part(part: str, row: Mapping[str, Any], manifest: Manifest, *, fetch: bool) -> RgbImage | str:
    """The file's own pixels in the part that the model saw (`original`), or a window with its side around it
    (`surroundings`); or why there are none. The original is reduced only beyond MAX_ORIGINAL_PX.
    """
    return _in_child({"original": _original, "surroundings": _surroundings}[part], row, manifest, fetch)


def _in_child(draw: Callable[..., RgbImage | str], row: Mapping[str, Any], *arguments: Any) -> RgbImage | str:
    call = limited.call_connected if is_url(row["path"]) else limited.call
    try:
        return call(_draw_explained, draw, row, *arguments)
    except Exception:  # noqa: BLE001  # readers raise exceptions of every kind on damaged files, or end their process
        return UNREADABLE


def _draw_explained(
    draw: Callable[..., RgbImage | str],
    row: Mapping[str, Any],
    manifest: Manifest | None,
    fetch: bool,
    *size: Size,
) -> RgbImage | str:
    """Draw the image that was explained, of the size and digest in the row, or say why there is none."""
    if is_url(row["path"]) and not fetch:
        return "The image is at a URL; --source with its present place allows fetching it."
    path = as_path(row["path"] or "")
    if not path.is_file():
        return "The file is no longer where it was when it was explained."
    if file_stat(path).bytes != row["bytes"]:
        return CHANGED
    item = Item(row["id"], path, index=row.get("index")) if manifest is None else manifest.item_of(row, path)
    content = read_item(item)
    return draw(content, row, *size) if content.sha256 == row["sha256"] else CHANGED


def _input(content: ItemContent, row: Mapping[str, Any], size: Size) -> RgbImage | str:
    return _crop(content.decode().image, row["input_box"], size)


def _original(content: ItemContent, row: Mapping[str, Any]) -> RgbImage | str:
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


def _surroundings(content: ItemContent, _row: Mapping[str, Any]) -> RgbImage | str:
    window, path = content.item.window, content.item.path
    if window is None or not isinstance(path, Path):
        return "Only windows of rasters have surroundings."
    image = show_window(path, window, around=1.0)
    low, high = round(image.width / 3), round(image.width * 2 / 3) - 1
    draw, line = ImageDraw.Draw(image), max(1, round(image.width / 160))
    for away, colour, width in ((2 * line, OUTLINE_EDGE, 3 * line), (line, OUTLINE, line)):
        draw.rectangle((low - away, low - away, high + away, high + away), outline=colour, width=width)
    return np.asarray(image)


def _crop(image: Image.Image, box: Sequence[Any] | None, size: Size) -> RgbImage | str:
    """The box of the image at this size; black where it extends beyond the image, as padding is."""
    box = [0.0, 0.0, *map(float, image.size)] if box is None else list(box)
    if len(box) != 4 or not all(isinstance(v, float) and math.isfinite(v) for v in box):
        return "The part of it that the model saw was not recorded."
    inside, filled = [], []
    for low, high, length, target in zip(box[:2], box[2:], image.size, size[::-1], strict=True):
        tolerance = 0.02 * length  # the box is measured, so one that misses the border by a little ends at it
        low = 0.0 if -tolerance <= low < 0 else low
        high = float(length) if length < high <= length + tolerance else high
        span = max(low, 0.0), min(high, float(length))
        if not span[0] < span[1]:
            return OUTSIDE
        inside.append(span)
        filled.append([round((v - low) / (high - low) * target) for v in span])
    ((x0, x1), (y0, y1)), ((left, right), (top, bottom)) = inside, filled
    if left >= right or top >= bottom:
        return OUTSIDE
    resized = image.resize(
        (right - left, bottom - top), Image.Resampling.BICUBIC, box=(x0, y0, x1, y1), reducing_gap=3
    )
    canvas = Image.new("RGB", size[::-1])
    canvas.paste(resized, (left, top))
    return np.asarray(canvas)


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
    y, x = (np.arange(length) - (length - 1) / 2 for length in size)
    for colour, inset in ((RING, 3), (PAPER, 0)) if ringed else ((PAPER, 0),):
        # soft over the pixel at the edge
        alpha = np.clip(radius * min(size) / 2 - inset - np.hypot(x, y[:, None]), 0.0, 1.0)[..., None]
        pixels = alpha * pixels + (1 - alpha) * np.asarray(colour, np.float64)
    return np.asarray(pixels.round().astype(np.uint8))


def colour_scale(greys: Iterable[float] = ()) -> str:
    """The colours of overlays from 0 to 1, as they look over the mean of these greys, as a data URL."""
    size, known = (16, 512), list(greys)
    ramp = np.broadcast_to(np.linspace(0, 1, size[1]), size).copy()
    grey = round(float(np.mean(known)) if known else NO_IMAGE_GREY)
    return data_url(overlay(np.full((*size, 3), grey, np.uint8), ramp))


def data_url(image: RgbImage, *, quality: int = 80) -> str:
    """An image as a JPEG in a data URL."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality, optimize=True, progressive=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
