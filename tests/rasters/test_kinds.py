"""A hundred and more kinds of file: each has the pixels that Pillow, pydicom, rasterio, tifffile or OpenSlide read from it."""

import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from equicam.images import limited
from equicam.images.formats import FORMATS
from equicam.images.items import open_image
from equicam.rasters.raster import open_raster
from tests.rasters.conftest import scene, write_geotiff, write_pyramid

rasterio = pytest.importorskip("rasterio")
tifffile = pytest.importorskip("tifffile")
openslide = pytest.importorskip("openslide")
pydicom = pytest.importorskip("pydicom")

SIDES = (48, 60)
"""Height and width of the images."""
BOX = (130, 70, 330, 250)
"""x0, y0, x1, y1 of what is read of a raster: parts of several tiles."""
SCENE = scene(4, size=(300, 420))
COLOURED = SCENE[:3].transpose(1, 2, 0)
RGB_TILES = {"tile": (128, 128), "photometric": "rgb"}
ORIENTATION = 0x0112


def image(mode: str) -> Image.Image:
    """An image that uses the mode's whole range."""
    planes = scene(4, size=SIDES)
    if mode == "I;16":
        return Image.fromarray(planes[0].astype(np.uint16) * 257)
    if mode in ("LA", "RGBA", "CMYK"):
        return Image.merge(mode, [Image.fromarray(plane) for plane in planes[: len(mode)]])
    return Image.fromarray(planes[:3].transpose(1, 2, 0)).convert(mode)


def twin(path: Path) -> np.ndarray:
    """Pillow's reading: upright, over white, 16 bits divided by 65535."""
    with Image.open(path, formats=FORMATS) as opened:
        found = ImageOps.exif_transpose(opened)
    if found.mode.startswith("I"):
        grey = (np.asarray(found) / 65535 * 255).round().astype(np.uint8)
        return np.stack([grey] * 3, 2)
    if "A" in found.mode or "transparency" in found.info:
        found = found.convert("RGBA")
        found = Image.alpha_composite(Image.new("RGBA", found.size, "white"), found)
    return np.asarray(found.convert("RGB"))


def save(path: Path, mode: str, **options: object) -> None:
    if "orientation" in options:
        options["exif"] = Image.Exif()
        options["exif"][ORIENTATION] = options.pop("orientation")
    image(mode).save(path, **options)


