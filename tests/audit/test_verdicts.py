"""What verdicts add up to: who said what, whether readers agree, and whether the queue finds more."""

import json

import numpy as np
import pyarrow.compute as pc
import pytest
from sklearn.metrics import cohen_kappa_score

from equicam.errors import EquicamError
from equicam.runs.bounds import _majority, summarise_reviews
from equicam.runs.log import Log
from equicam.runs.report.page import choose_examples, write_report
from equicam.runs.verdicts import VERDICTS, ReviewLog, StaleError, reviewer_name
from tests.audit.faked import HOSTILE, Page, fake_run, triaged

ARMS = {f"q{i}": "queue" for i in range(20)} | {f"c{i}": "control" for i in range(10)}


def said(readings, item, who, verdict, *, blind=True):
    before = readings.standing(who).get(item)
    seen = before.number if before else 0
    reason = "again" if before else ""
    return readings.add_verdict(
        item, who, verdict, reason=reason, blind=blind, previous_event=seen, mark=f"{who}-{item}-{seen}-mark"
    )


@pytest.fixture
def readings(tmp_path):
    return ReviewLog(tmp_path)


def test_the_last_stands_and_all_are_kept(readings):
    first = said(readings, "q0", "ana", "supports")
    second = said(readings, "q0", "ana", "unsure")
    assert [v.verdict for v in readings.verdicts("q0")] == ["supports", "unsure"]
    assert (first.blind, second.blind) == (True, False)
    assert (second.changes, second.previous) == (first.number, first.hash)
    assert readings.standing("ana") == {"q0": second}
    assert readings.standing("bo") == {}


def test_what_is_refused(readings):
    with pytest.raises(EquicamError, match="a verdict needs one of supports, shortcut"):
        said(readings, "q0", "ana", "fine")
    made = said(readings, "q0", "ana", "supports")
    for kind, why, item, given in (
        (StaleError, "reloading the image", "q0", {"reason": "x", "previous_event": 0, "mark": "other-mark"}),
        (EquicamError, "needs a reason", "q0", {"previous_event": made.number, "mark": "other-mark"}),
        (StaleError, "a mark of its own", "q1", {"previous_event": 0, "mark": "ana-q0-0-mark"}),
    ):
        with pytest.raises(kind, match=why):
            readings.add_verdict(item, "ana", "unsure", blind=True, **given)
    with pytest.raises(EquicamError, match="a note needs words"):
        readings.add_note("q0", "ana", "  ", mark="note-mark")
    with pytest.raises(StaleError):
        readings.add_note("q0", "ana", "words", mark="ana-q0-0-mark")
    assert len(Log(readings.log.path.parent).events()) == 1


def test_two_processes_count_a_mark_once(readings):
    one = said(readings, "q0", "ana", "supports")
    other = ReviewLog(readings.log.path.parent)
    again = {"blind": True, "previous_event": 0, "mark": "ana-q0-0-mark"}
    assert other.add_verdict("q0", "ana", "supports", **again) == one


def test_foreign_events_are_left_alone(readings):
    log = readings.log
    for payload in ({}, {"item": 3, "verdict": "supports"}, {"item": "q0", "verdict": "stable"}, {"by": "x"}):
        log.add("verdict", payload)
    log.add("other", {"item": "q0", "verdict": "supports"})
    readings.refresh()
    assert readings.verdicts() == ()


@pytest.mark.parametrize(("given", "kept"), [(" ana ", "ana"), ("Zoe\u0308", "Zoë"), ("李 雷", "李 雷")])
def test_names(given, kept):
    assert reviewer_name(given) == kept


def test_an_image_is_settled_by_majority():
    hits = "shortcut", "wrong-region shortcut", "second-reviewer shortcut", "supports shortcut wrong-region"
    cases = {True: hits, False: ["supports", "unsure"], None: ["second-reviewer", "supports shortcut", ""]}
    for hit, reviews in cases.items():
        assert [_majority(verdicts.split()) for verdicts in reviews] == [hit] * len(reviews)


