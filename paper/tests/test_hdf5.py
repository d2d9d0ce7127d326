"""Images in HDF5 files: read alone, from files that stay open, by threads and forks."""

import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from equicam import EquicamError
from equicam.images.items import Item, open_item, read_item
from equicam_paper import hdf5

PIXELS = np.random.default_rng(1).integers(0, 255, (20, 8, 9, 3), dtype=np.uint8)


@pytest.fixture
def many(tmp_path):
    with h5py.File(tmp_path / "many.h5", "w") as file:
        file.create_dataset("x", data=PIXELS, chunks=(4, 8, 9, 3), compression="gzip")
    return [Item(str(i), tmp_path / "many.h5", index=i, read=hdf5.read_image) for i in range(len(PIXELS))]


def right(i: Item) -> bool:
    return bool(np.array_equal(read_item(i).decode().image, PIXELS[i.index]))


def test_one_of_many_is_read_alone_from_a_file_opened_once(many, monkeypatch):
    opened, sizes = [], []
    whole, cut = h5py.File, h5py.Dataset.__getitem__
    monkeypatch.setattr(h5py, "File", lambda *a, **k: (opened.append(a), whole(*a, **k))[1])
    monkeypatch.setattr(
        h5py.Dataset, "__getitem__", lambda d, key: (found := cut(d, key), sizes.append(found.size))[0]
    )
    assert all(right(i) for i in many)
    assert len(opened) == 1
    assert set(sizes) == {PIXELS[0].size}
    assert open_item(many[0]).mode == "RGB"


def test_no_more_than_a_few_files_stay_open(many):
    for i in range(3 * hdf5.MAX_OPEN_FILES):
        copy = many[0].path.with_name(f"{i}.h5")
        copy.write_bytes(many[0].path.read_bytes())
        assert right(replace(many[0], path=copy, index=5))
    descriptors = Path("/proc/self/fd")
    if descriptors.is_dir():
        links = [d.readlink() for d in descriptors.iterdir() if d.is_symlink()]
        assert sum(many[0].path.parent in d.parents for d in links) <= hdf5.MAX_OPEN_FILES


def test_threads_read_at_the_same_time(many):
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, many * 50))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_reads_on_even_if_somebody_was_reading(many):
    assert right(many[0])
    sent = pickle.loads(pickle.dumps(many))
    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(right, i) for i in many * 50]
        for _ in range(4):
            with hdf5._LOCKS[os.getpid()]:
                child = os.fork()
            if child == 0:
                signal.alarm(30)  # a child that waits for its parent's lock would wait for ever
                os._exit(0 if all(map(right, sent)) else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert all(r.result(timeout=60) for r in reading)


def unlike(path: Path, **datasets) -> Path:
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data
    return path


def test_invalid_image_files_are_refused_with_a_reason(many, tmp_path):
    whole = many[0].path.read_bytes()
    (tmp_path / "cut.h5").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.h5").write_text("no HDF5")
    unlike(tmp_path / "group.h5", **{"x/inside": 1})
    unlike(tmp_path / "other.h5", z=PIXELS)
    unlike(tmp_path / "grey.h5", x=PIXELS[..., 0])
    unlike(tmp_path / "floats.h5", x=PIXELS / 255)
    with h5py.File(tmp_path / "bomb.h5", "w") as file:
        file.create_dataset("x", (1, 10**6, 10**6, 3), np.uint8, chunks=(1, 100, 100, 3))
    reasons = {
        "cut": "whole HDF5 file", "text": "whole HDF5 file", "other": "dataset 'x'", "none": "No such file",
        "group": "dataset 'x', got a Group", "grey": "8-bit images", "floats": "float64", "bomb": "at most 178,956,970 pixels",
    }  # fmt: skip
    for name, reason in reasons.items():
        message = f"needs [^;]*{reason}[^;]*; try (a fresh copy of it|tiling it first)$"
        with pytest.raises(EquicamError, match=f"^file '.*/{name}.h5' {message}"):
            open_item(replace(many[0], path=tmp_path / f"{name}.h5"))
    for index in (20, -1):
        with pytest.raises(EquicamError, match="images 0 to 19"):
            open_item(replace(many[0], index=index))
