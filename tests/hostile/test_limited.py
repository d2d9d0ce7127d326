"""The process that opens files has nothing of its parent but the folder and the environment of the moment."""

import gc
import importlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.items import Item, load_item, open_image
from equicam.images.sources import list_source
from equicam.rasters.options import Input, Tiling
from equicam.rasters.tiling import cut_windows
from equicam.runs.log import Log
from tests.rasters.conftest import scene, write_geotiff, write_pyramid


def write_image(path, level: int):
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(path)


def level(path) -> float:
    return float(np.asarray(open_image(path)).mean())


def test_a_relative_path_starts_from_the_present_folder(tmp_path, monkeypatch):
    for number, name in enumerate("ab"):
        write_image(tmp_path / name / "x.png", number)
        monkeypatch.chdir(tmp_path / name)
        assert level("x.png") == number


def test_the_environment_is_the_present_one(monkeypatch):
    for present in (None, "1", None):
        with monkeypatch.context() as patch:
            if present:
                patch.setenv("EQUICAM_TEST", present)
            assert limited.call(os.getenv, "EQUICAM_TEST") == present


def test_a_lock_of_another_thread_stops_nobody(tmp_path):
    """A fork would inherit the lock of a module that another thread imports, and wait for ever."""
    write_image(tmp_path / "x.png", 7)
    held, done = threading.Event(), threading.Event()

    def hold():
        lock = importlib._bootstrap._get_module_lock("PIL.PngImagePlugin")
        lock.acquire()
        held.set()
        done.wait(60)
        lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    limited.end_idle()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(limited.call, _mean_of_png, str(tmp_path / "x.png"))
        wait([reading], 50)
        found = reading.done()
        done.set()
    holder.join()
    assert found
    assert reading.result() == 7


def _mean_of_png(path: str) -> float:
    return float(np.asarray(Image.open(path)).mean())


