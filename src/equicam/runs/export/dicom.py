"""Maps of DICOM images as DICOM: a parametric map where the source has a frame of reference, else an overlay and a segmentation.

A parametric map holds the raw values. Radiographs (CR, DX) have no frame of reference, which a parametric map needs: they
get a secondary capture, the map over the image in colour, and a fractional segmentation, the map divided by its largest
value. Patient and study are those of the source. No text of a source enters a message: it may name a patient.
"""

import hashlib
import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.dicom import SUFFIXES
from equicam.images.files import MAX_IMAGE_BYTES, read_file
from equicam.runs.export.libraries import needing
from equicam.runs.export.stitching import interpolation

PARAMETRIC = ("CT", "MR")
"""Modalities whose images lie in a frame of reference."""
OUTSIDE = -1.0
"""Of a parametric map, where the model's input shows nothing; maps are not negative."""
SERIES_NUMBER = 9100


@dataclass(frozen=True)
class ImageMap:
    """The map of one image, and where it comes from."""

    id: str
    uid: str  # UUID of run and image
    run_uid: str
    path: Path
    sha256: str  # of the source's file, when it was explained
    box: tuple[float, float, float, float]  # of the source's pixels that the model's input shows
    map: NDArray[np.float32]  # [h, w], raw
    facts: Mapping[str, str]


