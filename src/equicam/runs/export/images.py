"""The maps of a run of DICOM images, one or two files for each image."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from equicam.errors import EquicamError
from equicam.images.items import valid_utf8
from equicam.images.remote import as_path
from equicam.runs.export.dicom import ImageMap, encode_map, is_single_frame
from equicam.runs.export.files import ExportFolder, safe_names
from equicam.runs.export.libraries import needing
from equicam.runs.export.windows import Row, run_facts, stored_planes
from equicam.runs.feature_ids import feature_id
from equicam.runs.store import RunStore

COLUMNS = ("id", "path", "index", "sha256", "input_box", "target", "status")


def write_images(
    store: RunStore, target: int | None, folder: ExportFolder, tick: Callable[[int], None]
) -> tuple[int, int, tuple[str, ...]]:
    """Write the map of every image as DICOM; returns how many have one, how many are left out, and why some have none."""
    rows: list[Row] = [row for row in store.read_items(list(COLUMNS)).to_pylist() if row["status"] == "ok"]
    wanted = {row["id"]: row for row in rows if is_single_frame(row) and target in (None, row["target"])}
    if not wanted:
        raise EquicamError(
            "--to dicom", needs="a run of DICOM files (.dcm) of one frame each", got=f"none among {len(rows):,} images",
            fix="another --to or --class",
        )  # fmt: skip
    with needing("dicom-out", "--to dicom"):
        import highdicom  # noqa: F401
    names = safe_names(list(wanted))
    refused: list[EquicamError] = []
    for name, plane, _ in stored_planes(store, wanted):
        try:
            files = encode_map(_image_map(store, wanted[name], plane))
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


def _image_map(store: RunStore, row: Row, plane: Any) -> ImageMap:
    path, box = as_path(row["path"]), row["input_box"]
    valid = (
        box is not None and len(box) == 4 and all(map(math.isfinite, box)) and box[0] < box[2] and box[1] < box[3]
    )  # fmt: skip
    if not valid or not isinstance(path, Path):
        raise EquicamError(
            f"image {valid_utf8(row['id'])!r}", needs="a file on a disk, and the box that the model's input shows",
            got=row["path"] if valid else box, fix="equicam audit again",
        )  # fmt: skip
    return ImageMap(
        row["id"], feature_id(store, row["id"]), feature_id(store, "series"), path, row["sha256"] or "",
        (box[0], box[1], box[2], box[3]), plane, run_facts(store, row["target"]),
    )  # fmt: skip
