"""Reading a queue: what is told when, verdicts that are only added, and files that can change meanwhile."""

import csv
import io
import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from urllib.parse import quote

import numpy as np
import pyarrow.compute as pc
import pytest
from PIL import Image

from equicam.auditing.log import Log
from equicam.auditing.review_log import VERDICTS, ReviewLog
from equicam.review.queue import A_PAGE, Shelves, key_of
from equicam.shards import read_table, write_table
from tests.audit.faked import BLANK, CHANGED, HOSTILE, MISSING, Page, fake_run
from tests.web.conftest import House, many, ranked

HIDDEN = ("label", "class", "prob", "peum", "rank", "arm", "evidence", "top5", "eq", "flip_rate")


def arms(run):
    table = read_table(run.folder / "triage.parquet")
    return dict(zip(table["id"].to_pylist(), table["arm"].to_pylist(), strict=True))


def by_key(run):
    return {key_of(name): name for name in arms(run)}


def events(run, kind="verdict"):
    return Log(run.folder).events(kind)


def everything(reader, key):
    """All that one reader can get on a picture, as text."""
    row = next(one for one in reader.list() if one["key"] == key)
    return [json.dumps(row), reader.get(f"/api/item/{key}").text, reader.get(f"/item/{key}").text]


def test_blind_nothing_is_told_before_the_verdict_and_all_but_the_arm_after(run, ana):
    rows = {row["id"]: row for row in run.read_items().to_pylist()}
    for one in ana.list():
        name = by_key(run)[one["key"]]
        facts = ana.get(f"/api/item/{one['key']}").json()
        assert facts["hidden"]
        assert all(facts.get(field) is None for field in (*HIDDEN, "known"))
        assert all(
            view["prob"] is None and view["class"] is None and not view["flips"] for view in facts["views"]
        )
        assert not any(reason.startswith(("PEUM", "low confidence")) for reason in facts["reasons"])
        for text in everything(ana, one["key"]):
            for secret in (
                "tumour",
                "normal",
                "evidence words",
                f"{rows[name]['prob']:.3f}",
                f"{rows[name]['peum']:.4f}",
            ):
                assert secret not in text
            assert not re.search(
                r"\b(control|arm|rank)\b",
                text.replace('"arm": null', "").replace('"arm":null', "").replace('"rank":null', ""),
            )
        break_at = ana.decide(one["key"], "supports")
        assert break_at.status_code == 200
        after = ana.get(f"/api/item/{one['key']}").json()
        assert after["known"]["prob"] == pytest.approx(rows[name]["confidence"])
        assert (
            "tumour" in ana.get(f"/item/{one['key']}").text or "normal" in ana.get(f"/item/{one['key']}").text
        )
        done = len(events(run)) == len(arms(run))
        assert (after["arm"] is None) != done
        if one["place"] == 3:
            break


def test_the_name_is_hidden_too_for_it_often_holds_the_label(run, ana):
    plain = [name for name in arms(run) if name.startswith("slide-")]
    page = ana.get("/").text + json.dumps(ana.list())
    assert plain
    assert not any(name in page for name in plain)


def test_what_another_reader_said_stays_hidden_until_ones_own_verdict(house, ana):
    bo, key = house.reader("bo"), ana.list()[0]["key"]
    ana.decide(key, "wrong-region", reason="the fat cell, surely")
    ana.post("/api/note", {"key": key, "text": "see slide 4", "mark": "note-0001"})
    before = "".join(everything(bo, key))
    assert not any(words in before for words in ("fat cell", "slide 4", "by</span> <bdi>ana"))
    assert '"wrong-region", "seen"' not in before
    bo.decide(key, "supports")
    after = "".join(everything(bo, key))
    assert "fat cell" in after
    assert "slide 4" in after


def test_the_order_is_by_peum_with_the_random_arm_spread_evenly(run, tmp_path):
    where = arms(run)
    rank = dict(
        zip(*(read_table(run.folder / "triage.parquet")[c].to_pylist() for c in ("id", "rank")), strict=True)
    )
    shelf = Shelves(run, blind=True).newest()
    queue = [rank[e.id] for e in shelf.entries if where[e.id] == "queue"]
    assert queue == sorted(queue)
    assert {e.id for e in shelf.entries} == set(where)
    big = Shelves(many(tmp_path / "many", 20_000), blind=True).newest()
    at = np.array([i for i, e in enumerate(big.entries) if e.arm == "control"]) / len(big.entries)
    assert len(at) == 4000
    assert np.abs(np.histogram(at, 10, (0, 1))[0] - 400).max() < 90  # > 4 standard deviations
    gaps = np.diff(at * len(big.entries))
    assert gaps.std() > 0.7 * gaps.mean()  # a constant distance would be a mark


