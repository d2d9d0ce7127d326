"""The signal a queue is ranked by: named on the page, its values hidden under blinding."""

import json

import pyarrow as pa
import pytest

from equicam.auditing.store import RunStore
from equicam.shards import read_table, write_table
from tests.audit.faked import BLANK, Page, fake_run
from tests.web.conftest import Server, rank


@pytest.fixture(scope="module")
def by_disagreement(tmp_path_factory):
    """A run ranked by disagreement, with views that agree so little that reasons name them."""
    run = fake_run(tmp_path_factory.mktemp("by-disagreement"), calibrate=0)
    path = run.path("items", 0)
    rows = read_table(path).to_pylist()
    for row in rows:
        if row["view_agreement"]:
            row["view_agreement"] = [r - 0.5 for r in row["view_agreement"]]
            row["disagreement"] += 0.5
    write_table(path, pa.Table.from_pylist(rows, schema=read_table(path).schema))
    return rank(RunStore(run.folder), by="disagreement")


def test_blinding_names_the_signal_and_hides_its_values(by_disagreement):
    client = Server(by_disagreement).client()
    assert "chosen by disagreement, shown in random order" in Page(client.get("/").text).text
    for one in client.list():
        facts = client.get(f"/api/item/{one['key']}").json()
        assert not any(r.startswith(("disagreement ", "the view")) for r in facts["reasons"])
        assert "higher than on" not in client.get(f"/item/{one['key']}").text
        assert "<dt>Disagreement</dt>" not in client.get(f"/item/{one['key']}").text


def test_open_values_and_rank_are_those_of_the_signal(by_disagreement):
    client = Server(by_disagreement, blind=False).client()
    triage = {row["id"]: row for row in read_table(by_disagreement.folder / "triage.parquet").to_pylist()}
    facts = [client.get(f"/api/item/{one['key']}").json() for one in client.list()]
    ranks = [f["rank"] for f in facts]
    assert ranks[:-1] == sorted(ranks[:-1])
    assert (ranks[-1], facts[-1]["flat"]) == (1, True)  # a blank map comes last
    assert any(r.startswith("the view") for f in facts for r in f["reasons"])
    values = [f["revealed"]["disagreement"] for f in facts if f["revealed"]["disagreement"] is not None]
    assert values == sorted(values, reverse=True)
    assert values == [row["disagreement"] for row in sorted(triage.values(), key=lambda r: r["rank"])
                      if row["disagreement"] is not None]  # fmt: skip
    for one, known in zip(client.list(), facts, strict=True):
        page = Page(client.get(f"/item/{one['key']}").text).text
        assert f"{known['rank']} by disagreement" in page
        value = known["revealed"]["disagreement"]
        assert ("Disagreement undefined" if value is None else f"Disagreement {value:.4f}") in page
        assert (value is None) == (known["revealed"]["name"] == BLANK)


def test_a_queue_ranked_by_peum_says_so(run):
    client = Server(run, blind=False).client()
    assert "ranked by PEUM" in Page(client.get("/").text).text
    first = next(one for one in client.list() if one["flat"])
    assert "1 by PEUM" in Page(client.get(f"/item/{first['key']}").text).text


def test_exported_verdicts_name_the_signal(by_disagreement):
    client = Server(by_disagreement, blind=False).client("bo")
    client.decide(client.list()[1]["key"], "supports")
    row = json.loads(client.get("/export/verdicts.json").text)["verdicts"][0]
    assert row["by"] == "disagreement"
    assert row["disagreement"] > 0


def test_stability_and_its_curve_are_shown_open_and_hidden_under_blinding(tmp_path):
    run = rank(fake_run(tmp_path, calibrate=0), by="stability")
    blinded = Server(run).client()
    assert "chosen by instability, shown in random order" in Page(blinded.get("/").text).text
    for one in blinded.list():
        page = blinded.get(f"/item/{one['key']}").text
        assert not any(
            word in page for word in ('class="curve"', "<dt>Stability</dt>", "the map moves", "its peak")
        )
        assert blinded.get(f"/api/item/{one['key']}").json()["revealed"] is None
    client = Server(run, blind=False).client()
    rows = {row["id"]: row for row in run.read_items().to_pylist()}
    values = []
    for one in client.list():
        facts, page = client.get(f"/api/item/{one['key']}").json(), client.get(f"/item/{one['key']}").text
        known = facts["revealed"]
        moving = known["stability_by_view"]
        assert page.count('class="curve"') == (moving is not None)
        if known["name"] in rows:
            row = rows[known["name"]]
            flat = {"blank", "constant"} & {*row["flags"]}
            assert (moving is None) == bool(flat)
            assert flat or moving == pytest.approx(row["stability_by_view"])
        shown = "undefined" if known["stability"] is None else f"{known['stability']:.3f}"
        assert f"Stability {shown}" in Page(page).text
        values += [known["stability"]] if known["stability"] is not None else []
    assert len(values) > 5
    assert values == sorted(values)  # the least stable first
