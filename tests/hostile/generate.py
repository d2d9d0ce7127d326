"""Hostile images and lists, made from a seed: nothing here is a file from anywhere."""

import io
import socket
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8)
SAVED: dict[str, tuple[str, dict[str, object]]] = {
    "jpeg": ("JPEG", {}),
    "progressive.jpeg": ("JPEG", {"progressive": True}),
    "mpo": ("MPO", {"save_all": True, "append_images": [Image.fromarray(PIXELS)]}),
    "png": ("PNG", {}),
    "tiff": ("TIFF", {}),
    "lzw.tiff": ("TIFF", {"compression": "tiff_lzw"}),
    "jpeg.tiff": ("TIFF", {"compression": "jpeg"}),
    "deflate.tiff": ("TIFF", {"compression": "tiff_adobe_deflate"}),
    "bmp": ("BMP", {}),
    "gif": ("GIF", {}),
    "webp": ("WEBP", {}),
    "lossless.webp": ("WEBP", {"lossless": True}),
    "ppm": ("PPM", {}),
    "jp2": ("JPEG2000", {}),
}
"""Every format that is opened, as Pillow writes it."""
WITH_EXIF = ("jpeg", "png", "webp", "mpo")


def exif(orientation: int = 6) -> bytes:
    """EXIF with an orientation and a few tags of other types."""
    made = Image.Exif()
    made.update({0x0112: orientation, 0x010F: "maker", 0x011A: 72.0, 0x0132: "2020:01:01 00:00:00"})
    made[0x8825] = {1: "N", 2: (1.0, 2.0, 3.0)}
    return made.tobytes()


def encode(name: str, pixels: np.ndarray = PIXELS, **options: object) -> bytes:
    """An image in one of the formats of `SAVED`."""
    kind, usual = SAVED[name]
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **usual, **options)
    return buffer.getvalue()


def png(width: int, height: int) -> bytes:
    """A small file with this many black pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(width + 1) * height, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def mutate(data: bytes, random: Random) -> bytes:
    """The same bytes with some damage."""
    return random.choice(MUTATIONS)(bytearray(data), random) if data else data


def _flip(data: bytearray, random: Random) -> bytes:
    for _ in range(random.choice((1, 1, 2, 4, 16, 64))):
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


def _overwrite(data: bytearray, random: Random) -> bytes:
    """Most structure is at the start."""
    for _ in range(random.choice((1, 2, 4, 8))):
        data[min(int(random.expovariate(1 / 80)), len(data) - 1)] = random.choice((0, 1, 127, 128, 255, 65))
    return bytes(data)


def _cut(data: bytearray, random: Random) -> bytes:
    return bytes(data[: random.randrange(len(data))])


def _splice(data: bytearray, random: Random) -> bytes:
    """A piece copied or moved to another place."""
    start, to = random.randrange(len(data)), random.randrange(len(data))
    piece = data[start : start + random.choice((1, 2, 4, 12, 64, 512))]
    if random.random() < 0.5:
        data[to : to + len(piece)] = piece
    else:
        data[to:to] = piece * random.choice((1, 1, 2, 50))
    return bytes(data)


def _remove(data: bytearray, random: Random) -> bytes:
    start = random.randrange(len(data))
    del data[start : start + random.choice((1, 2, 4, 16, 256))]
    return bytes(data)


def _number(data: bytearray, random: Random) -> bytes:
    """A size, offset or count replaced by an extreme one, in either byte order; fields are near the start."""
    order, kind, bits = random.choice("<>"), *random.choice((("H", 16), ("I", 32), ("Q", 64)))
    at = min(int(random.expovariate(1 / 60)), max(0, len(data) - bits // 8))
    value = random.choice((0, 1, 2, 2**15, 2**16, 10**5, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1))
    data[at : at + bits // 8] = struct.pack(order + kind, value % 2**bits)
    return bytes(data)


MUTATIONS = (_flip, _overwrite, _cut, _splice, _remove, _number)


def write_socket(path: Path) -> None:
    """A socket in the file system."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
