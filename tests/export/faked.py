"""Finished runs of windows without a model and without rasters: the stored maps are samples of a known field."""

import hashlib

import numpy as np
import pyarrow as pa

from equicam.images.items import Item
from equicam.rasters.options import Input, RasterWindow, Tiling, window_id
from equicam.rasters.tiling import RasterRow, _starts
from equicam.recipe import Recipe
from equicam.runs.export.stitching import WindowMaps
from equicam.runs.log import Log
from equicam.runs.manifest import Manifest
from equicam.runs.store import ITEMS, MAPS, RunStore, StoredMaps

GRID = 12  # a side of the layer


def raster_row(name="slide.svs", width=2220, height=2967, **given):
    """A raster as a run stores it."""
    plain = {
        "kind": "slide", "bands": ("red", "green", "blue"), "dtype": "uint8", "mpp": 0.499, "crs": None, "transform": None,
        "origin": (0.0, 0.0), "reader": "none", "bytes": 1, "mtime_ns": 1, "windows": 0, "background": 0, "nodata": 0,
        "outside": 0,
    }  # fmt: skip
    return RasterRow(name, f"/nowhere/{name}", width=width, height=height, **plain | given)


def places(width, height, side, step):
    """Left and top of every window, the last ones flush with the border."""
    return [(x, y) for y in _starts(height, side, step) for x in _starts(width, side, step)]


def sample_field(field, x, y, side, grid=GRID):
    """A field at the centres of a window's layer cells."""
    at = (np.arange(grid) + 0.5) / grid * side
    return np.asarray(field(x + at[None, :], y + at[:, None]) + np.zeros((grid, grid)), np.float32)


def window_maps(field, width, height, side, step, stability=0.5, grid=GRID):
    """The maps of all windows of a raster, as the run would give them."""
    for x, y in places(width, height, side, step):
        plane = sample_field(field, x, y, side, grid)
        yield WindowMaps(x, y, side, plane, plane / 2, stability)


def fake_raster_run(
    folder, rasters=None, *, field=lambda x, y: 1 + 0 * x * y, scale=2.004, tile=96, stride="tile", targets=lambda i: 1,
    target=None, facts=lambda i: {}, classes=("normal", "tumour"), views=(0.0, 180.0),
):  # fmt: skip
    """A finished run: windows of `scale` × `tile` pixels, explained for `targets(i)`."""
    tiling = Tiling(tile, stride, input=Input(mpp=1.0))
    items, rows, maps = [], [], []
    rasters = rasters or [raster_row()]
    for raster in rasters:
        side = tile * scale
        for x, y in places(raster.width, raster.height, side, tiling.step * scale):
            window = RasterWindow(x, y, side, tiling)
            name, i = window_id(raster.id, window), len(rows)
            plane = sample_field(field, x, y, side)
            maps.append(StoredMaps(plane, plane / 2, np.zeros((2, GRID, GRID), np.float32)).to_row(name))
            items.append(Item(name, folder / raster.id.replace("/", "_"), window=window))
            rows.append(
                {
                    "id": name, "path": raster.path, "x": x, "y": y, "side": side, "width": tile, "height": tile,
                    "input_box": [0.0, 0.0, tile, tile], "target": targets(i), "confidence": 0.9, "top5": [targets(i), 1 - targets(i)],
                    "top5_confidence": [0.9, 0.1], "peum_score": 0.02 + i / 1e4, "stability": 0.5 + i / 1e4,
                    "stability_by_view": [1.0, 0.5], "flip_rate": 0.25, "views_kept": 2,
                    "view_confidence": [0.9, 0.8], "view_top1": [targets(i)] * 2, "view_agreement": [0.5, 0.5],
                    "flags": [], "status": "ok",
                } | facts(i)
            )  # fmt: skip
    manifest = Manifest(
        recipe=Recipe(views=views, fill="reflect", context="none", compiled=False), method_description="none", model="embedded",
        weights=hashlib.sha256(b"weights").hexdigest(), weights_from=None, layer="layer4", layout="nchw", preprocessing="none",
        classes=classes, dtype="float32", device="cpu", shard_size=50, calibration_size=0, source="nowhere",
        split=None, images=len(items), data=hashlib.sha256(b"data").hexdigest(), versions=(("equicam", "0.2.0"),),
        tiling=tiling, target=target,
    )  # fmt: skip
    store = RunStore(folder / "run")
    store.begin(manifest, items, (), rasters)
    for number in range(store.shard_count):
        some = slice(50 * number, 50 * number + 50)
        tables = (
            pa.Table.from_pylist(table[some], schema=schema)
            for table, schema in ((rows, ITEMS), (maps, MAPS))
        )
        store.write_shard(number, *tables)
    Log(store.folder).add("started", {})
    return store
