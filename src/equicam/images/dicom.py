"""DICOM images as 8-bit RGB, by the window in the file or the caller's; never by the range of one image's own values.

Only the elements that decide pixels are read, and no text of the file or of a decoder's exception enters a message:
both may name a patient.
"""

import io
import logging
import math
import struct
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from equicam.errors import EquicamError, needing, refusing
from equicam.images.files import MAX_IMAGE_BYTES, open_regular, refuse_large
from equicam.images.formats import BAND_ROWS, UprightImage, refuse_size
from equicam.images.tiff import SLIDE_FIX

SUFFIXES = (".dcm", ".dicom")
MAX_FRAMES = 100_000
MAX_VALUE = 1e9
"""Of a window."""
VOI_FIX = "equicam audit or explain with voi = [CENTER, WIDTH] in the recipe file"
WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
DEFLATED = "1.2.840.10008.1.2.1.99"
"""The transfer syntax that compresses the whole file: a few bytes of it may become any number."""
_BIG_ENDIAN = "1.2.840.10008.1.2.2"
_SOP_CLASS, _FRAMES = 0x00080016, 0x00280008
_PIXELS_HEAD_BYTES = 12
"""Tag, type and length of compressed pixels, before their first item."""
_PHOTOMETRIC = (
    "MONOCHROME1", "MONOCHROME2", "PALETTE COLOR", "RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT"
)  # fmt: skip
_KEYWORDS = (
    "SOPClassUID", "SamplesPerPixel", "PhotometricInterpretation", "NumberOfFrames", "Rows", "Columns",
    "PlanarConfiguration",
    "BitsAllocated", "BitsStored", "PixelRepresentation", "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence",
    "WindowCenter", "WindowWidth", "VOILUTFunction", "VOILUTSequence", "SharedFunctionalGroupsSequence",
    "PerFrameFunctionalGroupsSequence", "RedPaletteColorLookupTableDescriptor", "RedPaletteColorLookupTableData",
    "GreenPaletteColorLookupTableDescriptor", "GreenPaletteColorLookupTableData",
    "BluePaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableData",
)  # fmt: skip

BinaryFile = io.BufferedReader | io.BytesIO
Window = tuple[float, float]
"""Centre and width, in the values that the rescaling gives."""


def is_dicom_file(path: Path) -> bool:
    """Whether a file is DICOM by its suffix or its content."""
    if path.suffix.lower() in SUFFIXES:
        return True
    with suppress(OSError, ValueError), open_regular(path, str(path)) as file:
        return file.read(132)[128:] == b"DICM"
    return False


def check_window(window: Sequence[float]) -> Window:
    """A window of the caller's as numbers."""
    numbers = tuple(map(float, window))
    if len(numbers) != 2 or not all(-MAX_VALUE <= one <= MAX_VALUE for one in numbers) or numbers[1] < 1:
        needs = f"a centre and a width of at least 1, both up to {MAX_VALUE:g}"
        raise EquicamError("a VOI window", needs, ",".join(f"{one:g}" for one in numbers), "voi=40,400")
    return numbers[0], numbers[1]


def frames(path: Path) -> int:
    """The number of frames in a file, from its header; an EquicamError says why it cannot be known."""
    what = f"image {str(path)!r}"
    with _open(path, what) as file, _reading_header(what):
        from pydicom.filereader import read_partial

        _transfer_syntax(file, what)
        header = read_partial(file, lambda tag, *_: tag > _FRAMES, specific_tags=[_SOP_CLASS, _FRAMES])
        _refuse_slide(header, what)
        return _frame_count(header, file.seek(0, io.SEEK_END), what)


def read_frame(path: Path, frame: int, voi: Window | None = None) -> NDArray[np.uint8]:
    """A frame of a file, from 0, as 8-bit RGB; only its part of the file is decoded."""
    what = f"image {str(path)!r}"
    with _open(path, what) as file:
        return _read(file, frame, voi, what)


def decode_dicom(data: bytes, what: str, voi: Window | None = None) -> UprightImage:
    """The image in the bytes of a file with one frame; `what` names it in error messages."""
    return UprightImage(Image.fromarray(_read(io.BytesIO(data), None, voi, what)), 1)