def test_descriptors_of_the_parents_libraries_are_not_those_of_a_raster(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    write_geotiff(tmp_path / "a.tif", np.full((3, 256, 256), 7, np.uint8), crs="EPSG:32618")
    rasterio.CRS.from_epsg(3857).to_epsg()  # PROJ opens its database
    windows, _ = cut_windows([Item("a", tmp_path / "a.tif")], Tiling(96, 96, input=Input(scale=255)), 0)
    limited.end_idle()
    for item in windows:
        assert (load_item(item).content.values == 7).all()


def test_a_child_keeps_no_memory_of_its_parent(tmp_path):
    write_image(tmp_path / "x.png", 7)
    large = np.ones(2**26)
    limited.end_idle()
    assert level(tmp_path / "x.png") == 7
    del large
    gc.collect()
    assert limited.call(_resident_bytes) < 2**28


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_death_names_the_file_and_one_that_takes_too_long_is_refused(tmp_path, monkeypatch):
    with pytest.raises(limited.KilledError, match="the end of the process that reads it"):
        limited.call(_die, tmp_path / "a.mat")
    monkeypatch.setattr(limited, "MAX_SECONDS", 0.5)
    with pytest.raises(limited.TimeLimitError, match=r"within 0\.5 s"):
        limited.call(_wait, tmp_path / "a.tif")


def _die(_path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _wait(_path) -> None:
    time.sleep(60)


def write_long_list(folder, rows: int = 100_000):
    """A kilobyte or two of Parquet whose rows take memory: one label of 8,000 letters, repeated."""
    folder.mkdir()
    zeros, texts = pa.array([0] * rows, pa.int32()), ("p.png", "a" * 8000)
    path, label = (pa.DictionaryArray.from_arrays(zeros, pa.array([text])) for text in texts)
    table = pa.table({"path": path, "id": pa.array(range(rows)), "label": label})
    options = {"use_dictionary": ["path", "label"], "column_encoding": {"id": "DELTA_BINARY_PACKED"}}
    pq.write_table(table, folder / "items.parquet", compression="zstd", **options)
    return folder


@pytest.mark.parametrize("reused", [False, True])
def test_a_list_is_whole_or_refused(tmp_path, monkeypatch, reused):
    """A child that ran out of memory after its first rows had ended the list there, as if that were all."""
    write_image(tmp_path / "x.png", 7)
    monkeypatch.setattr(limited, "MAX_MEMORY_BYTES", 2**28)
    limited.end_idle()
    if reused:
        level(tmp_path / "x.png")
    with pytest.raises(EquicamError, match="less memory"):
        list_source(write_long_list(tmp_path / "list"))
    limited.end_idle()


def test_one_raster_does_not_spoil_the_next(tmp_path, monkeypatch):
    """What a child keeps of earlier rasters takes memory; the next is tried again in a child that has read nothing."""
    (tmp_path / "in").mkdir()
    for name in "abcdef":
        write_pyramid(tmp_path / "in" / f"{name}.ome.tif", scene(3, size=(2000, 2000)), ome=True)
    monkeypatch.setattr(limited, "MAX_MEMORY_BYTES", 400 * 2**20)
    limited.end_idle()
    items = list_source(tmp_path / "in", frames=False)
    _, rows = cut_windows(items, Tiling(512, 512, tissue=0.1, input=Input(scale=255)), 0)
    limited.end_idle()
    assert [row.error for row in rows] == [None] * 6


def test_a_folder_with_a_name_that_gdal_reads_as_a_command(tmp_path, monkeypatch):
    folder = tmp_path / "GTIFF_DIR:1:.."
    folder.mkdir()
    write_geotiff(tmp_path / "secret.tif", np.full((3, 256, 256), 200, np.uint8))
    write_geotiff(folder / "secret.tif", np.full((3, 256, 256), 7, np.uint8))
    monkeypatch.chdir(tmp_path)
    limited.end_idle()
    tiling = Tiling(96, 96, input=Input(scale=255))
    windows, _ = cut_windows(list_source("GTIFF_DIR:1:..", frames=False), tiling, 0)
    assert (load_item(windows[0]).content.values == 7).all()


DROPS = "CREATE TRIGGER sqlite_autoindex_z BEFORE INSERT ON events BEGIN SELECT RAISE(IGNORE); END"


@pytest.mark.parametrize(
    "change",
    [
        ["CREATE TRIGGER other AFTER INSERT ON events BEGIN SELECT RAISE(IGNORE); END"],
        ["DROP INDEX marks", "CREATE TRIGGER marks AFTER INSERT ON events WHEN NEW.number > 2 BEGIN SELECT RAISE(IGNORE); END",
         "CREATE UNIQUE INDEX marks ON events (CASE WHEN json_valid(payload) THEN json_extract(payload, '$.mark') END)"],
        ["PRAGMA writable_schema=1", f"INSERT INTO sqlite_master VALUES('trigger', 'sqlite_autoindex_z', 'events', 0, '{DROPS}')"],
        ["CREATE VIEW other AS SELECT * FROM events"],
    ],
)  # fmt: skip
def test_a_log_with_anything_else_in_it_is_refused(tmp_path, change):
    log = Log(tmp_path)
    log.add("a", {"x": 1})
    database = sqlite3.connect(tmp_path / "events.sqlite", isolation_level=None)
    for statement in change:
        database.execute(statement)
    database.close()
    with pytest.raises(EquicamError, match="the table, index and triggers of a log alone"):
        Log(tmp_path).add("b", {"x": 2})


def test_a_working_child_ends_with_its_parent():
    code = "from equicam.images import limited; import time; limited.call(time.sleep, 60)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    assert _becomes_true(lambda: _children(parent.pid), 30)
    children = _children(parent.pid)
    time.sleep(1.5)  # it begins to work
    parent.kill()
    parent.wait()
    assert _becomes_true(lambda: not any(map(_is_running, children)), 5)


def _becomes_true(what, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(found)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
