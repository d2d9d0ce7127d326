"""Image lists and published layouts that are not what they claim are refused by name; what is left out is said."""

import logging
import os
import signal
import struct
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io

from equicam.data.items import Item, open_item
from equicam.data.sources import find_items
from equicam.errors import EquicamError
from tests.hostile.generate import encode

LISTS = {
    "non-utf8 header": (b"\xff\xfe,label\na,1\n", "a column 'path'"),
    "utf-16": ("path\na.png\n".encode("utf-16"), "a column 'path'"),
    "binary": (bytes(range(256)) * 40, "list '.*items.csv'"),
    "nul": (b"path\n" + b"\0" * 3_000_000, "lines of less than 1,048,576 characters"),
    "one line": (b"path\n" + b"a" * 3_000_000, "lines of less than 1,048,576 characters"),
    "huge field": (b"path,label\na.png," + b"x" * 500_000 + b"\n", "well-formed CSV, got field larger"),
    "huge quoted": (b'path\n"' + b"a\n" * 200_000, "well-formed CSV, got field larger"),
    "box": (b"path,boxes\na.png,1e999 0 nan 1\n", "boxes of four numbers"),
    "bad url": (b"path\nhttp://[x/a.png\n", "line 2, needs a host and a path"),
    "password": (b"path\ns3://me:secret@b/a.png\n", "line 2, needs no password"),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_hostile_csv_list_is_refused_by_name(tmp_path, name):
    data, reason = LISTS[name]
    (tmp_path / "items.csv").write_bytes(data)
    with pytest.raises(EquicamError, match=reason) as refused:
        find_items(tmp_path)
    assert str(refused.value).encode().count(b"; try ") == 1
    assert "secret" not in str(refused.value)


def test_paths_in_any_bytes_are_rows(tmp_path):
    (tmp_path / "items.csv").write_bytes(
        b"path,label\n\xff\xfe.png,\xff\na\0b.png,1\n" + b"x" * 5000 + b",2\n"
    )
    items = find_items(tmp_path)
    assert [item.label for item in items] == ["\\udcff", 1, 2]
    for item in items:
        item.id.encode()
        with pytest.raises(EquicamError):
            open_item(item)


def test_a_sparse_list_is_refused_in_no_time(tmp_path):
    with (tmp_path / "items.csv").open("wb") as file:
        file.write(b"path\n")
        file.truncate(8 * 10**12)
    with pytest.raises(EquicamError, match="lines of less than"):
        find_items(tmp_path)


def test_a_pipe_that_is_called_a_list_blocks_nothing(tmp_path):
    os.mkfifo(tmp_path / "items.csv")
    with pytest.raises(EquicamError):
        find_items(tmp_path)
    with pytest.raises(EquicamError):
        find_items(tmp_path / "items.csv")


PARQUET = {
    "struct": ({"path": [{"a": 1}]}, "text in column 'path'"),
    "list": ({"path": ["a"], "label": [[1, 2]]}, "text in column 'label'"),
    "map": ({"path": ["a"], "id": [{"x": [{"y": 1}]}]}, "text in column 'id'"),
    "decimal": ({"path": ["a"], "label": pa.array([1], pa.decimal128(38, 2))}, "an integer or a name"),
    "time": ({"path": ["a"], "label": pa.array([2**62], pa.timestamp("ms"))}, "list '"),
    "long": ({"path": ["a" * 200_000]}, "at most 131,072 characters in column 'path'"),
    "bytes": ({"path": [b"\xff"]}, "text in column 'path'"),
}


@pytest.mark.parametrize("name", PARQUET)
def test_a_hostile_parquet_list_is_refused_by_name(tmp_path, name):
    columns, reason = PARQUET[name]
    pq.write_table(pa.table(columns), tmp_path / "items.parquet")
    with pytest.raises(EquicamError, match=reason):
        find_items(tmp_path)


def test_a_list_that_repeats_a_row_is_refused_at_the_second(tmp_path):
    """Parquet stores ten million equal rows in a few kilobytes."""
    for rows, refusal in ((100_000, "line 2, needs a unique id"), (10_000_000, "at most 4 rows a byte")):
        row = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array(["a.png"]))
        pq.write_table(pa.table({"path": row}), tmp_path / "items.parquet")
        assert (tmp_path / "items.parquet").stat().st_size < 100_000
        del row
        before = pa.total_allocated_bytes()
        with pytest.raises(EquicamError, match=refusal):
            find_items(tmp_path)
        assert pa.total_allocated_bytes() - before < 10_000_000