def _read(file: BinaryFile, frame: int | None, voi: Window | None, what: str) -> NDArray[np.uint8]:
    with _reading_header(what):
        import pydicom
        import pydicom.pixels

        syntax = pydicom.uid.UID(_transfer_syntax(file, what))
        header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=list(_KEYWORDS))
        pixels_at = file.tell()
        _refuse_slide(header, what)
        count = _frame_count(header, file.seek(0, io.SEEK_END), what)
        if frame is None and count > 1:
            fix = "equicam audit, which takes each of them, on a local disk"
            raise EquicamError(what, "one frame", f"{count:,}", fix)
        number = frame or 0
        if not 0 <= number < count:
            raise EquicamError(what, f"a frame {number}", f"frames 0 to {count - 1}", "one of these")
        layout = _read_layout(header, syntax != _BIG_ENDIAN, what)
        places = _places(header, number)
        _refuse_unknown(syntax, what)
    with _refusing(what, f"pixels that can be decoded ({_syntax_name(syntax)})"):
        expected = (int(header.Rows), int(header.Columns))
        if syntax.is_encapsulated:
            file.seek(pixels_at + _PIXELS_HEAD_BYTES)
            values = _decompress(file, number, count, header)
        else:
            file.seek(0)
            values = pydicom.pixels.pixel_array(file, index=number)
        if values.shape[:2] != expected:
            raise ValueError(f"{values.shape[:2]} pixels, not {expected}")
    with _refusing(what, "a table or window that can be applied"):
        if layout.photometric == "PALETTE COLOR":
            return _apply_palette(values, header, layout, what)
        if values.ndim == 3:
            return np.ascontiguousarray(values, np.uint8)
        return _to_grey(values, places, layout, voi, what)


def _decompress(file: BinaryFile, frame: int, count: int, header: Any) -> NDArray[Any]:
    """Decode one compressed frame; a decoder allocates the size that the frame itself states, so that is checked first."""
    from pydicom.encaps import encapsulate, get_frame
    from pydicom.pixels import pixel_array

    encoded = get_frame(file, frame, number_of_frames=count)
    stated = _stated_size(encoded)
    if stated is not None and stated != (header.Rows, header.Columns):
        raise ValueError("a frame of another size")
    header.NumberOfFrames = 1
    header.PixelData = encapsulate([encoded])
    header["PixelData"].is_undefined_length = True
    values: NDArray[Any] = pixel_array(header, index=0)
    return values


def _stated_size(encoded: bytes) -> tuple[int, int] | None:
    """Height and width in the header of JPEG, JPEG-LS or JPEG 2000; None for run lengths, which have none."""
    if encoded[:2] == b"\xff\xd8":
        at = 2
        while encoded[at : at + 1] == b"\xff":
            marker = encoded[at + 1]
            if marker == 0xF7 or (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)):
                height, width = struct.unpack_from(">HH", encoded, at + 5)
                return height, width
            if marker == 0xFF:  # fill
                at += 1
                continue
            at += 2 + struct.unpack_from(">H", encoded, at + 2)[0]
        raise ValueError("no size before the data")
    start = encoded.find(b"\xff\x4f\xff\x51")
    if start < 0:
        return None
    right, bottom, left, top = struct.unpack_from(">4I", encoded, start + 8)
    return bottom - top, right - left


@dataclass(frozen=True)
class _Table:
    """A lookup table: values below the first entry get the first, those above the last get the last."""

    first: int
    entries: NDArray[np.float64]
    bits: int

    def __call__(self, values: NDArray[Any]) -> NDArray[np.float64]:
        at = np.rint(values).astype(np.int64) - self.first
        found: NDArray[np.float64] = self.entries[np.clip(at, 0, len(self.entries) - 1)]
        return found


@dataclass(frozen=True)
class _Layout:
    """How values are stored."""

    photometric: str
    bits: int
    signed: bool
    little_endian: bool


def _to_grey(
    values: NDArray[Any], places: Sequence[Any], layout: _Layout, voi: Window | None, what: str
) -> NDArray[np.uint8]:
    """From stored values to 8 bits: modality table or rescaling, then window or table, then MONOCHROME1 inverted."""
    rescale = _rescale(places)
    slope, intercept = rescale or (1.0, 0.0)
    modality = _table_in(places, "ModalityLUTSequence", layout)
    table = _table_in(places, "VOILUTSequence", layout) if voi is None else None
    window = (*check_window(voi), "LINEAR") if voi is not None else table or _window(places, what)
    if window is None and (layout.bits > 8 or modality):
        needs = "a VOI window, because it has more than 8 bits" if layout.bits > 8 else "a VOI window"
        raise EquicamError(what, needs, f"none in {layout.bits} bits", VOI_FIX)
    if window is None and rescale is not None and slope == 0:
        raise EquicamError(what, "a rescale slope other than 0", "0", "a fresh copy of it")

    def real(stored: NDArray[Any]) -> NDArray[np.float64]:
        """Values in their own unit, such as Hounsfield units."""
        return modality(stored) if modality else stored.astype(np.float64) * slope + intercept

    low = -(2 ** (layout.bits - 1)) if layout.signed else 0
    ends = real(np.array([low, low + 2**layout.bits - 1]))
    rgb = np.empty((*values.shape, 3), np.uint8)
    # in bands, because float64 copies of a whole large image would take gigabytes
    for start in range(0, len(values), BAND_ROWS):
        band = slice(start, start + BAND_ROWS)
        x = real(values[band])
        if isinstance(window, _Table):
            shown = window(x) / (2**window.bits - 1)
        elif window is None:  # all that the bits can hold
            shown = (x - ends.min()) / (ends.max() - ends.min())
        else:
            shown = _apply_window(x, *window)
        shown = np.clip(shown, 0, 1)
        grey = np.rint((1 - shown if layout.photometric == "MONOCHROME1" else shown) * 255)
        rgb[band] = grey.astype(np.uint8)[..., None]
    return rgb


