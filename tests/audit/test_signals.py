"""What a queue is ranked by: each signal against a slow and obvious version of itself, recorded, shown and compared."""

import csv
import json
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from equicam.auditing.exports import write_csv
from equicam.auditing.log import Log
from equicam.auditing.review_log import TRIAGE_COLUMNS, ReviewLog, verdict_rows
from equicam.auditing.signal_quality import UNKNOWN, SignalScores, _better
from equicam.auditing.signals import ranked_by, ranking_scores, signal_values
from equicam.auditing.store import ITEMS
from equicam.auditing.triage import ROWS, _guarantee, triage
from equicam.cli.app import app
from equicam.errors import EquicamError
from equicam.evaluation import statistics
from equicam.evaluation.statistics import Correlation, Estimate
from equicam.reasons import SIGNALS, describe, from_rows
from equicam.report.page import write_report
from equicam.shards import read_json, read_table, write_table
from tests.audit.faked import Page, fake_run

ANGLES = (0, 60, 120, 180, 240, 300)
COMMAND = CliRunner(env={"COLUMNS": "250"})


def picture(name, apart=0.1, **more):
    row = {
        "id": name,
        "path": name,
        "peum_score": 0.01,
        "disagreement": apart,
        "target": 0,
        "confidence": 0.9,
        "views_kept": 6,
        "status": "ok",
        "flags": [],
    }
    return row | {"view_top1": [0] * 6, "view_agreement": [0.9] * 6} | more


def table(rows):
    return pa.Table.from_pylist(rows, schema=ITEMS)


def sentences(row):
    return [describe(reason) for reason in from_rows(row["reasons"])]


def ranks(found):
    return {row["id"]: row["rank"] for row in found.rows.to_pylist()}


def slow_disagreement(row):
    """As stored; None where there is none, or nothing to agree on."""
    value = row["disagreement"]
    flat = "blank" in row["flags"] or "constant" in row["flags"]
    return None if flat or value is None or math.isnan(value) else value


def slow_peum(row):
    quiet = row["views_kept"] <= 1 or {"blank", "constant", "none-kept"} & set(row["flags"])
    return None if quiet or row["peum_score"] is None or math.isnan(row["peum_score"]) else row["peum_score"]


SLOW = {"peum": slow_peum, "disagreement": slow_disagreement}