@pytest.mark.parametrize("cut", [0, 3, 4, 12, 100, 400])
def test_a_damaged_parquet_list_is_refused(tmp_path, cut):
    pq.write_table(pa.table({"path": ["a", "b"]}), tmp_path / "whole.parquet")
    data = (tmp_path / "whole.parquet").read_bytes()
    for damaged in (
        data[:cut],
        data[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        data[:cut] + b"\xff" * 64 + data[cut + 64 :],
    ):
        (tmp_path / "items.parquet").write_bytes(damaged)
        try:
            assert [item.id for item in find_items(tmp_path)] == ["a", "b"]
        except EquicamError as error:
            assert "items.parquet" in str(error)  # noqa: PT017


def _patches(folder: Path, labels: int = 3) -> Path:
    with h5py.File(folder / "camelyonpatch_level_2_split_test_y.h5", "w") as file:
        file["y"] = np.zeros((labels, 1, 1, 1), np.uint8)
    return folder / "camelyonpatch_level_2_split_test_x.h5"


def test_hdf5_files_refer_to_no_other_file(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with h5py.File(other / "secret.h5", "w") as file:
        file["x"] = np.zeros((3, 4, 4, 3), np.uint8)
    (other / "raw").write_bytes(bytes(144))
    path = _patches(tmp_path)

    def link(file) -> None:
        file["x"] = h5py.ExternalLink(str(other / "secret.h5"), "x")

    def raw(file) -> None:
        file.create_dataset("x", (3, 4, 4, 3), np.uint8, external=[(str(other / "raw"), 0, 144)])

    def virtual(file) -> None:
        layout = h5py.VirtualLayout((3, 4, 4, 3), np.uint8)
        layout[:] = h5py.VirtualSource(str(other / "secret.h5"), "x", (3, 4, 4, 3))
        file.create_virtual_dataset("x", layout)

    for make in (link, raw, virtual):
        path.unlink(missing_ok=True)
        with h5py.File(path, "w") as file:
            make(file)
        with pytest.raises(EquicamError, match="a reference to another place"):
            find_items(tmp_path)


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
    path = _patches(tmp_path)
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
    for data in (
        b"",
        b"MATLAB 5.0 MAT-file" + b" " * 105 + b"\0\1IM" + b"\x0f\0\0\0" + b"\xff" * 64,
        bytes(200),
    ):
        (devkit / "meta.mat").write_bytes(data)
        with pytest.raises(EquicamError, match=r"meta\.mat' needs synsets"):
            find_items(devkit)


def test_a_file_that_crashes_its_reader_is_refused(tmp_path, monkeypatch):
    """SciPy's reader of MATLAB files ends by a segmentation fault on some damaged ones."""
    for name in ("ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_validation_ground_truth.txt", "meta.mat"):
        (tmp_path / name).touch()
    monkeypatch.setattr(scipy.io, "loadmat", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(EquicamError, match="the end of the process that reads it"):
        find_items(tmp_path)


def test_bytes_that_are_no_text_can_be_printed(tmp_path):
    for name in ("images", "image_class_labels", "bounding_boxes", "train_test_split"):
        (tmp_path / f"{name}.txt").write_bytes(b"1 a\n\xff b\n")
    with pytest.raises(EquicamError, match="a new image number") as refused:
        find_items(tmp_path)
    str(refused.value).encode()


def test_what_a_folder_leaves_out_is_said(tmp_path, caplog):
    for name in ("a/1.png", "a/2.jpg", "a/notes.txt", "a/.3.png", ".cache/4.png", "5"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encode("png"))
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    with caplog.at_level(logging.WARNING):
        found = find_items(tmp_path)
    assert [item.id for item in found] == ["a/1.png", "a/2.jpg", "pipe.png"]
    (record,) = caplog.records
    assert "5 left out" in record.getMessage()
    for name in (".cache", "5", "a/.3.png", "a/loop", "a/notes.txt"):
        assert repr(name) in record.getMessage()
    caplog.clear()
    assert len(find_items(tmp_path / "a/*")) == 2
    assert "'notes.txt'" in caplog.text
    assert ".3.png" not in caplog.text
    with pytest.raises(EquicamError, match="a named pipe"):
        open_item(Item("pipe.png", tmp_path / "pipe.png"))