def test_open_shows_all_and_sorts_by_rank(run):
    reader = House(run, blind=False).reader()
    rows = reader.list()
    where = arms(run)
    rank = dict(
        zip(*(read_table(run.folder / "triage.parquet")[c].to_pylist() for c in ("id", "rank")), strict=True)
    )
    order = [rank[by_key(run)[row["key"]]] for row in rows]
    assert order == sorted(order)
    facts = reader.get(f"/api/item/{rows[0]['key']}").json()
    assert facts["known"]["class"]
    assert facts["rank"] == order[0]
    assert facts["arm"] == where[by_key(run)[rows[0]["key"]]]
    assert {by_key(run)[r["key"]] for r in reader.list(arm="control")} == {
        i for i, a in where.items() if a == "control"
    }


def test_the_arm_filter_opens_when_everything_is_read(run, ana):
    assert ana.get("/api/queue?arm=control").status_code == 422
    assert 'name="arm"' not in ana.get("/").text
    for row in ana.list():
        assert ana.decide(row["key"], "supports").status_code == 200
    assert (
        ana.get("/api/queue?arm=control").json()["matching"]
        == sum(a == "control" for a in arms(run).values())
        > 0
    )
    assert 'name="arm"' in ana.get("/").text


def test_filters(run, ana):
    rows = ana.list()
    first, second = rows[0]["key"], rows[1]["key"]
    ana.decide(first, "shortcut")
    ana.decide(second, "unsure")
    assert [r["key"] for r in ana.list(verdict="shortcut")] == [first]
    assert [r["key"] for r in ana.list(verdict="read")] == [first, second]
    assert len(ana.list(verdict="unread")) == len(rows) - 2
    blank = {key_of(i) for i in arms(run)} & {key_of(BLANK)}
    assert {r["key"] for r in ana.list(flag="blank")} == blank
    named = ana.get(f"/api/item/{first}").json()["known"]["class"]
    # blind, a class may only find what was read: else it would tell the prediction of the rest
    assert {r["key"] for r in ana.list(**{"class": named})} <= {first, second}
    assert first in {r["key"] for r in ana.list(**{"class": named})}
    assert ana.list(verdict="nonsense") == []


def test_a_second_reader_finds_what_waits_for_one(house, ana):
    key = ana.list()[0]["key"]
    ana.decide(key, "second-reviewer")
    bo = house.reader("bo")
    assert [r["key"] for r in bo.list(verdict="to-second")] == [key]
    assert ana.list(verdict="to-second") == []
    bo.decide(key, "supports")
    assert bo.list(verdict="to-second") == []


def test_a_page_of_the_list_is_bounded_and_pages_cover_it_once(tmp_path):
    ana = House(many(tmp_path)).reader()
    answer = ana.get("/api/queue?limit=1000000")
    assert len(answer.json()["items"]) == A_PAGE
    assert len(answer.content) < 60_000
    assert len(ana.get("/").content) < 20_000
    keys = [row["key"] for start in range(0, 1000, 100) for row in ana.list(offset=start, limit=100)]
    assert len(set(keys)) == len(keys) == 1000
    last = ana.get("/api/queue?offset=99990").json()
    assert (last["matching"], len(last["items"])) == (100_000, 10)
    assert ana.get("/api/queue?offset=-5&limit=-5").json()["offset"] == 0
    assert ana.get("/api/queue?offset=1e9").status_code == 422


def test_a_change_is_a_new_event_that_keeps_the_old(run, ana):
    key = ana.list()[0]["key"]
    first = ana.decide(key, "supports").json()["number"]
    refused = ana.decide(key, "unsure", seen=first)
    assert refused.status_code == 422
    assert "a changed verdict needs a reason" in refused.json()["error"]
    second = ana.decide(key, "unsure", seen=first, reason="looked again").json()["number"]
    kept = events(run)
    assert [e.payload["verdict"] for e in kept] == ["supports", "unsure"]
    assert [e.payload["changes"] for e in kept] == [None, first]
    assert [e.payload["blind"] for e in kept] == [True, False]
    assert all(e.who == "ana" and e.time.endswith("+00:00") for e in kept)
    everything_logged = Log(run.folder).events()
    assert all(b.previous == a.hash for a, b in pairwise(everything_logged))
    assert Log(run.folder).problems() == []
    page = ana.get(f"/item/{key}").text
    assert "looked again" in page
    assert f"changes event {first}" in page
    assert second > first