def odd_rows(n=150, seed=0):
    """Every kind of row there is: views that are undefined, lists that are not there, gates and flat maps."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        row = picture(f"p{i:03d}", float(rng.uniform(0, 1.5)), peum_score=float(rng.gamma(2, 0.01)))
        row |= (
            {}, {}, {}, {"disagreement": None}, {"view_agreement": []}, {"disagreement": math.nan},
            {"view_agreement": [None, 0.1, 0.2, 0.3, 0.4, math.nan]}, {"flags": ["blank"]}, {"flags": ["flipped", "constant"]},
            {"flags": ["none-kept"], "views_kept": 0, "peum_score": 0.0}, {"views_kept": 1, "peum_score": 0.0}, {"views_kept": None},
            {"peum_score": math.nan}, {"peum_score": None}, {"flags": None},
        )[i % 15]  # fmt: skip
        rows.append(row)
    return rows


def whole(row):
    return row | {
        "flags": row["flags"] or [],
        "views_kept": 6 if row["views_kept"] is None else row["views_kept"],
    }


@pytest.mark.parametrize("by", SIGNALS)
def test_a_score_is_the_slow_one_and_what_says_nothing_stands_first(by):
    rows = odd_rows()
    slow = {row["id"]: SLOW[by](whole(row)) for row in rows}
    items = pa.concat_tables([table(rows[:70]), table([]), table(rows[70:])])
    score = dict(zip(items["id"].to_pylist(), ranking_scores(items, by), strict=True))
    assert {name for name, value in slow.items() if value is None} == {
        n for n, s in score.items() if s == np.inf
    }
    for name, value in slow.items():
        assert value is None or score[name] == pytest.approx(value, abs=1e-12)
    got = ranks(triage(items, by=by, budget="100%", quotas=False, angles=ANGLES))
    mute = [name for name, value in slow.items() if value is None]
    heard = sorted((name for name in slow if name not in mute), key=lambda name: -slow[name])
    assert 20 < len(mute) < 80
    assert sorted(got[name] for name in mute) == list(range(1, len(mute) + 1))
    assert [got[name] for name in heard] == list(range(len(mute) + 1, len(rows) + 1))


def test_on_a_run_each_signal_ranks_by_itself(tmp_path):
    run = fake_run(tmp_path, count=40, calibrate=0)
    rows = [row for row in run.read_items().to_pylist() if row["status"] == "ok"]
    orders = {}
    for by in SIGNALS:
        got = ranks(triage(run.read_items(), by=by, budget="100%", quotas=False, angles=run.manifest.angles))
        slow = {row["id"]: SLOW[by](row) for row in rows}
        orders[by] = sorted(slow, key=lambda name: -math.inf if slow[name] is None else -slow[name])
        assert sorted(got, key=got.get) == orders[by]
    assert orders["peum"] != orders["disagreement"]
    assert ranks(triage(run.read_items(), angles=run.manifest.angles)) == ranks(
        triage(run.read_items(), by="peum", angles=run.manifest.angles)
    )


def test_a_gate_that_keeps_no_view_silences_peum_and_not_the_agreement_of_all_views():
    rows = [
        picture("a", 0.8, views_kept=0, flags=["none-kept"]),
        picture("b", 0.9),
        picture("c", views_kept=1),
    ]
    assert ranking_scores(table(rows), "peum").tolist() == [np.inf, 0.01, np.inf]
    assert ranking_scores(table(rows), "disagreement") == pytest.approx([0.8, 0.9, 0.1])
    found = triage(table(rows), by="disagreement", budget="100%", angles=ANGLES)
    told = {row["id"]: sentences(row) for row in found.rows.to_pylist()}
    assert told["a"][0].startswith("no view kept the prediction")
    assert told["a"][1] == "disagreement 0.8: more uncertain than 33 % of the images"
    assert told["c"][0].startswith("only one view kept")
    assert told["b"][0] == "disagreement 0.9: more uncertain than 66 % of the images"


@pytest.mark.parametrize(("kept", "code"), [(0, "none-kept"), (1, "one-kept")])
def test_no_kept_view_and_one_say_nothing_even_without_a_flag(kept, code):
    rows = table([picture("a", views_kept=kept), picture("b", views_kept=None)])
    assert ranking_scores(rows, "peum").tolist() == [np.inf, 0.01]
    found = triage(rows, budget="100%", angles=ANGLES).rows.to_pylist()
    codes = {row["id"]: [reason["code"] for reason in row["reasons"]] for row in found}
    assert codes == {"a": [code], "b": ["signal-percentile"]}


def test_a_flat_map_has_no_disagreement():
    rows = [picture("a", 1.0, flags=["blank"]), picture("b", None), picture("c")]
    found = triage(table(rows), by="disagreement", budget="100%", angles=ANGLES)
    told = {row["id"]: row for row in found.rows.to_pylist()}
    assert told["a"]["disagreement"] is told["b"]["disagreement"] is None
    assert sentences(told["a"])[0] == "the map is blank: no positive evidence for the class"
    assert sentences(told["b"]) == ["disagreement is undefined here"]
    assert told["c"]["disagreement"] == pytest.approx(0.1)
    assert told["c"]["rank"] == 3


def test_another_signal_is_refused_and_so_is_one_the_run_does_not_hold():
    with pytest.raises(EquicamError, match=r"by needs peum or disagreement, got 'entropy'; try disagreement"):
        triage(table([picture("a")]), by="entropy", angles=ANGLES)
    with pytest.raises(EquicamError, match=r"needs a run that stores it.*try equicam triage --by peum"):
        triage(table([picture("a", None)]), by="disagreement", angles=ANGLES)
    with pytest.raises(EquicamError, match="one view, which has no disagreement to rank by"):
        triage(table([picture("a")]), by="disagreement", angles=(0,))
    assert triage(table([]), by="disagreement", angles=ANGLES).rows.num_rows == 0


def test_the_threshold_is_one_of_the_signal():
    rows = [picture(f"{i:02d}", i / 100, eq=0.2 if i >= 30 else 0.9) for i in range(50)]
    told = triage(table(rows), by="disagreement", budget="10%", quotas=False, angles=ANGLES).guarantee
    assert (told.threshold, told.needed) == (pytest.approx(0.31), 19)
    assert "with a disagreement of at least 0.31, or whose disagreement says nothing" in told.sentence
    assert "PEUM" not in told.sentence


def calibrated(n=120, *, peum=0.0, apart=0.0, seed=0):
    """Pictures with Eq, of which each signal knows as much as it is told to."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        drift = rng.uniform()
        heard = peum * drift + rng.uniform()
        seen = apart * drift + rng.uniform()
        rows.append(picture(f"{i:04d}", 0.3 * seen, peum_score=0.01 * heard, eq=1 - drift))
    return rows


