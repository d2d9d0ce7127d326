"""Rasters and lists are inert: nothing that one names is opened or connected to, and none takes the time or memory of a machine.

Whether a file is opened is what the kernel says (inotify), whatever library or process does it.
"""

import contextlib
import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import equicam
from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.items import Item
from equicam.images.sources import list_source
from equicam.rasters.options import Input, Tiling
from equicam.rasters.tiling import cut_windows
from tests.conftest import recipe
from tests.hostile.rasters import LISTS, RASTERS, READ, Bait, one_tile, parquet_of_one_cell
from tests.rasters.conftest import scene, write_geotiff, write_pyramid

for library in ("openslide", "rasterio", "tifffile", "pydicom"):
    pytest.importorskip(library)

TILING = Tiling(96, 96, input=Input(bands="1,1,1", scale=255))
IN_OPEN, IN_NONBLOCK = 0x20, 0o4000
MAX_LISTING_BYTES = 5 * 2**30


class Witness:
    """What was opened in a folder, and what connected to a port, since it was asked last."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch = libc.inotify_init1(IN_NONBLOCK)
        assert self._watch >= 0
        assert libc.inotify_add_watch(self._watch, os.fsencode(folder), IN_OPEN) >= 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port, self._connected = self._listening.getsockname()[1], 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._connected += 1
                connection.close()

    def seen(self) -> list[str]:
        """Names of opened files, and of the server where it was connected to."""
        with contextlib.suppress(BlockingIOError):
            data, names, at = os.read(self._watch, 2**16), [], 0
            while at < len(data):
                length = int.from_bytes(data[at + 12 : at + 16], sys.byteorder)
                names.append(data[at + 16 : at + 16 + length].rstrip(b"\0").decode())
                at += 16 + length
            return names + ["the server"] * self._connected
        return ["the server"] * self._connected

    def close(self) -> None:
        os.close(self._watch)
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(5)


@pytest.fixture
def trap(tmp_path) -> Iterator[tuple[Bait, Witness]]:
    """A readable raster that no command line names, and a server; what touches them is seen."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "in").mkdir()
    file = write_geotiff(elsewhere / "bait.tif", scene(seed=9))
    witness = Witness(elsewhere)
    yield Bait(file, f"http://127.0.0.1:{witness.port}"), witness
    witness.close()


def test_the_witness_sees_opens_by_libraries_in_c_and_connections(trap):
    import rasterio

    bait, witness = trap
    with rasterio.open(bait.file):
        assert "bait.tif" in witness.seen()
    with socket.create_connection(("127.0.0.1", witness.port)):
        time.sleep(0.2)
    assert "the server" in witness.seen()


@pytest.mark.parametrize("name", RASTERS)
def test_a_raster_that_names_others_or_is_a_bomb_is_refused(tmp_path, trap, name):
    bait, witness = trap
    path = RASTERS[name](tmp_path / "in", bait)
    witness.seen()  # making it may have opened the bait
    start = time.monotonic()
    with pytest.raises(EquicamError) as refused:
        cut_windows([Item("a", path)], TILING, 0)
    assert time.monotonic() - start < 30
    assert refused.value.fix
    assert not witness.seen()


@pytest.mark.parametrize("name", READ)
def test_pixels_are_those_of_the_file_itself_whatever_lies_beside(tmp_path, trap, name):
    from equicam.rasters.windows import read_window

    bait, witness = trap
    path = READ[name](tmp_path / "in", bait)
    witness.seen()
    windows, _ = cut_windows([Item("a", path)], TILING, 0)
    assert len(windows) == 7 * 10 + 7 + 10 + 1
    found = limited.call(read_window, path, windows[0].window).values
    assert (found == scene()[[0, 0, 0], :96, :96]).all()
    assert not witness.seen()


@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_names_data_elsewhere_or_is_a_bomb_is_refused(tmp_path, trap, name):
    bait, witness = trap
    path = LISTS[name](tmp_path / "in", bait)
    witness.seen()
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(EquicamError):
        equicam.explain(equicam.load("embedded"), list_source(path)[0].path)
    assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: its own child takes it
    assert not witness.seen()


