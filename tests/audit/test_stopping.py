"""What a review may state when it stops: the bounds against slow twins and simulated audits, and extended queues."""

import itertools
import json
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import chisquare

import equicam
from equicam.errors import EquicamError
from equicam.evaluate.statistics import upper_bound
from equicam.runs import bounds
from equicam.runs.bounds import _Counts, _is_wrong, _more_reviews, arms_now, bound_unopened, count_verdicts
from equicam.runs.log import Log
from equicam.runs.queue_files import rank_again, read_queue
from equicam.runs.verdicts import ReviewKey, ReviewLog
from tests.audit.conftest import run_command
from tests.audit.faked import Page, fake_run, table
from tests.audit.test_triage import rows_of
from tests.audit.test_triage import run as made_up
from tests.audit.test_triage import triage as triage_by_peum
from tests.audit.test_verdicts import said

KEY = ReviewKey(b"k" * 32)


def counts(**given):
    """A finished review of 155 controls from 9,755 images outside the queue."""
    usual = dict.fromkeys(_Counts.__annotations__, 0) | {"outside": 9755, "controls": 155, "reviewed": 155}
    return _Counts(**(usual | given))


# Bounds


def slow_bound(k, n, confidence):
    """The largest p, to 1e-9, at which k successes or fewer are still as likely as 1 − confidence."""
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        p = (low + high) / 2
        at_most_k = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
        low, high = (p, high) if at_most_k >= 1 - confidence else (low, p)
    return low


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_bound_is_that_of_searching(confidence):
    for n in (1, 2, 7, 30, 155):
        for k in {0, 1, n // 3, n - 1, n} - {n + 1}:
            slow = slow_bound(k, n, confidence)
            assert upper_bound(k, n, confidence=confidence) == pytest.approx(slow, abs=2e-9)
    assert upper_bound(0, 155) == pytest.approx(1 - 0.05 ** (1 / 155), abs=1e-12)
    assert round(100 * upper_bound(0, 155), 3) == 1.914
    assert upper_bound(4, 4) == 1
    for k, n in ((-1, 3), (4, 3)):
        with pytest.raises(EquicamError, match="successes needs a count from 0 to 3"):
            upper_bound(k, n)


def test_no_hit_in_155():
    found = bound_unopened(counts(found=40))
    bound = 1 - 0.05 ** (1 / 155)
    assert (found.unopened, found.unopened_share, found.recall) == (9600, 0, 1)
    stated = found.outside_bound, found.unopened_bound, found.recall_bound
    assert stated == pytest.approx((bound, bound * 9755 / 9600, 40 / (40 + bound * 9755)))
    assert found.sentence == (
        "Of the 9,600 maps nobody opened at most 2 % are wrong (95 % confidence; 0 of 155 drawn at random were). "
        "The review has found 40 wrong maps, at least 17 % of all wrong maps."
    )
    json.dumps(found.to_json(), allow_nan=False)


def test_undecided_maps_weaken_every_bound():
    decided = bound_unopened(counts(wrong=2, found=42))
    found = bound_unopened(counts(wrong=2, undecided=3, found=42, undecided_everywhere=10))
    missed = upper_bound(5, 155) * 9755 - 2  # the undecided may be right, so only two wrong maps are known
    assert decided.unopened_bound < found.unopened_bound == pytest.approx(missed / 9600)
    assert decided.recall_bound > found.recall_bound == pytest.approx(42 / (42 + 10 + missed))
    assert found.unopened_share == 2 / 152
    assert found.sentence == (
        "Of the 9,600 maps nobody opened at most 6.8 % are wrong (95 % confidence; 5 of 155 drawn at random were, counting 3 "
        "undecided as wrong). The review has found 42 wrong maps, at least 6 % of all wrong maps (10 undecided, not counted as found)."
    )


def test_what_is_not_reviewed_is_stated():
    part = bound_unopened(counts(controls=160, wrong=1, found=9, queue_left=12)).sentence
    assert part.startswith("Of the 9,600 maps outside the queue that nobody opened at most 3.1 % are")
    assert "1 of 155 drawn at random was)" in part
    left = "5 images of the control arm are not reviewed yet. 12 images of the queue are not reviewed yet."
    assert part.endswith(left)
    assert bound_unopened(counts(queue_left=1)).sentence.endswith("1 image of the queue is not reviewed yet.")
    assert bound_unopened(counts()).sentence.endswith("The review has found no wrong map.")


def test_without_a_random_verdict_there_is_no_bound():
    for given, why in (
        ({"reviewed": 0, "found": 7}, "none of the 155 drawn at random, the control arm, has been reviewed. The review has found 7 wrong maps."),
        ({"reviewed": 0, "controls": 1, "found": 1}, "the one drawn at random, the control arm, has not been reviewed. The review has found 1 wrong map."),
        ({"reviewed": 0, "controls": 0, "queue_left": 3}, "3 images of the queue are not reviewed yet."),
        ({"controls": 160, "reviewed_before": 2, "queue_left": 1}, "5 images of the control arm are not reviewed yet. 1 image of the queue is not reviewed yet."),
    ):  # fmt: skip
        found = bound_unopened(counts(**given))
        assert found.outside_bound is found.unopened_share is found.unopened_bound is None
        assert found.recall is found.recall_bound is None
        assert found.sentence.startswith("Whether the 9,755 maps outside the queue are right is not known")
        assert found.sentence.endswith(why)
    only_unsure = bound_unopened(counts(reviewed=3, undecided=3, undecided_everywhere=3))
    assert only_unsure.unopened_bound == 1
    assert only_unsure.unopened_share is only_unsure.recall is None


def test_where_nothing_is_left_the_count_is_exact():
    whole = bound_unopened(counts(outside=155, wrong=3, found=8))
    assert (whole.unopened, whole.unopened_bound, whole.recall_bound) == (0, 0, 1)
    assert whole.sentence == (
        "All 155 maps outside the queue are reviewed; 3 of them are wrong. The review has found 8 wrong maps, all there are."
    )
    queue = bound_unopened(counts(outside=0, controls=0, reviewed=0, found=8))
    assert queue.sentence == "Every map is in the queue. The review has found 8 wrong maps, all there are."
    assert bound_unopened(counts(outside=0, controls=0, reviewed=0)).recall is None


@pytest.mark.parametrize("share", [0.004, 0.0203, 0.05, 0.3, 0.777, 0.99951])
def test_sentences_round_to_the_safe_side(share):
    up, down = (float(bounds._percent(share, up=up).removesuffix(" %")) / 100 for up in (True, False))
    assert down - 1e-12 <= share <= up + 1e-12
    assert up - share <= 0.001
    assert share - down <= 0.01


def slow_more(c, share):
    """Count on until the statement is supported."""
    for n in range(c.reviewed, c.outside):
        if upper_bound(c.wrong + c.undecided, n) * c.outside - c.wrong <= share * (c.outside - n):
            return n - c.reviewed
    return None


def test_how_many_more_reviews_is_that_of_counting_on():
    rng, answers = np.random.default_rng(0), Counter()
    for _ in range(40):
        outside = int(rng.integers(20, 500))
        reviewed = int(rng.integers(1, outside // 2))
        wrong = int(rng.integers(0, min(4, reviewed + 1)))
        undecided = int(rng.integers(0, min(2, reviewed - wrong + 1)))
        c = counts(outside=outside, controls=reviewed, reviewed=reviewed, wrong=wrong, undecided=undecided)
        for share in (0.2, 0.05, 0.01):
            found = _more_reviews(c, share)
            assert found == slow_more(c, share)
            answers[found is None, found == 0] += 1
    assert len(answers) == 3  # none, some, and too many all occur


def test_more_reviews_make_the_statement_true():
    def after(more):
        reviewed = 155 + more
        return bound_unopened(counts(wrong=1, found=1, controls=reviewed, reviewed=reviewed))

    for text, more in after(0).more_reviews.items():
        assert after(more).unopened_bound <= float(text)
        assert not more or after(more - 1).unopened_bound > float(text)
    assert bound_unopened(counts(outside=300)).more_reviews == {"0.05": 0, "0.02": None, "0.01": None}


# Verdicts


def test_which_maps_are_wrong():
    cases = {
        False: ["supports", "second-reviewer supports", "unsure supports supports"],
        True: [
            "shortcut",
            "wrong-region shortcut supports",
            "second-reviewer shortcut",
            "unsure" + 2 * " shortcut",
        ],
        None: ["supports shortcut", "unsure", "second-reviewer", "unsure supports"],
    }
    for wrong, reviews in cases.items():
        assert [_is_wrong(verdicts.split()) for verdicts in reviews] == [wrong] * len(reviews)


def test_verdicts_are_counted_by_arm_and_by_what_they_represent(tmp_path):
    log = ReviewLog(tmp_path)
    arm = dict.fromkeys(("q0", "q1", "q2"), "queue") | {f"c{i}": "control" for i in range(6)}
    given = {"q0": "shortcut", "q1": "unsure", "c0": "supports", "c1": "wrong-region", "c2": "unsure"}
    for name, verdict in (given | {"c5": "shortcut", "elsewhere": "shortcut"}).items():
        said(log, name, "ana", verdict)
    said(log, "c0", "ana", "shortcut")  # the first verdict counts
    columns = {"id": list(arm), "arm": list(arm.values())}
    rows = pa.table(columns | {"represents_rest": [one == "control" for one in arm.values()]})
    usual = {"found": 4, "undecided": 1, "undecided_everywhere": 2}
    usual |= {"outside_both_samples": 1, "wrong_outside_both_samples": 1}
    counted = _Counts(**usual, outside=97, controls=6, reviewed=4, wrong=2, queue_left=1)
    assert count_verdicts(log, rows, 100) == counted
    extended = pa.table(columns | {"represents_rest": [name in ("c0", "c1", "c2", "c3") for name in arm]})
    # c4, which the queue has reached, is not reviewed either
    counted = _Counts(**usual, outside=95, controls=4, reviewed=3, wrong=1, queue_left=2)
    assert count_verdicts(log, extended, 100) == counted
    # rates take a control that the queue has reached for the queue
    assert arms_now(extended) == arm | {"c4": "queue", "c5": "queue"}


def test_images_of_the_queue_without_a_verdict_may_all_be_wrong_and_every_extension_is_a_look_more():
    begun = bound_unopened(counts(outside=0, controls=0, reviewed=0, found=1, queue_left=59))
    assert (begun.recall_bound, begun.recall) == (1 / 60, None)
    assert "1 wrong map, at least 1.6 % of all wrong maps." in begun.sentence
    late = bound_unopened(counts(found=40, queue_left=10))
    assert late.recall_bound < bound_unopened(counts(found=40)).recall_bound
    assert bound_unopened(counts(outside=0, controls=0, reviewed=0, found=1)).recall_bound == 1
    once, again = bound_unopened(counts()), bound_unopened(counts(extensions=2))
    assert again.outside_bound == upper_bound(0, 155, confidence=1 - 0.05 / 3) > once.outside_bound
    assert "(95 % confidence in all 3 looks together; 0 of 155" in again.sentence


@pytest.mark.slow
def test_an_auditor_who_stops_when_it_pleases_is_held_to_the_confidence():
    """Looks after every extension until at most 5 % can be stated, where more than 5 % are wrong."""
    rng, false = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(2000):
        wrong = rng.permutation(np.arange(2000) < 104)  # 5.2 %
        for corrected in false:
            for look in range(6):
                n = 59 + 30 * look
                hits, extensions = int(wrong[:n].sum()), look * corrected
                c = counts(outside=2000, controls=n, reviewed=n, wrong=hits, extensions=extensions)
                if bound_unopened(c, shares=()).outside_bound <= 0.05:
                    false[corrected] += 1
                    break
    assert false[True] / 2000 <= 0.05 < false[False] / 2000


def review(run, rows):
    """Ana finds the maps of the queue wrong, and the others right."""
    log = ReviewLog(run.folder)
    for row in rows:
        said(log, row["id"], "ana", "shortcut" if row["arm"] == "queue" else "supports")


def test_verdicts_of_an_earlier_queue_are_not_a_random_sample(tmp_path):
    run = equicam.Run(fake_run(tmp_path))
    run.triage(budget=12)
    review(run, first := read_queue(run.store).to_pylist())
    assert not run.bound().counts.may_be_selected
    run.triage(budget=12, by="peum", seed=3)
    arms = {row["id"]: row["arm"] for row in read_queue(run.store).to_pylist()}
    found, given = run.bound(), {row["id"] for row in first}
    assert found.counts.outside_both_samples == len(given - arms.keys()) > 0
    assert found.counts.reviewed_before == sum(arms.get(name) == "control" for name in given)
    assert found.unopened == found.counts.outside - found.counts.reviewed - found.counts.outside_both_samples
    assert found.unopened_bound is None or not found.counts.may_be_selected


# Simulated audits

AUDITS, IMAGES, QUEUE, CONTROLS, MORE_QUEUE, MORE_CONTROLS = 2000, 1000, 60, 80, 40, 40
QUALITIES = {"random": 0.0, "good": 2.0, "perfect": 1e9}


def lowest(keys, count):
    return keys <= np.partition(keys, count - 1, axis=1)[:, count - 1 : count]


def simulate(rng, prevalence, quality, extends):
    """Which maps are wrong, by rank; which of them lie in the queue; which are random controls."""
    wrong = rng.random((AUDITS, IMAGES)) < prevalence
    order = np.argsort(-(QUALITIES[quality] * wrong + rng.standard_normal(wrong.shape)), axis=1)
    wrong = np.take_along_axis(wrong, order, axis=1)
    keys = rng.random(wrong.shape)
    keys[:, :QUEUE] = 2
    control = lowest(keys, CONTROLS)
    if not extends:
        return wrong, QUEUE, control
    # controls outside the longer queue stay; as many are drawn to them as to have MORE_CONTROLS more
    keys = rng.random(wrong.shape) - control
    keys[:, : QUEUE + MORE_QUEUE] = 2
    control = lowest(keys, CONTROLS + MORE_CONTROLS)
    return wrong, QUEUE + MORE_QUEUE, control


@pytest.mark.parametrize("extends", [False, True])
def test_bounds_hold_as_often_as_they_state(extends):
    rng, least, cover = np.random.default_rng(11), 0.95 - 3 * math.sqrt(0.95 * 0.05 / AUDITS), {}
    cases = [(*case, 0) for case in itertools.product((0.005, 0.02, 0.10), QUALITIES)]
    cases += [(0.02, "good", 0.1), (0.10, "random", 0.1)]
    for prevalence, quality, unsure in cases:
        wrong, queue, control = simulate(rng, prevalence, quality, extends)
        undecided = rng.random(wrong.shape) < unsure
        opened = control.copy()
        opened[:, :queue] = True
        n = int(control[0].sum())
        assert (control.sum(1) == n).all()
        sums = (
            (wrong & ~undecided & control).sum(1), (undecided & control).sum(1), (wrong & ~undecided & opened).sum(1),
            (undecided & opened).sum(1),
        )  # fmt: skip
        unopened, missed, all_wrong = IMAGES - queue - n, (wrong & ~opened).sum(1), wrong.sum(1)
        stated, truth = {}, zip(*(s.tolist() for s in (*sums, missed, all_wrong)), strict=True)
        share_holds = recall_holds = 0
        for k, u, found, u_all, left, total in truth:
            if (k, u, found, u_all) not in stated:
                c = counts(outside=IMAGES - queue, controls=n, reviewed=n, wrong=k, undecided=u, found=found,
                           undecided_everywhere=u_all)  # fmt: skip
                stated[k, u, found, u_all] = bound_unopened(c, shares=())
            r = stated[k, u, found, u_all]
            share_holds += left / unopened <= r.unopened_bound
            recall_holds += total == 0 or found / total >= r.recall_bound
        cover[prevalence, quality, unsure] = share_holds / AUDITS, recall_holds / AUDITS
    assert all(min(pair) >= least for pair in cover.values()), cover
    assert min(share for share, _ in cover.values()) < 0.985, cover  # and not because they state nothing


# Extended queues


def without_representing(rows):
    return [{k: v for k, v in row.items() if k != "represents_rest"} for row in rows]


@pytest.mark.parametrize("quotas", [True, False])
@pytest.mark.parametrize("key", [KEY, None])
def test_an_extension_keeps_what_was_dealt(quotas, key):
    items = table(made_up(300))
    options = {"budget": 40, "quotas": quotas, "key": key, "control": 0.3}
    before = triage_by_peum(items, **options).rows.to_pylist()
    assert [row["represents_rest"] for row in before] == [row["arm"] == "control" for row in before]
    extended = []
    for more in (20, 35, 7):
        extended.append(more)
        found = triage_by_peum(items, **options, extended=extended)
        rows = found.rows.to_pylist()
        assert found.budget == len(rows) == len(before) + more
        assert without_representing(rows[: len(before)]) == without_representing(before)
        assert [row["place"] for row in rows] == list(range(1, len(rows) + 1))
        assert len({row["id"] for row in rows}) == len(rows)
        new = Counter(row["arm"] for row in rows[len(before) :])
        now = [row["represents_rest"] for row in rows]
        passed = sum(row["represents_rest"] and not now[row["place"] - 1] for row in before)
        assert new["control"] == math.floor(0.3 * more + 0.5) + passed
        controls = 12 + sum(math.floor(0.3 * reviews + 0.5) for reviews in extended)
        assert sum(row["represents_rest"] for row in rows) == controls
        reached = [row for row in rows if not row["represents_rest"]]
        assert {row["arm"] for row in rows if row["represents_rest"]} == {"control"}
        if not quotas:
            assert sorted(row["rank"] for row in reached) == list(range(1, len(reached) + 1))
        before = rows
    assert any(row["arm"] == "control" for row in reached)  # the queue did reach some
    other = triage_by_peum(items, **(options | {"key": ReviewKey(b"o" * 32)}), extended=extended).rows
    assert {*other["id"].to_pylist()} != {row["id"] for row in rows}


def test_an_extended_queue_is_still_the_head_of_every_class():
    items = table(made_up(300))
    whole = triage_by_peum(items, budget="100%").rows.to_pylist()
    found = triage_by_peum(items, budget=60, extended=[40, 40], key=KEY).rows.to_pylist()
    reached = {row["id"] for row in found if not row["represents_rest"]}
    for one in {row["target"] for row in whole}:
        by_rank = sorted((row for row in whole if row["target"] == one), key=lambda row: row["rank"])
        inside = [row["id"] in reached for row in by_rank]
        assert inside == sorted(inside, reverse=True)
        assert sum(inside) >= Fraction(len(by_rank) * 96, len(whole)) - 2


@pytest.mark.slow
def test_the_controls_of_an_extended_queue_are_a_random_sample_of_the_rest():
    items, samples, places = rows_of(12), Counter(), Counter()
    options = {"budget": 6, "control": 0.34, "quotas": False, "extended": [3]}
    for i in range(1000):
        rows = triage_by_peum(items, key=ReviewKey(i.to_bytes(32)), **options).rows.to_pylist()
        samples[tuple(sorted(row["id"] for row in rows if row["represents_rest"]))] += 1
        places.update(row["place"] for row in rows[6:] if row["represents_rest"])
    rest = [f"{i:02d}" for i in range(6)]  # 4 and 2 places of the queue
    assert set(samples) == set(itertools.combinations(rest, 3))
    assert chisquare(list(samples.values())).pvalue > 1e-3
    assert chisquare([places[i] for i in (7, 8, 9)]).pvalue > 1e-3


def test_an_extension_ends_with_the_images():
    items = rows_of(30)
    found = triage_by_peum(items, budget=10, extended=[500], key=KEY)
    assert found.budget == found.rows.num_rows == 30
    some = "a number of reviews from 1"
    for extended, why in (([500, 1], "images that are in no arm yet"), ([0], some), ([-5], some)):
        with pytest.raises(EquicamError, match=f"more needs {why}"):
            triage_by_peum(items, budget=10, extended=extended, key=KEY)


def test_a_run_is_extended_reviewed_and_reported(tmp_path):
    run = equicam.open_run(fake_run(tmp_path, calibrate=0).folder)
    with pytest.raises(EquicamError, match="needs a queue to extend"):
        run.triage(more=5)
    run.triage(12, control=0.4, seed=3)
    assert "outside the queue are right is not known yet" in run_command("report", run.folder)
    first = read_queue(run.store).to_pylist()
    review(run, first)
    assert run.bound().counts.queue_left == 0
    for given in ({"by": "risk"}, {"budget": 3}, {"seed": 3}):
        with pytest.raises(EquicamError, match=f"no other option.*got {next(iter(given))}"):
            run.triage(more=5, **given)
    assert read_queue(run.store).to_pylist() == first
    run.triage(more=5)
    run_command("triage", run.folder, "--more", 4)
    rows = read_queue(run.store).to_pylist()
    assert without_representing(rows[:12]) == without_representing(first)
    assert len(rows) == 21
    stored = json.loads((run.folder / "triage.json").read_text())["options"]
    assert (stored["extended"], stored["seed"]) == ([5, 4], 3)
    events = [event.payload["options"] for event in Log(run.folder).events("triaged")]
    assert [options.get("extended") for options in events] == [None, [5], [5, 4]]
    assert rank_again(run.store).rows.to_pylist() == rows
    found = run.bound()
    assert found.counts.queue_left == sum(not row["represents_rest"] for row in rows[12:])
    assert found.counts.reviewed == sum(row["represents_rest"] for row in rows[:12])
    assert found.counts.found == 7
    assert found.sentence in " ".join(run_command("report", run.folder).split())
    assert json.loads((run.folder / "report.json").read_text())["remainder"] == found.to_json()
    page = Page((run.folder / "report.html").read_text()).text
    assert page.index(found.sentence) < page.index("Stability, and the queue’s quality")
    differences = " ".join(run.verify(sample=0).problems)
    assert "digests.json" in differences  # which this run has not
    assert not any(name in differences for name in ("triage", "queue.csv"))
