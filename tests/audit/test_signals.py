"""What a queue is ranked by: each signal against a slow and obvious version of itself, recorded, shown and compared."""

import json
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from equicam.cli.app import app
from equicam.errors import EquicamError
from equicam.evaluate import statistics
from equicam.evaluate.statistics import Correlation, Estimate
from equicam.reasons import SIGNALS, from_rows
from equicam.runs.log import Log
from equicam.runs.report.page import write_report
from equicam.runs.signals import REVEALING, ranked_by, ranking_scores, signal_values
from equicam.runs.triage import UNKNOWN, _better, _SignalScores
from equicam.runs.triage import triage as rank
from equicam.shards import read_json, read_table
from tests.audit.faked import Page, fake_run, image_row, table
from tests.audit.test_triage import VIEWS, read_csv, sentences

COMMAND = CliRunner(env={"COLUMNS": "250"})


def triage(items, **options):
    return rank(items, **{"transforms": VIEWS, **options})


def codes(found):
    return {row["id"]: [r.code for r in from_rows(row["reasons"])] for row in found.rows.to_pylist()}


def slow_peum(row):
    quiet = row["views_kept"] <= 1 or {"blank", "constant", "none-kept"} & set(row["flags"])
    return None if quiet or row["peum_score"] is None or math.isnan(row["peum_score"]) else row["peum_score"]


def slow_stability(row):
    """1 − stability: the lowest is reviewed first."""
    flat = "blank" in row["flags"] or "constant" in row["flags"]
    return None if flat or row["stability"] is None or math.isnan(row["stability"]) else 1 - row["stability"]


def slow_doubt(row):
    """1 − the mean confidence of the views that have one."""
    known = [p for p in row["view_confidence"] or () if p is not None and not math.isnan(p)]
    return 1 - sum(known) / len(known) if known else None


SLOW = {"stability": slow_stability, "peum": slow_peum}


def slow_shares(values):
    """The share of the others below each, those equal by half."""
    heard = [v for v in values if v is not None]
    others = max(1, len(heard) - 1)
    below = {v: (sum(h < v for h in heard) + (sum(h == v for h in heard) - 1) / 2) / others for v in heard}
    return [below.get(v) for v in values]


def slow_signal(rows, by):
    """The score of every row by id, the highest reviewed first; None where the signal says nothing."""
    if by != "risk":
        return {row["id"]: SLOW[by](row) for row in rows}
    # a flat map's prediction has its place among the others
    shares = (slow_shares([score(row) for row in rows]) for score in (slow_stability, slow_doubt))
    pairs = zip(*shares, strict=True)
    return {
        row["id"]: None if None in pair or "blank" in row["flags"] else sum(pair) / 2
        for row, pair in zip(rows, pairs, strict=True)
    }


