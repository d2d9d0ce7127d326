"""Maps of DICOM images as DICOM: a parametric map where the source has a frame of reference, else an overlay and a segmentation.

A parametric map holds the raw values. Radiographs (CR, DX) have no frame of reference, which a parametric map needs: they
get a secondary capture, the map over the image in colour, and a fractional segmentation, the map divided by its largest
value. A slide gets its stitched map, tiled. Patient and study are those of the source. No text of a source enters a message: it may name a patient.
"""

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError, needing
from equicam.images import limited
from equicam.images.dicom import SUFFIXES
from equicam.images.files import MAX_IMAGE_BYTES, as_path, open_regular, read_file
from equicam.images.items import valid_utf8
from equicam.runs.export.files import ExportFolder, safe_names
from equicam.runs.export.stitching import Row, StitchedMap, interpolation, run_facts, stored_planes
from equicam.runs.queue_files import feature_id
from equicam.runs.store import RunStore

PARAMETRIC = ("CT", "MR")
"""Modalities whose images lie in a frame of reference."""
OUTSIDE = -1.0
"""Of a parametric map, where the model's input shows nothing; maps are not negative."""
SERIES_NUMBER = 9100
TILE_PX = 512
MAX_FILES_READ = 1000
COLUMNS = ("id", "path", "index", "sha256", "input_box", "target", "status")


@dataclass(frozen=True)
class _ImageMap:
    """The map of one image, and where it comes from."""

    id: str
    uid: str  # UUID of run and image
    run_uid: str
    path: Path
    sha256: str  # of the source's file, when it was explained
    box: tuple[float, float, float, float]  # of the source's pixels that the model's input shows
    map: NDArray[np.float32]  # [h, w], raw
    facts: Mapping[str, str]