@cache
def quality(by="peum", n=120, **known):
    return triage(table(calibrated(n, **known)), by=by, angles=ANGLES).quality


def test_both_signals_are_measured_on_the_same_pictures():
    rows = calibrated(peum=0.5, apart=2)
    found, other = (triage(table(rows), by=by, angles=ANGLES).quality for by in SIGNALS)
    assert (found.signals, found.difference, found.better) == (other.signals, other.difference, other.better)
    assert (found.spearman, found.auroc) == (found.signals["peum"].spearman, found.signals["peum"].auroc)
    assert other.auroc == found.signals["disagreement"].auroc
    drift = np.array([1 - row["eq"] for row in rows])
    worst = set(np.argsort(-drift)[:12])
    for by, tells in found.signals.items():
        score = np.array([SLOW[by](row) for row in rows])
        assert tells.captured.value == len(worst & set(np.argsort(-score)[:12])) / 12
        assert tells.captured.low < tells.captured.value < tells.captured.high
        assert tells.auroc.value == pytest.approx(np.mean(score[drift > 0.5][:, None] > score[drift <= 0.5]))
        assert tells.spearman.r == pytest.approx(statistics.spearman_r(score, drift))
    gap = found.signals["disagreement"].auroc.value - found.signals["peum"].auroc.value
    assert found.difference.value == pytest.approx(gap)
    assert found.difference.low < gap < found.difference.high


@pytest.mark.parametrize("by", SIGNALS)
def test_one_is_recommended_where_the_interval_separates_them(by):
    for better, known in {"disagreement": {"apart": 3}, "peum": {"peum": 3}}.items():
        found = quality(by, **known)
        assert found.better == better
        assert f": --by {better} finds them better" in found.advice
        assert found.advice.endswith("and ranks here") == (by == better)
    assert quality(by, apart=3).sentence.endswith(
        "disagreement finds them better than chance"
        if by == "disagreement"
        else "PEUM is not shown to find them"
    )


def test_none_is_recommended_where_it_does_not():
    alike = quality(peum=2, apart=2)
    assert alike.difference.low < 0 < alike.difference.high
    assert (alike.better, alike.advice.endswith(": neither is shown to be better")) == (None, True)
    blind = quality()
    assert (blind.better, blind.advice.endswith(": neither is shown to find them")) == (None, True)
    few = quality(n=60, apart=3)
    assert few.difference.low > 0
    assert (few.better, few.advice.endswith(": too few to recommend one")) == (None, True)


def tells(low, caught):
    spearman = Correlation(0.5, 0.4, 0.6, -9.0, 200)
    return SignalScores(spearman, Estimate(low + 0.1, low, low + 0.2, 200), Estimate(caught, 0.0, 1.0, 20))


