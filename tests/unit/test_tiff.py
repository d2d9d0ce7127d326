"""A TIFF is one image of 8 bits, or it is refused: never its first band, its first page, or near black.

EQUICAM_PICTURES  a folder with rasters/RGBA.uint16.tif, RGB.byte.tif and cogeo.tif
"""

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from equicam.errors import EquicamError
from equicam.images.formats import decode
from equicam.images.items import open_image
from equicam.images.tiff import COPY_FIX, GEO_FIX, SLIDE_FIX, read_pages, refuse_unfaithful
from tests.rasters.test_hostile import tiff

RASTERS = Path(os.environ.get("EQUICAM_PICTURES", "/nowhere")) / "rasters"
RAMP = np.linspace(0, 255, 48 * 32).reshape(48, 32).astype(np.uint8)
COLOUR = np.stack([RAMP, RAMP[::-1], np.full_like(RAMP, 90)], -1)
GEO_KEYS = [(34735, "H", 4, (1, 1, 0, 0), True)]
ONE_PAGE_OME = '<OME><Image><Pixels SizeC="1" SizeZ="5" SizeT="2"/></Image></OME>'


def written(*pages: np.ndarray, options: dict | None = None, **page_options) -> bytes:
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    with tifffile.TiffWriter(buffer, **(options or {})) as file:
        for page in pages:
            file.write(page, contiguous=False, **({"metadata": None} | page_options))
    return buffer.getvalue()


def bands(count: int, dtype: type = np.uint16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 100, (48, 32, count)).astype(dtype)


def ome(planes: np.ndarray) -> bytes:
    tifffile = pytest.importorskip("tifffile")
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, planes, ome=True, photometric="minisblack")
    return buffer.getvalue()


def tiled_page(size: int = 64) -> np.ndarray:
    return np.zeros((size, size, 3), np.uint8)


def test_billions_of_bands_are_refused_at_once():
    """The advice names three bands of a file: it must not count them all."""
    claims = {256: (4, 1, 8), 257: (4, 1, 8), 258: (3, 1, 8), 277: (4, 1, 4_000_000_000), 34735: (3, 1, 1)}
    with pytest.raises(EquicamError, match="4000000000 bands") as error:
        refuse_unfaithful(tiff(claims, b""), "a file")
    assert error.value.fix == GEO_FIX.format("4,3,2")


