"""Images travel as 8-bit levels and arrive as the numbers of the preprocessing, to the bit."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit.compute import _send, compact_preprocessing, preprocess_to_array
from equicam.images.decoding import DecodedImage, DecoderPool, decode_image
from equicam.images.formats import LevelPixels
from equicam.images.items import Item
from equicam.models.images import VisibleBoxes
from equicam.models.surround import window_levels
from equicam.rasters.windows import WindowPixels
from equicam.runtime.pending import numbers_of_levels, to_device

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return equicam.load("embedded")


def photo(seed, size=(120, 90)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def window(seed, dtype=np.uint8, *, side=40, bands=3, missing=False, std=None):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (bands, side, side)).astype(dtype)
    valid = np.ones((side, side), bool)
    valid[0, 0] = not missing
    return WindowPixels(values, valid, (0, 0), side, 255.0, None, std)


def decoded(seed, pixels):
    found = DecodedImage(Item(str(seed), Path(f"{seed}.png")))
    if isinstance(pixels, LevelPixels):
        return replace(found, x=pixels.levels, numbers=pixels.numbers)
    return replace(found, x=pixels)


@pytest.mark.parametrize("make", [photo, window])
def test_levels_stand_for_the_numbers_of_the_preprocessing(model, make):
    images = [make(seed) for seed in range(3)]
    expected = np.stack([preprocess_to_array(model, one) for one in images])
    assert expected.std() > 0.02
    found = [*map(compact_preprocessing(model, "none"), images)]
    assert all(isinstance(one, LevelPixels) for one in found)
    assert np.array_equal(np.stack([one.to_numbers() for one in found]), expected)
    sent = numbers_of_levels(to_device([one.levels for one in found], CPU), found[0].numbers)
    assert np.array_equal(sent.numpy(), expected)
    shard = [decoded(i, one) for i, one in enumerate(found)]
    assert np.array_equal(_send(shard, CPU).numpy(), expected)


def test_other_windows_are_numbers_from_the_start(model):
    for pixels in (window(1, np.uint16), window(1, np.float32), window(1, missing=True)):
        assert window_levels(model, pixels) is None
        found = compact_preprocessing(model, "none")(pixels)
        assert np.array_equal(found, preprocess_to_array(model, pixels))


def test_a_shard_may_mix_levels_tables_and_numbers(model):
    shard = [window(0), window(1, np.float32), window(2, std=(0.1, 0.2, 0.3)), window(3, missing=True)]
    pixels = [*map(compact_preprocessing(model, "none"), shard)]
    assert [isinstance(one, LevelPixels) for one in pixels] == [True, False, True, False]
    expected = np.stack([preprocess_to_array(model, one) for one in shard])
    found = _send([decoded(i, one) for i, one in enumerate(pixels)], CPU)
    assert np.array_equal(found.numpy(), expected)


def test_levels_come_back_from_workers(model, tmp_path):
    items = [Item(f"{seed}.png", tmp_path / f"{seed}.png") for seed in range(5)]
    for seed, item in enumerate(items):
        photo(seed).save(item.path)
    preprocess, boxes = compact_preprocessing(model, "none"), VisibleBoxes(model)
    options = {"workers": 2, "image_bytes": 4 * 3 * 224**2, "shard_size": 5}
    with closing(DecoderPool(preprocess, boxes, **options)) as pool:
        (shard,) = pool.decode_shards([items])
        assert {one.x.dtype for one in shard} == {np.dtype(np.uint8)}
        expected = np.stack([preprocess_to_array(model, photo(seed)) for seed in range(5)])
        assert np.array_equal(_send(shard, CPU).numpy(), expected)


def test_levels_whose_numbers_are_not_finite_are_a_reason(tmp_path):
    photo(0).save(path := tmp_path / "one.png")
    numbers = np.zeros((3, 256), np.float32)
    numbers[:, 255] = np.inf

    def decode(top):
        pixels = LevelPixels(np.full((3, 8, 8), top, np.uint8), numbers)
        return decode_image(Item(path.name, path), lambda _image: pixels, lambda _size: (0.0, 0.0, 1.0, 1.0))

    fine = decode(254)
    assert fine.reason is None
    assert fine.x.dtype == np.float32, "a table with an infinite number is not passed on"
    assert decode(255).reason.code == "not-finite"