@pytest.mark.parametrize("crs", ["+proj=longlat +nadgrids={file} +no_defs", "{url}/crs", "{file}"])
def test_regions_name_no_file_and_no_address(tmp_path, trap, crs):
    bait, witness = trap
    path = write_geotiff(tmp_path / "in" / "a.tif", scene())
    ring = [[500_000, 4_500_000], [505_000, 4_500_000], [505_000, 4_495_000], [500_000, 4_500_000]]
    feature = {"type": "Feature", "properties": {}, "geometry": {"type": "Polygon", "coordinates": [ring]}}
    name = {"type": "name", "properties": {"name": crs.format(file=bait.file, url=bait.url)}}
    regions = {"type": "FeatureCollection", "crs": name, "features": [feature]}
    (tmp_path / "regions.geojson").write_text(json.dumps(regions))
    witness.seen()
    with pytest.raises(EquicamError):
        cut_windows([Item("a", path)], replace(TILING, regions=str(tmp_path / "regions.geojson")), 0)
    assert not witness.seen()


def write_all(folder: Path, bait: Bait) -> Path:
    """All of them and a good raster; but for links that would be images of the folder, which the user does name."""
    for name, make in {**RASTERS, **READ}.items():
        if name not in ("DICOM beside a link", "MRXS whose folder is a link"):
            (folder / name).mkdir(parents=True)
            make(folder / name, bait)
    write_geotiff(folder / "good.tif", scene(size=(200, 200)))
    return folder


def test_no_command_touches_what_a_raster_names(tmp_path, trap):
    """Every command over a folder of all of them: rows with reasons, and the good raster explained, shown and exported."""
    bait, witness = trap
    source = write_all(tmp_path / "in", bait)
    witness.seen()
    model = equicam.load("embedded")
    run = equicam.audit(source, model, tmp_path / "run", views=4, tiling=TILING, n=400)
    rows = run.items.to_pylist()
    assert {row["id"].split("/")[0] for row in rows if row["status"] == "ok"}.isdisjoint(RASTERS)
    assert all(row["reason"] for row in rows if row["status"] == "bad")
    assert any(row["id"].startswith("good.tif") and row["status"] == "ok" for row in rows)
    run.triage(budget=4)
    run.report()
    assert run.verify(4).ok
    run.export("geotiff")
    run.export("geojson")
    assert not witness.seen()


WATCHED = """
import os, sys
from typer.testing import CliRunner
from equicam.cli.app import app

here, parent, busy = os.getcwd(), os.getpid(), False

def note(event, arguments):
    global busy
    if event in ("open", "socket.connect") and not busy:
        busy = True
        who = "parent" if os.getpid() == parent else "child"
        what = os.path.join(here, os.fsdecode(arguments[0])) if event == "open" and isinstance(arguments[0], (str, bytes)) else "?"
        file = os.open("events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{who} {event} {what}\\n".encode(errors="replace"))
        os.close(file)
        busy = False

sys.addaudithook(note)
for command in sys.argv[1:]:
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, (command, done.output, done.exception)
"""