def odd_rows(n=150, seed=0):
    """Every kind of row there is: views that are undefined, lists that are not there, gates and flat maps."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        row = image_row(f"p{i:03d}", float(rng.uniform(-0.2, 1)), peum_score=float(rng.gamma(2, 0.01)))
        row |= {"view_confidence": rng.uniform(0, 1, 6).tolist()}
        row |= (
            {}, {}, {}, {"view_agreement": []},
            {"view_agreement": [None, 0.1, 0.2, 0.3, 0.4, math.nan]}, {"flags": ["blank"]}, {"flags": ["flipped", "constant"]},
            {"flags": ["none-kept"], "views_kept": 0, "peum_score": 0.0}, {"views_kept": 1, "peum_score": 0.0}, {"views_kept": None},
            {"peum_score": math.nan}, {"peum_score": None}, {"flags": None}, {"stability": None}, {"stability": math.nan},
            {"view_confidence": None}, {"view_confidence": [None, float(rng.uniform()), math.nan, 0.5, 0.5, 0.5]},
        )[i % 17]  # fmt: skip
        rows.append(row)
    return rows


def whole(row):
    kept = 6 if row["views_kept"] is None else row["views_kept"]
    return row | {"flags": row["flags"] or [], "views_kept": kept}


@pytest.mark.parametrize("by", SIGNALS)
def test_a_score_is_the_slow_one_and_what_says_nothing_stands_first(by):
    rows = odd_rows()
    slow = slow_signal([whole(row) for row in rows], by)
    items = pa.concat_tables([table(rows[:70]), table([]), table(rows[70:])])
    score = dict(zip(items["id"].to_pylist(), ranking_scores(items, by), strict=True))
    expected = {name: np.inf if value is None else value for name, value in slow.items()}
    assert score == pytest.approx(expected, abs=1e-7)  # confidence is float32
    found = triage(items, by=by, budget="100%", quotas=False).rows.sort_by("rank")
    assert found["rank"].to_pylist() == list(range(1, len(rows) + 1))
    values = [slow[name] for name in found["id"].to_pylist()]
    mute = values.count(None)
    assert 10 < mute < 80
    assert values[:mute] == [None] * mute
    assert values[mute:] == sorted(values[mute:], reverse=True)


def test_a_gate_that_keeps_no_view_silences_peum_and_not_stability():
    rows = [image_row("a", 0.2, views_kept=0, flags=["none-kept"]), image_row("b", 0.1)]
    rows.append(image_row("c", 0.9, views_kept=1))
    assert ranking_scores(table(rows), "peum").tolist() == [np.inf, 0.01, np.inf]
    assert ranking_scores(table(rows), "stability") == pytest.approx([0.8, 0.9, 0.1])
    found = triage(table(rows), by="stability", budget="100%")
    ranked = "signal-percentile"
    assert codes(found) == {"a": ["none-kept", ranked], "b": [ranked], "c": ["one-kept", ranked]}
    reasons = {row["id"]: from_rows(row["reasons"]) for row in found.rows.to_pylist()}
    assert (reasons["a"][1].values["above_percent"], reasons["b"][0].values["above_percent"]) == (33, 66)
    for kept, code in enumerate(("none-kept", "one-kept")):  # even without a flag
        rows = table([image_row("a", views_kept=kept), image_row("b", views_kept=None)])
        assert ranking_scores(rows, "peum").tolist() == [np.inf, 0.01]
        assert codes(triage(rows, by="peum", budget="100%")) == {"a": [code], "b": [ranked]}


def test_a_flat_map_has_no_stability():
    rows = [image_row("a", 0.0, flags=["blank"]), image_row("b", None), image_row("c", 0.9)]
    found = triage(table(rows), by="stability", budget="100%")
    assert codes(found) == {"a": ["blank"], "b": ["signal-undefined"], "c": ["signal-percentile"]}
    rows = found.rows.sort_by("id")
    assert rows["stability"].to_pylist() == [None, None, 0.9]
    assert rows["rank"].to_pylist()[2] == 3


def test_another_signal_is_refused():
    with pytest.raises(EquicamError, match="by needs one of stability, peum, risk, got 'entropy'"):
        triage(table([image_row("a")]), by="entropy")
    with pytest.raises(EquicamError, match="one view, which has no stability to rank by"):
        triage(table([image_row("a")]), transforms=VIEWS[:1])
    for by in SIGNALS:
        assert triage(table([]), by=by).rows.num_rows == 0


def calibrated(n=120, *, seed=0, **known):
    """Pictures with Eq, of which each signal knows as much as it is told to."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(n):
        drift = rng.uniform()
        heard = {by: known.get(by, 0.0) * drift + rng.uniform() for by in ("peum", "stability", "confidence")}
        more = {"peum_score": 0.01 * heard["peum"], "eq": 1 - drift}
        more["view_confidence"] = [1 - 0.2 * heard["confidence"]] * 6
        rows.append(image_row(f"{i:04d}", 1 - 0.3 * heard["stability"], **more))
    return rows


@cache
def quality(by="stability", n=120, **known):
    return triage(table(calibrated(n, **known)), by=by).quality


def test_every_signal_is_measured_on_the_same_images():
    rows = calibrated(peum=0.5, stability=4)
    found, other = (triage(table(rows), by=by).quality for by in ("stability", "peum"))
    assert set(found.signals) == set(SIGNALS)
    assert found.signals == other.signals
    for worth, by in ((found, "stability"), (other, "peum")):
        assert (worth.spearman, worth.auroc) == (worth.signals[by].spearman, worth.signals[by].auroc)
    drift = np.array([1 - row["eq"] for row in rows])
    worst = set(np.argsort(-drift)[:12])
    for by, tells in found.signals.items():
        score = np.array(list(slow_signal(rows, by).values()))
        assert tells.captured.value == len(worst & set(np.argsort(-score)[:12])) / 12
        assert tells.captured.low < tells.captured.value < tells.captured.high
        bad, good = score[drift > 0.5][:, None], score[drift <= 0.5]
        assert tells.auroc.value == pytest.approx(np.mean((bad > good) + (bad == good) / 2))
        assert tells.spearman.r == pytest.approx(statistics.spearman_r(score, drift))
    for by, difference in other.differences.items():
        gap = found.signals[by].auroc.value - found.signals["peum"].auroc.value
        assert difference.value == pytest.approx(gap)
        assert difference.low < gap < difference.high
    assert set(other.differences) == set(SIGNALS) - {"peum"}
    for named in SIGNALS.values():
        assert f"{named} " in found.comparison


