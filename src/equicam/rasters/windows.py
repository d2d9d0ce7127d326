"""Windows read from rasters: the numbers that a model gets, and images for people."""

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from equicam.errors import EquicamError
from equicam.images.files import AnyPath
from equicam.images.tiff import pick_bands
from equicam.rasters.options import Input, RasterWindow
from equicam.rasters.raster import Area, Bands, Pixels, Raster, RasterInfo, bad_raster, open_raster


@dataclass(frozen=True)
class WindowPixels:
    """A window with the surround that was wanted: values as stored, not yet scaled."""

    values: NDArray[Any]  # [bands, height, width]
    valid: NDArray[np.bool_]
    margin: tuple[int, int]  # rows and columns around it that the raster has; beyond them it is reflected
    tile: int
    scale: int | float
    mean: tuple[int | float, ...] | None
    std: tuple[int | float, ...] | None

    def digest(self) -> str:
        """SHA-256 of the decoded values, and of where they are data."""
        shape = f"{self.values.dtype} {self.values.shape}".encode()
        return hashlib.sha256(shape + self.values.tobytes() + self.valid.tobytes()).hexdigest()


def read_window(path: AnyPath, window: RasterWindow) -> WindowPixels:
    """A window of a raster, at the resolution it declares, with its margin."""
    raster, tile = open_raster(path), window.tiling.tile
    if not window.side:
        raise bad_raster(path, "windows of it", "none when it was listed", "another run")
    given = resolve_input(raster.info, window.tiling.input, str(path))
    found, margin = _read(raster, window, raster.band_indices(given.bands or ()), window.margin)
    inner, middle = slice(window.margin, window.margin + tile), window.margin + tile // 2
    if not (found.valid[middle, middle] or found.valid[inner, inner].any()):
        raise EquicamError("a window", "some data", "none: nothing is stored there", "regions without it")
    return WindowPixels(found.values, found.valid, margin, tile, given.scale or 1.0, given.mean, given.std)


@lru_cache(maxsize=64)
def resolve_input(info: RasterInfo, given: Input, name: str) -> Input:
    """The input with its bands and scale, which an 8-bit RGB raster has of itself and any other must be given."""
    if given.bands is None and tuple(b.casefold() for b in info.bands[:3]) != ("red", "green", "blue"):
        fix = f"--bands {pick_bands(len(info.bands), info.alpha)}"
        raise bad_raster(name, "bands to be chosen", ", ".join(info.bands[:20]), fix)
    if given.scale is None and info.dtype != "uint8":
        needs, fix = "a scale, because its values are not 8-bit", "scale=10000, by which values are divided"
        raise bad_raster(name, needs, info.dtype, fix)
    return replace(given, bands=given.bands or info.bands[:3], scale=given.scale or 255.0)


def show_window(path: AnyPath, window: RasterWindow, around: int | float = 0.0) -> Image.Image:
    """A window as an 8-bit RGB image, or with as many times its side around it, white where there is nothing."""
    raster = open_raster(path)
    bands = display_bands(raster, window.tiling.input, str(path))
    if not around:
        found, _ = _read(raster, window, bands, 0)
        return _to_image(found, raster.value_range(bands))
    side = window.side * (1 + 2 * around)
    x, y = window.x - around * window.side, window.y - around * window.side
    left, top, right, bottom = box = _inside(raster, x, y, side)
    pixels = min(900, round(window.tiling.tile * (1 + 2 * around)))
    width, height = (max(1, round(length / side * pixels)) for length in (right - left, bottom - top))
    image = _to_image(raster.read(box, (width, height), bands), raster.value_range(bands))
    whole = Image.new("RGB", (pixels, pixels), "white")
    whole.paste(image, (round((left - x) / side * pixels), round((top - y) / side * pixels)))
    return whole


def show_original(path: AnyPath, window: RasterWindow, most: int) -> Image.Image:
    """A window in the raster's own finest pixels, at most this many a side, white where there is no data."""
    raster = open_raster(path)
    bands = display_bands(raster, window.tiling.input, str(path))
    pixels = max(1, min(most, round(window.side)))
    found = raster.read(_inside(raster, window.x, window.y, window.side), (pixels, pixels), bands)
    return _to_image(found, raster.value_range(bands))


def _inside(raster: Raster, x: float, y: float, side: float) -> Area:
    """What of a square lies in the raster."""
    info = raster.info
    return max(0.0, x), max(0.0, y), min(float(info.width), x + side), min(float(info.height), y + side)


def show_raster(path: AnyPath, given: Input, side: int) -> Image.Image:
    """A small image of all of a raster."""
    raster = open_raster(path)
    bands = display_bands(raster, given, str(path))
    return _to_image(raster.thumbnail(bands, side).pixels, raster.value_range(bands))


def display_bands(raster: Raster, given: Input, name: str) -> Bands:
    """The bands that people see: those declared, or the first three of the model's, or its first."""
    chosen = given.display or (resolve_input(raster.info, replace(given, scale=1.0), name).bands or ())
    indices = raster.band_indices(chosen)
    return indices[:3] if len(indices) >= 3 else indices[:1]


def _to_image(pixels: Pixels, ranges: tuple[tuple[float, float], ...]) -> Image.Image:
    """8-bit RGB, white where there is no data."""
    planes = []
    for band, (low, high) in zip(pixels.values, ranges, strict=True):
        share = (np.nan_to_num(band.astype(np.float64)) - low) / (high - low)
        planes.append(np.where(pixels.valid, np.rint(255 * np.clip(share, 0, 1)), 255).astype(np.uint8))
    planes = planes * 3 if len(planes) == 1 else planes
    return Image.fromarray(np.stack(planes, axis=-1))


def _read(raster: Raster, window: RasterWindow, bands: Bands, margin: int) -> tuple[Pixels, tuple[int, int]]:
    """Model pixels of a window and of what the raster has around it, the rest reflected about the border pixels."""
    tile, info = window.tiling.tile, raster.info
    scale = window.side / tile
    room = (window.x, window.y, info.width - window.x - window.side, info.height - window.y - window.side)
    if min(room) < -1e-6 * max(info.width, info.height):
        needs = f"to lie in the raster of {info.width} × {info.height} pixels"
        got = f"x={window.x:g}, y={window.y:g}, {window.side:g} a side"
        raise EquicamError("a window", needs, got, "the raster that was listed")
    left, top, right, bottom = (min(margin, int(max(0.0, space) / scale + 1e-6)) for space in room)
    box = (
        max(0.0, window.x - left * scale),
        max(0.0, window.y - top * scale),
        min(float(info.width), window.x + window.side + right * scale),
        min(float(info.height), window.y + window.side + bottom * scale),
    )
    found = raster.read(box, (tile + left + right, tile + top + bottom), bands)
    missing = ((margin - top, margin - bottom), (margin - left, margin - right))
    if np.any(missing):
        values = np.pad(found.values, ((0, 0), *missing), mode="reflect")
        found = Pixels(values, np.pad(found.valid, missing, mode="reflect"))
    return found, (min(top, bottom), min(left, right))
