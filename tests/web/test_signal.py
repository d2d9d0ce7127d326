"""What the page says of the signal a queue is ranked by, and what it keeps to itself."""

import json

import pyarrow as pa
import pytest

from equicam.auditing.store import RunStore
from equicam.review.queue import Shelves
from equicam.shards import read_table, write_table
from tests.audit.faked import BLANK, Page, fake_run
from tests.web.conftest import House, many, ranked


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A run ranked by disagreement, some of whose views agree so little that reasons name them."""
    run = fake_run(tmp_path_factory.mktemp("apart"), calibrate=0)
    part = run.path("items", 0)
    rows = read_table(part).to_pylist()
    for row in rows:
        if row["view_agreement"]:
            row["view_agreement"] = [r - 0.5 for r in row["view_agreement"]]
            row["disagreement"] += 0.5
    write_table(part, pa.Table.from_pylist(rows, schema=read_table(part).schema))
    return ranked(RunStore(run.folder), by="disagreement")


def test_blind_the_signal_is_named_and_its_numbers_are_not(apart):
    reader = House(apart).reader()
    assert "ranked by disagreement" in Page(reader.get("/").text).text
    for one in reader.list():
        facts = reader.get(f"/api/item/{one['key']}").json()
        assert not any(r.startswith(("disagreement ", "the view")) for r in facts["reasons"])
        assert "more uncertain" not in reader.get(f"/item/{one['key']}").text
        assert "<dt>Disagreement</dt>" not in reader.get(f"/item/{one['key']}").text


def test_open_the_numbers_and_the_rank_are_of_the_signal(apart):
    reader = House(apart, blind=False).reader()
    known = {row["id"]: row for row in read_table(apart.folder / "triage.parquet").to_pylist()}
    told = [reader.get(f"/api/item/{one['key']}").json() for one in reader.list()]
    assert [t["rank"] for t in told] == sorted(t["rank"] for t in told)
    assert any(r.startswith("the view") for t in told for r in t["reasons"])
    scores = [t["known"]["disagreement"] for t in told if t["known"]["disagreement"] is not None]
    assert scores == sorted(scores, reverse=True)
    assert scores == [row["disagreement"] for row in sorted(known.values(), key=lambda r: r["rank"])
                      if row["disagreement"] is not None]  # fmt: skip
    for one, facts in zip(reader.list(), told, strict=True):
        page = Page(reader.get(f"/item/{one['key']}").text).text
        assert f"{facts['rank']} by disagreement" in page
        value = facts["known"]["disagreement"]
        assert ("Disagreement says nothing here" if value is None else f"Disagreement {value:.4f}") in page
        assert (value is None) == (facts["known"]["name"] == BLANK)


def test_by_peum_the_page_says_peum(run):
    reader = House(run, blind=False).reader()
    assert "ranked by PEUM" in Page(reader.get("/").text).text
    first = reader.list()[0]
    assert "1 by PEUM" in Page(reader.get(f"/item/{first['key']}").text).text


def test_a_queue_made_before_there_was_a_choice_is_by_peum(run, tmp_path):
    path = run.folder / "triage.parquet"
    write_table(path, read_table(path).drop_columns(["by", "disagreement"]))
    reader = House(run, blind=False).reader()
    assert "ranked by PEUM" in Page(reader.get("/").text).text
    facts = reader.get(f"/api/item/{reader.list()[0]['key']}").json()
    assert (facts["known"]["by"], facts["known"]["disagreement"]) == ("PEUM", None)
    assert "<dt>Disagreement</dt>" not in reader.get(f"/item/{reader.list()[0]['key']}").text
    assert Shelves(many(tmp_path / "many", 20), blind=True).newest().by == "peum"


def test_exported_verdicts_say_what_ranked(apart):
    reader = House(apart, blind=False).reader("bo")
    reader.decide(reader.list()[1]["key"], "supports")
    row = json.loads(reader.get("/export/verdicts.json").text)["verdicts"][0]
    assert row["by"] == "disagreement"
    assert row["disagreement"] > 0