def test_stability_is_checked_against_eq():
    rows = [row | {"stability": 0.8 * row["eq"] + 0.05} for row in calibrated(60)]
    check = triage(table(rows)).quality.check
    apart = np.array([row["stability"] - row["eq"] for row in rows])
    assert check.pearson.r == pytest.approx(1)
    assert (check.mean_difference, check.bias) == pytest.approx((np.abs(apart).mean(), apart.mean()))
    assert f"differ by {np.abs(apart).mean():.2f} on average" in check.sentence
    unmeasured = table([row | {"stability": None} for row in rows])
    assert triage(unmeasured, by="peum").quality.check is None


def test_another_signal_is_recommended_only_where_the_interval_separates_them():
    for by, better in (("peum", "stability"), ("stability", "peum"), ("risk", "peum")):
        found = quality(by, **{better: 4.0})
        assert found.better == better
        assert found.advice.startswith(f"--by {better} finds maps with an Eq below 0.5 better here: ")
        weak = f"{SIGNALS[by]} is not shown to find maps with an Eq (equivariance) below 0.5"
        assert found.sentence.startswith(weak)
    ranking = quality("stability", stability=4.0)
    assert (ranking.better, ranking.advice) == (None, None)
    assert ranking.sentence.startswith("stability finds maps with an Eq (equivariance) below 0.5 better than")
    alike = quality("peum", peum=2.0, stability=2.0)
    assert alike.differences["stability"].low < 0 < alike.differences["stability"].high
    assert (alike.better, alike.advice) == (None, None)
    few = quality("peum", n=60, stability=4.0)
    assert few.differences["stability"].low > 0
    assert (few.better, few.advice, few.sentence.startswith("too few images")) == (None, None, True)


def test_what_stands_against_a_recommendation():
    def tells(low, caught):
        auroc, spearman = Estimate(low + 0.1, low, low + 0.2, 200), Correlation(0.5, 0.4, 0.6, -9.0, 200)
        return _SignalScores(spearman, auroc, Estimate(caught, 0.0, 1.0, 20))

    ahead, behind = Estimate(0.3, 0.2, 0.4, 200), Estimate(-0.3, -0.4, -0.2, 200)
    good, bad = tells(0.7, 0.5), tells(0.4, 0.1)
    for mine, other, difference, better in (
        (bad, good, ahead, "risk"),
        (good, bad, behind, None),
        (tells(0.1, 0.1), tells(0.45, 0.5), ahead, None),  # not above chance
        (bad, tells(0.7, 0.0), ahead, None),  # finds fewer of the worst
        (bad, good, Estimate(0.3, -0.01, 0.6, 200), None),
        (bad, good, UNKNOWN, None),
    ):
        assert _better({"peum": mine, "risk": other}, {"risk": difference}, "peum") == better


def test_risk_is_of_ranks_by_stability_and_by_the_confidence_of_all_views():
    views = {"a": [0.9, 0.1, None, None, None, None], "b": [0.8] * 6, "c": [0.7] * 6, "d": [0.6] * 6}
    stability = dict(zip("abcd", (0.9, 0.1, 0.5, 0.5), strict=True))
    rows = table([image_row(name, stability[name], view_confidence=views[name]) for name in views])
    expected = [(0 + 1) / 2, (1 + 0) / 2, (0.5 + 1 / 3) / 2, (0.5 + 2 / 3) / 2]
    assert signal_values(rows, "risk") == pytest.approx(expected)
    assert signal_values(rows, "stability").tolist() == [0.9, 0.1, 0.5, 0.5]
    found = triage(rows, by="risk", budget="100%").rows.sort_by("id").to_pylist()
    assert (found[1]["stability"], found[1]["risk"], found[3]["rank"]) == (0.1, 0.5, 1)


def test_the_reasons_follow_the_signal():
    moved = {"stability_by_view": [1.0, 0.4, 0.6, -0.1, 0.49, 0.5]}
    moved["view_agreement"] = [0.9, 0.9, 0.2, 0.9, 0.9, 0.9]
    rows = table([image_row("a", **moved), image_row("b", stability_by_view=[0.0] * 6)])
    for by in SIGNALS:
        code, views = ("views-disagree", ["120°"]) if by == "peum" else ("map-moves", ["180°", "60°", "240°"])
        found = triage(rows, by=by, budget="100%").rows.to_pylist()
        reasons = {row["id"]: {r.code: r.values for r in from_rows(row["reasons"])} for row in found}
        assert reasons["a"][code]["views"] == views
        assert not {"map-moves", "views-disagree"} - {code} & set(reasons["a"])
        if code == "map-moves":  # the presented view does not move, even if its own map is constant
            assert "0°" not in reasons["b"][code]["views"]
            assert len(reasons["b"][code]["views"]) == 5


