"""Whatever a file holds, it is an image or an EquicamError: never another decoder, another exception, or a hang."""

import contextlib
import json
import os
import time
from random import Random

import numpy as np
import pytest
from PIL import Image

import equicam
from equicam.errors import EquicamError
from equicam.evaluate.loading import load_image
from equicam.images.formats import FORMATS
from equicam.images.items import Item, open_image
from tests.hostile.generate import PIXELS, SAVED, WITH_EXIF, encode, exif, mutate, png, write_socket

OTHERS = ("EPS", "TGA", "PCX", "SGI", "ICO", "SPIDER", "DDS", "QOI")


@pytest.mark.parametrize("name", SAVED)
def test_the_usual_formats_are_opened(tmp_path, name):
    (tmp_path / "a.png").write_bytes(encode(name))
    assert open_image(tmp_path / "a.png").size == (64, 48)


@pytest.mark.parametrize("kind", OTHERS)
def test_no_other_decoder_is_tried(tmp_path, kind):
    image, path = Image.fromarray(PIXELS), tmp_path / f"a.{kind.lower()}"
    # under its own name first: Pillow remembers the suffix of a SPIDER file, and would save every .png as one
    (image.convert("F") if kind == "SPIDER" else image).save(path, kind)
    with pytest.raises(EquicamError, match="bytes of no known format"):
        open_image(path.rename(tmp_path / "a.png"))
    assert kind not in FORMATS


def test_an_eps_file_starts_no_program(tmp_path, monkeypatch):
    """Pillow gives EPS to Ghostscript, an interpreter of a programming language."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", str(program), raising=False)
    Image.fromarray(PIXELS).save(tmp_path / "a.png", "EPS")
    with pytest.raises(EquicamError):
        open_image(tmp_path / "a.png")
    assert not (tmp_path / "started").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITH_EXIF)
def test_damaged_exif_is_an_image_or_an_error(tmp_path, name):
    random, path, opened = Random(1), tmp_path / "a.png", 0
    for _ in range(200):
        damaged = bytearray(exif())
        for _ in range(random.randint(1, 4)):
            damaged[random.randrange(6, len(damaged))] = random.randrange(256)
        path.write_bytes(encode(name, exif=bytes(damaged)))
        with contextlib.suppress(EquicamError):
            assert open_image(path).size in ((64, 48), (48, 64))
            opened += 1
    assert opened > 150


def test_damage_elsewhere_leaves_the_orientation_readable(tmp_path):
    """Pillow writes EXIF back without its orientation, which fails on a tag of another type than its value has."""
    whole, path = exif(), tmp_path / "a.png"
    for tag in (0x010F, 0x011A, 0x0132, 0x8825):
        for kind in range(20):
            at = whole.index(tag.to_bytes(2, "big")) + 3
            path.write_bytes(encode("png", exif=whole[:at] + bytes([kind]) + whole[at + 1 :]))
            assert np.array_equal(open_image(path), np.rot90(PIXELS, -1)), (tag, kind)


def test_an_unreadable_orientation_is_said_never_guessed(tmp_path):
    """Pillow takes these for upright: the directory ends before the tag, or holds no number there."""
    whole = exif()
    at = whole.index(b"\x01\x12\x00\x03")  # tag and type
    cut, text = whole[: at - 2], whole[: at + 3] + b"\x02" + whole[at + 4 :]
    for i, damaged in enumerate((cut, text, whole[:8] + b"\xff" * 4 + whole[12:], exif(orientation=200))):
        (tmp_path / f"{i}.png").write_bytes(encode("png", exif=damaged))
        with pytest.warns(UserWarning, match="taken as stored"):
            assert np.array_equal(open_image(tmp_path / f"{i}.png"), PIXELS)
    (tmp_path / "good.png").write_bytes(encode("png", exif=whole))
    run = equicam.audit(tmp_path, equicam.load("embedded"), tmp_path.parent / "run", views=2)
    bad = [f"{i}.png" for i in range(4)]
    assert [row["id"] for row in run.items.to_pylist() if "orientation-unread" in row["flags"]] == bad
    run.triage(budget=5, control=0.0)
    queue = {row["id"]: json.dumps(row["reasons"]) for row in run.queue()}
    assert {name for name, text in queue.items() if "orientation-unread" in text} == set(bad)
    assert len(queue) == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SAVED)
def test_any_damage_is_an_image_or_an_error(tmp_path, name):
    random, path = Random(name), tmp_path / "a.png"
    data = encode(name, **({"exif": exif()} if name in WITH_EXIF else {}))
    for _ in range(100):
        path.write_bytes(mutate(data, random))
        with contextlib.suppress(EquicamError):
            assert open_image(path).mode == "RGB"


@pytest.mark.parametrize("size", [(1, 200_000), (200_000, 1), (30, 3_001), (65_536, 2_000)])
def test_an_absurd_size_is_refused_before_it_is_decoded(tmp_path, size):
    path = tmp_path / "a.png"
    path.write_bytes(png(*size))
    model = equicam.load("embedded")
    start = time.process_time()
    for reads in (open_image, lambda p: equicam.explain(model, p), lambda p: load_image(model, Item("a", p))):
        with pytest.raises(EquicamError, match="sides of 1 to 65,535 pixels, one at most 100 times"):
            reads(path)
    assert time.process_time() - start < 1
    path.write_bytes(png(30, 3_000))
    assert open_image(path).size == (30, 3_000)


def test_only_regular_files_are_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    write_socket(tmp_path / "socket")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 8 * 10**12)
    (tmp_path / "good.png").write_bytes(encode("png"))
    (tmp_path / "link").symlink_to("good.png")
    expected = {
        "folder": "got a folder", "pipe": "got a named pipe", "socket": "read whole", "zero": "got a character device",
        "sparse": "at most 1,073,741,824 bytes, got 8,000,000,000,000", "absent": "No such file", "nul\0": "null",
    }  # fmt: skip
    for name, words in expected.items():
        with pytest.raises(EquicamError, match=words):
            open_image(tmp_path / name)
    assert open_image(tmp_path / "link").size == (64, 48)