def test_sent_again_it_counts_once(run, ana):
    key = ana.list()[0]["key"]
    answers = [ana.decide(key, "supports", mark="the-same-mark") for _ in range(3)]
    assert [a.status_code for a in answers] == [200] * 3
    assert len({a.json()["number"] for a in answers}) == 1
    assert len(events(run)) == 1
    assert ana.decide(key, "unsure", mark="the-same-mark").status_code == 409
    assert len(events(run)) == 1


def test_a_window_that_is_behind_is_told(run, ana):
    key = ana.list()[0]["key"]
    ana.decide(key, "supports")
    late = ana.decide(key, "unsure", seen=0, reason="from the other tab", mark="another-mark")
    assert late.status_code == 409
    assert len(events(run)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "stable"}, {"verdict": 3}, {"verdict": "supports", "more": 1}, {"key": "../../etc"}, {"key": "f" * 20}, {"seen": -1}, {"seen": "0"}, {"mark": "short"},
        {"mark": "x" * 65}, {"reason": "x" * 2001}, {"reason": "x" * 5000}, {"reason": "\ud800"}, {"reason": "a\x00b"}, {"reason": None},
    ],
)  # fmt: skip
def test_a_post_that_is_not_ours_is_refused(run, ana, change):
    body = {
        "key": ana.list()[0]["key"],
        "verdict": "supports",
        "reason": "",
        "seen": 0,
        "mark": "12345678",
    } | change
    assert ana.post("/api/verdict", body).status_code in (404, 422)
    assert events(run) == []


@pytest.mark.parametrize("name", ["", " ", "x" * 61, "two\nlines", "\u202eevil", "a\x00"])
def test_a_reviewers_name_is_one_visible_line(ana, name):
    assert ana.post("/api/reviewer", {"name": name}).status_code == 422
    assert "reading as</span> <bdi>ana" in ana.get("/").text


def test_without_a_name_the_page_asks_for_one(house):
    nobody = house.reader(None)
    assert nobody.get("/").headers["location"] == "/who"
    assert nobody.get("/api/queue").status_code == 422


def test_two_reviewers_at_once_lose_nothing(house, run):
    readers = [house.reader(name) for name in ("ana", "bo")]
    keys = [row["key"] for row in readers[0].list()]
    secrets = [reader.csrf for reader in readers]
    answers = []

    def read(reader, secret):
        for i, key in enumerate(keys):
            body = {
                "key": key,
                "verdict": list(VERDICTS)[i % 5],
                "seen": 0,
                "mark": f"{secret[:8]}-{i:04d}".replace("_", "-"),
            }
            answers.append(
                reader.http.post("/api/verdict", json=body, headers={"x-equicam-csrf": secret}).status_code
            )

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, secrets, strict=True)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert answers == [200] * (2 * len(keys))
    assert len(events(run)) == 2 * len(keys)
    assert Log(run.folder).problems() == []
    assert all(
        {v.reviewer for v in house_readings(run).verdicts(name)} == {"ana", "bo"} for name in arms(run)
    )


def house_readings(run):
    found = ReviewLog(run.folder)
    found.refresh()
    return found


def test_two_servers_over_one_run_see_each_other(run):
    one, two = House(run).reader("ana"), House(run).reader("bo")
    key = one.list()[0]["key"]
    one.decide(key, "supports", mark="from-one")
    two.decide(key, "unsure", mark="from-two")
    assert "Unsure" in one.get(f"/item/{key}").text.split("Verdicts so far")[1]
    again = House(run).reader("ana")
    assert again.list()[0]["verdict"] == "supports"


def test_ranked_anew_while_it_is_read(run, ana):
    before = ana.get("/api/queue").json()
    key = before["items"][0]["key"]
    ana.decide(key, "supports")
    ranked(run, budget="90%")
    after = ana.get("/api/queue").json()
    assert after["version"] != before["version"]
    assert after["matching"] > before["matching"]
    keys = [row["key"] for row in ana.list()]
    assert len(keys) == len(set(keys))
    assert next(row for row in ana.list() if row["key"] == key)["verdict"] == "supports"
    ranked(run, budget=1)
    gone = [k for k in keys if ana.get(f"/item/{k}").status_code == 404]
    assert len(gone) == len(keys) - 1


