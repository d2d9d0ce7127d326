"""Maps of DICOM images as DICOM, read back with pydicom and highdicom; the sources are small files of highdicom's tests."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from equicam.audit.run import Run
from equicam.errors import EquicamError
from equicam.images.items import Item
from equicam.runs.export.dicom import OUTSIDE, _map_in_frame
from equicam.runs.log import Log
from equicam.runs.store import ITEMS, MAPS, RunStore, StoredMaps
from tests.export.faked import fake_raster_run, raster_row

highdicom = pytest.importorskip("highdicom")
pydicom = pytest.importorskip("pydicom")
pytest.importorskip("pydicom.data")

RASTERS = Path(os.environ.get("EQUICAM_RASTERS", Path(__file__).parents[2] / ".rasters"))
DICOM = Path(os.environ.get("EQUICAM_DICOM", "/nowhere"))
"""A folder with ct_image.dcm, dx_image.dcm and sm_image.dcm of highdicom's tests; without it, others stand in for the first two."""
STAND_INS = {"ct_image.dcm": "CT_small.dcm", "dx_image.dcm": "RG1_UNCR.dcm"}


def source(name):
    found = [DICOM / name, RASTERS / STAND_INS.get(name, name)]
    if name == "ct_image.dcm":
        found.append(Path(pydicom.data.get_testdata_file("CT_small.dcm", download=False) or "/nowhere"))
    return next((p for p in found if p.is_file()), None) or pytest.skip(f"no {name} in EQUICAM_DICOM")


def hill(h=6, w=8):
    y, x = np.mgrid[:h, :w]
    return np.exp(-((x - 5) ** 2 + (y - 1) ** 2) / 4).astype(np.float32) / 5


def dicom_run(folder, paths, box=lambda path: None, **facts):
    """A finished run of files; `box` says what the model's input shows."""
    rows, maps, items = [], [], []
    for path in paths:
        size = pydicom.dcmread(path, stop_before_pixels=True)
        whole = [0.0, 0.0, float(size.Columns), float(size.Rows)]
        rows.append(
            {
                "id": path.name, "path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "index": None,
                "input_box": box(path) or whole, "target": 1, "status": "ok", "width": size.Columns, "height": size.Rows,
            } | facts
        )  # fmt: skip
        maps.append(StoredMaps(hill(), hill(), np.zeros((2, 6, 8), np.float32)).to_row(path.name))
        items.append(Item(path.name, path))
    other = fake_raster_run(folder / "other").manifest
    store = RunStore(folder / "run")
    store.begin(replace(other, tiling=None, images=len(rows), shard_size=10), items, ())
    store.write_shard(0, pa.Table.from_pylist(rows, schema=ITEMS), pa.Table.from_pylist(maps, schema=MAPS))
    Log(store.folder).add("started", {})
    return store


def one_dicom(run, **options):
    """The one file of an export, and its content."""
    (path,) = Run(run).export("dicom", **options).files
    return path, pydicom.dcmread(path)


def same(made, before, names):
    """The fields of a source that are in the file made of it."""
    assert {name: made.get(name) for name in names.split()} == {
        name: before.get(name) for name in names.split()
    }


def test_a_map_lies_in_the_frame_where_the_input_was():
    plane = np.arange(4, dtype=np.float32)[None, :] + np.zeros((4, 1), np.float32)
    found = _map_in_frame(plane, (10.0, 5.0, 50.0, 45.0), (60, 70))
    inside = np.zeros((60, 70), bool)
    inside[5:45, 10:50] = True
    np.testing.assert_array_equal(np.isfinite(found), inside)
    wanted = np.clip((np.arange(10, 50) + 0.5 - 10) / 10 - 0.5, 0, 3)
    np.testing.assert_allclose(found[20, 10:50], wanted)


def test_ct_gets_a_parametric_map_of_raw_values(tmp_path):
    path, box = source("ct_image.dcm"), [20.0, 0.0, 120.0, 100.0]
    store, before = dicom_run(tmp_path, [path], box=lambda _: box), pydicom.dcmread(path)
    written, made = one_dicom(store)
    assert written.name == f"{path.name}.map.dcm"
    assert made.SOPClassUID.name == "Parametric Map Storage"
    same(made, before, "StudyInstanceUID FrameOfReferenceUID PatientID")
    assert made.SeriesInstanceUID != before.SeriesInstanceUID
    assert made.FloatPixelPaddingValue == OUTSIDE
    values = highdicom.imread(written).get_frames()[0]
    wanted = _map_in_frame(hill(), tuple(box), (128, 128))
    known = np.isfinite(wanted)
    assert known.sum() == 100 * 100
    np.testing.assert_allclose(values[known], wanted[known], atol=2e-4)
    assert (values[~known] == OUTSIDE).all()
    place = made.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence[0].ImagePositionPatient
    assert list(place) == pytest.approx(list(before.ImagePositionPatient))
    _, again = one_dicom(store, out=tmp_path / "again")
    same(again, made, "SOPInstanceUID SeriesInstanceUID")


