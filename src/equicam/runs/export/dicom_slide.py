"""The stitched map of a DICOM slide as a parametric map, tiled, in the slide's frame of reference, patient and study."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.dicom import SUFFIXES
from equicam.images.files import open_regular
from equicam.runs.export.dicom import OUTSIDE, equipment, object_uids
from equicam.runs.export.libraries import needing
from equicam.runs.export.stitched import StitchedMap

TILE_PX = 512
MAX_FILES_READ = 1000


def write_dicom_slide(path: Path, stitched: StitchedMap, source: Path, uid: str, run_uid: str) -> None:
    """Write the map; `source` is any file of the slide, whose finest level is looked for next to it."""
    with needing("dicom-out", "--to dicom"):
        import highdicom
        from highdicom.pm import ParametricMap, RealWorldValueMapping
        from pydicom.sr.codedict import codes

    what = f"raster {stitched.raster.id!r}"
    size = stitched.raster.width, stitched.raster.height
    slide = limited.call(_finest_level, source, size, what)
    values = np.where(np.isfinite(stitched.bands[0]), stitched.bands[0], OUTSIDE).astype(np.float32)
    largest = max(float(values.max()), 1e-30)
    mapping = RealWorldValueMapping(
        lut_label="saliency", lut_explanation=stitched.facts["class"][:64], unit=codes.UCUM.NoUnits,
        value_range=(OUTSIDE, largest), slope=1.0, intercept=0.0,
    )  # fmt: skip
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they quote what they warn of, and that may name a patient
            measures = slide.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
            origin = slide.TotalPixelMatrixOriginSequence[0]
            place = (origin.XOffsetInSlideCoordinateSystem, origin.YOffsetInSlideCoordinateSystem, 0.0)
            made = ParametricMap(
                [slide], values[None], contains_recognizable_visual_features=False, real_world_value_mappings=[mapping],
                voi_lut_transformations=[highdicom.VOILUTTransformation(window_center=largest / 2, window_width=largest)],
                pixel_measures=highdicom.PixelMeasuresSequence(
                    pixel_spacing=[float(length) * stitched.cell for length in measures.PixelSpacing],
                    slice_thickness=float(measures.get("SliceThickness") or 1.0),
                ),
                plane_orientation=highdicom.PlaneOrientationSequence("SLIDE", slide.ImageOrientationSlide),
                plane_positions=[highdicom.PlanePositionSequence("SLIDE", place, pixel_matrix_position=(1, 1))],
                tile_pixel_array=True, tile_size=(TILE_PX, TILE_PX),
                **object_uids(highdicom, run_uid, uid, slide, 0), **equipment(stitched.facts),
            )  # fmt: skip
            made.FloatPixelPaddingValue = OUTSIDE
            made.save_as(path, enforce_file_format=True)
    except Exception as error:  # libraries raise exceptions of every kind on damaged files
        raise EquicamError(
            what,
            needs="a DICOM slide that highdicom can refer to",
            got=type(error).__name__,
            fix="--to ome-tiff",
        ) from error


def _finest_level(source: Path, wanted: tuple[int, int], what: str) -> Any:
    """The header of the file of this series that has the whole size."""
    if source.suffix.lower() not in SUFFIXES:
        raise EquicamError(what, needs="a DICOM slide", got=f"a file {source.suffix}", fix="--to ome-tiff")
    try:
        series = _header(source).SeriesInstanceUID
        files = [
            source,
            *sorted(p for p in source.parent.iterdir() if p.suffix.lower() in SUFFIXES and p != source),
        ]
        for file in files[:MAX_FILES_READ]:
            found = _header(file)
            size = (found.get("TotalPixelMatrixColumns"), found.get("TotalPixelMatrixRows"))
            if found.get("SeriesInstanceUID") == series and size == wanted:
                return found
    except Exception as error:  # libraries raise exceptions of every kind on damaged files
        raise EquicamError(
            what, needs="DICOM files that can be read", got=type(error).__name__, fix="restoring them"
        ) from error
    raise EquicamError(
        what,
        needs=f"its level of {wanted[0]} × {wanted[1]} pixels",
        got="none next to it",
        fix="restoring it",
    )


def _header(path: Path) -> Any:
    import pydicom

    with open_regular(path, str(path)) as file:
        return pydicom.dcmread(file, stop_before_pixels=True)
