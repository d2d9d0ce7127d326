"""The signal a queue is ranked by: named on the page, its values hidden under blinding."""

import pytest

from equicam.shards import read_table
from tests.audit.faked import BLANK, Page, fake_run
from tests.web.conftest import Server, rank


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """Runs by their signal; ana, who is blinded, gives no verdict."""
    folder = tmp_path_factory.mktemp("ranked")
    return {by: rank(fake_run(folder / by, calibrate=0), by=by) for by in ("risk", "stability")}


@pytest.mark.parametrize(
    ("by", "words"),
    [
        ("risk", ("higher than on", "<dt>Risk</dt>", "the map moves")),
        ("stability", ('class="curve"', "<dt>Stability</dt>", "the map moves")),
    ],
)
def test_blinding_names_the_signal_and_hides_its_values(ranked, by, words):
    client = Server(ranked[by]).client()
    assert f"chosen by {by}, shown in random order" in client.page().text
    for key in client.list_keys():
        page, facts = client.get(f"/item/{key}").text, client.facts(key)
        assert not any(one in page for one in words)
        assert not any(reason.startswith((f"{by} ", "the map moves")) for reason in facts["reasons"])
        assert facts["revealed"] is None


def test_open_values_and_rank_are_those_of_the_signal(ranked):
    client = Server(ranked["risk"], blind=False).client("bo")
    facts = [client.facts(key) for key in client.list_keys()]
    ranks = [f["rank"] for f in facts]
    assert ranks[:-1] == sorted(ranks[:-1])
    assert (ranks[-1], facts[-1]["flat"]) == (1, True)  # a blank map comes last
    assert any(r.startswith("the map moves") for f in facts for r in f["reasons"])
    values = [f["revealed"]["risk"] for f in facts if f["revealed"]["risk"] is not None]
    assert values == sorted(values, reverse=True)
    triage = read_table(ranked["risk"].folder / "triage.parquet").sort_by("rank")
    assert values == triage["risk"].drop_null().to_pylist()
    for known in facts:
        page, value = client.page(f"/item/{known['key']}").text, known["revealed"]["risk"]
        assert f"{known['rank']} by risk" in page
        assert value is None or f"Risk {value:.3f}" in page
        assert (value is None) == (known["revealed"]["name"] == BLANK)
    client.decide(facts[1]["key"], "supports")
    row = client.get("/export/verdicts.json").json()["verdicts"][0]
    assert (row["by"], row["risk"] > 0) == ("risk", True)


def test_a_queue_ranked_by_peum_says_so(run):
    client = Server(run, blind=False).client()
    assert "ranked by PEUM" in client.page().text
    first = next(one for one in client.list() if one["flat"])
    assert "1 by PEUM" in client.page(f"/item/{first['key']}").text


def test_stability_and_its_curve_are_shown_without_blinding(ranked):
    client, rows = (
        Server(ranked["stability"], blind=False).client(),
        ranked["stability"].read_items().to_pylist(),
    )
    rows, values = {row["id"]: row for row in rows}, []
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
