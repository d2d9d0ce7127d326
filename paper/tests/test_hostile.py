"""Published data sets that are not what they claim are refused by name, and nothing that they name is opened."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from equicam.errors import EquicamError
from equicam_paper.benchmarks import find_items
from tests.hostile.test_rasters import trap

__all__ = ["trap"]


def patches(folder: Path) -> Path:
    """Where PatchCamelyon's test images would be, next to their labels."""
    with h5py.File(folder / "camelyonpatch_level_2_split_test_y.h5", "w") as file:
        file["y"] = np.zeros((3, 1, 1, 1), np.uint8)
    return folder / "camelyonpatch_level_2_split_test_x.h5"


def soft_link(file: h5py.File, bait: str) -> None:
    file["away"], file["x"] = h5py.ExternalLink(bait, "x"), h5py.SoftLink("/away")


def virtual(file: h5py.File, bait: str) -> None:
    layout = h5py.VirtualLayout((3, 8, 8, 3), np.uint8)
    layout[:] = h5py.VirtualSource(bait, "x", (3, 8, 8, 3))
    file.create_virtual_dataset("x", layout)


REFERENCES = {
    "external link": lambda file, bait: file.update({"x": h5py.ExternalLink(bait, "x")}),
    "soft link": soft_link,
    "external storage": lambda file, bait: file.create_dataset("x", (3, 8, 8, 3), np.uint8, external=[(bait, 0, 576)]),
    "virtual": virtual,
}  # fmt: skip


@pytest.mark.parametrize("kind", REFERENCES)
def test_hdf5_files_refer_to_no_other_file(tmp_path, trap, kind):
    bait, witness = trap
    path = patches(tmp_path / "in")
    with h5py.File(path, "w") as file:
        REFERENCES[kind](file, str(bait.file))
    witness.seen()  # making it may have opened the bait
    with pytest.raises(EquicamError, match="a reference to another place"):
        find_items(path)
    assert not witness.seen()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((10**12, 4, 4, 3), "at most 10,000,000 images"),
        ((3, 10**9, 10**9, 3), "at most 178,956,970 pixels"),
        ((3, 1, 1000, 3), "one at most 100 times the other"),
        ((3, 0, 4, 3), "sides of 1 to"),
        ((3, 4, 4), "8-bit images"),
        ((), "8-bit images"),
    ],
)
def test_absurd_sizes_in_hdf5_are_refused(tmp_path, shape, reason):
    path = patches(tmp_path)
    with h5py.File(path, "w") as file:
        chunks = tuple(min(64, max(1, n)) for n in shape) or None
        file.create_dataset("x", shape, np.uint8, chunks=chunks if 0 not in shape else None)
    with pytest.raises(EquicamError, match=reason):
        find_items(tmp_path)


def test_damaged_lists_of_published_sets_are_refused(tmp_path):
    for name in ("images.txt", "image_class_labels.txt", "bounding_boxes.txt", "train_test_split.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(8 * 10**12)
    with pytest.raises(EquicamError, match=r"images\.txt' needs at most 67,108,864 bytes"):
        find_items(tmp_path)
    devkit = tmp_path / "imagenet"
    devkit.mkdir()
    (devkit / "ILSVRC2012_val_00000001.JPEG").touch()
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_bytes(b"\xff\0")
    matlab = b"MATLAB 5.0 MAT-file" + b" " * 105 + b"\0\1IM" + b"\x0f\0\0\0" + b"\xff" * 64
    for data in (b"", matlab, bytes(200)):
        (devkit / "meta.mat").write_bytes(data)
        with pytest.raises(EquicamError, match=r"meta\.mat' needs synsets"):
            find_items(devkit)


def test_bytes_that_are_no_text_can_be_printed(tmp_path):
    for name in ("images", "image_class_labels", "bounding_boxes", "train_test_split"):
        (tmp_path / f"{name}.txt").write_bytes(b"1 a\n\xff b\n")
    with pytest.raises(EquicamError, match="a new image number") as refused:
        find_items(tmp_path)
    str(refused.value).encode()