def test_hit_rates_of_both_arms(readings):
    for i in range(20):
        said(readings, f"q{i}", "ana", "shortcut" if i < 14 else "supports")
    for i, verdict in enumerate(["wrong-region", *["unsure"] * 8, "second-reviewer"]):
        said(readings, f"c{i}", "ana", verdict)
    said(readings, "elsewhere", "ana", "shortcut")
    found = summarise_reviews(readings, ARMS)
    assert (found.first.queue.value, found.first.queue.n) == (0.7, 20)
    assert (found.first.control.value, found.first.control.n) == (pytest.approx(1 / 9), 9)
    assert found.first.difference.low > 0
    assert "finds more than chance" in found.first.sentence
    assert (found.reviewed, found.reviewed_twice, found.first.open, found.unblinded) == (30, 0, 1, 0)
    assert dict(zip(VERDICTS, (0, 0, 1, 8, 1), strict=True)) == found.counts["control"]
    json.dumps(found.to_json(), allow_nan=False)


def test_first_verdicts_measure_and_standing_ones_are_told_beside(readings):
    for i in range(6):
        said(readings, f"q{i}", "ana", "supports", blind=i > 0)
        said(readings, f"q{i}", "ana", "shortcut")
    found = summarise_reviews(readings, ARMS)
    assert (found.first.queue.value, found.standing.queue.value) == (0, 1)
    assert (found.changed, found.unblinded) == (6, 1)
    assert "a comparison needs both" in found.first.sentence


def test_no_difference_is_not_called_one(readings):
    for name in ("q0", "q1", "c0", "c1"):
        said(readings, name, "ana", "shortcut" if name.endswith("0") else "supports")
    assert "is not shown to find more" in summarise_reviews(readings, ARMS).first.sentence
    assert summarise_reviews(ReviewLog(readings.log.path.parent / "none"), ARMS) is None


def test_agreement_is_cohens_on_what_both_read_first(readings):
    rng = np.random.default_rng(1)
    names, a = list(VERDICTS), rng.integers(0, 5, 20)
    b = np.where(rng.random(20) < 0.7, a, rng.integers(0, 5, 20))
    for i in range(20):
        said(readings, f"q{i}", "ana", names[a[i]])
        said(readings, f"q{i}", "bo", names[b[i]])
        said(readings, f"q{i}", "bo", "unsure")  # after seeing the other's: it does not count here
    said(readings, "c0", "cy", "supports")
    (pair,) = summarise_reviews(readings, ARMS).pairs
    assert (pair.reviewers, pair.agreement.n) == (("ana", "bo"), 20)
    assert pair.kappa.value == pytest.approx(cohen_kappa_score(a, b))
    assert pair.kappa.low < pair.kappa.value < pair.kappa.high
    assert pair.agreement.value == pytest.approx((a == b).mean())


def test_the_report_tells_what_reviewers_found(tmp_path):
    run = fake_run(tmp_path)
    path = write_report(run, triage := triaged(run))
    assert "What reviewers found" not in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["review"] is None
    rows, readings = triage.rows.to_pylist(), ReviewLog(run.folder)
    for row in rows:
        said(readings, row["id"], "ana <b>", "shortcut" if row["arm"] == "queue" else "supports")
    queue, controls = ([row["id"] for row in rows if row["arm"] == arm] for arm in ("queue", "control"))
    for name in queue[:8]:
        said(readings, name, "bo", "shortcut" if name != queue[0] else "unsure")
    said(readings, queue[0], "bo", "supports")
    readings.add_note(queue[0], "bo", "ask <i>again</i>", mark="note-0001")
    path = write_report(run, triage)
    page, facts = Page(path.read_text()), json.loads(path.with_suffix(".json").read_text())
    told = facts["review"]
    assert told["first"]["queue"]["n"] == len(queue) - 1  # one image is open
    high = pytest.approx(0.5615, abs=1e-4)
    assert told["first"]["control"] == {"value": 0.0, "low": 0.0, "high": high, "n": 3, "groups": None}
    assert told["pairs"][0]["reviewers"] == ["ana <b>", "bo"]
    words = "What reviewers found", "Cohen’s κ", "1 verdict was changed", "ask <i>again</i>", "ana <b>"
    assert all(text in page.text for text in (*words, told["first"]["sentence"]))
    assert any(len(q["verdicts"]) == 3 for q in facts["queue"])
    assert {row["id"] for row in facts.pop("images")} > set(controls)  # as of any other image
    plain = [name for name in controls if name not in HOSTILE]
    assert plain
    assert not any(name in json.dumps(facts) for name in plain)
    # chosen by stability alone, arms play no part
    examples = choose_examples(run, run.read_items().filter(pc.equal(run.read_items()["status"], "ok")))
    shown = {example.row["id"] for example in (*examples["best"], *examples["worst"])}
    assert all(path.read_text().count(name) == 1 + (name in shown) for name in plain)
