"""Any picture file, or a refusal with a reason: what comes out is upright 8-bit RGB."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from equicam.data.remote import RemotePath, as_file
from equicam.errors import EquicamError

MAX_PIXELS = 2 * (
    Image.MAX_IMAGE_PIXELS or 89_478_485
)  # where Pillow refuses a picture as a decompression bomb


def open_image(path: str | Path | RemotePath) -> Image.Image:
    """The first frame of a picture file as `rgb` has it; anything unreadable, truncated or too large is refused."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Pillow warns at half its limit
            with Image.open(as_file(path)) as picture:
                return to_rgb(picture)
    except Image.DecompressionBombError as error:
        raise EquicamError(
            f"picture {str(path)!r}",
            needs=f"at most {MAX_PIXELS:,} pixels",
            got=error,
            fix="tiling it first",
        ) from error
    except FileNotFoundError as error:
        raise EquicamError(
            f"picture {str(path)!r}", needs="an existing file", got="No such file", fix="its full path"
        ) from error
    except IsADirectoryError as error:
        raise EquicamError(
            f"picture {str(path)!r}",
            needs="a file",
            got="a folder",
            fix="its pictures one by one, or equicam audit",
        ) from error
    except UnidentifiedImageError as error:
        raise EquicamError(
            f"picture {str(path)!r}",
            needs="a picture file",
            got="bytes of no known format",
            fix="PNG, JPEG or TIFF",
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise EquicamError(
            f"picture {str(path)!r}",
            needs="a file that can be read whole",
            got=error,
            fix="a fresh copy of it",
        ) from error


def exif_orientation(path: str | Path | RemotePath) -> int:
    """The EXIF orientation of a picture file, 1 (upright) where there is none."""
    try:
        with Image.open(as_file(path)) as picture:
            return int(picture.getexif().get(0x0112, 1))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return 1


def to_rgb(picture: Image.Image) -> Image.Image:
    """8-bit RGB, upright by its EXIF tag; transparency over white, 16 bits scaled down, CMYK and palettes converted."""
    picture.load()
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I") or picture.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(picture), picture.mode)).convert("RGB")
    if "A" in picture.getbands() or "transparency" in picture.info:
        over = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return picture.convert("RGB")


def _eight_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Sixteen-bit levels over their full range; wider integers and floats by the narrowest usual range they fit."""
    highest = float(np.nanmax(values, initial=0))
    ranges = (
        (65535.0,) if mode.startswith("I;16") else (255.0, 65535.0) if mode == "I" else (1.0, 255.0, 65535.0)
    )
    top = next((r for r in ranges if highest <= r), highest)
    scaled: np.ndarray = np.clip(np.nan_to_num(values) / top, 0, 1) * 255
    return scaled.round().astype(np.uint8)
