"""Every image becomes a row in bounded time and memory, with the digest of the bytes that were decoded."""

import contextlib
import hashlib
import multiprocessing
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import equicam
from equicam.audit.compute import AuditJob, preprocess_to_array
from equicam.engines.worker import ModelFromName, SharedFolder
from equicam.errors import EquicamError
from equicam.images import decoding, limited
from equicam.images.decoding import DecoderPool, decode_image
from equicam.images.items import Item, read_item
from equicam.images.limited import limits_scale
from equicam.images.sources import find_items
from equicam.models.images import input_bytes
from equicam.reasons import describe
from equicam.runs.report.render import read_input
from equicam.runtime.executor import CHOSEN_BY_USER
from tests.hostile.generate import encode, png, write_socket

TRIGGER = 200
"""The value of the pixels of the image on which a preprocessing misbehaves."""
VALUES = [10, 20, TRIGGER, 30, 40, 50]


def of_colour(value: int) -> bytes:
    return encode("png", np.full((32, 32, 3), value, np.uint8))


def box(size: tuple[int, int]) -> tuple[float, float, float, float]:
    return 0.0, 0.0, float(size[0]), float(size[1])


def plain(image) -> np.ndarray:
    return np.asarray(image, np.float32).mean((0, 1))


def on_trigger(act, image) -> np.ndarray:
    """The mean colour, after `act` for the image that triggers it."""
    if int(np.asarray(image)[0, 0, 0]) == TRIGGER:
        act()
    return plain(image)


def never_ends() -> None:
    """Inside C code that holds the interpreter: no handler in Python would run."""
    re.match("(a+)+$", "a" * 60 + "b")


def fills_memory() -> None:
    np.empty(3 * 2**30, np.uint8)


KEPT_MEMORY = """
import torch
from equicam.images.limited import call_alone, _limit_memory
from equicam.runtime.executor import keep_freed_memory

assert keep_freed_memory()
blocks = [torch.ones(2**28, dtype=torch.uint8) for _ in range(6)]
del blocks

def fill():
    _limit_memory(2**29)
    try:
        torch.empty(2**30 - 2**20, dtype=torch.uint8)
    except RuntimeError:
        return "refused"
    return "fits"

print(call_alone(fill)[0])
"""
"""A process that frees more than it lets another take, and keeps it."""


@pytest.fixture
def items(tmp_path) -> list[Item]:
    """Six images of one colour each; the third is the trigger."""
    for i, value in enumerate(VALUES):
        (tmp_path / f"{i}.png").write_bytes(of_colour(value))
    return find_items(tmp_path)


def decoded(items, preprocess, *, workers: int = 2) -> list[decoding.DecodedImage]:
    with closing(DecoderPool(preprocess, box, workers=workers, image_bytes=12, shard_size=2)) as pool:
        shards = [items[i : i + 2] for i in range(0, len(items), 2)]
        found = (one for shard in pool.decode_shards(shards) for one in shard)
        return [replace(one, x=None if one.x is None else one.x.copy()) for one in found]


def check_others(items, found) -> None:
    """All rows are there in order, and all but the third have their own pixels."""
    assert [one.item for one in found] == items
    others = zip(found[:2] + found[3:], VALUES[:2] + VALUES[3:], strict=True)
    assert all(one.x.tolist() == [value] * 3 for one, value in others)


def test_an_image_that_takes_too_long_is_a_row(items, monkeypatch):
    monkeypatch.setattr(limited, "MAX_SECONDS", 0.5)
    found = decoded(items, partial(on_trigger, never_ends))
    check_others(items, found)
    assert found[2].reason.code == "decoding-timeout"
    assert describe(found[2].reason) == "decoding it takes more than 0.5 s"
    assert found[2].bytes