def images() -> dict[str, tuple[str, Callable[[Path], None]]]:
    """Ending and writer of each kind of image."""
    kinds: list[tuple[str, str, dict[str, object]]] = [
        *(("png", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
        *(("png", mode, {"transparency": clear}) for mode, clear in (("P", 3), ("L", 80), ("RGB", (9, 9, 9)))),
        *(("bmp", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")),
        ("gif", "L", {}), ("gif", "P", {}), ("gif", "P", {"transparency": 3}),
        *(("webp", mode, {"lossless": lossless}) for mode in ("RGB", "RGBA") for lossless in (True, False)),
        ("pbm", "1", {}), ("pgm", "L", {}), ("pgm", "I;16", {}), ("ppm", "RGB", {}),
        *(("jpg", mode, {}) for mode in ("L", "RGB", "CMYK")),
        *(("jpg", "RGB", {"subsampling": s, "progressive": p}) for s in (0, 1, 2) for p in (True, False)),
        *(("jp2", mode, {"irreversible": lossy}) for mode in ("L", "LA", "RGB", "RGBA") for lossy in (True, False)),
        ("jp2", "I;16", {}),
        *(("tif", mode, {"compression": c}) for mode in ("L", "P", "RGB", "RGBA", "CMYK")
          for c in (None, "tiff_lzw", "tiff_adobe_deflate", "packbits")),
        *(("tif", "1", {"compression": c}) for c in (None, "group3", "group4")),
        *((ending, "RGB", {"orientation": o}) for ending in ("jpg", "png", "webp", "tif") for o in range(2, 9)),
    ]  # fmt: skip
    return {
        " ".join((ending, mode, *(f"{k}={v}" for k, v in options.items()))): (ending, partial(save, mode=mode, **options))
        for ending, mode, options in kinds
    }  # fmt: skip


IMAGES = images()


@pytest.mark.parametrize("kind", IMAGES)
def test_an_image_is_what_pillow_reads(tmp_path, kind):
    ending, write = IMAGES[kind]
    path = tmp_path / f"a.{ending}"
    write(path)
    expected = twin(path)
    assert expected.std() > 5
    np.testing.assert_array_equal(np.asarray(open_image(path)), expected)


def geotiff(path: Path, dtype: str = "uint8", count: int = 3, **options: object) -> None:
    write_geotiff(path, scene(count, dtype, size=SCENE.shape[1:]), **options)


TYPES = ("uint8", "uint16", "int16", "int32", "uint32", "float32", "float64")
MAPS: dict[str, Callable[[Path], object]] = {
    **{f"{t} {c}": partial(geotiff, dtype=t, compress=c) for t, c in product(TYPES, ("none", "deflate", "lzw", "zstd"))},
    **{
        f"{layout}, by {interleave}": partial(geotiff, interleave=interleave, tiled=layout == "tiles", blockysize=128)
        for layout, interleave in product(("strips", "tiles"), ("pixel", "band"))
    },
    "BigTIFF": partial(geotiff, BIGTIFF="YES"),
    "predictor 2": partial(geotiff, compress="deflate", predictor=2),
    "predictor 3": partial(geotiff, dtype="float32", compress="deflate", predictor=3),
    "jpeg": partial(geotiff, compress="jpeg", photometric="ycbcr", interleave="pixel"),
    "webp": partial(geotiff, compress="webp", interleave="pixel"),
    "packbits": partial(geotiff, compress="packbits"),
    "lerc": partial(geotiff, dtype="float32", compress="lerc"),
    "thirteen bands": partial(geotiff, dtype="uint16", count=13),
    "one band": partial(geotiff, count=1),
    "big-endian": partial(geotiff, dtype="uint16", ENDIANNESS="BIG"),
    "nodata": partial(geotiff, nodata=120),
    "mask": lambda path: write_geotiff(path, SCENE[:3], mask=(SCENE[3] > 100).astype(np.uint8) * 255),
    "alpha": lambda path: write_geotiff(path, np.where(SCENE > 100, SCENE, 0), photometric="rgb", alpha="yes"),
    "overviews": partial(geotiff, overviews=(2, 4)),
    "cloud-optimised": partial(geotiff, driver="COG"),
    "no place": partial(geotiff, dtype="uint16", crs=None, affine=rasterio.Affine.identity()),
    "JPEG 2000": partial(geotiff, driver="JP2OpenJPEG", QUALITY="100", REVERSIBLE="YES"),
    "JPEG 2000, 16 bits": partial(geotiff, dtype="uint16", driver="JP2OpenJPEG", QUALITY="100", REVERSIBLE="YES"),
}  # fmt: skip


def read(path: Path, box: tuple[int, int, int, int]) -> tuple[str, np.ndarray, np.ndarray, tuple[float, ...]]:
    raster = open_raster(path)
    found = raster.read(box, (box[2] - box[0], box[3] - box[1]), tuple(range(len(raster.info.bands))))
    return raster.info.reader, found.values, found.valid, raster.info.downsamples


@pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
@pytest.mark.parametrize("kind", MAPS)
def test_a_map_is_what_rasterio_reads(tmp_path, kind):
    path = tmp_path / ("a.jp2" if "JPEG 2000" in kind else "a.tif")
    MAPS[kind](path)
    reader, values, valid, levels = limited.call(read, path, BOX)
    assert reader.startswith("rasterio")
    with rasterio.open(path) as file:
        window = (BOX[1], BOX[3]), (BOX[0], BOX[2])
        expected, masks = file.read(window=window), file.read_masks(window=window)
        assert len(levels) == 1 + len(file.overviews(1))
    assert expected.astype(float).std() > 5
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(valid, (masks > 0).all(0))
    assert valid.all() == (kind not in ("nodata", "mask", "alpha"))


def ome(path: Path, values: np.ndarray, axes: str, **options: object) -> None:
    tifffile.imwrite(path, values, ome=True, metadata={"axes": axes}, **options)


GREY = {"photometric": "minisblack"}
TILED = {"tile": (128, 128), **GREY}
OME: dict[str, Callable[[Path], object]] = {
    **{
        f"{t} {c}": partial(ome, values=scene(3, t, size=SCENE.shape[1:]), axes="CYX", compression=c, **TILED)
        for t, c in product(("uint8", "uint16", "float32"), (None, "zlib", "lzw", "zstd"))
    },
    "colour": partial(ome, values=COLOURED, axes="YXS", **RGB_TILES),
    "colour, jpeg": partial(ome, values=COLOURED, axes="YXS", compression="jpeg", **RGB_TILES),
    "strips": partial(ome, values=SCENE[:3], axes="CYX", rowsperstrip=32, **GREY),
    "one plane": partial(ome, values=SCENE[0], axes="YX", tile=(64, 64), **GREY),
    "predictor": partial(ome, values=SCENE[:3], axes="CYX", compression="zlib", predictor=True, **TILED),
    "BigTIFF": partial(ome, values=SCENE[:3], axes="CYX", bigtiff=True, **TILED),
}  # fmt: skip


@pytest.mark.parametrize("kind", OME)
def test_an_ome_tiff_is_what_tifffile_reads(tmp_path, kind):
    path = tmp_path / "a.ome.tif"
    OME[kind](path)
    reader, values, valid, _ = limited.call(read, path, BOX)
    assert reader.startswith("tifffile")
    expected = tifffile.imread(path)
    expected = expected.transpose(2, 0, 1) if expected.shape[-1] == 3 else np.atleast_3d(expected.T).T
    expected = expected[:, BOX[1] : BOX[3], BOX[0] : BOX[2]]
    assert expected.astype(float).std() > 5
    np.testing.assert_array_equal(values, expected)
    assert valid.all()


def slide(path: Path, **options: object) -> None:
    tifffile.imwrite(path, COLOURED, metadata=None, **RGB_TILES, **options)


SLIDES: dict[str, Callable[[Path], object]] = {
    "pyramid": lambda path: write_pyramid(path, SCENE[:3], levels=2),
    "plain": slide,
    "jpeg": partial(slide, compression="jpeg"),
    "deflate": partial(slide, compression="zlib"),
    "lzw": partial(slide, compression="lzw"),
    "BigTIFF": partial(slide, bigtiff=True),
    "Aperio": partial(slide, description="Aperio Image Library v12\n420x300|AppMag = 20|MPP = 0.5", compression="jpeg"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLIDES)
def test_a_slide_is_what_openslide_reads(tmp_path, kind):
    path = tmp_path / "a.tif"
    SLIDES[kind](path)
    reader, values, valid, levels = limited.call(read, path, BOX)
    assert reader.startswith("openslide")
    with openslide.OpenSlide(path) as file:
        region = file.read_region(BOX[:2], 0, (BOX[2] - BOX[0], BOX[3] - BOX[1]))
        assert len(levels) == file.level_count
    expected = np.asarray(region.convert("RGB")).transpose(2, 0, 1)
    assert expected.std() > 5
    np.testing.assert_array_equal(values, expected)
    assert valid.all()


def dicom(values: np.ndarray, syntax: str, **elements: object) -> "pydicom.Dataset":
    """A dataset of one image of the type of its values."""
    from tests.unit.test_dicom import made

    found = made(values, getattr(pydicom.uid, syntax), **elements)
    if found.BitsAllocated > 8 and "WindowCenter" not in elements:
        found.WindowCenter, found.WindowWidth = 500, 3000
    return found


DEEP = (scene(1, "uint16", size=SIDES)[0] * 0.4).astype(np.uint16)
COLOUR = scene(3, size=SIDES).transpose(1, 2, 0)
SYNTAXES = ("ExplicitVRLittleEndian", "ImplicitVRLittleEndian", "ExplicitVRBigEndian")
DICOM: dict[str, Callable[[], "pydicom.Dataset"]] = {
    **{f"{t} {syntax}": partial(dicom, DEEP.astype(t), syntax) for t, syntax in product(("uint16", "int16"), SYNTAXES)},
    **{
        f"{slope:g} x + {intercept:g}": partial(
            dicom, DEEP, SYNTAXES[0], RescaleSlope=slope, RescaleIntercept=intercept, WindowCenter=40, WindowWidth=400
        )
        for slope, intercept in ((1, -1024), (0.5, 0), (2, -3000))
    },
    **{
        f"window {function}": partial(dicom, DEEP, SYNTAXES[0], WindowCenter=900, WindowWidth=800, VOILUTFunction=function)
        for function in ("LINEAR", "LINEAR_EXACT", "SIGMOID")
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", DICOM)
def test_a_dicom_image_is_what_pydicom_reads(tmp_path, kind):
    from pydicom.pixels import apply_modality_lut, apply_windowing

    from tests.unit.test_dicom import as_bytes

    data = as_bytes(DICOM[kind]())
    (tmp_path / "a.dcm").write_bytes(data)
    header = pydicom.dcmread(io.BytesIO(data))
    shown = apply_windowing(apply_modality_lut(header.pixel_array, header), header).astype(float)
    full = (0.0, 2.0**header.BitsStored - 1) if header.PixelRepresentation == 0 else (-(2.0**15), 2.0**15 - 1)
    if "RescaleSlope" in header:
        full = tuple(v * header.RescaleSlope + header.RescaleIntercept for v in full)
    assert np.ptp(shown) > 0
    expected = (shown - full[0]) / (full[1] - full[0]) * 255
    found = np.asarray(open_image(tmp_path / "a.dcm")).astype(float)
    assert found[..., 0].std() > 5
    assert np.abs(found - expected[..., None]).max() <= 0.5 + 1e-6


def test_there_are_a_hundred_and_twenty_kinds():
    assert len(IMAGES) + len(MAPS) + len(OME) + len(SLIDES) + len(DICOM) >= 120