def is_single_frame(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a DICOM file with one frame."""
    return row["index"] is None and str(row["path"] or "").lower().endswith(SUFFIXES)


def map_in_frame(
    plane: NDArray[np.float32], box: tuple[float, float, float, float], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """A map at the pixels of its source, bilinear; NaN outside the model's input."""
    x0, y0, x1, y1 = box
    down, across = (
        (np.arange(n) + 0.5 - low) / (high - low) for n, low, high in ((shape[0], y0, y1), (shape[1], x0, x1))
    )
    found = (
        interpolation(np.clip(down, 0, 1), plane.shape[0])
        @ plane
        @ interpolation(np.clip(across, 0, 1), plane.shape[1]).T
    )
    inside = np.outer((down >= 0) & (down <= 1), (across >= 0) & (across <= 1))
    return np.where(inside, found, np.nan)  # fmt: skip


def encode_map(image: ImageMap) -> dict[str, bytes]:
    """The files of one map, by their ending; the source is read in a process that opens files."""
    return limited.call(_encode_map, image)


def _encode_map(image: ImageMap) -> dict[str, bytes]:
    found = {}
    for ending, made in dicom_objects(image).items():
        made.save_as(buffer := io.BytesIO(), enforce_file_format=True)
        found[ending] = buffer.getvalue()
    return found


def dicom_objects(image: ImageMap) -> dict[str, Any]:
    """The DICOM objects of one map, by the ending of their files."""
    with needing("dicom-out", "--to dicom"):
        import highdicom
        import pydicom  # noqa: F401  # highdicom brings it; without it nothing is read

    what = f"image {image.id!r}"
    data, _ = read_file(image.path, what=what, limit=MAX_IMAGE_BYTES)
    if hashlib.sha256(data).hexdigest() != image.sha256:
        raise EquicamError(
            what, needs="the file that was explained", got="another one under its name", fix="restoring it"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they quote what they warn of, and that may name a patient
            return _objects(highdicom, image, data)
    except Exception as error:  # libraries raise exceptions of every kind on damaged files
        missing = (
            re.search(r"has no attribute '(\w{1,64})'", str(error))
            if isinstance(error, AttributeError)
            else None
        )
        raise EquicamError(
            what, needs="a DICOM image that highdicom can refer to", got=f"no {missing[1]}" if missing else type(error).__name__,
            fix="mending the file, or a run without it",
        ) from error  # fmt: skip


def _objects(highdicom: Any, image: ImageMap, data: bytes) -> dict[str, Any]:
    import pydicom

    source = pydicom.dcmread(io.BytesIO(data))
    values = map_in_frame(image.map, image.box, (source.Rows, source.Columns))
    if source.Modality in PARAMETRIC and source.get("FrameOfReferenceUID"):
        return {"map.dcm": _parametric_map(highdicom, image, source, values)}
    return {
        "overlay.dcm": _overlay(highdicom, image, source, values, data),
        "seg.dcm": _segmentation(highdicom, image, source, values),
    }


def object_uids(highdicom: Any, run_uid: str, uid: str, source: Any, kind: int) -> dict[str, Any]:
    """UIDs that the same run always gives to the same map; `kind` tells the objects of one image apart."""
    return {
        "series_instance_uid": _uid(highdicom, f"{run_uid} {source.SeriesInstanceUID} {kind}"),
        "series_number": SERIES_NUMBER + kind,
        "sop_instance_uid": _uid(highdicom, f"{uid} {kind}"),
        "instance_number": int(source.get("InstanceNumber") or 1),
        "manufacturer": "equicam",
    }


def _uid(highdicom: Any, text: str) -> Any:
    return highdicom.UID(f"2.25.{UUID(bytes=hashlib.sha256(text.encode()).digest()[:16], version=4).int}")


def equipment(facts: Mapping[str, str]) -> dict[str, Any]:
    """What made the map, as DICOM asks for it."""
    return {
        "manufacturer_model_name": "equicam",
        "software_versions": facts["version"],
        "device_serial_number": facts["run digest"][:16],
        "content_description": f"{facts['method']}, {facts['class']}"[:64],
        "content_label": "SALIENCY",
    }


def _parametric_map(highdicom: Any, image: ImageMap, source: Any, values: NDArray[np.float64]) -> Any:
    from highdicom.pm import ParametricMap, RealWorldValueMapping
    from pydicom.sr.codedict import codes

    pixels = np.where(np.isfinite(values), values, OUTSIDE).astype(np.float32)
    largest = max(float(pixels.max()), 1e-30)
    mapping = RealWorldValueMapping(
        lut_label="saliency", lut_explanation=image.facts["class"][:64], unit=codes.UCUM.NoUnits,
        value_range=(OUTSIDE, largest), slope=1.0, intercept=0.0,
    )  # fmt: skip
    window = highdicom.VOILUTTransformation(window_center=largest / 2, window_width=largest)
    found = ParametricMap(
        [source], pixels[None], contains_recognizable_visual_features=False, real_world_value_mappings=[mapping],
        voi_lut_transformations=[window], **object_uids(highdicom, image.run_uid, image.uid, source, 0), **equipment(image.facts),
    )  # fmt: skip
    found.FloatPixelPaddingValue = OUTSIDE
    return found


def _segmentation(highdicom: Any, image: ImageMap, source: Any, values: NDArray[np.float64]) -> Any:
    from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentDescription
    from highdicom.sr import CodedConcept
    from pydicom.sr.codedict import codes

    algorithm = highdicom.AlgorithmIdentificationSequence(
        name="equicam", version=image.facts["version"], family=codes.DCM.ArtificialIntelligence
    )
    segment = SegmentDescription(
        1, f"saliency, {image.facts['class']}"[:64], CodedConcept("309825002", "SCT", "Spatial and Relational Concept"),
        CodedConcept("111099", "DCM", "Selected region"), SegmentAlgorithmTypeValues.AUTOMATIC, algorithm,
    )  # fmt: skip
    return Segmentation(
        [source], _unit(values)[None].astype(np.float32), "FRACTIONAL", [segment], omit_empty_frames=False,
        **object_uids(highdicom, image.run_uid, image.uid, source, 1), **equipment(image.facts),
    )  # fmt: skip


def _overlay(highdicom: Any, image: ImageMap, source: Any, values: NDArray[np.float64], data: bytes) -> Any:
    from highdicom.sc import SCImage

    from equicam.overlay import overlay

    grey = highdicom.imread(io.BytesIO(data)).get_frame(
        1, apply_voi_transform=None, apply_presentation_lut=True, dtype=np.float64
    )
    if (
        grey.ndim == 2
    ):  # by the window in the file if it has one; only the background is stretched, never the map
        low, high = float(grey.min()), float(grey.max())
        grey = np.repeat(255 * ((grey - low) / ((high - low) or 1.0))[..., None], 3, axis=2)
    coloured = overlay(grey.round().astype(np.uint8), _unit(values))
    return SCImage.from_ref_dataset(
        source, coloured, "RGB", 8, "PATIENT",
        patient_orientation=tuple(source.get("PatientOrientation") or ("L", "F")),
        laterality=source.get("ImageLaterality") or source.get("Laterality") or None,
        **object_uids(highdicom, image.run_uid, image.uid, source, 2),
    )  # fmt: skip


def _unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divided by the largest value, 0 outside the model's input."""
    known = np.clip(np.nan_to_num(values), 0, None)
    return np.asarray(known / (float(known.max(initial=0.0)) or 1.0))
