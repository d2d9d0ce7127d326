"""Image lists that are not what they claim are refused by name; what is left out is said."""

import logging
import os
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equicam.errors import EquicamError
from equicam.images.items import Item, open_item
from equicam.images.sources import find_items
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
    rows = (b"path,label", b"\xff\xfe.png,\xff", b"a\0b.png,1", b"x" * 5000 + b",2\n")
    (tmp_path / "items.csv").write_bytes(b"\n".join(rows))
    items = find_items(tmp_path)
    assert [item.label for item in items] == ["\\udcff", 1, 2]
    for item in items:
        item.id.encode()
        with pytest.raises(EquicamError):
            open_item(item)


def test_a_sparse_list_is_refused_in_no_time_and_a_pipe_that_is_called_a_list_blocks_nothing(tmp_path):
    file = tmp_path / "items.csv"
    file.write_bytes(b"path\n")
    os.truncate(file, 8 * 10**12)
    with pytest.raises(EquicamError, match="lines of less than"):
        find_items(tmp_path)
    file.unlink()
    os.mkfifo(file)
    for named in (tmp_path, file):
        with pytest.raises(EquicamError):
            find_items(named)


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
    absurd, spoilt = struct.pack("<I", 2**31 - 1) + b"PAR1", data[:cut] + b"\xff" * 64 + data[cut + 64 :]
    for damaged in (data[:cut], data[:-8] + absurd, spoilt):
        (tmp_path / "items.parquet").write_bytes(damaged)
        try:
            assert [item.id for item in find_items(tmp_path)] == ["a", "b"]
        except EquicamError as error:
            assert "items.parquet" in str(error)  # noqa: PT017


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
    assert all(repr(name) in caplog.text for name in (".cache", "5", "a/.3.png", "a/loop", "a/notes.txt"))
    caplog.clear()
    assert len(find_items(tmp_path / "a/*")) == 2
    assert "'notes.txt'" in caplog.text
    assert ".3.png" not in caplog.text
    with pytest.raises(EquicamError, match="a named pipe"):
        open_item(Item("pipe.png", tmp_path / "pipe.png"))