def test_only_limited_processes_open_images_and_rasters(tmp_path, trap):
    """By Python's audit events: the process that computes opens no file of the sources, and nothing connects."""
    bait, _ = trap
    for name in ("overviews that send a file", "OME-TIFF in several files", "MRXS whose data leads away"):
        (tmp_path / "in" / name).mkdir()
        RASTERS[name](tmp_path / "in" / name, bait)
    write_geotiff(tmp_path / "in" / "good.tif", scene(size=(200, 200)))
    (tmp_path / "images").mkdir()
    for name in ("a.png", "b.jpg", "c.png"):
        Image.fromarray(scene(size=(120, 120)).transpose(1, 2, 0)).save(tmp_path / "images" / name)
    commands = [
        f"audit in --model embedded --tile 96 --bands 1,1,1 {' '.join(recipe('tiling.scale = 255'))} --views 4 --out run",
        "triage run --budget 2", "report run", "verify run", "export run --to geotiff",
        "audit images --model embedded --views 4 --out run2", "triage run2 --budget 2", "report run2", "verify run2",
        "explain images/a.png --model embedded --out explained",
        "evaluate images --model embedded --methods grad-cam --scores eq --out scores.parquet",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-c", WATCHED, *commands], cwd=tmp_path, check=True, timeout=300)
    events = (tmp_path / "events").read_text().splitlines()
    sources = [str(tmp_path / one) for one in ("in/", "images/", "elsewhere/")]
    opened = [line.split(" ", 2) for line in events if any(f" {one}" in line for one in sources)]
    assert {path for who, _, path in opened if who == "child"} >= {str(tmp_path / "images" / "a.png")}
    assert not [path for who, _, path in opened if who == "parent" or "elsewhere/" in path]
    assert not [line for line in events if "socket.connect" in line]


@pytest.mark.parametrize("name", ["overviews that send a file", "overviews in a file", "VMS that leads away"])
def test_what_became_hostile_after_its_audit_is_shown_by_no_command(tmp_path, trap, name):
    bait, witness = trap
    path = tmp_path / "in" / "a.tif"
    write_geotiff(path, scene())
    model = equicam.load("embedded")
    run = equicam.audit(tmp_path / "in", model, tmp_path / "run", views=4, tiling=TILING, n=4)
    (tmp_path / "later").mkdir()
    shutil.move(RASTERS[name](tmp_path / "later", bait), path)
    witness.seen()
    run.triage(budget=2)
    run.report()
    assert not run.verify(4).ok
    run.export("geojson")
    assert not witness.seen()


HUGE = {
    "one shared tile, 400,000² pixels": partial(one_tile, 400_000, 1024, shared=True),
    "one shared tile, 4,000,000² pixels": partial(one_tile, 4_000_000, 16_384, shared=True),
    "one strip": partial(one_tile, 60_000, 60_000, shared=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_listing_a_bomb_takes_no_more_than_a_decoder_may(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.tif").write_bytes(HUGE[name]())
    write_geotiff(tmp_path / "in" / "good.tif", scene(size=(200, 200)))
    seconds, peak, printed = measure("audit", "in", "--model", "embedded", "--tile", "96", "--bands", "1,1,1", *recipe("tiling.scale = 255"), "--views", "2", "--out", "run", "--n", "50", cwd=tmp_path)  # fmt: skip
    assert seconds < 130, printed
    assert peak < MAX_LISTING_BYTES, printed
    assert (tmp_path / "run").is_dir(), printed


def measure(*arguments: str, cwd: Path) -> tuple[float, int, str]:
    """Seconds, peak bytes of the largest process, and text of a command."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "equicam", *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    printed = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    return time.monotonic() - start, usage.ru_maxrss * 1024, printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_kernel_saw_no_other_file_and_no_connection(tmp_path, trap):
    """All file names and addresses that the processes of an audit, report, verification and export gave to the kernel."""
    bait, _ = trap
    write_all(tmp_path / "in", bait)
    commands = [
        ["audit", "in", "--model", "embedded", "--tile", "96", "--bands", "1,1,1", *recipe("tiling.scale = 255"), "--views", "4", "--n", "100", "--out", "run"],
        ["triage", "run", "--budget", "4"], ["report", "run"], ["verify", "run"], ["export", "run", "--to", "geotiff"],
    ]  # fmt: skip
    for number, command in enumerate(commands):
        trace = tmp_path / f"trace-{number}"
        done = subprocess.run(
            ["strace", "-f", "-qq", "-e", "trace=%file,connect,execve", "-o", trace, sys.executable, "-m", "equicam", *command],
            cwd=tmp_path, check=False, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = trace.read_text(errors="replace").splitlines()
        assert any("openat" in line for line in lines)
        opened = [line for line in lines if "bait.tif" in line and "open" in line]
        assert not opened, opened[:3]
        connected = [line for line in lines if "connect(" in line and "AF_INET" in line]
        assert not connected, connected[:3]


def test_a_plain_raster_has_the_pixels_of_its_reader(tmp_path):
    """The checks above refuse nothing that is whole: rasterio and tifffile read the same from a pyramid and a GeoTIFF."""
    import rasterio

    from equicam.rasters.windows import read_window

    write_geotiff(tmp_path / "a.tif", scene(), overviews=(2, 4), mask=np.full((760, 1000), 255, np.uint8))
    write_pyramid(tmp_path / "b.ome.tif", scene(), ome=True)
    for name in ("a.tif", "b.ome.tif"):
        windows, _ = cut_windows([Item("a", tmp_path / name)], TILING, 0)
        with rasterio.open(tmp_path / name) as file:
            expected = file.read(1)
        for item in windows:
            x, y = int(item.window.x), int(item.window.y)
            found = limited.call(read_window, item.path, item.window).values[0]
            assert (found == expected[y : y + 96, x : x + 96]).all()


def test_a_parquet_list_repeats_an_honest_cell_as_often_as_it_likes(tmp_path):
    Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / ("a" * 196 + ".png"))
    parquet_of_one_cell(tmp_path / "items.parquet", cell=200, rows=50_000)
    assert len(list_source(tmp_path / "items.parquet")) == 50_000
