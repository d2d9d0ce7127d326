"""The signal a queue is ranked by: named on the page, its values hidden under blinding."""

import pytest

from equicam.shards import read_table
from tests.audit.faked import BLANK, Page, fake_run
from tests.web.conftest import Server, rank


@pytest.fixture(scope="module")
def by_risk(tmp_path_factory):
    return rank(fake_run(tmp_path_factory.mktemp("by-risk"), calibrate=0), by="risk")


def test_blinding_names_the_signal_and_hides_its_values(by_risk):
    client = Server(by_risk).client()
    assert "chosen by risk, shown in random order" in client.page().text
    for key in client.list_keys():
        assert not any(r.startswith(("risk ", "the map moves")) for r in client.facts(key)["reasons"])
        page = client.get(f"/item/{key}").text
        assert not any(words in page for words in ("higher than on", "<dt>Risk</dt>"))


def test_open_values_and_rank_are_those_of_the_signal(by_risk):
    client = Server(by_risk, blind=False).client()
    triage = read_table(by_risk.folder / "triage.parquet").to_pylist()
    facts = [client.facts(key) for key in client.list_keys()]
    ranks = [f["rank"] for f in facts]
    assert ranks[:-1] == sorted(ranks[:-1])
    assert (ranks[-1], facts[-1]["flat"]) == (1, True)  # a blank map comes last
    assert any(r.startswith("the map moves") for f in facts for r in f["reasons"])
    values = [f["revealed"]["risk"] for f in facts if f["revealed"]["risk"] is not None]
    assert values == sorted(values, reverse=True)
    kept = [row["risk"] for row in sorted(triage, key=lambda row: row["rank"])]
    assert values == [one for one in kept if one is not None]
    for known in facts:
        page = client.page(f"/item/{known['key']}").text
        assert f"{known['rank']} by risk" in page
        value = known["revealed"]["risk"]
        assert value is None or f"Risk {value:.3f}" in page
        assert (value is None) == (known["revealed"]["name"] == BLANK)


def test_a_queue_ranked_by_peum_says_so(run):
    client = Server(run, blind=False).client()
    assert "ranked by PEUM" in client.page().text
    first = next(one for one in client.list() if one["flat"])
    assert "1 by PEUM" in client.page(f"/item/{first['key']}").text


def test_exported_verdicts_name_the_signal(by_risk):
    client = Server(by_risk, blind=False).client("bo")
    client.decide(client.list_keys()[1], "supports")
    row = client.get("/export/verdicts.json").json()["verdicts"][0]
    assert (row["by"], row["risk"] > 0) == ("risk", True)


def test_stability_and_its_curve_are_shown_open_and_hidden_under_blinding(tmp_path):
    run = rank(fake_run(tmp_path, calibrate=0), by="stability")
    blinded = Server(run).client()
    assert "chosen by stability, shown in random order" in blinded.page().text
    for key in blinded.list_keys():
        page = blinded.get(f"/item/{key}").text
        assert not any(word in page for word in ('class="curve"', "<dt>Stability</dt>", "the map moves"))
        assert blinded.facts(key)["revealed"] is None
    client = Server(run, blind=False).client()
    rows = {row["id"]: row for row in run.read_items().to_pylist()}
    values = []
    for key in client.list_keys():
        known, page = client.facts(key)["revealed"], client.get(f"/item/{key}").text
        moving = known["stability_by_view"]
        assert page.count('class="curve"') == (moving is not None)
        if known["name"] in rows:
            row = rows[known["name"]]
            flat = bool({"blank", "constant"} & {*row["flags"]})
            assert (moving is None) == flat
            assert flat or moving == pytest.approx(row["stability_by_view"])
        shown = "undefined" if known["stability"] is None else f"{known['stability']:.3f}"
        assert f"Stability {shown}" in Page(page).text
        values += [known["stability"]] if known["stability"] is not None else []
    assert len(values) > 5
    assert values == sorted(values)  # the least stable first
