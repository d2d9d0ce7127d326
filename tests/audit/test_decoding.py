"""Pictures opened by other processes: the same pixels, through memory that is shared or not."""

import mmap
import os
import time
from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit.compute import preprocess_to_array
from equicam.errors import EquicamError
from equicam.evaluate.loading import load_or_reason
from equicam.images.decoding import SHARDS_AHEAD, DecoderPool, _SharedBuffer, decode_image, decoder_count
from equicam.images.sources import find_items
from equicam.models.images import VisibleBoxes, input_bytes
from equicam.reasons import describe


@pytest.fixture(scope="module")
def eyes():
    model = equicam.load("embedded")
    return partial(preprocess_to_array, model), VisibleBoxes(model)


@pytest.fixture(scope="module")
def good(items):
    return [item for item in items if not item.id.startswith("05")]


@pytest.fixture(scope="module")
def items(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(11):
        Image.fromarray(rng.integers(0, 255, (96, 96, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")
    (folder / "05.png").write_bytes(b"no image")
    return find_items(folder)


def by_parts(items, count):
    return [items[i : i + count] for i in range(0, len(items), count)]


def shared(x):
    while isinstance(x, np.ndarray):
        x = x.base
    return isinstance(getattr(x, "obj", x), mmap.mmap)


@pytest.mark.parametrize("known", [True, False])
def test_every_part_has_the_pixels_opened_here(eyes, items, known):
    size, parts = input_bytes(equicam.load("embedded")), by_parts(items, 2)
    assert len(parts) > SHARDS_AHEAD + 1, "places must come round again"
    alone = [decode_image(item, *eyes) for item in items]
    assert all(one.x is None or one.x.nbytes == size for one in alone)
    settings, seen = {"image_bytes": size, "shard_size": 2} if known else {}, []
    with closing(DecoderPool(*eyes, workers=2, **settings)) as decoders:
        for found in decoders.decode_shards(parts):
            time.sleep(0.3)  # for the parts ahead to be opened: they must leave these pixels alone
            assert all(shared(one.x) == known for one in found if one.x is not None)
            seen += [(one.item.id, one.reason, None if one.x is None else one.x.copy()) for one in found]
    assert [name for name, _, _ in seen] == [item.id for item in items]
    assert sum(x is None for _, _, x in seen) == 1
    for (_, reason, x), one in zip(seen, alone, strict=True):
        assert reason == one.reason
        np.testing.assert_array_equal(x, one.x)


def _by_brightness(image):
    """Two sizes of input: what fits the shared places, and what does not."""
    side = 8 if np.asarray(image)[0, 0, 0] < 128 else 6
    return np.full((3, side, side), float(np.asarray(image).mean()), np.float32)


def test_an_image_of_another_size_is_sent(good, eyes):
    alone = [decode_image(item, _by_brightness, eyes[1]).x for item in good]
    assert {x.shape[-1] for x in alone} == {6, 8}
    for part in (3, 2):  # also more images than a part was said to have
        options, seen = {"image_bytes": 8 * 8 * 3 * 4, "shard_size": part}, []
        with closing(DecoderPool(_by_brightness, eyes[1], workers=2, **options)) as decoders:
            for found in decoders.decode_shards(by_parts(good, 3)):
                time.sleep(0.1)
                seen += [one.x.copy() for one in found]
        for x, expected in zip(seen, alone, strict=True):
            np.testing.assert_array_equal(x, expected)


def _deadly(killer, image):
    if np.asarray(image)[0, 0, 0] == killer:
        os._exit(9)
    return np.asarray(image, np.float32).transpose(2, 0, 1).copy()


def test_pixels_are_right_after_an_image_killed_its_worker(good, eyes):
    firsts = [int(np.asarray(Image.open(item.path))[0, 0, 0]) for item in good]
    assert firsts.count(firsts[3]) == 1
    prepare, options = partial(_deadly, firsts[3]), {"image_bytes": 96 * 96 * 3 * 4, "shard_size": 2}
    with closing(DecoderPool(prepare, eyes[1], workers=2, **options)) as decoders:
        first = decoders._buffer
        found = (one for part in decoders.decode_shards(by_parts(good, 2)) for one in part)
        seen = [(one.item.id, None if one.x is None else one.x.copy()) for one in found]
    assert decoders._buffer is not first, "what is left of the pool that broke may still write there"
    assert [name for name, x in seen if x is None] == [good[3].id]
    for item, (_, x) in zip(good, seen, strict=True):
        if item is not good[3]:
            np.testing.assert_array_equal(x, prepare(Image.open(item.path)))


def test_a_place_holds_one_image_and_none_that_is_larger():
    places, kind = _SharedBuffer(16, 3), np.dtype(np.float32)
    for place in range(3):
        assert places.put(place, np.full((2, 2), place, np.float32))
    assert [places.at(place, (2, 2), kind).mean() for place in range(3)] == [0, 1, 2]
    assert not places.put(0, np.ones((3, 3), np.float32))
    assert places.at(0, (4,), kind).tolist() == [0] * 4
    levels = np.arange(12, dtype=np.uint8).reshape(2, 3, 2).transpose(2, 0, 1)
    assert places.put(1, levels)
    assert np.array_equal(places.at(1, levels.shape, levels.dtype), levels)
    assert [places.at(place, (2, 2), kind).mean() for place in (0, 2)] == [0, 2]


def test_a_preprocessing_that_takes_no_small_image_is_no_obstacle():
    def choosy(image):
        if min(image.size) < 96:
            raise ValueError("too small")
        return torch.zeros(3, 96, 96)

    model = replace(equicam.load("embedded"), preprocess=choosy)
    assert input_bytes(model) == 4 * 3 * 224**2
    assert input_bytes(replace(model, preprocess=lambda _image: torch.zeros(1, 5, 7))) == 4 * 35


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), KeyError("mean"), AssertionError()])
def test_whatever_preprocessing_raises_is_the_reason_in_audit_and_evaluation(items, eyes, error):
    def fails(_image):
        raise error

    found, loaded = decode_image(items[0], fails, eyes[1]), load_or_reason(fails, items[0])
    assert (found.x, found.reason.code) == (None, "unreadable")
    assert found.reason.values["error"] == type(error).__name__
    assert found.sha256 is not None
    assert (loaded.x, loaded.reason) == (None, describe(found.reason))


@pytest.mark.parametrize(
    ("cpus", "images", "devices", "expected"),
    [(16, 1000, 1, 10), (8, 1000, 1, 7), (16, 3, 1, 3), (32, 1000, 4, 7), (2, 1000, 4, 1), (1, 1000, 1, 1), (8, 0, 1, 1)],
)  # fmt: skip
def test_cpus_images_and_devices_decide_how_many_decode(cpus, images, devices, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cpus)), raising=False)
    assert decoder_count(None, images, devices) == expected
    assert decoder_count(13, images, devices) == 13


@pytest.mark.parametrize("workers", [0, -2])
def test_workers_below_one_are_refused_before_anything_is_written(workers, tmp_path, items):
    with pytest.raises(EquicamError, match="workers needs a number of processes"):
        equicam.audit(items[0].path.parent, equicam.load("embedded"), tmp_path / "run", workers=workers)
    assert not (tmp_path / "run").exists()


def test_an_audit_starts_as_many_decoders_as_there_should_be(items, tmp_path, monkeypatch):
    from equicam.audit import audit as module

    started, pool = [], module.DecoderPool

    def counted(*given, workers, **options):
        started.append(workers)
        return pool(*given, workers=workers, **options)

    monkeypatch.setattr(module, "DecoderPool", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(4)), raising=False)
    folder, model = items[0].path.parent, equicam.load("embedded")
    for i, workers in enumerate((None, 1)):
        equicam.audit(folder, model, tmp_path / f"run{i}", views=2, workers=workers)
    assert started == [3, 1]