def test_a_signal_that_says_nothing_is_not_compared():
    rows = [row | {"view_confidence": None} for row in calibrated(150, peum=3.0)]
    found = triage(table(rows))
    assert "risk" not in {**found.quality.signals, **found.quality.differences}
    assert "risk" not in found.quality.comparison
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize("by", SIGNALS)
def test_reviewers_get_nothing_of_what_ranks(by, tmp_path):
    rows, same = [], {"view_top1": [0, 1, 0, 0, 0, 0], "confidence": 0.4}
    for i in range(20):
        lists = {"stability_by_view": [1.0] + [i / 100] * 5, "view_agreement": [0.1 + i / 100] * 6}
        rows.append(image_row(f"{i:02d}", i / 100, **same, **lists, view_confidence=[i / 40] * 6))
    found = triage(table(rows), by=by, budget="100%")
    every = [sentences(row) for row in found.rows.to_pylist()]
    assert all(any(r.startswith(("the views ", "the map moves")) for r in one) for one in every)
    reasons = [row["reasons"] for row in read_csv(found, tmp_path)]
    moves, drops = "the map moves", ("low confidence", "the prediction changes")
    hidden = {"stability": (moves,), "peum": ("(r = ",), "risk": (moves, *drops)}[by]
    for text in reasons:
        assert not any(reason.startswith(f"{SIGNALS[by]} ") for reason in text.split("; "))
        for word in ("higher than on", "lower than on", *hidden):
            assert word not in text
    shown = {"the prediction changes", "low confidence"} - {*hidden}
    assert all(word in text for text in reasons for word in shown)
    assert set(REVEALING) == set(SIGNALS)


@pytest.mark.parametrize("by", SIGNALS)
def test_the_report_follows_the_signal(by, tmp_path):
    run = fake_run(tmp_path)
    views = {"transforms": run.manifest.transforms, "classes": run.manifest.classes}
    found = triage(run.read_items(), by=by, budget="60%", **views)
    path = write_report(run, found)
    text, facts = Page(path.read_text()).text, json.loads(path.with_suffix(".json").read_text())
    named, ok = SIGNALS[by], run.read_items().filter(pa.compute.field("status") == "ok")
    assert facts["by"] == by
    quality = found.quality
    for sentence in (quality.sentence, quality.comparison, quality.check.sentence, found.unstable.sentence):
        assert sentence[1:] in text  # some begin with a capital there
    assert f"the least trustworthy by {named} first" in text
    assert f"Undefined {named} is not {'high' if by == 'stability' else 'low'} {named}." in text
    assert (f"Histogram of {named}; " in path.read_text()) == (by != "stability")
    for name in SIGNALS:
        assert facts["summary"][f"median_{name}"] == np.nanmedian(signal_values(ok, name))
    for q in facts["queue"]:
        assert all(q[name] is None or f"{q[name]:.3f}" in text for name in ("stability", "risk"))
    moving = [q for q in facts["queue"] if not {"blank", "constant"} & {*q["flags"]}]
    assert 0 < len(moving) < len(facts["queue"])
    assert path.read_text().count('class="curve"') == len(moving)
    assert [name for name in SIGNALS.values() if f"Does {name} find maps with a low Eq?" in text] == [named]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("signals"), count=40, calibrate=0)


def command(*arguments):
    done = COMMAND.invoke(app, [str(a) for a in arguments])
    return SimpleNamespace(code=done.exit_code, said=" ".join(done.output.split()))


def test_the_command_ranks_by_the_signal_and_says_so(run):
    for by, named in SIGNALS.items():
        done = command("triage", run.folder, "--by", by, "--budget", "50%")
        assert done.code == 0, done.said
        assert f"of the queue, by {named};" in done.said
        assert f"p {named} reasons" in done.said
        assert read_json(run.folder / "triage.json")["by"] == by
        assert read_json(run.folder / "triage.json")["options"]["by"] == by
        assert ranked_by(read_table(run.folder / "triage.parquet")) == by
        assert Log(run.folder).events("triaged")[-1].payload["options"]["by"] == by
    assert command("report", run.folder).code == 0
    assert read_json(run.folder / "report.json")["by"] == by


def test_the_command_says_how_good_the_signals_are(tmp_path):
    run = fake_run(tmp_path)
    done = command("triage", run.folder, "--by", "risk", "--budget", "50%")
    told = read_json(run.folder / "triage.json")
    sentences = [told[name]["sentence"] for name in ("unstable", "quality")]
    for sentence in (*sentences, told["quality"]["check"]["sentence"], told["quality"]["comparison"]):
        assert sentence in done.said
    assert "--alpha" not in " ".join(command("triage", "--help").said.split())
