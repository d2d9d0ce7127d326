"""Readers: the same window by every reader that should agree, against an obvious twin."""

import gc
import shutil
import weakref

import numpy as np
import pytest
from PIL import Image

from equicam.errors import EquicamError
from equicam.rasters.options import Input, RasterWindow, Tiling
from equicam.rasters.raster import MAX_OPEN, Pixels, open_raster, resample
from equicam.rasters.windows import read_window, show_raster, show_window
from tests.rasters.conftest import HEIGHT, WIDTH, halved, scene, write_geotiff, write_pyramid

pytest.importorskip("openslide")
pytest.importorskip("rasterio")
RGB = (0, 1, 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, image = tmp_path_factory.mktemp("rasters"), scene()
    write_pyramid(folder / "slide.tif", image)
    write_pyramid(folder / "slide.ome.tif", image, ome=True)
    write_geotiff(folder / "map.tif", image)
    shutil.copy(folder / "map.tif", folder / "map.svs")  # whatever its name
    return folder, image


MAPS = dict.fromkeys(("map.tif", "map.svs"), "rasterio")
READERS = {"slide.tif": "openslide", "slide.ome.tif": "tifffile", **MAPS}


@pytest.mark.parametrize("name", READERS)
def test_content_chooses_the_reader_which_gives_whole_pixels_as_stored(files, name):
    folder, image = files
    raster = open_raster(folder / name)
    assert raster.info.reader.startswith(f"{READERS[name]} ")
    assert (raster.info.width, raster.info.height) == (WIDTH, HEIGHT)
    for x, y, side in ((0, 0, 64), (137, 250, 200), (WIDTH - 96, HEIGHT - 96, 96)):
        found = raster.read((x, y, x + side, y + side), (side, side), RGB)
        assert image[:, y : y + side, x : x + side].std() > 5
        np.testing.assert_array_equal(found.values, image[:, y : y + side, x : x + side])
        assert found.valid.all()


def slow_bilinear(plane, x, y, scale, size):
    """The mean of fine samples of the bilinear surface over each pixel's area: what a reader should come near to."""
    from scipy import ndimage

    fine = 8
    steps = (np.arange(size * fine) + 0.5) / fine * scale
    rows, columns = np.meshgrid(y + steps - 0.5, x + steps - 0.5, indexing="ij")
    sampled = ndimage.map_coordinates(plane.astype(float), [rows, columns], order=1, mode="nearest")
    return sampled.reshape(size, fine, size, fine).mean((1, 3))


@pytest.mark.parametrize(("x", "y", "scale"), [(100, 60, 1.5), (333.25, 210.75, 1.002), (12.3, 45.6, 2.5)])
def test_fractional_windows_agree_between_readers_and_with_the_scene(files, x, y, scale):
    folder, image = files
    side, size = 90 * scale, 90
    box, names = (x, y, x + side, y + side), ("slide.tif", "slide.ome.tif")
    found, other = (open_raster(folder / name).read(box, (size, size), RGB).values for name in names)
    np.testing.assert_array_equal(found, other)
    expected = np.stack([slow_bilinear(band, x, y, scale, size) for band in image])
    assert expected.std() > 5
    assert np.abs(found - expected).mean() < 0.8
    moved = np.stack([slow_bilinear(band, x + scale, y, scale, size) for band in image])
    assert np.abs(found - moved).mean() > 2 * np.abs(found - expected).mean()


def test_a_map_agrees_with_a_slide_where_both_have_one_level(tmp_path):
    image = scene(seed=3)
    write_pyramid(tmp_path / "slide.tif", image, levels=1)
    write_geotiff(tmp_path / "map.tif", image)
    box = (101.25, 77.5, 101.25 + 150, 77.5 + 150)
    paths = (tmp_path / "slide.tif", tmp_path / "map.tif")
    slide, chart = (open_raster(path).read(box, (100, 100), RGB) for path in paths)
    np.testing.assert_array_equal(slide.values, chart.values)


def test_the_next_finer_level_is_read(files, monkeypatch):
    folder, image = files
    raster = open_raster(folder / "slide.tif")
    assert raster.info.downsamples == pytest.approx((1, 2, 4))
    levels, read = [], raster.read_level
    monkeypatch.setattr(raster, "read_level", lambda level, *rest: levels.append(level) or read(level, *rest))
    for ratio in (0.7, 1, 1.9, 2, 3.9, 4, 7):
        raster.read((0, 0, 64 * ratio, 64 * ratio), (64, 64), RGB)
    assert levels == [0, 0, 0, 1, 1, 2, 2]
    exact = raster.read((128, 64, 128 + 200, 64 + 200), (100, 100), RGB).values
    np.testing.assert_array_equal(exact, np.rint(halved(image)).astype(np.uint8)[:, 32:132, 64:164])


def test_bands_by_name_and_number_and_their_types(tmp_path):
    image = scene(13, "uint16", seed=5)
    raster = open_raster(write_geotiff(tmp_path / "sentinel.tif", image))
    assert (raster.info.bands[:2], raster.info.dtype) == (("1", "2"), "uint16")
    assert raster.band_indices(("4", "3", "13")) == (3, 2, 12)
    with pytest.raises(EquicamError, match="band '14' needs one of 1, 2, 3"):
        raster.band_indices(("14",))
    found = raster.read((10, 20, 110, 120), (100, 100), (3, 2, 1)).values
    np.testing.assert_array_equal(found, image[[3, 2, 1], 20:120, 10:110])
    fluorescence = scene(4, "float32", seed=6)
    write_pyramid(tmp_path / "cells.ome.tif", fluorescence, ome=True)
    cells = open_raster(tmp_path / "cells.ome.tif")
    assert cells.info.bands == ("stain 0", "stain 1", "stain 2", "stain 3")
    assert cells.info.mpp == pytest.approx(0.5)
    assert cells.band_indices(("Stain 2", "1")) == (2, 0)
    found = cells.read((5, 7, 205, 207), (200, 200), (2, 0)).values
    np.testing.assert_array_equal(found, fluorescence[[2, 0], 7:207, 5:205])


@pytest.mark.parametrize("how", ["nodata", "mask", "nan", "alpha"])
def test_what_is_no_data(tmp_path, how):
    image = scene(3, "float32" if how == "nan" else "uint8") + 1
    hole = np.zeros(image.shape[1:], bool)
    hole[100:300, 200:500] = True
    if how == "nodata":
        write_geotiff(tmp_path / "a.tif", np.where(hole, 0, image).astype("uint8"), nodata=0)
    elif how == "nan":
        write_geotiff(tmp_path / "a.tif", np.where(hole, np.nan, image).astype("float32"))
    elif how == "mask":
        write_geotiff(tmp_path / "a.tif", image, mask=(~hole).astype("uint8") * 255)
    else:
        alpha = np.where(hole, 0, 255)[None].astype("uint8")
        write_geotiff(tmp_path / "a.tif", np.concatenate([image, alpha]), photometric="RGB", alpha="YES")
    raster = open_raster(tmp_path / "a.tif")
    found = raster.read((0, 0, WIDTH, HEIGHT), (WIDTH, HEIGHT), RGB)
    np.testing.assert_array_equal(found.valid, ~hole)
    shrunk = raster.read((0, 0, WIDTH, HEIGHT), (WIDTH // 4, HEIGHT // 4), RGB)
    assert abs(shrunk.valid.mean() - (~hole).mean()) < 0.01
    # no value of the hole leaks into the pixels around it
    around = shrunk.values[:, 20:30, 45:55][:, shrunk.valid[20:30, 45:55]]
    assert abs(float(around.mean()) - float(image[:, 80:120, 180:220][:, ~hole[80:120, 180:220]].mean())) < 6


def test_resample_gives_invalid_pixels_no_weight():
    valid = np.tile(np.arange(40) < 20, (40, 1))
    values = np.where(valid, 100, 255)[None].astype(np.uint8)
    found = resample(Pixels(values, valid), (0, 0, 40, 40), (20, 20))
    assert set(np.unique(found.values[0][found.valid])) == {100}


def window(x, y, side, *, margin=0, tile=64, **given) -> RasterWindow:
    return RasterWindow(x, y, side, Tiling(tile, input=Input(**given)), margin)


def test_windows_have_their_surround_and_say_what_is_missing(files):
    path, image = files[0] / "slide.tif", files[1]
    found = read_window(path, window(200, 300, 64, margin=20))
    np.testing.assert_array_equal(found.values, image[:, 280:384, 180:284])
    assert found.margin == (20, 20)
    corner = read_window(path, window(5, 0, 64, margin=20))
    assert corner.margin == (0, 5)
    expected = np.pad(image[:, :84, :89], ((0, 0), (20, 0), (15, 0)), mode="reflect")
    np.testing.assert_array_equal(corner.values, expected)
    assert corner.digest() != found.digest()
    with pytest.raises(EquicamError, match="a window needs to lie in the raster"):
        read_window(path, window(WIDTH - 10, 0, 64))


def test_deep_pixels_need_bands_and_a_scale(tmp_path):
    path = write_geotiff(tmp_path / "deep.tif", scene(13, "uint16"))
    with pytest.raises(EquicamError, match=r"bands to be chosen.*--bands 4,3,2"):
        read_window(path, window(0, 0, 64))
    with pytest.raises(EquicamError, match=r"a scale, because its values are not 8-bit.*scale=10000"):
        read_window(path, window(0, 0, 64, bands="4,3,2"))
    found = read_window(path, window(0, 0, 64, bands="4,3,2", scale=10_000))
    assert (found.values.dtype, found.scale) == (np.uint16, 10_000)


@pytest.mark.parametrize(("alpha", "bands"), [(0, "1,1,1"), (2, "1,1,1"), (4, "1,2,3"), (5, "4,3,2")])
def test_the_bands_to_try_are_in_the_file_and_no_transparency(tmp_path, alpha, bands):
    from rasterio.enums import ColorInterp

    path = write_geotiff(tmp_path / "deep.tif", scene(alpha or 2, "uint16"))
    with pytest.importorskip("rasterio").open(path, "r+") as file:
        file.colorinterp = [ColorInterp.alpha if i == alpha else ColorInterp.gray for i in file.indexes]
    with pytest.raises(EquicamError, match="bands to be chosen") as error:
        read_window(path, window(0, 0, 64, scale=10_000))
    assert error.value.fix == f"--bands {bands}"
    assert read_window(path, window(0, 0, 64, scale=10_000, bands=bands)).values.shape == (3, 64, 64)


def test_pictures_use_one_range_for_the_whole_raster(tmp_path):
    image = scene(3, "uint16")
    image[:, :100, :100] = 100  # a dark corner stays dark
    path = write_geotiff(tmp_path / "deep.tif", image)
    given = {"bands": "1,2,3", "scale": 10_000.0}
    dark, bright = (np.asarray(show_window(path, window(at, at, 64, **given))) for at in (10, 500))
    assert dark.max() < 60 < bright.mean()
    assert len(open_raster(path).value_range(RGB)) == 3
    around = show_window(path, window(0, 0, 64, **given), around=1.0)
    assert around.size == (192, 192)
    assert np.asarray(around)[:60, :60].min() == 255  # beyond the raster
    assert show_raster(path, Input(**given), 200).size == (200, 152)


def test_a_rotated_affine_and_degrees_are_read_as_pixels(tmp_path):
    from rasterio import Affine

    image = scene()
    turned = Affine.translation(5e5, 4e6) @ Affine.rotation(30) @ Affine.scale(2, -2)
    raster = open_raster(write_geotiff(tmp_path / "turn.tif", image, affine=turned))
    assert raster.info.mpp == pytest.approx(2)
    np.testing.assert_array_equal(raster.read((8, 9, 72, 73), (64, 64), RGB).values, image[:, 9:73, 8:72])


def test_handles_are_kept_and_few(tmp_path):
    paths = [write_geotiff(tmp_path / f"{i}.tif", scene(seed=i, size=(130, 140))) for i in range(6)]
    first = open_raster(paths[0])
    assert open_raster(paths[0]) is first
    for path in paths[1:]:
        open_raster(path)
    assert open_raster(paths[0]) is not first  # closed to make room, and opened again
    assert open_raster(paths[0]).read((0, 0, 64, 64), (64, 64), RGB).values.shape == (3, 64, 64)


def test_what_was_shown_of_a_raster_does_not_keep_it_open(tmp_path):
    opened = []
    for i in range(MAX_OPEN + 3):
        path = write_geotiff(tmp_path / f"{i}.tif", scene(3, "uint16", seed=i))
        show_raster(path, Input(bands="1,2,3", scale=10_000), 64)
        opened.append(weakref.ref(open_raster(path)))
    gc.collect()
    assert sum(one() is not None for one in opened) <= MAX_OPEN


def test_an_image_that_is_no_raster_is_refused(tmp_path):
    Image.new("RGB", (300, 300)).save(tmp_path / "a.png")
    with pytest.raises(EquicamError, match="no format we know; try no --tile"):
        open_raster(tmp_path / "a.png")
