"""Rasters that lie: each is a row with a reason or a refusal, never a crash, never silence."""

import os
import struct
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest

import equicam
from equicam.errors import EquicamError
from equicam.images.items import Item
from equicam.rasters.options import Input, Tiling
from equicam.rasters.raster import open_raster
from equicam.rasters.tiling import cut_windows
from equicam.rasters.windows import read_window
from tests.rasters.conftest import scene, write_geotiff, write_pyramid

pytest.importorskip("openslide")
pytest.importorskip("rasterio")


def tiff(tags: dict[int, tuple[int, int, int]], tail: bytes = b"", big: bool = False) -> bytes:
    """A TIFF with one directory of these tags: type, count, value."""
    head = struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16) if big else struct.pack("<2sHI", b"II", 42, 8)
    count, entry, following = ("<Q", "<HHQQ", "<Q") if big else ("<H", "<HHII", "<I")
    body = b"".join(struct.pack(entry, tag, *value) for tag, value in sorted(tags.items()))
    return head + struct.pack(count, len(tags)) + body + struct.pack(following, 0) + tail


def tags(width=64, height=64, bits=8, samples=1, **changes):
    found = {
        256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, bits), 259: (3, 1, 1), 262: (3, 1, 1),
        277: (3, 1, samples), 322: (3, 1, 64), 323: (3, 1, 64), 324: (4, 1, 300), 325: (4, 1, 4096),
    }  # fmt: skip
    return found | {int(k[1:]): v for k, v in changes.items()}


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "noise":
        rng = np.random.default_rng(0)
        for place in rng.integers(1000, len(data), 3000):
            data[place] = rng.integers(256)
    path.write_bytes(data[: {"truncated": len(data) // 2, "head only": 200}.get(how)])


MADE = {
    "empty": b"",
    "magic only": b"II*\0",
    "big magic only": b"II+\0\x08\0\0\0",
    "directory beyond the end": struct.pack("<2sHI", b"II", 42, 10**6),
    "no tags": tiff({}),
    "absurd size": tiff(tags(width=2**31 - 1, height=2**31 - 1)),
    "absurd size, big": tiff(tags(width=2**32 - 1, height=2**32 - 1), big=True),
    "zero size": tiff(tags(width=0, height=0)),
    "absurd tiles": tiff(tags(t322=(4, 1, 2**31 - 1), t323=(4, 1, 2**31 - 1))),
    "absurd samples": tiff(tags(samples=65_535)),
    "absurd bits": tiff(tags(bits=60_000)),
    "unknown compression": tiff(tags(t259=(3, 1, 9999))),
    "tags beyond the end": tiff(tags(t324=(4, 2**30, 2**31))),
    "html": b"<html>" * 100,
    "jp2 magic": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(200),
    "dicom magic": bytes(128) + b"DICM" + bytes(300),
    "vrt": b'<VRTDataset rasterXSize="512" rasterYSize="512"><SRS>EPSG:4326</SRS></VRTDataset>',
}


@pytest.mark.parametrize("suffix", [".svs", ".tif"])
@pytest.mark.parametrize("name", MADE)
def test_made_up_files(tmp_path, name, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(MADE[name])
    windows = []
    with suppress(EquicamError):
        open_raster(path).close()
        # a header that can be read: it gives no windows, or windows whose reading is refused
        windows, _ = cut_windows([Item("a", path)], Tiling(32, input=Input(bands="1", scale=255)), 8)
    for item in windows:
        with pytest.raises((EquicamError, OSError, ValueError)):
            read_window(item.path, item.window)


def audit(source, out, **options):
    return equicam.audit(source, equicam.load("embedded"), out, views=4, tiling=Tiling(96, 96), **options)


@pytest.mark.parametrize("how", ["truncated", "head only", "noise"])
@pytest.mark.parametrize("kind", ["slide", "ome", "map"])
def test_damaged_rasters_give_rows_with_a_reason(tmp_path, kind, how):
    path = tmp_path / "in" / ("a.ome.tif" if kind == "ome" else "a.tif")
    path.parent.mkdir()
    if kind == "map":
        write_geotiff(path, scene(), compress="deflate", overviews=(2, 4))
    else:
        write_pyramid(path, scene(), ome=kind == "ome")
    damage(path, how)
    write_geotiff(tmp_path / "in" / "good.tif", scene(size=(200, 200)))
    run = audit(path.parent, tmp_path / "run", shard_size=16)
    rows = run.items.to_pylist()
    assert any(row["status"] == "ok" and row["id"].startswith("good.tif") for row in rows)
    of_bad = [row for row in rows if row["id"].startswith("a.")]
    statuses = {row["status"] for row in of_bad}
    assert statuses
    assert all(row["reason"] for row in of_bad if row["status"] == "bad")
    if how == "head only":
        assert statuses == {"bad"}
    if how == "truncated" and kind != "slide":  # OpenSlide's generic TIFF refuses it whole or in part
        assert "bad" in statuses
    assert run.verify(2).ok


def test_a_corrupt_region_is_rows_with_reasons_and_the_others_are_explained(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", scene(), compress="lzw")
    data = bytearray(path.read_bytes())
    half = len(data) * 3 // 4
    data[half : half + 3000] = b"\xff" * 3000
    path.write_bytes(data)
    statuses = audit(path, tmp_path / "run").items["status"].to_pylist()
    assert {"ok", "bad"} == set(statuses)
    assert statuses.count("ok") > statuses.count("bad")


def test_no_pipe_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.svs")
    with pytest.raises(EquicamError):
        open_raster(tmp_path / "a.svs")


def test_names_of_rasters_may_be_anything(tmp_path):
    name = "a#x=1,y=2,s=3 <b>\u202e'\".tif"
    run = audit(write_geotiff(tmp_path / name, scene(size=(100, 200))), tmp_path / "run")
    assert run.items["id"].to_pylist()[0] == f"{name}#x=0,y=0,s=96"
    assert run.verify(2).ok


@pytest.mark.slow
def test_large_and_sparse_is_read_in_little_memory(tmp_path):
    """100,000 × 100,000 pixels with a pyramid, almost all of it never written."""
    tifffile = pytest.importorskip("tifffile")
    path, side = tmp_path / "large.ome.tif", 100_000

    def tiles(size, tile=1024):
        count = -(-size // tile)
        ramp = np.broadcast_to(np.arange(tile) // 4, (3, tile, tile)).transpose(1, 2, 0).astype(np.uint8)
        some = np.ascontiguousarray(ramp)
        for i in range(count * count):
            yield some if i % 29 == 0 else None

    metadata = {"axes": "YXS"} | {f"PhysicalSize{axis}": 0.25 for axis in "XY"}
    metadata |= {f"PhysicalSize{axis}Unit": "µm" for axis in "XY"}
    common = {"dtype": "uint8", "tile": (1024, 1024), "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path, ome=True, bigtiff=True) as file:
        for level in range(5):
            size = side >> (2 * level)
            options = {"subfiletype": 1, "metadata": None} if level else {"subifds": 4, "metadata": metadata}
            file.write(tiles(size), shape=(size, size, 3), **common, **options)
    assert path.stat().st_size < 100e6
    program = f"""
import resource, numpy as np
from contextlib import suppress
from equicam.errors import EquicamError
from pathlib import Path
from equicam.rasters.raster import open_raster
from equicam.rasters.options import RasterWindow, Tiling, Input
from equicam.rasters.windows import read_window
path = Path({str(path)!r})
raster = open_raster(path)
raster.thumbnail((0, 1, 2))
tiling = Tiling(224, input=Input(mpp=0.5))
read_window(path, RasterWindow(0.0, 0.0, 448, tiling, 47))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rng = np.random.default_rng(0)
for x, y in rng.integers(0, {side} - 448, (2000, 2)):
    with suppress(EquicamError):  # most of it has no data
        read_window(path, RasterWindow(float(x), float(y), 448, tiling, 47))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) / 1024, before / 1024, raster._bytes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    grown, start, kept = map(float, done.stdout.split())
    assert kept > 20e6  # tiles were decoded, and kept
    assert grown < 150, (grown, start)  # megabytes: the cache of tiles, and no more