def _apply_window(x: NDArray[np.float64], centre: float, width: float, function: str) -> NDArray[np.float64]:
    """Values as 0 for black to 1 for white, PS3.3 C.11.2.1."""
    shown: NDArray[np.float64]
    if function == "SIGMOID":
        shown = 1 / (1 + np.exp(np.clip(-4 * (x - centre) / width, -700, 700)))
    elif function == "LINEAR_EXACT":
        shown = (x - centre) / width + 0.5
    elif width == 1:
        shown = (x > centre - 0.5).astype(np.float64)
    else:
        shown = (x - (centre - 0.5)) / (width - 1) + 0.5
    return shown


def _window(places: Sequence[Any], what: str) -> tuple[float, float, str] | None:
    """Centre, width and function of the file's first window."""
    for place in places:
        centre, width = _number(place, "WindowCenter"), _number(place, "WindowWidth")
        if centre is None or width is None:
            continue
        function = str(place.get("VOILUTFunction") or "LINEAR").strip()
        known = function in ("LINEAR", "LINEAR_EXACT", "SIGMOID")
        if not known or width <= 0 or (function == "LINEAR" and width < 1):
            needs = "a VOI window with a width of at least 1 and a known function"
            raise EquicamError(what, needs, f"a width of {width:g}" if known else "another function", VOI_FIX)
        return centre, width, function
    return None


def _read_layout(header: Any, little_endian: bool, what: str) -> _Layout:
    """How values are stored; sizes are refused before decoding."""
    rows, columns = _count(header, "Rows", what), _count(header, "Columns", what)
    refuse_size(columns, rows, what)
    photometric = header.get("PhotometricInterpretation")
    if photometric not in _PHOTOMETRIC:
        needs = f"a photometric interpretation of {', '.join(_PHOTOMETRIC)}"
        raise EquicamError(what, needs, "another", "a copy as PNG")
    numbers = ("SamplesPerPixel", "BitsAllocated", "BitsStored")
    samples, allocated, bits = (_count(header, name, what) for name in numbers)
    if samples != (1 if photometric.startswith(("MONO", "PAL")) else 3):
        needs = f"the samples of {photometric}"
        raise EquicamError(what, needs, f"{samples} per pixel", "a fresh copy of it")
    if allocated not in (8, 16, 32) or not 1 <= bits <= allocated:
        raise EquicamError(what, "8, 16 or 32 bits per value", f"{bits} in {allocated} bits", "a copy as PNG")
    if samples == 3 and allocated != 8:
        raise EquicamError(what, "colours of 8 bits", f"{allocated} bits", "a copy with colours of 8 bits")
    return _Layout(str(photometric), bits, header.get("PixelRepresentation") == 1, little_endian)


def _frame_count(header: Any, file_bytes: int, what: str) -> int:
    found = header.get("NumberOfFrames")
    count = 1 if found is None else int(found)
    if not 1 <= count <= min(MAX_FRAMES, file_bytes):
        got = f"{count:,}" if abs(count) < 10**12 else "an absurd number"
        needs = f"1 to {MAX_FRAMES:,} frames that its size can hold"
        raise EquicamError(what, needs, got, "a fresh copy of it")
    return count


def _count(header: Any, keyword: str, what: str) -> int:
    found = header.get(keyword)
    if not isinstance(found, int):
        raise EquicamError(what, f"a number {keyword}", "none", "a fresh copy of it")
    return int(found)


def _number(place: Any, keyword: str) -> float | None:
    """A number, the first if there are several; None where there is none."""
    found = place.get(keyword)
    if found is None or found == "":
        return None
    several = hasattr(found, "__len__") and not isinstance(found, str)
    first = float(found[0] if several else found)
    if not math.isfinite(first):
        raise ValueError(keyword)
    return first


def _places(header: Any, frame: int) -> list[Any]:
    """Where a frame's rescaling and window may be: its functional groups, those of all frames, the header itself."""
    places: list[Any] = []
    of_frames = header.get("PerFrameFunctionalGroupsSequence") or []
    shared = header.get("SharedFunctionalGroupsSequence") or []
    for group in [*of_frames[frame : frame + 1], *shared[:1]]:
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            places += (group.get(name) or [])[:1]
    return [*places, header]


