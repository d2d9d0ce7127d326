"""Image files of the usual formats as upright 8-bit RGB; what 8-bit RGB cannot hold is refused with a reason."""

import io
import re
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin, UnidentifiedImageError

from equicam.errors import EquicamError, refusing
from equicam.images import tiff

FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "GIF", "WEBP", "PPM", "JPEG2000")
"""The only decoders that are tried, whatever a file's name; MPO files are opened as JPEG.

Pillow has others that start programs (EPS) or were written for files nobody sends to a classifier.
"""
MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Pillow refuses larger images as decompression bombs."""
MAX_SIDE = 65_535
"""The longest side in pixels; JPEG allows no longer one."""
MAX_ASPECT = 100
"""The longest side over the shortest: preprocessing enlarges the shortest to its own size, and the longest with it."""
BAND_ROWS = 256
"""Rows scaled at a time: the float64 copies of a whole large image would take gigabytes."""

ORIENTATION = 0x0112
_MOVES = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_TRANSPOSE = {i: Image.Transpose[name] for i, name in enumerate(_MOVES.split(), start=2)}
_INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""The integer types of EXIF, as `struct` names them."""


@dataclass(frozen=True)
class UprightImage:
    """An image as 8-bit RGB, and the EXIF orientation (1 to 8) that was applied to it.

    The orientation is None where EXIF is too damaged to contain it: the image is as stored.
    """

    image: Image.Image
    orientation: int | None


def decode(data: bytes, what: str, voi: tuple[float, float] | None = None) -> UprightImage:
    """The first frame in the bytes of an image file; every failure is an EquicamError, in which `what` names it."""
    if data[128:132] == b"DICM":
        from equicam.images.dicom import decode_dicom

        return decode_dicom(data, what, voi)
    if tiff.is_tiff(data):
        tiff.refuse_unfaithful(data, what)
    with refusing(what, "a file that can be read whole"):
        try:
            with warnings.catch_warnings():
                # Pillow warns at half its limit
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                    refuse_size(*image.size, what)
                    if image.format == "JPEG2000":
                        _refuse_deep_colours(data, what)
                    return upright(image, ours=True)
        except Image.DecompressionBombError as error:
            raise _too_large(what, error) from error
        except UnidentifiedImageError as error:
            got, fix = "bytes of no known format", "PNG, JPEG or TIFF"
            raise EquicamError(what, "an image file", got, fix) from error


def refuse_size(width: int, height: int, what: str) -> None:
    """Raise an EquicamError for an image of a size that is not decoded, before it is."""
    longest, shortest = max(width, height), min(width, height)
    if width * height > MAX_PIXELS:
        raise _too_large(what, f"{width:,} × {height:,}")
    if shortest < 1 or longest > MAX_SIDE or longest > MAX_ASPECT * shortest:
        needs = f"sides of 1 to {MAX_SIDE:,} pixels, one at most {MAX_ASPECT} times the other"
        raise EquicamError(what, needs, f"{width:,} × {height:,}", "tiling it first")


def _too_large(what: str, got: object) -> EquicamError:
    return EquicamError(what, f"at most {MAX_PIXELS:,} pixels", got, "tiling it first")


