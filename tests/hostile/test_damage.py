"""A run's files are damaged, forged or lost, before and after it is finished: every case is healed or found, none passes for whole."""

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import equicam
from equicam.errors import EquicamError
from equicam.runs import log as logging
from equicam.runs.log import Log
from equicam.runs.store import PLANES, RunStore
from tests.audit.conftest import ENV, OPTIONS, equicam_command, run_command
from tests.audit.test_run import drawn, log_and_complete_again, rows

ITEMS, MAPS = "items/shard-000001.parquet", "maps/shard-000001.parquet"
LOST = (4, 5)
"""Shards that the unfinished run does not have yet."""


def flip(path: Path, _run: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)


def cut(path: Path, _run: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def delete(path: Path, _run: Path) -> None:
    path.unlink()


def forge(path: Path, run: Path) -> None:
    """Another whole file of the same kind."""
    if path.name == "manifest.json":
        path.write_text(path.read_text().replace('"source": "', '"source": "/elsewhere'))
    elif path.name == "sample.parquet":
        shutil.copy(run / ITEMS, path)
    elif path.name == "events.sqlite":
        path.unlink()
        Log(run).add("started", {"pending": 6, "shards": 6})
    elif path.name == "digests.json":
        path.write_text(path.read_text().replace("a", "b"))
    else:
        shutil.copy(path.with_name(path.name.replace("1", "2")), path)


def garbage(path: Path, _run: Path) -> None:
    path.write_bytes(b"garbage" * 100)


DAMAGES: tuple[Callable[[Path, Path], None], ...] = (flip, cut, delete, forge)
UNFINISHED = ("manifest.json", "sample.parquet", ITEMS, MAPS, "events.sqlite")


@pytest.fixture(scope="module")
def unfinished(whole, tmp_path_factory) -> Path:
    """The run as a kill leaves it: two shards are not there, and the log does not know them."""
    out = shutil.copytree(whole, tmp_path_factory.mktemp("unfinished") / "run")
    events = Log(out).events()
    for name in ("digests.json", "events.sqlite"):
        (out / name).unlink()
    for number in LOST:
        for kind in ("items", "maps"):
            RunStore(out).path(kind, number).unlink()
    log = Log(out)
    for event in events:
        if event.kind != "completed" and event.payload.get("shard") not in LOST:
            log.add(event.kind, event.payload)
    assert len(log.events("shard")) == 4
    return out


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", UNFINISHED)
def test_damage_to_an_unfinished_run_is_healed_or_found(patches, whole, unfinished, tmp_path, name, damage):
    out = shutil.copytree(unfinished, tmp_path / "run")
    before = (out / name).read_bytes()
    damage(out / name, out)
    assert not (out / name).is_file() or (out / name).read_bytes() != before
    code, said = equicam_command("audit", patches, "--out", out, *OPTIONS)
    assert "Traceback" not in said
    if code:
        assert code == 2, said
        assert name in said or (name == "manifest.json" and "the settings it was started with" in said)
        assert not (out / "digests.json").exists()
        assert name not in (ITEMS, MAPS), "a damaged shard is computed again"
        assert name != "sample.parquet" or damage is forge, "a damaged sample is written again"
        return
    assert rows(out) == rows(whole)
    assert drawn(out) == drawn(whole)
    assert equicam.open_run(out).verify(2).ok
    if name in (ITEMS, MAPS) and damage is not delete:
        assert "shard 1 was not as the log has it, and is computed again" in said
    if name == "sample.parquet":
        assert "sample.parquet was not as it was written, and is written again" in said


@pytest.mark.parametrize("damage", [*DAMAGES, garbage], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", [*UNFINISHED, "digests.json"])
def test_damage_to_a_finished_run_is_found(out, name, damage):
    damage(out / name, out)
    code, said = equicam_command("verify", out, "--sample", "0")
    assert code in (1, 2), said
    assert "Traceback" not in said
    assert name in said or (name == "events.sqlite" and "log" in said)


def test_a_forged_row_is_refused_while_the_run_is_computed(patches, tmp_path):
    """Somebody writes another shard over one of ours before the last is computed."""
    out = tmp_path / "run"

    def tamper(done: int, total: int, _computed: int) -> None:
        if done == total:
            shutil.copy(RunStore(out).path("items", 1), RunStore(out).path("items", 0))

    arguments, options = (patches, equicam.load("embedded"), out), {"views": 2, "shard_size": 6}
    with pytest.raises(EquicamError, match=r"items/shard-000000\.parquet"):
        equicam.audit(*arguments, **options, progress=tamper)
    assert not (out / "digests.json").exists()
    with pytest.warns(UserWarning, match="shard 0 was not as the log has it"):
        assert equicam.audit(*arguments, **options).verify(0).ok


def test_leftover_temporary_files_are_removed(patches, out):
    for folder in (out, out / "items", out / "maps"):
        (folder / ".shard-000001.parquet.abc.tmp").write_bytes(b"half")
    assert equicam_command("audit", patches, "--out", out, *OPTIONS)[0] == 0
    assert not list(out.rglob("*.tmp"))


def test_rows_that_are_not_the_samples_are_found_whatever_the_digests_say(out):
    shutil.copy(RunStore(out).path("items", 2), RunStore(out).path("items", 1))
    log_and_complete_again(out)
    problems = equicam.open_run(out).verify(4).problems
    assert f"{ITEMS} has other images than the sample" in problems
    assert f"{MAPS} has other maps than images explained" in problems


def test_digests_of_other_files_are_not_read(out):
    text = (out / "digests.json").read_text()
    (out / "digests.json").write_text(text.replace('"sample.parquet"', '"../../../../dev/zero"'))
    assert any("'../../../../dev/zero'" in problem for problem in equicam.open_run(out).verify(0).problems)


def test_a_clock_that_went_back_is_noted(out, monkeypatch):
    assert equicam.open_run(out).verify(0).notes == ()

    class Yesterday(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(hours=3)

    monkeypatch.setattr(logging, "datetime", Yesterday)
    Log(out).add("note", {"text": "late"})
    monkeypatch.undo()
    found = equicam.open_run(out).verify(0)
    assert found.ok
    assert found.notes[0].startswith("the clock went back by 2:59:59.")


def test_a_noted_hash_finds_a_cut_and_a_rewritten_log(out, tmp_path):
    said = run_command("verify", out, "--sample", "0")
    noted = Log(out).last()  # of the check itself
    assert re.findall("[0-9a-f]{64}", said) == [noted]
    number = len(Log(out).events())
    found = equicam.open_run(out).verify(0, noted_hash=f" {noted.upper()}\n")
    assert found.ok
    assert found.notes == (f"the log holds event {number}, whose hash was noted; no event came after it",)
    found = equicam.open_run(out).verify(0, noted_hash=noted)
    assert found.ok
    assert found.notes[0].endswith("what came after it is not covered: 1 × verified")

    events = Log(out).events()
    for keep in (len(events), number - 1):
        copy = shutil.copytree(out, tmp_path / f"rewritten-{keep}")
        (copy / "events.sqlite").unlink()
        log = Log(copy)  # chained anew by somebody with write access
        for event in events[:keep]:
            log.add(event.kind, event.payload, actor=event.actor)
        assert equicam.open_run(copy).verify(0).ok  # the chain alone does not show it
        problems = equicam.open_run(copy).verify(0, noted_hash=noted).problems
        assert any("the log was cut off or rewritten" in problem for problem in problems), problems
    assert not equicam.open_run(out).verify(0, noted_hash="").ok


def rewrite(path: Path, **columns) -> None:
    """A table with other values in these columns, by function of the old value."""
    table = pq.read_table(path)
    rows = [row | {name: of(row[name]) for name, of in columns.items()} for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def test_a_file_written_again_after_the_noted_event_is_found(out):
    noted = Log(out).last()
    rewrite(out / ITEMS, flip_rate=lambda _: 0.0)
    log_and_complete_again(out)  # appended: nothing of the log is cut or rewritten
    assert equicam.open_run(out).verify(0).ok
    problems = equicam.open_run(out).verify(0, noted_hash=noted).problems
    assert f"{ITEMS} was written again after the noted event" in problems


def test_the_hash_of_a_damaged_run_is_not_given(out):
    flip(out / MAPS, out)
    assert equicam.open_run(out).verify(0).last_hash is None
    assert not re.search("[0-9a-f]{64}", equicam_command("verify", out, "--sample", "0")[1])


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_the_commands_of_the_docs_sign_and_check_the_log(whole, tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    block = next(block for block in text.split("\n\n") if block.startswith("    equicam verify RUN | grep"))
    sign, check = (block.index(line) for line in ("    equicam verify", "    echo"))
    shutil.copytree(whole, tmp_path / "RUN")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "equicam"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m equicam "$@"\n')
    command.chmod(0o755)
    home = {"HOME": str(tmp_path), "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}"}
    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh" / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def run(commands: str) -> subprocess.CompletedProcess:
        options = {"cwd": tmp_path, "env": ENV | home, "capture_output": True, "text": True}
        return subprocess.run(["sh", "-c", commands], **options)

    done = run(block[sign:check])
    assert (tmp_path / "run.hash.sig").is_file(), done.stderr
    done = run(block[check:])
    assert done.returncode == 0, done.stderr
    assert "what came after it is not covered" not in done.stderr
    (tmp_path / "run.hash").write_text("f" * 64 + "\n")  # with a hash of somebody else's
    assert run(block[check:]).returncode != 0


GRID = dict.fromkeys(("height", "width"), lambda _: 2) | dict.fromkeys(PLANES, lambda v: v[:4])
ODD_MAPS = {
    "nan": ({"map_scale": lambda _: float("nan")}, "map correlates 0.0000"),
    "another height": ({"height": lambda _: 5}, "to be as they were written"),
    "another grid": (GRID, "map correlates 0.0000"),
}


@pytest.mark.parametrize(("columns", "expected"), ODD_MAPS.values(), ids=ODD_MAPS)
def test_odd_maps_are_differences(out, columns, expected):
    rewrite(out / MAPS, **columns)
    log_and_complete_again(out)
    found = equicam.open_run(out).verify(4, seed=0)
    assert any(expected in problem for problem in found.problems), found.problems


def test_other_class_names_are_a_difference(out):
    from tests.hostile.test_code import forget_and_log_again

    forget_and_log_again(out, classes=RunStore(out).manifest.classes[::-1])
    assert any("class names" in problem for problem in equicam.open_run(out).verify(2).problems)


def test_empty_digests_are_a_difference(out):
    (out / "digests.json").write_text("{}")
    assert not equicam.open_run(out).verify(0).ok


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_in_place_of_a_file_does_not_hang(out, kind):
    (out / ITEMS).unlink()
    if kind == "pipe":
        os.mkfifo(out / ITEMS)
    else:
        (out / ITEMS).symlink_to("/dev/zero")
    problems = equicam.open_run(out).verify(0).problems
    assert any(problem.startswith(f"{ITEMS} cannot be read") for problem in problems)


ODD_EVENTS = """1, x'00', 'w', 'started', '{}', 'p', 'h'
1, 't', 'w', 'started', x'00', 'p', 'h'
'a', 't', 'w', 'started', '{}', 'p', 'h'
NULL, 't', 'w', 'started', '{}', 'p', 'h'
1, 't', 'w', 'started', '[]', 'p', 'h'
1, NULL, NULL, NULL, NULL, NULL, NULL"""


@pytest.mark.parametrize("values", ODD_EVENTS.splitlines())
def test_an_odd_table_of_events_is_refused_in_a_sentence(out, values):
    (out / "events.sqlite").unlink()
    with sqlite3.connect(out / "events.sqlite") as database:
        database.execute("CREATE TABLE events (number, time, who, kind, payload, previous, hash)")
        database.execute(f"INSERT INTO events VALUES ({values})")
    database.close()
    code, said = equicam_command("verify", out, "--sample", "0")
    assert code in (1, 2), said
    assert "Traceback" not in said
    assert "Traceback" not in equicam_command("triage", out)[1]  # it only adds an event