def test_what_stands_against_a_recommendation():
    ahead, behind = Estimate(0.3, 0.2, 0.4, 200), Estimate(-0.3, -0.4, -0.2, 200)
    good, bad = tells(0.7, 0.5), tells(0.4, 0.1)
    assert _better({"disagreement": good, "peum": bad}, ahead) == "disagreement"
    assert _better({"disagreement": bad, "peum": good}, behind) == "peum"
    assert (
        _better({"disagreement": tells(0.45, 0.5), "peum": tells(0.1, 0.1)}, ahead) is None
    )  # not above chance
    assert _better({"disagreement": tells(0.7, 0.0), "peum": bad}, ahead) is None  # finds fewer of the worst
    assert _better({"disagreement": good, "peum": bad}, Estimate(0.3, -0.01, 0.6, 200)) is None
    assert _better({"disagreement": good, "peum": bad}, UNKNOWN) is None


def test_choosing_on_the_pictures_that_set_the_threshold_costs_a_little():
    """Two equally good signals, of which the one with the higher AUROC is taken every time."""
    rng, missed = np.random.default_rng(0), []
    for _ in range(600):
        bad = rng.random(200) < 0.2
        drawn = [(rng.normal(size=200) + bad, rng.normal(size=400) + 1.0) for _ in range(2)]
        found = [
            _guarantee(here, np.where(bad, 0.2, 0.8), np.arange(0), alpha=0.1, unstable=0.5).threshold
            for here, _ in drawn
        ]
        rates = [(new < threshold).mean() for threshold, (_, new) in zip(found, drawn, strict=True)]
        better = int(np.argmax([statistics.auroc(here, bad) for here, _ in drawn]))
        missed.append((rates[0], rates[better]))
    fixed, chosen = np.mean(missed, axis=0)
    assert 0.08 < fixed < 0.10
    assert 0.005 < chosen - fixed < 0.025


def test_a_signal_that_says_nothing_is_not_compared():
    rows = [row | {"disagreement": None} for row in calibrated(150, peum=3)]
    found = triage(table(rows), angles=ANGLES)
    assert found.quality.better is None
    assert found.quality.advice == "not compared: disagreement is undefined on every calibration image"
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("by", SIGNALS)
def test_the_signal_is_ranked_by(by):
    found = triage(table(odd_rows()), by=by, angles=ANGLES)
    told = found.to_json()
    assert (found.by, told["by"], ranked_by(found.rows)) == (by, by, by)
    assert {row["by"] for row in told["rows"]} == {by}
    assert ranked_by(found.rows.drop_columns(["by", "disagreement"])) == "peum"
    assert ranked_by(found.rows.slice(0, 0)) == "peum"


@pytest.mark.parametrize("by", SIGNALS)
def test_reviewers_get_nothing_of_what_ranks(by, tmp_path):
    rows = [
        picture(f"{i:02d}", i / 100, view_top1=[0, 1, 0, 0, 0, 0], view_agreement=[0.1 + i / 100] * 6)
        for i in range(20)
    ]
    found = triage(table(rows), by=by, budget="100%", angles=ANGLES)
    assert all(any(r.startswith("the views at") for r in sentences(row)) for row in found.rows.to_pylist())
    write_csv(found, tmp_path / "queue.csv")
    with (tmp_path / "queue.csv").open(newline="") as file:
        reasons = [row["reasons"] for row in csv.DictReader(file)]
    assert all("the prediction changes at 60°" in text for text in reasons)
    for text in reasons:
        assert not any(reason.startswith(f"{SIGNALS[by]} ") for reason in text.split("; "))
        assert "more uncertain" not in text
        assert ("(r = " in text) == (by == "peum")  # these numbers are the rank, where disagreement ranks