def test_a_run_that_is_still_written_is_read(run, ana):
    """Parts that are to come change nothing that is on the page."""
    (run.folder / "manifest.json").write_text(replace(run.manifest, images=5000).dumps())
    assert run.pending()
    reader = House(run).reader("ana")
    before = [row["key"] for row in reader.list()]
    (run.path("items", 1).parent / ".shard-000001.parquet.x.tmp").write_bytes(b"half")
    assert reader.decide(before[0], "supports").status_code == 200
    write_table(run.path("maps", 1), read_table(run.path("maps", 0)).slice(0, 0))
    write_table(run.path("items", 1), read_table(run.path("items", 0)).slice(0, 0))
    assert [row["key"] for row in reader.list()] == before
    assert reader.get(f"/item/{before[1]}").status_code == 200


def test_a_run_without_a_queue_says_what_to_do(tmp_path):
    reader = House(fake_run(tmp_path)).reader()
    answer = reader.get("/api/queue")
    assert answer.status_code == 422
    assert "equicam triage" in answer.json()["error"]


def test_hostile_names_are_text(run):
    reader = House(run, blind=False).reader()
    for row in reader.list():
        page = Page(reader.get(f"/item/{row['key']}").text)
        assert not [a for a in page.every("img") if "onerror" in a or a.get("src") == "x"]
        assert all(a.get("src", "").startswith("/static/") for a in page.every("script"))
        text = reader.get(f"/item/{row['key']}").text
        assert not any(c in text for c in "\u202e\u200f\x00\x1b")
        assert not re.search(r"[/=]" + re.escape(by_key(run)[row["key"]][:6]), row["key"])
    shown = {by_key(run)[row["key"]] for row in reader.list()}
    assert shown & set(HOSTILE)


@pytest.mark.parametrize(
    "kind", ["photo", "map", "single", "peum", "view-3", "strip", "thumb", "bare", "thumb-4"]
)
def test_pictures_are_drawn_and_not_sent_twice(run, ana, kind):
    key = next(key_of(i) for i in arms(run) if i not in (MISSING, CHANGED, BLANK))
    answer = ana.get(f"/picture/{key}/{kind}")
    assert answer.headers["content-type"] in ("image/png", "image/jpeg")
    picture = Image.open(io.BytesIO(answer.content))
    assert np.asarray(picture.convert("RGB")).std() > 5
    again = ana.get(f"/picture/{key}/{kind}", headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_views_differ_and_layers_are_clear_where_low(run, ana):
    key = next(key_of(i) for i in arms(run) if i not in (MISSING, CHANGED, BLANK))
    layers = [
        np.asarray(Image.open(io.BytesIO(ana.get(f"/picture/{key}/{kind}").content))).astype(float)
        for kind in ("map", "view-3", "view-9")
    ]
    assert all(layer.shape[-1] == 4 and layer[..., 3].min() < 30 for layer in layers)
    assert all(np.abs(a - b).mean() > 1 for a, b in pairwise(layers))


@pytest.mark.parametrize(
    ("name", "why"), [(MISSING, "no longer where it was"), (CHANGED, "has changed since")]
)
def test_a_picture_that_is_not_the_one_explained_is_not_shown(run, ana, name, why):
    key = key_of(name)
    if key not in ana.get("/api/queue?limit=200").text:
        ranked(run, budget="100%")
    assert ana.get(f"/picture/{key}/photo").status_code == 404
    assert why in ana.get(f"/item/{key}").text
    assert ana.get(f"/picture/{key}/map").status_code == 200


def test_a_row_that_points_elsewhere_sends_no_file(run, ana, tmp_path):
    """Even a run's own table gets no file out but as a picture it has the digest of."""
    secret = tmp_path / "secret.txt"
    secret.write_text("root:x:0:0")
    link = tmp_path / "link.png"
    link.symlink_to(secret)
    key = ana.list()[0]["key"]
    path = run.path("items", 0)
    table = read_table(path)
    for target in (secret, link, tmp_path / "pictures" / ".." / "secret.txt"):
        paths = [str(target)] * table.num_rows
        at = table.column_names.index("path")
        write_table(path, table.set_column(at, table.schema.field("path"), [paths]))
        answer = ana.get(f"/picture/{key}/photo")
        assert answer.status_code == 404
        assert b"root" not in answer.content


def test_a_blind_export_has_ones_own_verdicts_and_no_arm_and_a_finished_one_all(house, run, ana):
    bo = house.reader("bo")
    keys = [row["key"] for row in ana.list()]
    ana.decide(keys[0], "supports", reason="=HYPERLINK(1)")
    bo.decide(keys[1], "unsure", reason="bo's own")
    told = ana.get("/export/verdicts.json")
    assert told.headers["content-disposition"] == 'attachment; filename="verdicts.json"'
    assert [row["reviewer"] for row in told.json()["verdicts"]] == ["ana"]
    assert "arm" not in told.text
    rows = list(csv.DictReader(io.StringIO(ana.get("/export/verdicts.csv").text)))
    assert rows[0]["reason"] == "'=HYPERLINK(1)"
    assert rows[0]["hash"] == events(run)[0].hash
    assert rows[0]["previous"] == events(run)[0].previous
    bo.post("/api/note", {"key": keys[1], "text": "bo's note", "mark": "note-of-bo"})
    assert ana.get("/export/verdicts.json").json()["notes"] == []
    for key in keys[1:]:
        ana.decide(key, "supports")
    full = ana.get("/export/verdicts.json").json()
    assert full["complete"]
    assert [note["text"] for note in full["notes"]] == ["bo's note"]
    assert {row["reviewer"] for row in full["verdicts"]} == {"ana", "bo"}
    assert {row["arm"] for row in full["verdicts"]} == {"queue", "control"}
    whole = csv.DictReader(io.StringIO(ana.get("/export/verdicts.csv").text))
    assert {row["arm"] for row in whole} == {"queue", "control"}


def test_every_picture_and_control_has_words(ana):
    for path in ("/", f"/item/{ana.list()[0]['key']}", "/who"):
        page = Page(ana.get(path).text)
        assert all("alt" in a for a in page.every("img"))
        labelled = {a["for"] for a in page.every("label") if "for" in a}
        for tag in ("input", "select", "textarea"):
            for a in page.every(tag):
                assert (
                    a.get("id") in labelled
                    or a.get("name") in ("verdict", "flag", "class", "arm")
                    or a.get("id") in ("opacity", "go-on")
                )
        assert page.every("html") == [{"lang": "en"}]
        assert [a for a in page.every("p") if a.get("aria-live") == "polite"]
        assert len([1 for name, _ in page.elements if name == "h1"]) == 1
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids))