def _map_in_frame(
    plane: NDArray[np.float32], box: tuple[float, float, float, float], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """A map at the pixels of its source, bilinear; NaN outside the model's input."""
    x0, y0, x1, y1 = box
    down, across = (
        (np.arange(n) + 0.5 - low) / (high - low) for n, low, high in ((shape[0], y0, y1), (shape[1], x0, x1))
    )
    rows_of, columns_of = (
        interpolation(np.clip(at, 0, 1), n) for at, n in zip((down, across), plane.shape, strict=True)
    )
    inside = np.outer((down >= 0) & (down <= 1), (across >= 0) & (across <= 1))
    return np.where(inside, rows_of @ plane @ columns_of.T, np.nan)


def _encode_map(image: _ImageMap) -> dict[str, bytes]:
    """The files of one map, by their ending; called in a process that opens files."""
    with needing("dicom-out", "--to dicom"):
        import highdicom  # noqa: F401
        import pydicom  # highdicom brings it; without it nothing is read

    what = f"image {image.id!r}"
    data, _ = read_file(image.path, what=what, limit=MAX_IMAGE_BYTES)
    if hashlib.sha256(data).hexdigest() != image.sha256:
        raise EquicamError(what, "the file that was explained", "another one under its name", "restoring it")
    encoded = {}
    with _refusing(
        what, "a DICOM image that highdicom can refer to", "mending the file, or a run without it"
    ):
        source = pydicom.dcmread(io.BytesIO(data))
        values = _map_in_frame(image.map, image.box, (source.Rows, source.Columns))
        uids = partial(_uids, image.run_uid, image.uid, source)
        if source.Modality in PARAMETRIC and source.get("FrameOfReferenceUID"):
            made = {"map.dcm": _parametric_map(source, values, image.facts, uids(kind=0))}
        else:
            made = {
                "overlay.dcm": _overlay(source, values, data, uids(kind=2)),
                "seg.dcm": _segmentation(source, values, image.facts, uids(kind=1)),
            }
        for ending, one in made.items():
            one.save_as(buffer := io.BytesIO(), enforce_file_format=True)
            encoded[ending] = buffer.getvalue()
    return encoded


@contextmanager
def _refusing(what: str, needs: str, fix: str) -> Iterator[None]:
    """Every exception becomes an EquicamError that names a missing element, and warnings are dropped: their texts may name a patient."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except EquicamError:
        raise
    except Exception as error:  # libraries raise exceptions of every kind on damaged files
        text = str(error) if isinstance(error, AttributeError) else ""
        found = re.search(r"has no attribute '(\w{1,64})'", text)
        raise EquicamError(what, needs, f"no {found[1]}" if found else type(error).__name__, fix) from error


def _uids(run_uid: str, uid: str, source: Any, kind: int) -> dict[str, Any]:
    """UIDs that the same run always gives to the same map; `kind` tells the objects of one image apart."""
    series, instance = (
        f"2.25.{UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=4).int}"
        for text in (f"{run_uid} {source.SeriesInstanceUID} {kind}", f"{uid} {kind}")
    )
    return {
        "series_instance_uid": series,
        "series_number": SERIES_NUMBER + kind,
        "sop_instance_uid": instance,
        "instance_number": int(source.get("InstanceNumber") or 1),
        "manufacturer": "equicam",
    }


def _equipment(facts: Mapping[str, str]) -> dict[str, Any]:
    """What made the map, as DICOM asks for it."""
    return {
        "manufacturer_model_name": "equicam",
        "software_versions": facts["version"],
        "device_serial_number": facts["run digest"][:16],
        "content_description": f"{facts['method']}, {facts['class']}"[:64],
        "content_label": "SALIENCY",
    }


def _parametric_map(
    source: Any, values: NDArray[Any], facts: Mapping[str, str], uids: dict[str, Any], **place: Any
) -> Any:
    """The map in the frame of reference of its source, or at a place of its own."""
    import highdicom
    from highdicom.pm import ParametricMap, RealWorldValueMapping
    from pydicom.sr.codedict import codes

    pixels = np.where(np.isfinite(values), values, OUTSIDE).astype(np.float32)
    largest = max(float(pixels.max()), 1e-30)
    mapping = RealWorldValueMapping(
        lut_label="saliency", lut_explanation=facts["class"][:64], unit=codes.UCUM.NoUnits,
        value_range=(OUTSIDE, largest), slope=1.0, intercept=0.0,
    )  # fmt: skip
    window = highdicom.VOILUTTransformation(window_center=largest / 2, window_width=largest)
    found = ParametricMap(
        [source], pixels[None], contains_recognizable_visual_features=False, real_world_value_mappings=[mapping],
        voi_lut_transformations=[window], **uids, **_equipment(facts), **place,
    )  # fmt: skip
    found.FloatPixelPaddingValue = OUTSIDE
    return found


def _segmentation(
    source: Any, values: NDArray[np.float64], facts: Mapping[str, str], uids: dict[str, Any]
) -> Any:
    import highdicom
    from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentDescription
    from highdicom.sr import CodedConcept
    from pydicom.sr.codedict import codes

    algorithm = highdicom.AlgorithmIdentificationSequence(
        name="equicam", version=facts["version"], family=codes.DCM.ArtificialIntelligence
    )
    segment = SegmentDescription(
        1, f"saliency, {facts['class']}"[:64], CodedConcept("309825002", "SCT", "Spatial and Relational Concept"),
        CodedConcept("111099", "DCM", "Selected region"), SegmentAlgorithmTypeValues.AUTOMATIC, algorithm,
    )  # fmt: skip
    return Segmentation(
        [source], _unit(values)[None].astype(np.float32), "FRACTIONAL", [segment], omit_empty_frames=False, **uids, **_equipment(facts),
    )  # fmt: skip


def _overlay(source: Any, values: NDArray[np.float64], data: bytes, uids: dict[str, Any]) -> Any:
    import highdicom
    from highdicom.sc import SCImage

    from equicam.overlay import overlay

    grey = highdicom.imread(io.BytesIO(data)).get_frame(
        1, apply_voi_transform=None, apply_presentation_lut=True, dtype=np.float64
    )
    # by the window in the file if it has one; only the background is stretched, never the map
    if grey.ndim == 2:
        low, high = float(grey.min()), float(grey.max())
        grey = np.repeat(255 * ((grey - low) / ((high - low) or 1.0))[..., None], 3, axis=2)
    coloured = overlay(grey.round().astype(np.uint8), _unit(values))
    return SCImage.from_ref_dataset(
        source, coloured, "RGB", 8, "PATIENT",
        patient_orientation=tuple(source.get("PatientOrientation") or ("L", "F")),
        laterality=source.get("ImageLaterality") or source.get("Laterality") or None,
        **uids,
    )  # fmt: skip


def _unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divided by the largest value, 0 outside the model's input."""
    known = np.clip(np.nan_to_num(values), 0, None)
    return np.asarray(known / (float(known.max(initial=0.0)) or 1.0))


def write_dicom_slide(path: Path, stitched: StitchedMap, source: Path, uid: str, run_uid: str) -> None:
    """Write the map; `source` is any file of the slide, whose finest level is looked for next to it."""
    with needing("dicom-out", "--to dicom"):
        import highdicom

    what = f"raster {stitched.raster.id!r}"
    size = stitched.raster.width, stitched.raster.height
    slide = limited.call(_finest_level, source, size, what)
    with _refusing(what, "a DICOM slide that highdicom can refer to", "--to ome-tiff"):
        measures = slide.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        origin = slide.TotalPixelMatrixOriginSequence[0]
        place = (origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem, 0.0)
        made = _parametric_map(
            slide, stitched.bands[0], stitched.facts, _uids(run_uid, uid, slide, 0),
            pixel_measures=highdicom.PixelMeasuresSequence(
                pixel_spacing=[float(length) * stitched.cell for length in measures.PixelSpacing],
                slice_thickness=float(measures.get("SliceThickness") or 1.0),
            ),
            plane_orientation=highdicom.PlaneOrientationSequence("SLIDE", slide.ImageOrientationSlide),
            plane_positions=[highdicom.PlanePositionSequence("SLIDE", place, pixel_matrix_position=(1, 1))],
            tile_pixel_array=True, tile_size=(TILE_PX, TILE_PX),
        )  # fmt: skip
        made.save_as(path, enforce_file_format=True)


def _finest_level(source: Path, wanted: tuple[int, int], what: str) -> Any:
    """The header of the file of this series that has the whole size."""
    import pydicom

    if source.suffix.lower() not in SUFFIXES:
        raise EquicamError(what, "a DICOM slide", f"a file {source.suffix}", "--to ome-tiff")
    series = None
    with _refusing(what, "DICOM files that can be read", "restoring them"):
        others = (p for p in source.parent.iterdir() if p.suffix.lower() in SUFFIXES and p != source)
        for path in [source, *sorted(others)][:MAX_FILES_READ]:
            with open_regular(path, str(path)) as file:
                found = pydicom.dcmread(file, stop_before_pixels=True)
            series = series or found.SeriesInstanceUID
            size = (found.get("TotalPixelMatrixColumns"), found.get("TotalPixelMatrixRows"))
            if found.get("SeriesInstanceUID") == series and size == wanted:
                return found
    needs = f"its level of {wanted[0]} × {wanted[1]} pixels"
    raise EquicamError(what, needs, "none next to it", "restoring it")


def write_images(
    store: RunStore, target: int | None, folder: ExportFolder, tick: Callable[[int], None]
) -> tuple[int, int, tuple[str, ...]]:
    """Write the map of every image as DICOM; returns how many have one, how many are left out, and why some have none."""
    rows: list[Row] = [row for row in store.read_items(list(COLUMNS)).to_pylist() if row["status"] == "ok"]
    wanted = {
        row["id"]: row
        for row in rows
        if row["index"] is None and str(row["path"] or "").lower().endswith(SUFFIXES)  # of one frame
        if target in (None, row["target"])
    }
    if not wanted:
        raise EquicamError(
            "--to dicom", "a run of DICOM files (.dcm) of one frame each", f"none among {len(rows):,} images",
            "another --to or --class",
        )  # fmt: skip
    with needing("dicom-out", "--to dicom"):
        import highdicom  # noqa: F401
    names = safe_names(list(wanted))
    refused: list[EquicamError] = []
    for name, plane, _ in stored_planes(store, wanted):
        try:
            files = limited.call(_encode_map, _image_map(store, wanted[name], plane))
        except EquicamError as error:
            refused.append(error)
            continue
        for ending, data in files.items():
            with folder.writing(f"{names[name]}.{ending}") as path:
                path.write_bytes(data)
        tick(1)
    if len(refused) == len(wanted):
        raise refused[0]
    return len(wanted) - len(refused), len(rows) - len(wanted), tuple(map(str, refused))


def _image_map(store: RunStore, row: Row, plane: Any) -> _ImageMap:
    path, box = as_path(row["path"]), list(row["input_box"] or ())
    valid = len(box) == 4 and all(map(math.isfinite, box)) and box[0] < box[2] and box[1] < box[3]
    if not valid or not isinstance(path, Path):
        raise EquicamError(
            f"image {valid_utf8(row['id'])!r}", "a file on a disk, and the box that the model's input shows",
            row["path"] if valid else row["input_box"], "equicam audit again",
        )  # fmt: skip
    return _ImageMap(
        row["id"], feature_id(store, row["id"]), feature_id(store, "series"), path, row["sha256"] or "",
        (box[0], box[1], box[2], box[3]), plane, run_facts(store, row["target"]),
    )  # fmt: skip
