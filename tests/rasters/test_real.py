"""Real files: a slide, a satellite scene and an aerial image. `make rasters` fetches them; without them these skip."""

import os
from pathlib import Path

import numpy as np
import pytest

import equicam
from equicam.errors import EquicamError
from equicam.images.items import Item, open_image
from equicam.rasters.options import Input, Tiling
from equicam.rasters.raster import open_raster
from equicam.rasters.tiling import cut_windows
from equicam.rasters.windows import show_raster

FOLDER = Path(os.environ.get("EQUICAM_RASTERS", Path(__file__).parents[2] / ".rasters"))
pytestmark = pytest.mark.real
RGB = (0, 1, 2)


def real(name: str) -> Path:
    if not (FOLDER / name).is_file():
        pytest.skip(f"no {name} in {FOLDER}: make rasters fetches it, or EQUICAM_RASTERS names its folder")
    return FOLDER / name


def test_a_slide_of_a_scanner():
    openslide = pytest.importorskip("openslide")
    path = real("cmu_small_region.svs")
    raster = open_raster(path)
    assert (raster.info.width, raster.info.height) == (2220, 2967)
    assert raster.info.mpp == pytest.approx(0.499)
    bare = openslide.OpenSlide(str(path))
    for x, y in ((1000, 1500), (777, 1234), (1400, 2967 - 300)):
        found = raster.read((x, y, x + 300, y + 300), (300, 300), RGB).values.transpose(1, 2, 0)
        expected = np.asarray(bare.read_region((x, y), 0, (300, 300)).convert("RGB"))
        assert expected.std() > 5
        np.testing.assert_array_equal(found, expected)
    windows, (row,) = cut_windows([Item("cmu", path)], Tiling(224, "disc", 0.1, input=Input(mpp=0.5)), 47)
    assert row.windows == len(windows) == 128
    assert row.background == 138
    assert show_raster(path, Input(), 400).size == (299, 400)


def test_a_slide_is_not_read_as_an_image():
    with pytest.raises(EquicamError, match="--tile"):
        open_image(real("cmu_small_region.svs"))


def test_an_audit_of_a_slide(tmp_path):
    pytest.importorskip("openslide")
    tiling = Tiling(96, 300, 0.1, input=Input(mpp=1.0))
    path, model = real("cmu_small_region.svs"), equicam.load("embedded")
    run = equicam.audit(path, model, tmp_path / "run", views=4, tiling=tiling)
    assert set(run.items["status"].to_pylist()) == {"ok"}
    assert run.verify(3).ok


def test_a_band_of_sentinel_2():
    """GeoTIFF inside, whatever the suffix says."""
    rasterio = pytest.importorskip("rasterio")
    path = real("s2_B04.jp2")
    raster = open_raster(path)
    assert (raster.info.kind, raster.info.dtype, raster.info.crs) == ("map", "uint16", "EPSG:32618")
    assert raster.info.mpp == pytest.approx(10)
    with rasterio.open(path) as bare:
        expected = bare.read(1)
    assert expected.std() > 50
    found = raster.read((500, 600, 818, 918), (318, 318), (0,)).values[0]
    np.testing.assert_array_equal(found, expected[600:918, 500:818])
    with pytest.raises(EquicamError, match=r"equicam\[geo\]"):
        open_image(path)


def test_thirteen_bands_stacked(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    from rasterio.enums import Resampling

    names = ["B01", "B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B09", "B10", "B11", "B12"]
    with rasterio.open(real("s2_B02.jp2")) as first:
        profile, shape = first.profile, first.shape
    path = tmp_path / "scene.tif"
    with rasterio.open(path, "w", **profile | {"count": 13, "driver": "GTiff"}) as scene:
        for i, name in enumerate(names, 1):
            with rasterio.open(real(f"s2_{name}.jp2")) as band:
                scene.write(band.read(1, out_shape=shape, resampling=Resampling.bilinear), i)
            scene.set_band_description(i, name)
    with pytest.raises(EquicamError, match="13 bands of 16 bits"):
        open_image(path)
    tiling = Tiling(96, 500, input=Input("B04,B03,B02", 3000))
    run = equicam.audit(path, equicam.load("embedded"), tmp_path / "run", views=4, tiling=tiling)
    assert set(run.items["status"].to_pylist()) == {"ok"}
    (row,) = run.store.rasters().to_pylist()
    assert row["bands"] == names
    assert row["crs"] == "EPSG:32618"
    shown = np.asarray(show_raster(path, tiling.input, 300))
    assert 40 < shown.mean() < 220


def test_an_aerial_image():
    pytest.importorskip("rasterio")
    path = real("OSBS_029.tif")
    windows, (row,) = cut_windows([Item("osbs", path)], Tiling(100), 20)
    assert (row.width, row.height, row.windows) == (400, 400, 16)
    assert windows[5].window.x == 100