REFUSED = {
    "sentinel-2": (lambda: written(bands(13), photometric="minisblack", planarconfig="contig", extratags=GEO_KEYS), "13 bands of 16 bits", GEO_FIX.format("4,3,2 and scale = 10000 in the recipe file")),
    "planes": (lambda: written(np.moveaxis(bands(13), -1, 0), photometric="minisblack", planarconfig="separate"), "13 bands of 16 bits", COPY_FIX),
    "rgb16": (lambda: written(bands(3), photometric="rgb", extratags=GEO_KEYS), "3 bands of 16 bits", GEO_FIX.format("1,2,3 and scale = 10000 in the recipe file")),
    "rgba16": (lambda: written(bands(4), photometric="rgb", extrasamples=["unassalpha"], extratags=GEO_KEYS), "4 bands of 16 bits", GEO_FIX.format("1,2,3 and scale = 10000 in the recipe file")),
    "fourth-of-5": (lambda: written(bands(5, np.uint8), photometric="rgb", extrasamples=["assocalpha", "unspecified"], planarconfig="contig", extratags=GEO_KEYS), "5 bands of 8 bits", GEO_FIX.format("1,2,3")),
    "height": (lambda: written(bands(1, np.float32)[..., 0], extratags=GEO_KEYS), "1 band of 32 bits", GEO_FIX.format("1,1,1 and scale = 1 in the recipe file")),
    "radar": (lambda: written(bands(1, np.complex64)[..., 0], extratags=GEO_KEYS), "complex numbers", COPY_FIX),
    "grey16": (lambda: written(bands(1)[..., 0]), "1 band of 16 bits", COPY_FIX),
    "grey32": (lambda: written(bands(1, np.uint32)[..., 0]), "1 band of 32 bits", COPY_FIX),
    "big": (lambda: written(bands(1)[..., 0], options={"bigtiff": True}), "1 band of 16 bits", COPY_FIX),
    "big-endian": (lambda: written(bands(3), photometric="rgb", options={"byteorder": ">"}), "3 bands of 16 bits", COPY_FIX),
    "signed": (lambda: written(bands(1, np.int16)[..., 0]), r"1 band of 16 bits \(signed integers\)", COPY_FIX),
    "signed8": (lambda: written(bands(1, np.int8)[..., 0]), r"1 band of 8 bits \(signed integers\)", COPY_FIX),
    "float": (lambda: written(bands(1, np.float32)[..., 0]), r"1 band of 32 bits \(floating-point numbers\)", COPY_FIX),
    "five": (lambda: written(bands(5, np.uint8), photometric="minisblack", planarconfig="contig"), "5 bands of 8 bits", COPY_FIX),
    "pages": (lambda: written(RAMP, RAMP), "2 pages, each an image", COPY_FIX),
    "float-ome": (lambda: ome(bands(1, np.float32)[..., 0]), "floating-point numbers", SLIDE_FIX),
    "ome-planes": (lambda: ome(np.stack([RAMP] * 3)), "3 pages, each an image", SLIDE_FIX),
    "ome-elsewhere": (lambda: written(RAMP, description=ONE_PAGE_OME), "one of 10 planes", SLIDE_FIX),
    "slide": (lambda: written(tiled_page(), tiled_page(32), tile=(16, 16)), "a slide of 2 pages", SLIDE_FIX),
    "aperio": (lambda: written(tiled_page(), tiled_page(32), description="Aperio Image Library v1"), "a slide of 2 pages", SLIDE_FIX),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_8_bit_rgb_cannot_hold_is_refused(tmp_path, name):
    made, found, fix = REFUSED[name]
    (tmp_path / "a.png").write_bytes(made())  # by content, not by suffix
    with pytest.raises(EquicamError, match=found) as error:
        open_image(tmp_path / "a.png")
    assert error.value.fix == fix


def test_ordinary_tiffs_are_read():
    assert np.array_equal(decode(written(RAMP), "a").image, COLOUR[..., :1].repeat(3, -1))
    assert np.array_equal(decode(written(COLOUR, photometric="rgb"), "a").image, COLOUR)
    big = written(COLOUR, photometric="rgb", options={"bigtiff": True}, extratags=GEO_KEYS)
    assert np.array_equal(decode(big, "a").image, COLOUR)
    assert np.array_equal(decode(ome(RAMP), "a").image, COLOUR[..., :1].repeat(3, -1))
    for mode in ("1", "P", "L", "LA", "RGBA", "CMYK"):
        buffer = io.BytesIO()
        Image.fromarray(COLOUR).convert(mode).save(buffer, "TIFF")
        assert decode(buffer.getvalue(), "a").image.size == (32, 48)


def test_reduced_copies_and_masks_are_no_further_images():
    pytest.importorskip("tifffile")
    whole = written(COLOUR, photometric="rgb")
    for kind in (1, 4, 5):
        at = len(whole) + len(whole) % 2
        copy = classic([(254, 4, 1, kind), (256, 4, 1, 8), (257, 4, 1, 8)], start=at)[8:]
        linked = bytearray(whole.ljust(at, b"\0") + copy)
        (first,) = struct.unpack_from("<I", linked, 4)
        (count,) = struct.unpack_from("<H", linked, first)
        struct.pack_into("<I", linked, first + 2 + 12 * count, at)
        assert len(read_pages(bytes(linked))) == 2
        assert np.array_equal(decode(bytes(linked), "a").image, COLOUR)


def classic(entries, *, start: int = 8, following: int = 0, count: int | None = None) -> bytes:
    """A little-endian TIFF of one directory, at `start`."""
    made = struct.pack("<2sHIH", b"II", 42, start, len(entries) if count is None else count)
    return made + b"".join(struct.pack("<HHII", *entry) for entry in entries) + struct.pack("<I", following)


SIZE = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8)]
BIG = b"II+\0\x08\0\0\0"
HOSTILE = {
    "header only": b"II*\0",
    "no page": struct.pack("<2sHI", b"II", 42, 0),
    "first page beyond the end": struct.pack("<2sHI", b"II", 42, 2**32 - 1),
    "directory cut off": classic(SIZE)[:30],
    "absurd count of entries": classic(SIZE, count=65535),
    "no next page": classic(SIZE)[:-4],
    "loop to itself": classic(SIZE, following=8),
    "next page beyond the end": classic(SIZE, following=10**9),
    "absurd count of transparencies": classic([*SIZE, (338, 3, 2**31, 8)]),
    "absurd count of values": classic([*SIZE, (339, 3, 2**32 - 1, 8)]),
    "values beyond the end": classic([*SIZE[:2], (258, 3, 13, 2**31)]),
    "unknown type": classic([*SIZE[:2], (258, 99, 1, 8)]),
    "text for a number": classic([*SIZE[:2], (258, 2, 2, 8)]),
    "zero width": classic([(256, 4, 1, 0), *SIZE[1:]]),
    "no size": classic([SIZE[2]]),
    "negative size": classic([(256, 9, 1, 2**32 - 8), *SIZE[1:]]),
    "no pixels": classic(SIZE),
    "bigtiff of another kind": b"II+\0\x04\0\0\0" + bytes(16),
    "bigtiff beyond the end": BIG + struct.pack("<Q", 2**64 - 1),
    "bigtiff of absurd count": BIG + struct.pack("<QQ", 16, 2**63) + bytes(64),
    "bigtiff of absurd values": BIG + struct.pack("<QQHHQQQ", 16, 1, 258, 3, 2**63, 16, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_damaged_tiff_is_an_error(tmp_path, name):
    (tmp_path / "a.tif").write_bytes(HOSTILE[name])
    with pytest.raises(EquicamError):
        open_image(tmp_path / "a.tif")


def test_a_long_chain_of_pages_ends(monkeypatch):
    monkeypatch.setattr("equicam.images.tiff.MAX_PAGES", 200)
    entry = struct.pack("<HHHII", 1, 256, 4, 1, 8)
    size = len(entry) + 4
    pages = b"".join(entry + struct.pack("<I", 8 + (i + 1) * size) for i in range(201))
    with pytest.raises(EquicamError, match="more than 200 pages"):
        decode(struct.pack("<2sHI", b"II", 42, 8) + pages, "a")


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "found"), [("RGBA.uint16.tif", "4 bands of 16 bits"), ("RGB.byte.tif", ""), ("cogeo.tif", "")]
)
def test_real_rasters(name, found):
    if not (RASTERS / name).is_file():
        pytest.skip(f"EQUICAM_PICTURES names no folder with rasters/{name}")
    if found:
        with pytest.raises(EquicamError, match=found) as error:
            open_image(RASTERS / name)
        assert error.value.fix == GEO_FIX.format("1,2,3 and scale = 10000 in the recipe file")
    else:
        assert np.asarray(open_image(RASTERS / name)).std() > 10