def test_the_page_never_imports_torch():
    code = "import sys; sys.modules['torch'] = None; import equicam.cli.app, equicam.review.app, equicam.review.images; import equicam.report.render; print('scipy.stats' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_flags_and_classes_are_counted(run, ana):
    told = ana.get("/api/progress").json()
    table = read_table(run.folder / "triage.parquet")
    assert told["total"] == table.num_rows
    assert told["flags"].get("flipped", 0) == sum("flipped" in flags for flags in table["flags"].to_pylist())
    assert told["classes"] == {}
    assert told["arms"] is None
    assert (
        House(run, blind=False).reader().get("/api/progress").json()["arms"]["control"]
        == pc.sum(pc.equal(table["arm"], "control")).as_py()
    )


@pytest.mark.parametrize(
    "name",
    [
        "../../../../etc/passwd",
        "/etc/passwd",
        "..\\..\\x'\"<img src=x onerror=alert(1)>\n\u202e.png",
        "%2e%2e%2f",
    ],
)
def test_a_name_that_climbs_is_only_a_name(run, name):
    old = next(i for i in arms(run) if i.startswith("slide-") and i not in (MISSING, CHANGED))
    for path in ("sample.parquet", "triage.parquet", "items/part-000000.parquet", "maps/part-000000.parquet"):
        table = read_table(run.folder / path)
        ids = pc.if_else(pc.equal(table["id"], old), name, table["id"])
        write_table(
            run.folder / path, table.set_column(table.column_names.index("id"), table.schema.field("id"), ids)
        )
    reader, key = House(run, blind=False).reader(), key_of(name)
    page = Page(reader.get(f"/item/{key}").text)
    assert "root:" not in page.text
    assert not [a for a in page.every("img") if a.get("src") == "x"]
    assert Image.open(io.BytesIO(reader.get(f"/picture/{key}/photo").content)).size == (96, 96)
    assert reader.decide(key, "supports").status_code == 200
    assert events(run)[0].payload["item"] == name
    assert (
        next(iter(csv.DictReader(io.StringIO(reader.get("/export/verdicts.csv").text, newline=""))))["item"]
        == name
    )
    assert reader.get(f"/item/{quote(name)}").status_code == 404
    assert reader.get(f"/item/{quote(name, safe='')}").status_code == 404
