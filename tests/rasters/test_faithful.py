"""Files that a reader would open and read wrongly go to the one that reads them right, or are refused with its extra."""

import builtins
import json
import sys

import numpy as np
import pytest

from equicam.errors import EquicamError
from equicam.rasters.geojson import read_regions
from equicam.rasters.options import Input
from equicam.rasters.raster import open_raster
from tests.rasters.conftest import scene, write_pyramid
from tests.rasters.test_tiling import cut, polygon

rasterio = pytest.importorskip("rasterio")
pytest.importorskip("openslide")
tifffile = pytest.importorskip("tifffile")


TILED = {"driver": "GTiff", "tiled": True, "blockxsize": 128, "blockysize": 128}
PLACE = {"crs": "EPSG:32618", "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 4e6)}


def rgb(image):
    return np.ascontiguousarray(image.transpose(1, 2, 0))


def tiled(path, image, **options):
    size = dict(zip(("count", "height", "width"), image.shape, strict=True))
    with rasterio.open(path, "w", dtype=image.dtype, **TILED, **size, **options) as file:
        file.write(image)
    return path


@pytest.mark.parametrize(
    ("bands", "dtype"), [(13, "uint16"), (3, "uint16"), (3, "float32"), (4, "uint8"), (1, "uint8")]
)
def test_a_tiled_tiff_without_coordinates_keeps_its_values(tmp_path, bands, dtype):
    image = scene(bands, dtype)
    raster = open_raster(tiled(tmp_path / "plain.tif", image))
    assert raster.info.reader.startswith("rasterio")
    assert (len(raster.info.bands), raster.info.dtype) == (bands, dtype)
    found = raster.read((10, 20, 74, 84), (64, 64), tuple(range(bands)))
    assert np.ptp(found.values[-1].astype(float)) > 0
    assert np.array_equal(found.values, image[:, 20:84, 10:74])


def test_nodata_of_a_tiled_tiff_without_coordinates_is_no_data(tmp_path):
    image = scene()
    image[:, :300] = 0
    raster = open_raster(tiled(tmp_path / "nodata.tif", image, nodata=0))
    assert not raster.read((0, 0, 64, 64), (64, 64), (0, 1, 2)).valid.any()


@pytest.fixture
def without(monkeypatch):
    """Make libraries impossible to import."""
    real = builtins.__import__

    def forget(*names):
        for name in [one for one in sys.modules if one.split(".")[0] in names]:
            monkeypatch.delitem(sys.modules, name)

        def fake(name, *args, **kwargs):
            if name.split(".")[0] in names:
                raise ImportError(f"No module named {name!r}", name=name)
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", fake)

    return forget


@pytest.mark.parametrize("place", [{}, PLACE], ids=["nowhere", "somewhere"])
def test_without_rasterio_thirteen_bands_are_refused(tmp_path, without, place):
    path = tiled(tmp_path / "deep.tif", scene(13, "uint16"), **place)
    without("rasterio")
    with pytest.raises(EquicamError, match=r"equicam\[geo\]"):
        open_raster(path)


def test_without_openslide_a_slide_is_refused(tmp_path, without):
    path = tmp_path / "slide.svs"
    image, options = rgb(scene()), {"tile": (128, 128), "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(image, description="Aperio Image Library v10\n|MPP = 0.5", **options)
        file.write(image[:200, :500], **options)  # a label
    without("openslide")
    with pytest.raises(EquicamError, match=r"equicam\[wsi\]"):
        open_raster(path)


def test_without_tifffile_an_ome_tiff_is_refused(tmp_path, without):
    write_pyramid(tmp_path / "image.ome.tif", scene(), ome=True)
    without("tifffile")
    with pytest.raises(EquicamError, match=r"equicam\[wsi\]"):
        open_raster(tmp_path / "image.ome.tif")


def test_other_images_in_a_file_are_no_levels(tmp_path):
    image, options = rgb(scene()), {"photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(tmp_path / "two.tif") as file:
        file.write(image, **options)
        for other in (image[:90, :400], image[::2, ::2]):  # the first only says that it is a reduced copy
            file.write(other, subfiletype=1, **options)
    raster = open_raster(tmp_path / "two.tif")
    assert raster.info.reader.startswith("rasterio")
    assert raster.info.downsamples == (1.0, 2.0)
    assert raster.level_size(1) == (500, 380)


def test_a_band_that_was_never_written_is_no_data_in_any_order(tmp_path):
    path, image = tmp_path / "sparse.tif", scene(size=(256, 256))
    size = {"count": 3, "height": 256, "width": 256, "dtype": "uint8", "interleave": "band"}
    with rasterio.open(path, "w", **TILED, **size, SPARSE_OK=True) as file:
        file.write(image[0], 1)
        file.write(image[2], 3)
    raster = open_raster(path)
    for order in ((0, 1, 2), (1, 0, 2), (2, 0, 1)):
        assert not raster.read((0, 0, 64, 64), (64, 64), order).valid.any()
    assert raster.read((0, 0, 64, 64), (64, 64), (0, 2)).valid.all()


@pytest.mark.parametrize("compression", ["jpeg", "lzw", "zlib"])
def test_compressed_ome_tiffs_are_read(tmp_path, compression):
    pytest.importorskip("imagecodecs")
    image, path = rgb(scene()), tmp_path / f"{compression}.ome.tif"
    options = {"tile": (128, 128), "photometric": "rgb", "metadata": {"axes": "YXS"}}
    tifffile.imwrite(path, image, ome=True, compression=compression, **options)
    found = open_raster(path).read((10, 20, 74, 84), (64, 64), (0, 1, 2)).values.transpose(1, 2, 0)
    apart = np.abs(found.astype(int) - image[20:84, 10:74].astype(int))
    assert apart.max() <= (30 if compression == "jpeg" else 0)


def test_a_compression_that_nothing_decodes_is_refused_once(tmp_path, monkeypatch):
    path = tmp_path / "a.ome.tif"
    tifffile.imwrite(path, scene()[0], ome=True, tile=(128, 128), compression="zlib")
    monkeypatch.setitem(vars(tifffile.TIFF), "DECOMPRESSORS", {1: None})
    with pytest.raises(EquicamError, match="imagecodecs"):
        open_raster(path)


def test_channel_names_are_those_of_the_first_image(tmp_path):
    from equicam.rasters.slides import _read_ome

    text = """<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">
    <Image><Pixels PhysicalSizeX="0.5" PhysicalSizeY="0.5"><Channel Name="DAPI &amp; co"/><Channel/></Pixels></Image>
    <Image><Pixels><Channel Name="label"/></Pixels></Image></OME>"""
    assert _read_ome(text, tmp_path) == ([], 0.5)
    assert _read_ome(text.replace("<Channel/>", '<Channel Name="b"/>'), tmp_path) == (["DAPI & co", "b"], 0.5)
    assert _read_ome('<!DOCTYPE a [<!ENTITY b "c">]>' + text, tmp_path) == ([], None)
    assert _read_ome("<OME", tmp_path) == ([], None)


def read_areas(folder, path, content):
    file = folder / "regions.geojson"
    file.write_text(json.dumps(content))
    return read_regions(open_raster(path).info, path, str(file))


def area(x, y, side, **properties):
    ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
    return polygon(ring, **properties)


def test_regions_in_the_crs_that_a_file_names(tmp_path):
    path = tiled(tmp_path / "utm.tif", scene(), **PLACE)
    feature = area(5e5 + 1000, 4e6 - 3000, 1000, label="field")
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32618"}}
    given = {"type": "FeatureCollection", "crs": crs, "features": [feature]}
    ((label, (ring,)),) = read_areas(tmp_path, path, given)
    assert label == "field"
    assert (ring.min(0), ring.max(0)) == (pytest.approx([100, 200]), pytest.approx([200, 300]))
    for wrong, said in ((None, "degrees"), ({"type": "name", "properties": {"name": "local"}}, "EPSG")):
        with pytest.raises(EquicamError, match=said):
            read_areas(tmp_path, path, given | {"crs": wrong})


def test_regions_may_hold_points_and_be_one_feature(tmp_path):
    path = tmp_path / "slide.tif"
    write_pyramid(path, scene())
    tumor = area(0, 0, 100, classification={"names": ["Tumor", "edge"]})
    point = {"type": "Feature", "properties": {}, "geometry": {"type": "Point", "coordinates": [1, 2]}}
    nothing = {"type": "Feature", "properties": {}, "geometry": None}
    for given in (tumor, [point, tumor, nothing]):
        ((label, _),) = read_areas(tmp_path, path, given)
        assert label == "Tumor: edge"
    with pytest.raises(EquicamError, match="at least one polygon"):
        read_areas(tmp_path, path, [point])


def test_options_that_cannot_be_followed_are_refused(tmp_path):
    place = PLACE | {"transform": rasterio.Affine(10, 0, 5e5, 0, -20, 4e6)}
    path = tiled(tmp_path / "flat.tif", scene(), photometric="RGB", **place)
    with pytest.raises(EquicamError, match="square pixels"):
        cut(path, tile=224, input=Input(mpp=10))
    with pytest.raises(EquicamError, match="for tissue") as refused:
        cut(path, tile=224, tissue=0.1)
    assert "try another tile" not in str(refused.value)


def test_a_resolution_that_is_given_wins(tmp_path):
    write_pyramid(tmp_path / "slide.tif", scene(), mpp=0.5)
    items, row = cut(tmp_path / "slide.tif", tile=100, mpp_is=0.25, input=Input(mpp=0.5))
    assert items[0].window.side == 200
    assert row.mpp == 0.25