def _refuse_deep_colours(data: bytes, what: str) -> None:
    """Refuse a JPEG 2000 in colour of more than 8 bits, whose white Pillow would decode as black."""
    start = data.find(b"\xff\x4f\xff\x51")  # the codestream, and its sizes
    (count,) = struct.unpack_from(">H", data, start + 40)
    depths = [1 + (one & 0x7F) for one in data[start + 42 : start + 42 + 3 * count : 3]]
    if count > 1 and max(depths, default=8) > 8:
        got = f"{count} components of {max(depths)} bits"
        raise EquicamError(what, "at most 8 bits, in colour", got, tiff.COPY_FIX)


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, upright by the EXIF tag; transparency over white, 16 bits scaled to 8, CMYK and palettes converted."""
    return warn_if_as_stored(upright(image), "an image")


def warn_if_as_stored(found: UprightImage, what: str) -> Image.Image:
    """The image, after a warning if its orientation is unknown."""
    if found.orientation is None:
        warnings.warn(f"{what}: its EXIF orientation cannot be read, so it is taken as stored", stacklevel=3)
    return found.image


def upright(image: Image.Image, *, ours: bool = False) -> UprightImage:
    """`to_rgb`, and the orientation that was applied. An image that is `ours` may be changed; others are copied first."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # Pillow itself applies it when it loads a TIFF
        orientation = _in_range(image.getexif().get(ORIENTATION, 1))
        image.load()
        remaining = _in_range(image.getexif().get(ORIENTATION, 1))
    else:
        image.load()
        orientation = remaining = _stored_orientation(image.info)
    if remaining in _TRANSPOSE:
        image = image.transpose(_TRANSPOSE[remaining])
    rgb = _rgb(image)
    if rgb.info:  # with its EXIF, the image would be rotated again the next time
        rgb = rgb.copy() if rgb is image and not ours else rgb
        rgb.info = {}
    return UprightImage(rgb, orientation)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow scales PGM to 16 bits, whatever its own largest value is
        mode = "I;16" if image.format == "PPM" and image.mode == "I" else image.mode
        values = np.asarray(image)
        grey = _to_8_bits(values, mode)
        # of a PNG: the value that is no image, over white
        if isinstance(clear := image.info.get("transparency"), int):
            grey[values == clear] = 255
        return Image.fromarray(grey).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _stored_orientation(info: Mapping[Any, Any]) -> int | None:
    """The orientation (1 to 8) in the EXIF or XMP that Pillow found in a file; None where it cannot be read.

    Pillow's own reader fails on damage in any tag, and takes an image for upright where the tag is cut off.
    """
    try:
        exif = info.get("exif")
        if exif is None and "Raw profile type exif" in info:
            exif = bytes.fromhex("".join(info["Raw profile type exif"].split("\n")[3:]))
        found = _exif_orientation(re.sub(b"^(Exif\0\0){1,2}", b"", exif)) if exif else None
        if found is None:
            xmp = info.get("XML:com.adobe.xmp") or info.get("xmp") or ""
            xmp = xmp.decode("latin-1") if isinstance(xmp, bytes) else xmp
            match = re.search(r'tiff:Orientation(?:="|>)([0-9])', xmp)
            found = int(match[1]) if match else 1
    except Exception:  # noqa: BLE001  # whatever is wrong with it, it cannot be read
        return None
    return _in_range(found)


def _exif_orientation(exif: bytes) -> int | None:
    """The tag in the first directory of EXIF; None if there is none."""
    if not exif:
        return None
    order = {b"II": "<", b"MM": ">"}[exif[:2]]
    (start,) = struct.unpack_from(f"{order}I", exif, 4)
    (count,) = struct.unpack_from(f"{order}H", exif, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind, values = struct.unpack_from(f"{order}HHI", exif, entry)
        if tag == ORIENTATION:
            if values != 1:
                raise ValueError(f"{values} orientations")
            return int(struct.unpack_from(f"{order}{_INTEGERS[kind]}", exif, entry + 8)[0])
    return None


def _in_range(value: object) -> int | None:
    """An orientation from 1 to 8; 0, which some cameras write, counts as upright, and anything else is unreadable."""
    return (value or 1) if isinstance(value, int) and 0 <= value <= 8 else None


def _to_8_bits(values: np.ndarray, mode: str) -> np.ndarray:
    """Scale 16-bit values by their full range, wider integers and floats by the smallest usual range that fits."""
    highest = float(np.nanmax(values, initial=0))
    ranges = (1.0, 255.0, 65535.0)[2 if mode.startswith("I;16") else 1 if mode == "I" else 0 :]
    top = next((r for r in ranges if highest <= r), highest)
    scaled = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), BAND_ROWS):
        band = slice(start, start + BAND_ROWS)
        scaled[band] = (np.clip(np.nan_to_num(values[band]) / top, 0, 1) * 255).round()
    return scaled


@dataclass(frozen=True, eq=False)
class LevelPixels:
    """A model's input whose every number depends on one 8-bit level alone."""

    levels: NDArray[np.uint8]  # [c, H, W]
    numbers: NDArray[np.float32]  # [c, 256], of every level

    def to_numbers(self) -> NDArray[np.float32]:
        """The model's input."""
        found = np.empty(self.levels.shape, np.float32)
        for levels, numbers, out in zip(self.levels, self.numbers, found, strict=True):
            np.take(numbers, levels, out=out)
        return found