def _rescale(places: Sequence[Any]) -> tuple[float, float] | None:
    for place in places:
        slope, intercept = _number(place, "RescaleSlope"), _number(place, "RescaleIntercept")
        if slope is not None or intercept is not None:
            return 1.0 if slope is None else slope, intercept or 0.0
    return None


def _table_in(places: Sequence[Any], name: str, layout: _Layout) -> _Table | None:
    item = next((place.get(name)[0] for place in places if place.get(name)), None)
    return None if item is None else _table(item.LUTDescriptor, item.LUTData, layout)


def _table(descriptor: Any, data: Any, layout: _Layout) -> _Table:
    """PS3.3 C.11.1.1: number of entries (0 is 65,536), first value mapped, and bits of an entry."""
    count, first, bits = (int(one) for one in descriptor)
    count = count or 2**16
    if not 1 <= bits <= 16 or not 0 < count <= 2**16:
        raise ValueError("a table of another kind")
    if isinstance(data, bytes):
        kind = "u1" if len(data) < 2 * count else "<u2" if layout.little_endian else ">u2"
        entries = np.frombuffer(data if kind == "u1" else data[: 2 * count], kind)
    else:
        entries = np.atleast_1d(np.asarray(data, np.int64))
    if len(entries) < count:
        raise ValueError("a table cut off")
    first -= 2**16 if layout.signed and first >= 2**15 else 0
    return _Table(first, entries[:count].astype(np.float64), bits)


def _apply_palette(values: NDArray[Any], header: Any, layout: _Layout, what: str) -> NDArray[np.uint8]:
    if "RedPaletteColorLookupTableData" not in header:
        raise EquicamError(what, "a palette that is not segmented", "none", "a copy with colours of 8 bits")
    rgb = np.empty((*values.shape, 3), np.uint8)
    for i, colour in enumerate(("Red", "Green", "Blue")):
        stem = f"{colour}PaletteColorLookupTable"
        table = _table(header[f"{stem}Descriptor"].value, header[f"{stem}Data"].value, layout)
        high_byte = table.bits > 8 or table.entries.max() > 255  # some writers put 8-bit colours there too
        for start in range(0, len(values), BAND_ROWS):
            band = slice(start, start + BAND_ROWS)
            rgb[band, :, i] = table(values[band]) // (256 if high_byte else 1)
    return rgb


def _refuse_slide(header: Any, what: str) -> None:
    if header.get("SOPClassUID") == WHOLE_SLIDE:
        raise EquicamError(what, "an image", "a tile or level of a whole slide", SLIDE_FIX)


def _transfer_syntax(file: BinaryFile, what: str) -> str:
    """The transfer syntax in the file's meta information, read before the rest.

    pydicom inflates a deflated file whole, whatever it becomes.
    """
    from pydicom.filereader import _read_file_meta_info

    file.seek(0)
    if file.read(132)[128:] != b"DICM":
        raise EquicamError(what, "DICM at byte 128", "none", "a fresh copy of it")
    found = str(_read_file_meta_info(file).get("TransferSyntaxUID") or "")
    if not found or found == DEFLATED:
        needs, got = "a transfer syntax that can be read in parts", "a deflated file" if found else "none"
        raise EquicamError(what, needs, got, "a copy in another transfer syntax")
    file.seek(0)
    return found


def _refuse_unknown(syntax: Any, what: str) -> None:
    """Refuse a transfer syntax that no installed package decodes."""
    from pydicom.pixels import get_decoder

    with suppress(NotImplementedError):
        if get_decoder(syntax).is_available:
            return
    fix = "pip install pylibjpeg[all], or a copy without compression"
    raise EquicamError(what, "a transfer syntax that can be decoded here", _syntax_name(syntax), fix)


def _syntax_name(syntax: Any) -> str:
    return str(syntax.name) if syntax.is_transfer_syntax and not syntax.is_private else "an unknown one"


@contextmanager
def _open(path: Path, what: str) -> Iterator[BinaryFile]:
    with refusing(what, "an existing file that can be read", fix="its full path, and its permissions"):
        file = open_regular(path, what)
    with file:
        refuse_large(file.seek(0, io.SEEK_END), what, MAX_IMAGE_BYTES)
        yield file


@contextmanager
def _reading_header(what: str) -> Iterator[None]:
    with _refusing(what, "a DICOM header that can be read"), needing("dicom", what):
        yield


@contextmanager
def _refusing(what: str, needs: str) -> Iterator[None]:
    """Every exception becomes an EquicamError without its text, and pydicom's warnings are dropped: they quote values."""
    logger = logging.getLogger("pydicom")
    logger.addFilter(_drop := lambda _record: False)
    try:
        with refusing(what, needs, quoted=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeFilter(_drop)
