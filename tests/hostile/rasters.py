"""Rasters and lists that name other files, or that are larger than they look: each made here, none from anywhere."""

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.rasters.conftest import scene, write_geotiff
from tests.rasters.test_hostile import tiff


@dataclass(frozen=True)
class Bait:
    """What a hostile file names: a readable raster that the command line does not, and a server."""

    file: Path
    url: str

    def fill(self, text: str, folder: Path) -> str:
        """The text with their names: {file}, {beside} as seen from a folder, {url}, and {vrt}, a mosaic of the file."""
        names = {"file": self.file, "beside": os.path.relpath(self.file, folder), "url": self.url}
        return text.format(**names, vrt=vrt(self.file))


def _overviews(folder: Path, bait: Bait, name: str) -> Path:
    import rasterio

    path = write_geotiff(folder / "a.tif", scene())
    with rasterio.open(path, "r+") as file:
        file.update_tags(ns="OVERVIEWS", OVERVIEW_FILE=bait.fill(name, folder))
    return path


def _beside(folder: Path, bait: Bait, text: str, name: str = "a.tif.aux.xml") -> Path:
    (folder / name).write_text(bait.fill(text, folder))
    return write_geotiff(folder / "a.tif", scene())


def vrt(name: object, size: tuple[int, int] = (500, 380)) -> str:
    """A mosaic of another file."""
    source = f"<SimpleSource><SourceFilename>{name}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>"
    bands = "".join(f'<VRTRasterBand dataType="Byte" band="{i}">{source}</VRTRasterBand>' for i in (1, 2, 3))
    return f'<VRTDataset rasterXSize="{size[0]}" rasterYSize="{size[1]}">{bands}</VRTDataset>'


def ome(path: Path, change: Callable[[str], str], planes: int = 1) -> Path:
    """An OME-TIFF whose description was changed."""
    import tifffile

    image, options = scene(planes), {"tile": (128, 128), "photometric": "minisblack"}
    with tifffile.TiffWriter(path, ome=True) as file:
        file.write(image, metadata={"axes": "CYX"}, **options)
    with tifffile.TiffFile(path) as file:
        text = file.ome_metadata
    with tifffile.TiffWriter(path, ome=False) as file:
        for number, plane in enumerate(image):
            file.write(plane, description=None if number else change(text), metadata=None, **options)
    return path


def _ome_with(folder: Path, bait: Bait, old: str, new: str) -> Path:
    return ome(folder / "a.ome.tif", lambda text: text.replace(old, bait.fill(new, folder), 1))


def mrxs(folder: Path, bait: Bait, *, index="Index.dat", data="Data0000.dat", pipe="", link="") -> Path:
    """A MIRAX slide: an empty file, and a folder of its name with an index; a file in it may be a pipe or link."""
    path, inner = folder / "a.mrxs", folder / "a"
    path.write_bytes(b"")
    if link == "a":  # the folder itself
        inner.symlink_to(bait.file.parent / "slide")
        (bait.file.parent / "slide").mkdir(exist_ok=True)
    else:
        inner.mkdir()
        (inner / "Index.dat").write_bytes(b"01.02" + bytes(200))
    text = (
        "[GENERAL]\nSLIDE_VERSION = 01.02\nSLIDE_ID = A\nIMAGENUMBER_X = 2\nIMAGENUMBER_Y = 2\n"
        "CURRENT_SLIDE_VERSION = 1.0\nOBJECTIVE_MAGNIFICATION = 20\nCAMERA_IMAGE_DIVISIONS_PER_SIDE = 1\n"
        f"[HIERARCHICAL]\nHIER_COUNT = 0\nINDEXFILE = {index}\n[DATAFILE]\nFILE_COUNT = 1\nFILE_0 = {data}\n"
    )
    if link == "Slidedat.ini":
        (inner / link).symlink_to(bait.file.parent / link)
    elif link not in ("", "a"):
        (inner / link).symlink_to(bait.file)
    if pipe:
        os.mkfifo(inner / pipe)
    if pipe != "Slidedat.ini":
        (inner / "Slidedat.ini").write_text(bait.fill(text, inner))
    return path