@pytest.mark.parametrize("by", SIGNALS)
def test_the_report_follows_the_signal(by, tmp_path):
    run = fake_run(tmp_path)
    found = triage(
        run.read_items(), by=by, budget="60%", angles=run.manifest.angles, classes=run.manifest.classes
    )
    path = write_report(run, found)
    text, facts = Page(path.read_text()).text, json.loads(path.with_suffix(".json").read_text())
    named, ok = SIGNALS[by], run.read_items().filter(pa.compute.field("status") == "ok")
    assert facts["by"] == by
    assert f"the most uncertain by {named} first" in text
    assert f"Ranked by {named}. On the same images {found.quality.advice}" in text
    assert f"Does {named} find unstable maps?" in text
    assert f"median {named}" in text
    assert f"Undefined {named} is not low {named}." in text
    assert f"Histogram of {named}; " in path.read_text()
    assert facts["summary"]["median_disagreement"] == np.nanmedian(signal_values(ok, "disagreement"))
    for q in facts["queue"]:
        value = q["disagreement"]
        assert value is None or (f"{value:.4f}" in text) == (by == "disagreement")
    if by == "disagreement":
        assert "Does PEUM find unstable maps?" not in text
        assert "by PEUM" not in text


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("signals"), count=40, calibrate=0)


def command(*arguments):
    done = COMMAND.invoke(app, [str(a) for a in arguments])
    return SimpleNamespace(code=done.exit_code, said=" ".join(done.output.split()))


def test_the_command_ranks_by_the_signal_and_says_so(run):
    for by, named in SIGNALS.items():
        done = command("triage", run.folder, "--by", by, "--budget", "50%", "--evidence", "0")
        assert done.code == 0, done.said
        assert f"in the queue, by {named};" in done.said
        assert f"p {named} reasons" in done.said
        assert read_json(run.folder / "triage.json")["by"] == by
        assert read_json(run.folder / "triage.json")["options"]["by"] == by
        assert ranked_by(read_table(run.folder / "triage.parquet")) == by
        assert Log(run.folder).events("triaged")[-1].payload["options"]["by"] == by
        assert command("report", run.folder).code == 0
        assert read_json(run.folder / "report.json")["by"] == by


def test_the_command_says_which_signal_tells(tmp_path):
    run = fake_run(tmp_path)
    done = command("triage", run.folder, "--by", "disagreement", "--budget", "50%", "--evidence", "0")
    assert f"PEUM or disagreement: {read_json(run.folder / 'triage.json')['quality']['advice']}" in done.said
    assert done.said.count("too few to recommend one") == 1


def test_the_command_refuses_another_signal(run):
    done = command("triage", run.folder, "--by", "entropy")
    assert (done.code, done.said) == (2, "by needs peum or disagreement, got 'entropy'; try disagreement")


def test_a_triage_made_before_there_was_a_choice_is_by_peum(run):
    assert command("triage", run.folder, "--by", "peum", "--budget", "50%", "--evidence", "0").code == 0
    told = read_json(run.folder / "triage.json")
    for key in (told, told["options"]):
        del key["by"]
    told["rows"] = [{k: v for k, v in row.items() if k not in ("by", "disagreement")} for row in told["rows"]]
    (run.folder / "triage.json").write_text(json.dumps(told))
    old = read_table(run.folder / "triage.parquet").drop_columns(["by", "disagreement"])
    write_table(run.folder / "triage.parquet", old)
    done = command("report", run.folder)
    assert done.code == 0, done.said
    assert read_json(run.folder / "report.json")["by"] == "peum"
    assert "the most uncertain by PEUM first" in Page((run.folder / "report.html").read_text()).text
    readings = ReviewLog(run.folder)
    readings.add_verdict(
        old["id"][0].as_py(),
        "ana",
        "supports",
        reason="",
        blind=True,
        previous_event=0,
        mark="one-mark-of-ana",
    )
    row = verdict_rows(readings, old)[0]
    assert (row["by"], row["disagreement"], row["peum_score"]) == (None, None, old["peum_score"][0].as_py())
    assert {"by", "peum_score", "disagreement"} <= {*TRIAGE_COLUMNS} <= {*ROWS.names}
