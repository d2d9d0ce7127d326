"""Parts on a disk: whole or not at all, and of one fingerprint."""

import os
import subprocess
import sys
import time

import pyarrow as pa
import pytest

from equicam.errors import EquicamError
from equicam.shards import Shards, differences, write_atomic

ROWS = pa.table({"a": [1, 2]})


def test_parts_are_pending_until_they_are_there(tmp_path):
    parts = Shards(tmp_path / "run", {"model": "a"}, fix="another folder")
    assert parts.pending(3) == [0, 1, 2]
    parts.write(1, ROWS)
    assert parts.pending(3) == [0, 2]
    parts.write(0, ROWS)
    again = Shards(tmp_path / "run", {"model": "a"}, fix="another folder")
    assert (again.pending(2), again.read(2)["a"].to_pylist()) == ([], [1, 2, 1, 2])


def test_another_fingerprint_is_refused_by_name(tmp_path):
    Shards(tmp_path, {"model": "a", "views": (0, 90), "n": 1}, fix="another folder")
    Shards(tmp_path, {"model": "a", "views": [0, 90], "n": 1}, fix="another folder")  # as it reads back
    with pytest.raises(EquicamError, match=r'model was "a", is "b"; n was 1, is absent; try another folder'):
        Shards(tmp_path, {"model": "b", "views": (0, 90)}, fix="another folder")
    assert differences({"a": "x" * 200}, {"a": "y"})[0].endswith('…, is "y"')


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_atomic(target, b"before")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(target, b"after")
    assert (target.read_bytes(), [p.name for p in tmp_path.iterdir()]) == (b"before", ["file"])


def test_a_killed_writer_leaves_a_whole_file_or_none(tmp_path):
    code = """
import sys
from pathlib import Path
from equicam.shards import write_atomic
for i in range(10**6):
    write_atomic(Path(sys.argv[1]) / "file", bytes([65 + i % 26]) * 300_000)
"""
    for wait in (0.3, 0.5):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
        while not (tmp_path / "file").exists():
            time.sleep(0.01)
        time.sleep(wait)
        child.kill()
        child.wait()
        data = (tmp_path / "file").read_bytes()
        assert (len(data), len(set(data))) == (300_000, 1)


def test_a_folder_of_somebody_elses_is_not_taken(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(EquicamError, match="needs to be empty, new or ours, got other files"):
        Shards(tmp_path, {"model": "a"}, fix="another folder")
    assert (tmp_path / "notes.txt").read_text() == "mine"