def _link_of_its_name(folder: Path, bait: Bait) -> Path:
    """Trestle's format has a second image in such a file."""
    import tifffile

    image = np.ascontiguousarray(scene(size=(300, 420)).transpose(1, 2, 0))
    options = {"tile": (128, 128), "photometric": "rgb", "metadata": None, "software": "MedScan"}
    tifffile.imwrite(folder / "a.tif", image, **options)
    (folder / "a.Full").symlink_to(bait.file)
    return folder / "a.tif"


def _changes_beside(folder: Path, _bait: Bait) -> Path:
    """SQLite, which Sakura's format is, would apply them."""
    (folder / "a.svslide").write_bytes(b"SQLite format 3\0" + bytes(500))
    (folder / "a.svslide-wal").write_bytes(bytes(100))
    return folder / "a.svslide"


def _vms(folder: Path, bait: Bait, padding: str = "") -> Path:
    path, name = folder / "a.vms", os.path.relpath(bait.file, folder)
    path.write_text(
        f"{padding}[Virtual Microscope Specimen]\nNoLayers=1\nNoJpegColumns=1\nNoJpegRows=1\n"
        f"ImageFile={name}\nMapFile={name}\nOptimisationFile={name}\nMacroImage={name}\n"
    )
    return path


def dicom(path: Path) -> Path:
    """The head of a DICOM slide, which makes OpenSlide look at every file of the folder."""
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.77.1.6"
    meta.MediaStorageSOPInstanceUID = generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made = FileDataset(str(path), {}, file_meta=meta, preamble=bytes(128))
    made.SOPClassUID, made.SOPInstanceUID = meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID
    made.SeriesInstanceUID, made.Modality = generate_uid(), "SM"
    made.Rows = made.Columns = 64
    made.TotalPixelMatrixRows = made.TotalPixelMatrixColumns = 64
    made.SamplesPerPixel, made.PhotometricInterpretation, made.PlanarConfiguration = 3, "RGB", 0
    made.BitsAllocated = made.BitsStored = 8
    made.HighBit, made.PixelRepresentation = 7, 0
    made.NumberOfFrames, made.ImageType = 1, ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    made.PixelData = bytes(64 * 64 * 3)
    pydicom.dcmwrite(path, made, enforce_file_format=True)
    return path


def _dicom_pipe(folder: Path, _bait: Bait) -> Path:
    os.mkfifo(folder / "b.dcm")
    return dicom(folder / "a.dcm")


def _dicom_link(folder: Path, bait: Bait) -> Path:
    (folder / "b.dcm").symlink_to(bait.file)
    return dicom(folder / "a.dcm")


def _mosaic(folder: Path, bait: Bait, name: str = "a.tif") -> Path:
    (folder / name).write_text(vrt(bait.file))
    return folder / name


def _mask_beside(folder: Path, _bait: Bait) -> Path:
    path = write_geotiff(folder / "a.tif", scene())
    write_geotiff(folder / "mask.tif", np.zeros((1, 760, 1000), np.uint8)).rename(folder / "a.tif.msk")
    return path


def _grids_as_extension(folder: Path, bait: Bait, size: tuple[int, int] = (760, 1000)) -> Path:
    import rasterio

    wkt = (
        'GEOGCS["x",DATUM["y",SPHEROID["WGS 84",6378137,298.257223563],EXTENSION["PROJ4_GRIDS","' + str(bait.file)
        + '"]],PRIMEM["Greenwich",0],UNIT["degree",0.0174532925199433]]'
    )  # fmt: skip
    crs = rasterio.CRS.from_wkt(wkt)
    return write_geotiff(folder / "a.tif", scene(size=size), crs=crs, GEOTIFF_KEYS_FLAVOR="ESRI_PE")


