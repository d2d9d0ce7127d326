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
    for path in found:
        if path.is_file():
            return path
    pytest.skip(f"no {name} in EQUICAM_DICOM")


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


def test_a_map_lies_in_the_frame_where_the_input_was():
    plane = np.arange(4, dtype=np.float32)[None, :] + np.zeros((4, 1), np.float32)
    found = _map_in_frame(plane, (10.0, 5.0, 50.0, 45.0), (60, 70))
    assert found.shape == (60, 70)
    inside = np.zeros((60, 70), bool)
    inside[5:45, 10:50] = True
    np.testing.assert_array_equal(np.isfinite(found), inside)
    columns = np.arange(10, 50)
    wanted = np.clip((columns + 0.5 - 10) / 10 - 0.5, 0, 3)
    np.testing.assert_allclose(found[20, 10:50], wanted)


def test_ct_gets_a_parametric_map_of_raw_values(tmp_path):
    path = source("ct_image.dcm")
    store = dicom_run(tmp_path, [path], box=lambda _: [20.0, 0.0, 120.0, 100.0])
    (written,) = Run(store).export("dicom").files
    assert written.name == f"{path.name}.map.dcm"
    made, before = pydicom.dcmread(written), pydicom.dcmread(path)
    assert made.SOPClassUID.name == "Parametric Map Storage"
    assert made.StudyInstanceUID == before.StudyInstanceUID
    assert made.FrameOfReferenceUID == before.FrameOfReferenceUID
    assert made.SeriesInstanceUID != before.SeriesInstanceUID
    assert made.PatientID == before.PatientID
    assert made.FloatPixelPaddingValue == OUTSIDE
    values = highdicom.imread(written).get_frames()[0]
    wanted = _map_in_frame(hill(), (20.0, 0.0, 120.0, 100.0), (128, 128))
    known = np.isfinite(wanted)
    assert known.sum() == 100 * 100
    np.testing.assert_allclose(values[known], wanted[known], atol=2e-4)
    assert (values[~known] == OUTSIDE).all()
    place = made.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence[0].ImagePositionPatient
    assert list(place) == pytest.approx(list(before.ImagePositionPatient))


def test_radiographs_get_an_overlay_and_a_segmentation(tmp_path):
    path = source("dx_image.dcm")
    store = dicom_run(tmp_path, [path])
    files = {p.name: pydicom.dcmread(p) for p in Run(store).export("dicom").files}
    assert sorted(files) == [f"{path.name}.overlay.dcm", f"{path.name}.seg.dcm"]
    overlay, segmentation = files[f"{path.name}.overlay.dcm"], files[f"{path.name}.seg.dcm"]
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


def test_the_same_run_gives_the_same_uids(tmp_path):
    path = source("ct_image.dcm")
    store = dicom_run(tmp_path, [path])
    first, again = (pydicom.dcmread(Run(store).export("dicom", out=tmp_path / n).files[0]) for n in "ab")
    assert first.SOPInstanceUID == again.SOPInstanceUID
    assert first.SeriesInstanceUID == again.SeriesInstanceUID


def test_what_cannot_be_written_is_refused_without_a_patients_name(tmp_path):
    path = source("ct_image.dcm")
    copy = tmp_path / "copy.dcm"
    copy.write_bytes(path.read_bytes())
    store = dicom_run(tmp_path, [copy])
    data = pydicom.dcmread(copy)
    data.PatientName = "Doe^Jane"
    data.save_as(copy)
    with pytest.raises(EquicamError, match="the file that was explained"):
        Run(store).export("dicom")
    broken = tmp_path / "broken.dcm"
    data.StudyInstanceUID = None
    del data.SOPClassUID
    data.save_as(broken)
    with pytest.raises(EquicamError, match="highdicom can refer to") as error:
        Run(dicom_run(tmp_path / "c", [broken])).export("dicom")
    assert "Doe" not in str(error.value)
    for wrong in ({"index": 3}, {"path": "a.png"}):
        with pytest.raises(EquicamError, match="of one frame each, got none among 1 images"):
            Run(dicom_run(tmp_path / str(wrong)[2:6], [path], **wrong)).export("dicom")
    with pytest.raises(EquicamError, match="a file on a disk, and the box"):
        Run(dicom_run(tmp_path / "d", [path], input_box=[0.0, 0.0, 0.0, 5.0])).export("dicom")
    with pytest.raises(EquicamError, match="--blind alone"):
        Run(store).export("dicom", blind=True)


def test_the_map_of_a_slide_lies_in_its_frame_of_reference(tmp_path):
    path = source("sm_image.dcm")
    slide = pydicom.dcmread(path)
    size = {"width": slide.TotalPixelMatrixColumns, "height": slide.TotalPixelMatrixRows}
    raster = replace(raster_row("sm_image.dcm", **size), path=str(path))
    store = fake_raster_run(tmp_path / "run", [raster], field=lambda x, y: x + 2 * y, scale=0.2, stride=32)
    run = Run(store)
    (written,) = run.export("dicom", every=20).files
    made = pydicom.dcmread(written)
    assert written.name == "sm_image.dcm.class-1.map.dcm"
    assert made.Modality == "OT" or made.SOPClassUID.name.startswith("Parametric Map")
    for name in ("PatientID", "StudyInstanceUID", "FrameOfReferenceUID", "ContainerIdentifier"):
        assert made.get(name) == slide.get(name), name
    cell = 0.2 * 20  # of the slide's pixels
    spacing, before = (
        one.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing for one in (made, slide)
    )
    assert [float(v) for v in spacing] == pytest.approx([cell * float(v) for v in before])
    found = np.squeeze(highdicom.imread(written).get_total_pixel_matrix())
    assert found.shape == (13, 13)
    at = (np.arange(13) + 0.5) * cell
    expected = at[None, :] + 2 * at[:, None]
    inside = slice(2, 11)
    assert np.ptp(expected) > 50
    assert found[inside, inside] == pytest.approx(expected[inside, inside], abs=2)
    again = pydicom.dcmread(run.export("dicom", every=20, out=tmp_path / "again").files[0])
    assert again.SOPInstanceUID == made.SOPInstanceUID


def test_other_slides_get_no_dicom(tmp_path):
    with pytest.raises(EquicamError, match="--to ome-tiff"):
        Run(fake_raster_run(tmp_path / "run")).export("dicom")
