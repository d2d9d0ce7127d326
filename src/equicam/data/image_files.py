"""Image files of any format as upright 8-bit RGB."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from equicam.data.remote import RemotePath, as_file
from equicam.errors import EquicamError

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Pillow refuses larger images as decompression bombs."""


def open_image(path: str | Path | RemotePath) -> Image.Image:
    """The first frame of an image file, converted by `to_rgb`; unreadable, truncated and too large files are refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow warns at half its limit
            with Image.open(as_file(path)) as image:
                return to_rgb(image)
    except Image.DecompressionBombError as error:
        raise EquicamError(
            f"image {str(path)!r}",
            needs=f"at most {MAX_PIXELS:,} pixels",
            got=error,
            fix="tiling it first",
        ) from error
    except FileNotFoundError as error:
        raise EquicamError(
            f"image {str(path)!r}", needs="an existing file", got="No such file", fix="its full path"
        ) from error
    except IsADirectoryError as error:
        raise EquicamError(
            f"image {str(path)!r}",
            needs="a file",
            got="a folder",
            fix="its images one by one, or equicam audit",
        ) from error
    except UnidentifiedImageError as error:
        raise EquicamError(
            f"image {str(path)!r}",
            needs="an image file",
            got="bytes of no known format",
            fix="PNG, JPEG or TIFF",
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise EquicamError(
            f"image {str(path)!r}",
            needs="a file that can be read whole",
            got=error,
            fix="a fresh copy of it",
        ) from error


def exif_orientation(path: str | Path | RemotePath) -> int:
    """The EXIF orientation of an image file; 1 (upright) if it has none."""
    try:
        with Image.open(as_file(path)) as image:
            return int(image.getexif().get(0x0112, 1))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return 1


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, upright by the EXIF tag; transparency over white, 16 bits scaled to 8, CMYK and palettes converted."""
    image.load()
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bits(np.asarray(image), image.mode)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Scale 16-bit values by their full range, wider integers and floats by the smallest usual range that fits."""
    highest = float(np.nanmax(values, initial=0))
    ranges = (
        (65535.0,) if mode.startswith("I;16") else (255.0, 65535.0) if mode == "I" else (1.0, 255.0, 65535.0)
    )
    top = next((r for r in ranges if highest <= r), highest)
    scaled: np.ndarray = np.clip(np.nan_to_num(values) / top, 0, 1) * 255
    return scaled.round().astype(np.uint8)
