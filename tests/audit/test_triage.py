"""The queue and its blind arm, against slow and obvious versions of themselves; most are ranked by PEUM."""

import csv
import json
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from scipy.stats import chisquare

from equicam.cli import run_output
from equicam.core.transforms import Transform
from equicam.errors import EquicamError
from equicam.reasons import Reason, describe, from_rows
from equicam.runs.queue_files import write_csv
from equicam.runs.triage import _class_quotas
from equicam.runs.triage import triage as rank
from equicam.shards import write_table
from tests.audit.faked import image_row, table

VIEWS = tuple(map(Transform, (0, 60, 120, 180, 240, 300)))


def triage(items, **options):
    return rank(items, **{"by": "peum", "transforms": VIEWS, **options})


def rows_of(count):
    return table([ranked_row(f"{i:02d}", i / 100) for i in range(count)])


def ranked_row(name, peum=0.01, target=0, **more):
    unmeasured = dict.fromkeys(("stability", "stability_by_view", "view_confidence"))
    return image_row(name, **unmeasured, peum_score=peum, target=target) | {"view_top1": [target] * 6} | more


def run(n, *, seed=0, calibrated=0, classes=4):
    """A run in which PEUM knows something of Eq, some images are bad and on some PEUM says nothing."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        peum = float(rng.gamma(2, 0.01))
        row = ranked_row(f"p{i:04d}", peum, int(rng.integers(classes) ** 2 // classes))
        kind = rng.choice(["ok", "ok", "ok", "ok", "ok", "ok", "none-kept", "one-kept", "blank", "bad"])
        if kind in ("none-kept", "one-kept"):
            row |= {"peum_score": 0.0, "views_kept": int(kind == "one-kept")}
            row |= {"flags": ["none-kept"] * (kind == "none-kept")}
        elif kind == "blank":
            row |= {"peum_score": 0.0, "flags": ["blank"]}
        elif kind == "bad":
            row |= {"status": "bad", "reason": "unreadable", "peum_score": None, "target": None}
        if i < calibrated and kind not in ("bad", "blank"):
            drift = 0.7 if silent(row) else 25 * peum
            row["eq"] = float(np.clip(1 - drift + rng.normal(0, 0.15), -1, 1))
        rows.append(row)
    return rows


def silent(row):
    return row["views_kept"] <= 1 or bool({"none-kept", "blank", "constant"} & set(row["flags"]))


def reviewed(found, arm=None):
    return [row for row in found.rows.to_pylist() if arm in (None, row["arm"])]


def sentences(row):
    return [describe(reason) for reason in from_rows(row["reasons"])]


def slow_ranks(rows):
    """Rank of every ok image: those of which PEUM says nothing in any order, then from the highest PEUM."""
    ok = [row for row in rows if row["status"] == "ok"]
    mute = {row["id"] for row in ok if silent(row)}
    heard = sorted((row for row in ok if row["id"] not in mute), key=lambda row: -row["peum_score"])
    return mute, {row["id"]: len(mute) + i for i, row in enumerate(heard, start=1)}


def slow_dealt(counts, places):
    """Whole shares."""
    total = sum(counts.values())
    return {one: math.floor(Fraction(places * count, total)) for one, count in counts.items()}


def test_places_are_dealt_by_whole_shares():
    rng = np.random.default_rng(0)
    for _ in range(500):
        counts = {int(c): int(rng.integers(1, 30)) for c in rng.permutation(20)[: rng.integers(1, 9)]}
        places = int(rng.integers(0, sum(counts.values()) + 1))
        given = _class_quotas(counts, places)
        assert given == slow_dealt(counts, places)
        assert all(given[one] <= counts[one] for one in counts)
    assert _class_quotas({7: 5, 3: 5, 5: 5}, 4) == {3: 1, 5: 1, 7: 1}


def test_with_more_classes_than_places_and_without_quotas_the_queue_goes_by_rank():
    rows = [ranked_row(f"{i:03d}", i / 1000, i % 100) for i in range(200)]
    found = triage(table(rows), budget=20, control=0)
    assert sorted(row["rank"] for row in reviewed(found, "queue")) == list(range(1, 21))
    found = triage(table(run(300)), budget=50, quotas=False)
    assert sorted(row["rank"] for row in reviewed(found, "queue")) == list(range(1, 41))
    assert all(row["rank"] > 40 for row in reviewed(found, "control"))
    assert found.quotas == {}


def test_the_queue_is_the_head_of_every_class():
    rows = run(300)
    found = triage(table(rows), budget=60, classes=["a", "b", "c", "d"])
    mute, ranks = slow_ranks(rows)
    ok = Counter(row["target"] for row in rows if row["status"] == "ok")
    places = slow_dealt(ok, 48)
    assert sum(found.quotas.values()) == 48
    assert all(found.quotas["abcd"[one]] >= count for one, count in places.items())
    for one in places:
        count = found.quotas["abcd"[one]]
        queued = {row["id"] for row in reviewed(found, "queue") if row["target"] == one}
        members = [row["id"] for row in rows if row["status"] == "ok" and row["target"] == one]
        heard = sorted((name for name in members if name not in mute), key=lambda name: ranks[name])
        quiet = [name for name in members if name in mute]
        assert len(queued) == count
        assert queued - mute == set(heard[: max(count - len(quiet), 0)])
        assert len(queued & mute) == min(count, len(quiet))
    assert len(reviewed(found, "control")) == 12


def test_classes_of_one_name_share_a_line():
    rows = table([ranked_row(f"{i}", i / 100, i % 2) for i in range(20)])
    found = triage(rows, budget=5, classes=["crane", "crane"])
    assert found.quotas == {"crane": 4}
    assert {row["class"] for row in reviewed(found)} == {"crane"}
    assert {row["class"] for row in reviewed(triage(rows, budget=5))} <= {"0", "1"}


BUDGETS = {"10%": 3, "10 %": 3, "11%": 4, "0.01%": 1, "100%": 30, "7": 7, 7: 7, 999: 30, 1: 1}


def test_a_budget_is_a_share_or_a_number():
    for budget, reviews in BUDGETS.items():
        found = triage(rows_of(30), budget=budget)
        assert found.budget == found.rows.num_rows == reviews, budget
    assert triage(rows_of(100), budget="7%").budget == 7  # 0.07 · 100 is above 7 in floating point


BUDGET = "the budget needs a share from above 0% to 100%, or a number"
WRONG = {
    BUDGET: [{"budget": b} for b in ("0%", "abc", -3, 0, "150%", "", "-5%", "1.5", "10%%", "nan%")],
    "needs a share": [{"control": 1}, {"control": -0.1}],
    "transforms needs those of 'a', got 4 for 6 views": [{"transforms": VIEWS[:4]}],
}


def test_other_options_are_refused_in_a_sentence():
    for why, options in WRONG.items():
        for option in options:
            with pytest.raises(EquicamError, match=why):
                triage(table([ranked_row("a")]), **option)


BUDGETS_AND_SHARES = (4, 0.2), (2, 0.2), (5, 0.01), (4, 0.01), (20, 0.2), (20, 0), (3, 0.9), (30, 0.2)


def test_how_many_reviews_are_blind():
    for (budget, control), arm in zip(BUDGETS_AND_SHARES, (1, 0, 1, 0, 4, 0, 2, 0), strict=True):
        arms = Counter(row["arm"] for row in reviewed(triage(rows_of(30), budget=budget, control=control)))
        assert arms == Counter(queue=budget - arm, control=arm), (budget, control)


def test_no_images_no_reviews():
    for rows in ([], [ranked_row("a", status="bad")]):
        found = triage(table(rows))
        assert (found.rows.num_rows, found.budget, found.ok, found.bad) == (0, 0, 0, len(rows))
        assert (found.quality, found.unstable.count) == (None, 0)
        json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.slow
def test_the_blind_arm_is_uniform_over_the_rest_and_mixed_in():
    items, drawn, places = rows_of(20), Counter(), Counter()
    for seed in range(1500):
        rows = reviewed(triage(items, budget=10, quotas=False, seed=seed), "control")
        drawn.update(row["id"] for row in rows)
        places.update(row["place"] for row in rows)
    assert set(drawn) == {f"{i:02d}" for i in range(12)}
    assert chisquare([drawn[f"{i:02d}"] for i in range(12)]).pvalue > 1e-3
    assert chisquare([places[i] for i in range(1, 11)]).pvalue > 1e-3


def test_ties_do_not_stand_by_name_and_the_order_of_rows_changes_nothing():
    items = table([ranked_row(f"{i:02d}", 0.0) for i in range(40)])
    found = [triage(items, budget=3, control=0, seed=seed) for seed in range(8)]
    assert len({tuple(sorted(one.rows["id"].to_pylist())) for one in found}) > 4
    rows = run(120, calibrated=60)
    shuffled = [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]
    told = triage(table(rows)).to_json()
    in_parts = pa.concat_tables([table(shuffled[:50]), table(shuffled[50:])])
    assert triage(in_parts).to_json() == told
    assert triage(in_parts, seed=1).to_json()["rows"] != told["rows"]


def test_reasons_are_codes_and_values():
    rows = [ranked_row(f"{i:02d}", i / 1000) for i in range(100)]
    rows[98] |= {"view_top1": [0, 1, 0, 0, 2, 0], "view_agreement": [0.9, 0.12, None, 0.4, -0.3, 0.49]}
    rows[97] |= {"view_top1": [0, 1, 1, 1, 2, 1], "confidence": 0.34}
    rows[97] |= {"flags": ["flipped", "low-coverage", "odd-size"]}
    rows[0] |= {"flags": ["none-kept"], "views_kept": 0}
    rows[1] |= {"views_kept": 1}
    rows[2] |= {"flags": ["blank"]}
    rows[3] |= {"flags": ["constant"]}
    rows[4] |= {"peum_score": float("nan")}
    found = triage(table(rows), budget="100%")
    told = {row["id"]: from_rows(row["reasons"]) for row in reviewed(found)}
    codes = {name: [reason.code for reason in reasons] for name, reasons in told.items()}
    assert codes["99"] == ["signal-percentile"]
    assert told["99"][0].values == {"signal": "peum", "value": 0.099, "above_percent": 94}
    assert codes["98"] == ["signal-percentile", "prediction-changes", "views-disagree"]
    assert told["98"][1].values == {"views": ["60°", "240°"], "of": 6}
    assert told["98"][2].values["views"] == ["240°", "60°", "180°", "300°"]
    assert told["98"][2].values["correlations"] == pytest.approx([-0.3, 0.12, 0.4, 0.49])
    assert codes["97"][1:] == ["prediction-changes", "low-coverage", "odd-size", "low-confidence"]
    assert told["97"][-1].values["confidence"] == pytest.approx(0.34)
    flat = ["none-kept", "one-kept", "blank", "constant", "signal-undefined"]
    assert [codes[f"0{i}"] for i in range(5)] == [[code] for code in flat]
    assert {row["rank"] for row in reviewed(found) if row["id"] < "05"} == {1, 2, 3, 4, 5}


def test_unstable_maps_are_counted_and_not_predicted():
    rows = [ranked_row(f"{i:02d}", stability=i / 50) for i in range(50)]
    rows += [ranked_row("flat", stability=0.9, flags=["blank"]), ranked_row("none", stability=None)]
    found = triage(table(rows), by="stability", budget=10, control=0, quotas=False)
    assert (found.unstable.count, found.unstable.in_queue, found.unstable.undefined) == (25, 8, 2)
    assert found.unstable.sentence == (
        "25 of 52 maps (48.1 %) have a stability below 0.5, 8 of them in the queue; 2 have none (blank, constant or not measured)"
    )
    assert found.quality is found.to_json()["quality"] is None
    less = triage(table(rows), by="stability", unstable=0.2)
    assert (less.unstable.below, less.unstable.count, less.to_json()["unstable"]["count"]) == (0.2, 10, 10)
    unknown = triage(table([ranked_row("a")])).unstable
    assert unknown.count == 0
    assert unknown.sentence == "no map has a stability: all are blank or constant, or it was not measured"


def test_where_only_silent_images_are_unstable_the_signal_finds_them():
    rows = [ranked_row(f"{i:02d}", 0.0, views_kept=0, flags=["none-kept"], eq=0.1) for i in range(20)]
    rows += [ranked_row(f"a{i:02d}", i / 100, eq=0.9) for i in range(20)]
    found = triage(table(rows), budget="100%")
    assert found.quality.auroc.value == 1
    assert math.isnan(found.quality.outside.value)  # nothing is outside


def test_worth_is_measured_on_the_calibrated():
    rows = run(400, calibrated=250)
    found = triage(table(rows), budget="20%")
    worth, queue = found.quality, {row["id"] for row in reviewed(found, "queue")}
    known = [row for row in rows if row.get("eq") is not None]
    bad = [row for row in known if row["eq"] < 0.5]
    outside = [row for row in known if row["id"] not in queue]
    assert worth.n == len(known)
    assert worth.unstable.value == len(bad) / len(known)
    assert worth.outside.value == sum(row["id"] not in queue for row in bad) / len(outside)
    assert worth.outside.low < worth.outside.value < worth.outside.high
    heard = [row for row in known if not silent(row)]
    r = np.corrcoef([row["peum_score"] for row in heard], [1 - row["eq"] for row in heard])[0, 1]
    assert worth.pearson.r == pytest.approx(r)
    assert worth.pearson.n == len(heard) < worth.spearman.n == len(known)
    assert worth.auroc.low > 0.5
    assert worth.lift.value > 1
    assert worth.held_out.lift.value > 1
    assert f"better than chance. Measured on {len(known)} images at seven other angles: " in worth.sentence
    assert worth.lift.value <= 1 / worth.unstable.value
    json.dumps(found.to_json(), allow_nan=False)


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2", "@SUM(A1)", "\tx", "\rx"]
HOSTILE = [*FORMULAS, 'a,"b"\nc', "ünï ☃; 'q'", "", "'=1", "plain"]
SIGNS = ("=", "+", "-", "@", "\t", "\r")


def read_csv(found, folder):
    """The queue as a spreadsheet gets it."""
    write_csv(found, folder / "queue.csv")
    with (folder / "queue.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_hostile_names_survive_csv_and_run_nothing(tmp_path):
    rows = [ranked_row(name, i / 100, i) for i, name in enumerate(HOSTILE)]
    found = triage(table(rows), budget="100%", classes=HOSTILE)
    read = read_csv(found, tmp_path)
    assert [row["place"] for row in read] == [str(i) for i in range(1, len(HOSTILE) + 1)]
    by_place = {str(row["place"]): row for row in reviewed(found)}
    for row in read:
        true = by_place[row["place"]]
        for name in ("id", "class"):
            assert not row[name].startswith(SIGNS)
            guarded = true[name].lstrip("'").startswith(SIGNS)
            assert row[name] == ("'" if guarded else "") + true[name]
        reasons = [reason for reason in sentences(true) if not reason.startswith("PEUM ")]
        assert [reason for reason in row["reasons"].split("; ") if reason] == reasons


def test_what_reviewers_get_is_blind(tmp_path):
    found = triage(table(run(200)))
    found = replace(found, rows=found.rows.sort_by("rank"))
    read = read_csv(found, tmp_path)
    write_table(tmp_path / "queue.parquet", found.rows)
    assert [int(row["place"]) for row in read] == list(range(1, found.budget + 1))
    for row in read:
        assert not {"arm", "rank", "peum_score"} & set(row)
        assert not any(word in json.dumps(row) for word in ("control", "queue", "higher than"))
    whole = pq.read_table(tmp_path / "queue.parquet")
    assert whole.equals(found.rows)
    assert set(whole["arm"].to_pylist()) == {"queue", "control"}


@pytest.mark.parametrize("columns", ["80", "160"])
def test_reasons_are_readable_in_any_terminal(capsys, monkeypatch, columns):
    """A column for them in 80 would fold them to shreds: there they have lines of their own."""
    monkeypatch.setattr(run_output, "console", Console(width=int(columns)))
    why = "the views at 60° (r = 0.35), 80° (r = 0.35) and 3 more disagree on the place"
    row = {"rank": 7, "id": "patch.png", "class": "tumour [x]", "confidence": 0.5, "peum_score": 0.05}
    row["reasons"] = [Reason("text", {"text": why}).to_row()]
    unstable = SimpleNamespace(sentence="how many are unstable")
    facts = {"by": "peum", "budget": 2, "unstable": unstable, "quality": None, "quotas": {}}
    run_output.print_queue(SimpleNamespace(**facts, queue=lambda: [row]))
    said = capsys.readouterr().out
    assert why in said
    assert "tumour [x]" in said
    assert ("reasons, by rank" in said) == (columns == "80")