def _grids_in_jpeg2000(folder: Path, bait: Bait) -> Path:
    inner = _grids_as_extension(folder, bait, (1, 1))
    tags = bytes.fromhex("b14bf8bd083d4b43a5ae8cd7d5a6ce03") + inner.read_bytes()
    inner.unlink()
    path = write_geotiff(folder / "a.jp2", scene(), crs=None, driver="JP2OpenJPEG", GMLJP2="NO", GeoJP2="NO")
    data = path.read_bytes()
    start = data.index(b"jp2c") - 4
    path.write_bytes(data[:start] + struct.pack(">I4s", 8 + len(tags), b"uuid") + tags + data[start:])
    return path


def _grids(folder: Path, bait: Bait) -> Path:
    import rasterio

    path = write_geotiff(folder / "a.tif", scene())
    with rasterio.open(path, "r+") as file:
        file.crs = rasterio.CRS.from_string(f"+proj=longlat +ellps=bessel +nadgrids={bait.file} +no_defs")
    return path


def one_tile(side: int, tile: int, *, shared: bool, bits: int = 8) -> bytes:
    """A grey TIFF whose tiles all have the same few bytes: deflate of zeros."""
    import zlib

    data = zlib.compress(bytes(tile * tile * bits // 8), 9)
    count = (-(-side // tile)) ** 2 if shared else 1
    tags = {
        256: (4, 1, side), 257: (4, 1, side), 258: (3, 1, bits), 259: (3, 1, 8), 262: (3, 1, 1), 277: (3, 1, 1),
        322: (4, 1, tile), 323: (4, 1, tile), 324: (4, count, 0), 325: (4, count, 0),
    }  # fmt: skip
    start = 8 + 2 + 12 * len(tags) + 4
    if count == 1:
        tags[324], tags[325] = (4, 1, start), (4, 1, len(data))
        return tiff(tags, data)
    place = start + 8 * count
    tags[324], tags[325] = (4, count, start), (4, count, start + 4 * count)
    return tiff(tags, struct.pack("<I", place) * count + struct.pack("<I", len(data)) * count + data)


def _large_tile(folder: Path, _bait: Bait) -> Path:
    (folder / "a.tif").write_bytes(one_tile(30_000, 30_000, shared=False))
    return folder / "a.tif"


NODATA = '<PAMDataset><PAMRasterBand band="1"><NoDataValue>0</NoDataValue></PAMRasterBand></PAMDataset>'
FILE = '<MDI key="OVERVIEW_FILE">{file}</MDI>'
OVERVIEWS = f'<PAMDataset><Metadata domain="OVERVIEWS">{FILE}</Metadata></PAMDataset>'
MEAN = '<Metadata><MDI key="STATISTICS_MEAN">9</MDI></Metadata>'
STATISTICS = NODATA.replace("<NoDataValue>0</NoDataValue>", MEAN)
MANY = '"500000000"'
NAMED = '<UUID FileName="{beside}">urn:uuid:other</UUID>'
ELSEWHERE = f'<TiffData IFD="0" PlaneCount="1">{NAMED}</TiffData><TiffData'
BINARY_ONLY = '<BinaryOnly MetadataFile="{file}" UUID="urn:uuid:other"/><Image'
PLANES = f"<TiffData PlaneCount={MANY}/><TiffData"
BESIDE = partial(_beside, name="a.tif.ovr")

RASTERS: dict[str, Callable[[Path, Bait], Path]] = {
    "overviews at an address": partial(_overviews, name="/vsicurl/{url}/a.tif"),
    "overviews that send a file": partial(_overviews, name="/vsicurl?header_file={file}&url={url}/a.tif"),
    "overviews at a plain address": partial(_overviews, name="{url}/a.tif"),
    "overviews in a file": partial(_overviews, name="{file}"),
    "overviews in a mosaic": partial(_overviews, name="{vrt}"),
    "aux.xml with overviews": partial(_beside, text=OVERVIEWS),
    "aux.xml with nodata": partial(_beside, text=NODATA),
    "mask beside": _mask_beside,
    "mosaic": partial(_mosaic, name="a.vrt"),
    "mosaic as a map": _mosaic,
    "grid files": _grids,
    "grid files in an extension": _grids_as_extension,
    "grid files in a JPEG 2000": _grids_in_jpeg2000,
    "OME-TIFF in several files": partial(_ome_with, old="<TiffData", new=ELSEWHERE),
    "OME-TIFF described elsewhere": partial(_ome_with, old="<Image", new=BINARY_ONLY),
    "OME-TIFF of many times": partial(_ome_with, old='SizeT="1"', new=f"SizeT={MANY}"),
    "OME-TIFF of many planes": partial(_ome_with, old="<TiffData", new=PLANES),
    "MRXS whose index leads away": partial(mrxs, index="{beside}", data="D.dat"),
    "MRXS whose data leads away": partial(mrxs, data="{file}"),
    "MRXS with a link": partial(mrxs, link="Data0000.dat"),
    "MRXS whose folder is a link": partial(mrxs, link="a"),
    "MRXS with a pipe as index": partial(mrxs, pipe="Slidedat.ini"),
    "MRXS with a pipe as data": partial(mrxs, pipe="Data0000.dat"),
    "VMS that leads away": _vms,
    "VMS that leads away, after 5,000 bytes": partial(_vms, padding=f"# {'x' * 5000}\n"),
    "MRXS whose list is a link": partial(mrxs, link="Slidedat.ini"),
    "a slide beside a link of its name": _link_of_its_name,
    "a slide beside changes to it": _changes_beside,
    "DICOM beside a pipe": _dicom_pipe,
    "DICOM beside a link": _dicom_link,
    "a tile of 900 Mpx": _large_tile,
}
"""Rasters of which no window may be read."""

READ: dict[str, Callable[[Path, Bait], Path]] = {
    "overviews beside, a mosaic of a file": partial(BESIDE, text="{vrt}"),
    "overviews beside, a mosaic of an address": partial(BESIDE, text=vrt("/vsicurl/{url}/a.tif")),
    "aux.xml with statistics": partial(_beside, text=STATISTICS),
    "a world file": partial(_beside, name="a.tfw", text="2\n0\n0\n-2\n5\n6\n"),
}
"""Rasters of which the pixels in the file itself are read, whatever lies beside."""


def parquet_of_one_cell(path: Path, *, cell: int = 30_000_000, rows: int = 1024) -> Path:
    """A list of a few kilobytes: one long path, which every row repeats."""
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["a" * cell]))
    pq.write_table(pa.table({"path": long, "id": [str(i) for i in range(rows)]}), path, compression="zstd")
    return path


def parquet_of_many_rows(path: Path, *, rows: int = 50_000_000) -> Path:
    """A list of a few kilobytes: one path, and ids that only count up."""
    same = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array(["a.png"]))
    table = pa.table({"path": same, "id": np.arange(rows)})
    options = {"use_dictionary": ["path"], "column_encoding": {"id": "DELTA_BINARY_PACKED"}}
    pq.write_table(table, path, compression="zstd", row_group_size=rows, **options)
    return path


def _arrow(folder: Path, name: str) -> Path:
    """A data set saved to disk, whose state names its data."""
    (folder / "state.json").write_text(f'{{"_data_files": [{{"filename": "{name}"}}]}}')
    (folder / "dataset_info.json").write_text("{}")
    return folder


def _arrow_bomb(folder: Path, _bait: Bait) -> Path:
    """One image of 2 GB that is a few kilobytes in the file."""
    table = pa.table({"image": [{"bytes": bytes(2**31 - 2**20), "path": None}]})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(folder / "data.arrow", table.schema, options=options) as stream:
        stream.write_table(table)
    return _arrow(folder, "data.arrow")


LISTS: dict[str, Callable[[Path, Bait], Path]] = {
    "Parquet of one long cell": lambda folder, _: parquet_of_one_cell(folder / "items.parquet"),
    "Arrow with data elsewhere": lambda folder, bait: _arrow(folder, os.path.relpath(bait.file, folder)),
    "Arrow of a packed image": _arrow_bomb,
    "Parquet of many rows": lambda folder, _: parquet_of_many_rows(folder / "items.parquet"),
}
"""Lists that are refused."""