def test_radiographs_get_an_overlay_and_a_segmentation(tmp_path):
    path = source("dx_image.dcm")
    files = {p.name: pydicom.dcmread(p) for p in Run(dicom_run(tmp_path, [path])).export("dicom").files}
    assert sorted(files) == [f"{path.name}.overlay.dcm", f"{path.name}.seg.dcm"]
    overlay, segmentation = (files[f"{path.name}.{kind}.dcm"] for kind in ("overlay", "seg"))
    assert overlay.SOPClassUID.name == "Secondary Capture Image Storage"
    colours = overlay.pixel_array.astype(float)
    high, wide = pydicom.dcmread(path, stop_before_pixels=True)["Rows"].value, colours.shape[1]
    assert colours.shape == (high, wide, 3)
    wanted = _map_in_frame(hill(), (0.0, 0.0, float(wide), float(high)), (high, wide))
    colourful = np.ptp(colours, axis=2)
    assert colourful[wanted > 0.1].mean() > 3 * colourful[wanted < 0.01].mean()
    assert segmentation.SegmentationType == "FRACTIONAL"
    assert segmentation.SegmentSequence[0].SegmentLabel == "saliency, tumour"
    np.testing.assert_allclose(segmentation.pixel_array / 255, wanted / wanted.max(), atol=0.004)
    assert overlay.SeriesInstanceUID != segmentation.SeriesInstanceUID


def test_what_cannot_be_written_is_refused_without_a_patients_name(tmp_path):
    path, copy, broken = source("ct_image.dcm"), tmp_path / "copy.dcm", tmp_path / "broken.dcm"
    copy.write_bytes(path.read_bytes())
    changed = dicom_run(tmp_path, [copy])
    data = pydicom.dcmread(copy)
    data.PatientName = "Doe^Jane"
    data.save_as(copy)
    data.StudyInstanceUID = None
    del data.SOPClassUID
    data.save_as(broken)
    many = "of one frame each, got none among 1 images"
    for store, options, match in (
        (changed, {}, "the file that was explained"),
        (changed, {"blind": True}, "--blind alone"),
        (dicom_run(tmp_path / "broken", [broken]), {}, "highdicom can refer to"),
        (dicom_run(tmp_path / "index", [path], index=3), {}, many),
        (dicom_run(tmp_path / "path", [path], path="a.png"), {}, many),
        (
            dicom_run(tmp_path / "box", [path], input_box=[0.0, 0.0, 0.0, 5.0]),
            {},
            "a file on a disk, and the box",
        ),
        (fake_raster_run(tmp_path / "slide"), {}, "--to ome-tiff"),
    ):
        with pytest.raises(EquicamError, match=match) as error:
            Run(store).export("dicom", **options)
        assert "Doe" not in str(error.value)


def test_the_map_of_a_slide_lies_in_its_frame_of_reference(tmp_path):
    path = source("sm_image.dcm")
    slide = pydicom.dcmread(path)
    size = {"width": slide.TotalPixelMatrixColumns, "height": slide.TotalPixelMatrixRows}
    raster = replace(raster_row("sm_image.dcm", **size), path=str(path))
    store = fake_raster_run(tmp_path / "run", [raster], field=lambda x, y: x + 2 * y, scale=0.2, stride=32)
    written, made = one_dicom(store, every=20)
    assert written.name == "sm_image.dcm.class-1.map.dcm"
    assert made.Modality == "OT" or made.SOPClassUID.name.startswith("Parametric Map")
    same(made, slide, "PatientID StudyInstanceUID FrameOfReferenceUID ContainerIdentifier")
    cell = 0.2 * 20  # of the slide's pixels
    groups = [one.SharedFunctionalGroupsSequence[0] for one in (made, slide)]
    spacing, before = ([float(v) for v in one.PixelMeasuresSequence[0].PixelSpacing] for one in groups)
    assert spacing == pytest.approx([cell * v for v in before])
    found = np.squeeze(highdicom.imread(written).get_total_pixel_matrix())
    assert found.shape == (13, 13)
    at = (np.arange(13) + 0.5) * cell
    expected = at[None, :] + 2 * at[:, None]
    inside = slice(2, 11)
    assert np.ptp(expected) > 50
    assert found[inside, inside] == pytest.approx(expected[inside, inside], abs=2)
    _, again = one_dicom(store, every=20, out=tmp_path / "again")
    assert again.SOPInstanceUID == made.SOPInstanceUID
