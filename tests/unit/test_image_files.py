"""Every kind of image file is opened as upright 8-bit RGB, or refused with a reason."""

import zlib

import numpy as np
import pytest
from PIL import Image

import equicam
from equicam import EquicamError
from equicam.errors import needing, refusing
from equicam.images.formats import to_rgb
from equicam.images.items import open_image
from tests.hostile.generate import encode

RAMP = np.linspace(0, 255, 40 * 30).reshape(40, 30).astype(np.uint8)
COLOUR = np.stack([RAMP, RAMP[::-1], np.full_like(RAMP, 90)], -1)


def saved(tmp_path, image: Image.Image, name: str, **options):
    image.save(tmp_path / name, **options)
    return tmp_path / name


@pytest.mark.parametrize("name", ["a.png", "a.tiff", "a.bmp", "a.webp"])
def test_colour(tmp_path, name):
    options = {"lossless": True} if name.endswith("webp") else {}
    assert np.array_equal(open_image(saved(tmp_path, Image.fromarray(COLOUR), name, **options)), COLOUR)


def test_greyscale_and_sixteen_bits_are_the_same_image(tmp_path):
    eight = open_image(saved(tmp_path, Image.fromarray(RAMP), "8.png"))
    sixteen = Image.fromarray(RAMP.astype(np.uint16) * 257)
    deep = [open_image(saved(tmp_path, sixteen, f"16.{ending}")) for ending in ("png", "pgm", "jp2")]
    floats = to_rgb(Image.fromarray((RAMP / 255).astype(np.float32)))
    dark = open_image(saved(tmp_path, Image.fromarray(RAMP.astype(np.uint16)), "dark.png"))
    assert np.asarray(dark).max() == 1  # 255 of 65535 is dark, whatever else is in the image
    for found in (eight, *deep, floats):
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found)[..., 0], RAMP)


def test_transparency_is_over_white(tmp_path):
    clear = np.dstack([COLOUR, np.zeros_like(RAMP)])
    assert np.asarray(open_image(saved(tmp_path, Image.fromarray(clear), "a.png"))).min() == 255
    palette = Image.fromarray(COLOUR).quantize(8)
    palette.info["transparency"] = 0
    found = np.asarray(open_image(saved(tmp_path, palette, "p.png", transparency=0)))
    assert (found[np.asarray(palette) == 0] == 255).all()


def test_cmyk(tmp_path):
    path = saved(tmp_path, Image.fromarray(COLOUR).convert("CMYK"), "a.jpg", quality=95)
    found = open_image(path)
    assert found.mode == "RGB"
    assert np.abs(np.asarray(found, int) - COLOUR).mean() < 12


def test_exif_says_which_way_is_up(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate clockwise to show
    path = saved(tmp_path, Image.fromarray(COLOUR), "a.png", exif=exif)
    assert np.array_equal(open_image(path), np.rot90(COLOUR, -1))
    with Image.open(path) as image:
        assert to_rgb(image).size == (40, 30)


def test_an_animation_is_its_first_frame(tmp_path):
    options = {"save_all": True, "append_images": [Image.fromarray(COLOUR[::-1])]}
    path = saved(tmp_path, Image.fromarray(COLOUR), "a.png", **options)
    assert np.array_equal(open_image(path), COLOUR)


def bomb(side: int = 60_000) -> bytes:
    """A PNG header that promises so many pixels, and nothing behind it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = chunk(b"IHDR", side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


REFUSED = {
    "bomb.png": (bomb(), "at most 178,956,970 pixels"),
    "just over.png": (bomb(13_378), "at most 178,956,970 pixels"),
    "just under.png": (bomb(13_377), "can be read whole"),  # not for its size
    "empty.png": (b"", "bytes of no known format"),
    "text.jpg": (b"<script>alert(1)</script>", "bytes of no known format"),
    "truncated.png": (encode("png")[:2000], "can be read whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unreadable_files_are_refused_with_a_reason(tmp_path, name):
    data, reason = REFUSED[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(EquicamError, match=reason):
        open_image(tmp_path / name)
    with pytest.raises(EquicamError, match=reason):
        equicam.explain(equicam.load("embedded"), tmp_path / name)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(EquicamError, match="No such file"):
        open_image(tmp_path / "nothing.png")


def test_any_size_and_aspect_is_explained():
    model = equicam.load("embedded")
    for size in ((40, 300), (500, 97), (96, 96), (7, 9)):
        image = Image.fromarray(np.random.default_rng(1).integers(0, 255, (*size, 3), dtype=np.uint8))
        assert equicam.explain(model, image, views=2).map.shape == (1, 96, 96)
    grey = Image.fromarray(RAMP)
    assert equicam.explain(model, [grey, Image.fromarray(COLOUR)], views=2).map.shape == (2, 96, 96)


def test_what_libraries_raise_becomes_a_refusal():
    whole = "a.png needs a whole file, got cut off; try a fresh copy of it"
    with pytest.raises(EquicamError, match=whole), refusing("a.png", "a whole file"):
        raise OSError("cut off")
    with pytest.raises(EquicamError, match="got OSError; try") as error, refusing("a", "b", quoted=False):
        raise OSError("Jane Doe")
    assert error.value.__cause__ is None
    with pytest.raises(EquicamError, match="less memory") as error, refusing("a", "b", quoted=False):
        raise MemoryError
    assert isinstance(error.value.__cause__, MemoryError)
    extra = r"a needs b, which.*pip install 'equicam\[geo\]'"
    with pytest.raises(EquicamError, match=extra), refusing("a", "c"), needing("geo", "a"):
        raise ImportError(name="b")
