"""The log of a run: events are only added, and whatever else happens to them shows."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from equicam.runs.log import FIRST, Log

ADDING = """
import sys
from pathlib import Path
from equicam.runs.log import Log
log = Log(Path(sys.argv[1]))
for i in range(int(sys.argv[3])):
    log.add("verdict", {"by": sys.argv[2], "i": i, "text": "ü" * 200}, actor=sys.argv[2])
"""


def adding(folder, who, count):
    return subprocess.Popen([sys.executable, "-c", ADDING, str(folder), who, str(count)])


@pytest.fixture
def log(tmp_path):
    log = Log(tmp_path)
    for i in range(6):
        log.add("verdict", {"image": f"p{i}", "verdict": "stable"}, actor="ana")
    return log


def tampered(log, *statements):
    """What someone with the file and no scruples does."""
    with closing(sqlite3.connect(log.path)) as database:
        database.executescript("DROP TRIGGER IF EXISTS no_change; DROP TRIGGER IF EXISTS no_removal;")
        for statement in statements:
            database.execute(statement)
        database.commit()
    return log.problems()


def test_a_chain_verifies_and_reads_back(tmp_path):
    log = Log(tmp_path)
    assert (log.events(), log.last(), log.problems()) == ([], FIRST, [])
    one = log.add("started", {"b": 1, "a": ["ü", None, 0.5]})
    two = log.add("verdict", {}, actor="ana")
    assert log.events() == [one, two]
    assert log.events("verdict") == [two]
    assert (one.number, one.previous, two.number, two.previous) == (1, FIRST, 2, one.hash)
    assert one.payload == {"b": 1, "a": ["ü", None, 0.5]}
    assert log.last() == two.hash
    assert log.problems() == []


CHANGES = "payload = '{}'", "who = 'eve'", "kind = 'other'", "time = '2020-01-01T00:00:00.000+00:00'"
CHANGED = [f"UPDATE events SET {change} WHERE number = 3" for change in CHANGES]
REMOVED = "DELETE FROM events WHERE number = 2"
RENUMBERED = "UPDATE events SET number = number - 1 WHERE number > 2"
NEW_HASH = "UPDATE events SET hash = 'f00d' WHERE number = 3"
SWAPS = (4, 99), (5, 4), (99, 5)
REORDERED = [f"UPDATE events SET number = {new} WHERE number = {old}" for old, new in SWAPS]


@pytest.mark.parametrize(
    ("statements", "changed", "not_following"),
    [
        *(([change], [3], []) for change in CHANGED),
        ([NEW_HASH], [3], [4]),  # a hash of its own breaks the next
        ([REMOVED, RENUMBERED], [2, 3, 4, 5], [2]),
        (REORDERED, [4, 5], [4, 5, 6]),
    ],
)
def test_changed_and_reordered_events_are_named(log, statements, changed, not_following):
    expected = {f"event {number} was changed" for number in changed}
    expected |= {f"event {number} does not follow the one before it" for number in not_following}
    assert {*tampered(log, *statements)} == expected


def test_a_dropped_event_is_named_and_a_cut_end_shows_against_a_hash_noted_elsewhere(log):
    noted = log.last()
    assert tampered(log, "DELETE FROM events WHERE number = 6") == []
    assert log.last() != noted
    assert tampered(log, REMOVED) == ["event 2 is missing (the next one is 3)"]


@pytest.mark.parametrize("begun_without", [False, True], ids=["as made", "begun before there were marks"])
def test_a_mark_is_added_once_whoever_sends_it(log, begun_without):
    if begun_without:
        with closing(sqlite3.connect(log.path)) as database:
            database.execute("DROP INDEX marks")
    first = log.add("verdict", {"mark": "m-1", "verdict": "supports"}, actor="ana")
    assert log.add("verdict", {"mark": "m-1", "verdict": "supports"}, actor="ana") == first
    assert log.add("note", {"mark": "m-1"}, actor="bo") == first
    for payload in ({"mark": "m-2"}, {}, {}):
        log.add("verdict", payload, actor="ana")
    assert len(log.events()) == 10
    assert log.events(after=2) == log.events()[2:]
    assert log.problems() == []


def test_change_and_removal_are_refused(log):
    with closing(sqlite3.connect(log.path)) as database:
        for statement in ("UPDATE events SET who = 'eve'", "DELETE FROM events WHERE number = 6"):
            with pytest.raises(sqlite3.IntegrityError, match="only added"):
                database.execute(statement)
    assert len(log.events()) == 6
    assert log.problems() == []


def test_two_writers_at_once_give_one_chain(tmp_path):
    writers = [adding(tmp_path, who, 50) for who in ("ana", "bo")]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    log = Log(tmp_path)
    events = log.events()
    assert [event.number for event in events] == list(range(1, 101))
    assert log.problems() == []
    for who in ("ana", "bo"):
        assert [event.payload["i"] for event in events if event.actor == who] == list(range(50))


def test_a_killed_writer_leaves_an_unbroken_chain(tmp_path):
    log, before = Log(tmp_path), 0
    for wait in (0.05, 0.11, 0.17):
        writer = adding(tmp_path, "ana", 100_000)
        while len(log.events()) == before and writer.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        assert log.problems() == []
        assert len(log.events()) > before
        log.add("verdict", {"after": "the kill"})
        assert log.problems() == []
        before = len(log.events())
