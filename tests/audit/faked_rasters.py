"""A finished run over rasters, made without a model: two georeferenced images, one broken file, windows with plausible maps."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from equicam.images.items import Item, read_item
from equicam.rasters.options import Tiling
from equicam.rasters.tiling import cut_windows
from equicam.reasons import Reason
from equicam.runs.log import Log
from equicam.runs.store import ITEMS, MAPS, RunStore, StoredMaps
from tests.audit.faked import ANGLES, fake_run, views_of

TILE = 48
WINDOWS = (10, 8)  # columns and rows of each raster


def write_map(path, *, seed, size=(480, 384)):
    """A GeoTIFF of coloured noise; the left column of windows has no data."""
    rasterio = pytest.importorskip("rasterio")
    from rasterio.transform import from_origin

    rng = np.random.default_rng(seed)
    coarse = rng.integers(20, 235, (3, size[1] // 12, size[0] // 12), dtype=np.uint8)
    values = np.kron(coarse, np.ones((1, 12, 12), np.uint8))
    values[:, :, :TILE] = 0
    with rasterio.open(
        path, "w", driver="GTiff", width=size[0], height=size[1], count=3, dtype="uint8", nodata=0, crs="EPSG:32633",
        transform=from_origin(5e5, 5e6, 10, 10), photometric="RGB", tiled=True, blockxsize=64, blockysize=64,
    ) as file:  # fmt: skip
        file.write(values)
    return path


def fake_raster_run(folder, *, names=("north.tif", "south<b>.tif")):
    """A run of all windows; `broken.tif` could not be opened."""
    rng = np.random.default_rng(7)
    manifest = fake_run(folder / "other", count=11, bad=0).manifest
    (folder / "rasters").mkdir()
    sources = [Item(name, write_map(folder / "rasters" / f"{i}.tif", seed=i)) for i, name in enumerate(names)]
    broken = folder / "rasters" / "broken.tif"
    broken.write_bytes(b"II*\0" + bytes(40))
    tiling = Tiling(TILE, valid=0.5)
    items, rasters = cut_windows([*sources, Item("broken.tif", broken)], tiling, 0)
    rows, maps = [], []
    for i, item in enumerate(items):
        row = {"id": item.id, "path": str(item.path), "status": "ok"}
        row |= {name: getattr(item.window, name) for name in ("x", "y", "side")}
        if item.id == "broken.tif":
            reason = Reason("unreadable", {"error": "EquicamError", "message": "it is broken"}).to_row()
            rows.append(row | {"status": "bad", "reason": reason["code"], "reason_values": reason["values"]})
            continue
        content = read_item(item)
        planes, fused, peum, agree, stable = views_of(rng, 0.2 + 2.5 * (i % 7 == 0) + 0.01 * i)
        maps.append(StoredMaps(*(a.astype(np.float32) for a in (fused, peum, planes))).to_row(item.id))
        target = i % 2
        rows.append(
            row
            | {
                "sha256": content.sha256, "bytes": content.stat.bytes, "mtime_ns": content.stat.mtime_ns, "width": TILE,
                "height": TILE, "input_box": [0.0, 0.0, float(TILE), float(TILE)], "target": target,
                "confidence": 0.5 + 0.4 * rng.random(), "peum_score": float(peum.mean()),
                "stability": float(stable[1:].mean()), "stability_by_view": stable.tolist(),
                "flip_rate": 0.0, "views_kept": len(ANGLES),
                "view_confidence": [0.7] * len(ANGLES), "view_top1": [target] * len(ANGLES),
                "view_agreement": agree.tolist(), "flags": [],
            }
        )  # fmt: skip
    run = RunStore(folder / "run")
    run.begin(replace(manifest, tiling=tiling, images=len(items), calibration_size=0), items, (), rasters)
    run.write_shard(0, pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(maps, schema=MAPS))
    Log(run.folder).add("started", {"pending": 1, "shards": 1})
    return run