def test_an_image_that_takes_too_much_memory_is_a_row(items, monkeypatch):
    monkeypatch.setattr(limited, "MAX_MEMORY_BYTES", 2**30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    found = decoded(items, partial(on_trigger, fills_memory))
    check_others(items, found)
    assert found[2].reason.code == "out-of-memory"
    assert found[2].sha256
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    monkeypatch.setenv("EQUICAM_DECODE_LIMITS", "4")
    assert all(one.reason is None for one in decoded(items, partial(on_trigger, fills_memory)))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_memory_that_the_parent_keeps_is_no_gift():
    env = {name: value for name, value in os.environ.items() if not name.startswith(CHOSEN_BY_USER)}
    command = [sys.executable, "-c", KEPT_MEMORY]
    assert subprocess.check_output(command, env=env, text=True) == "refused\n"


def test_the_factor_of_the_limits_is_checked(monkeypatch):
    for text in ("no", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("EQUICAM_DECODE_LIMITS", text)
        with pytest.raises(EquicamError, match="a factor above 0"):
            limits_scale()


ACTS = {"decoding-timeout": never_ends, "out-of-memory": fills_memory, "killed-decoder": partial(os._exit, 9)}


@pytest.mark.parametrize("code", ACTS)
def test_other_engines_have_the_same_limits_and_keep_none(items, tmp_path, monkeypatch, code):
    """On Ray, a task decodes a shard: nothing of it may stay in the process, which belongs to Ray."""
    model = equicam.load("embedded")
    run = equicam.audit(tmp_path, model, tmp_path / "run", views=1, workers=1)

    def preprocess(image):
        on_trigger(ACTS[code], image)
        return model.preprocess(image)

    source = ModelFromName("embedded")
    job = AuditJob(
        SharedFolder.at(run.folder / "manifest.json"), run.manifest, frozenset(), source,
        replace(source.preprocessing_only(model), preprocess=preprocess), 1, input_bytes(model),
    )  # fmt: skip
    monkeypatch.setattr(limited, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(limited, "MAX_MEMORY_BYTES", 2**30)
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    found = job.decode((0, items))
    assert [one.item for one in found] == items
    assert [one.reason and one.reason.code for one in found] == [None, None, code, None, None, None]
    for one in found[:2] + found[3:]:
        alone = decode_image(one.item, partial(preprocess_to_array, model), box)
        np.testing.assert_array_equal(one.x, alone.x)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_worker_killed_from_outside_is_not_the_images_fault(items, tmp_path):
    """Killed in the pool, and again when the image is decoded alone."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def wait_to_be_killed() -> None:
        for i in range(2):
            with contextlib.suppress(FileExistsError):
                (notes / f"{i}").touch(exist_ok=False)
                (notes / f"{i}.pid").write_text(str(os.getpid()))
                time.sleep(30)

    def kill() -> None:
        for file in (notes / "0.pid", notes / "1.pid"):
            while not file.exists() or not file.read_text():
                time.sleep(0.01)
            os.kill(int(file.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = decoded(items, partial(on_trigger, wait_to_be_killed))
    killer.join()
    check_others(items, found)
    assert (found[2].reason, found[2].x.tolist()) == (None, [TRIGGER] * 3)


def test_an_image_that_kills_every_worker_is_a_row(items):
    found = decoded(items, partial(on_trigger, partial(os._exit, 9)))
    check_others(items, found)
    assert found[2].reason.code == "killed-decoder"


def _swap(path: Path, data: tuple[bytes, bytes], stop) -> None:
    """Replace a file as fast as possible, each time whole."""
    other = path.with_suffix(".new")
    while not stop.is_set():
        for one in data:
            other.write_bytes(one)
            other.replace(path)


def test_the_digest_is_that_of_the_image_explained(tmp_path):
    """However often the file is replaced meanwhile."""
    path, dark, light = tmp_path / "a.png", of_colour(10), of_colour(240)
    of = {hashlib.sha256(dark).hexdigest(): 10.0, hashlib.sha256(light).hexdigest(): 240.0}
    path.write_bytes(dark)
    stop = multiprocessing.Event()
    swapper = multiprocessing.get_context("fork").Process(target=_swap, args=(path, (dark, light), stop))
    swapper.start()
    wrong, seen = 0, set()
    item = Item("a", path)
    row = {"id": "a", "path": str(path), "bytes": len(light), "sha256": hashlib.sha256(light).hexdigest(), "input_box": None}  # fmt: skip
    try:
        for _ in range(1200):
            found = decode_image(item, plain, box)
            seen.add(found.sha256)
            wrong += of[found.sha256] != found.x[0]
            shown = read_input(row, (8, 8))
            wrong += not isinstance(shown, str) and int(shown[0, 0, 0]) != 240
            content = read_item(item)
            wrong += int(np.asarray(content.decode().image)[0, 0, 0]) != of[content.sha256]
    finally:
        stop.set()
        swapper.join()
    assert wrong == 0
    assert seen == set(of), "the file was replaced while it was read"


def test_every_entry_of_a_list_is_a_row(tmp_path):
    (tmp_path / "good.png").write_bytes(encode("png"))
    (tmp_path / "long.png").write_bytes(png(1, 200_000))
    os.mkfifo(tmp_path / "pipe.png")
    write_socket(tmp_path / "socket.png")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(8 * 10**12)
    names = ["good.png", "long.png", "pipe.png", "socket.png", "sparse.png", "/dev/zero", "/dev/stdin", "/", "absent.png", "nul\0.png"]  # fmt: skip
    (tmp_path / "items.csv").write_text("\n".join(["path", *names]))
    model, options = equicam.load("embedded"), {"views": 2, "shard_size": 4, "workers": 1}
    run = equicam.audit(tmp_path, model, tmp_path / "run", **options)
    rows = {row["id"]: row for row in run.items.to_pylist()}
    assert rows.keys() == set(names)
    assert {name for name, row in rows.items() if row["status"] == "ok"} == {"good.png"}
    assert all(row["reason"] == "unreadable" for name, row in rows.items() if name != "good.png")
    equicam.audit(tmp_path, model, tmp_path / "run", **options)
