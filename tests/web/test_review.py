"""Reviewing a queue: blinding, an append-only log of verdicts, and files that change meanwhile."""

import csv
import io
import json
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from PIL import Image

from equicam.audit.run import Run
from equicam.drawing.text import VERDICT_MEANINGS
from equicam.images.files import file_digest
from equicam.overlay import stretch
from equicam.runs.log import Log
from equicam.runs.review.app import MAX_ITEMS_PER_RESPONSE
from equicam.runs.review.images import LAYER_PX
from equicam.runs.review.queue import QueueLoader
from equicam.runs.store import ITEMS, RunStore
from equicam.runs.verdicts import VERDICTS, ReviewLog
from equicam.shards import read_table, write_table
from tests.audit.faked import BLANK, CHANGED, HOSTILE, MISSING, fake_run
from tests.web.conftest import Server, assert_hidden, by_key, events, key_of, large_run, queued, rank

UNSPELLED = runpy.run_path(str(Path(__file__).parents[2] / "scripts/check_words.py"))["unspelled"]
HIDDEN = ("label", "class", "confidence", "peum_score", "rank", "arm", "top5", "eq", "flip_rate")


def triage_column(run, name):
    """A column of the triage, by id."""
    table = read_table(run.folder / "triage.parquet")
    return dict(zip(table["id"].to_pylist(), table[name].to_pylist(), strict=True))


def set_column(path, name, make):
    table = read_table(path)
    field = table.schema.field(name)
    write_table(path, table.set_column(table.column_names.index(name), field, make(table)))


def exported(client):
    return list(csv.DictReader(io.StringIO(client.get("/export/verdicts.csv").text, newline="")))


def test_blinding_hides_everything_before_the_verdict_and_only_the_arm_after(run):
    ana = Server(run, blind_class=True).client("ana")
    rows, names = run.rows(queued(run)), by_key(run)
    plain = [name for name in queued(run) if name.startswith("slide-")]  # names often hold the label
    assert plain
    page = ana.get("/").text + json.dumps(ana.list())
    assert not any(name in page for name in plain)
    for key in ana.list_keys()[:3]:
        row, facts = rows[names[key]], ana.facts(key)
        assert facts["blinded"]
        assert all(facts.get(field) is None for field in (*HIDDEN, "revealed"))
        views = [(view["confidence"], view["class"], bool(view["flips"])) for view in facts["views"]]
        assert {*views} <= {(None, None, False)}
        assert not any(reason.startswith(("PEUM", "low confidence")) for reason in facts["reasons"])
        confidence, peum = f"{row['confidence']:.3f}", f"{row['peum_score']:.4f}"
        assert_hidden(ana.texts(key), "tumour", "normal", confidence, peum)
        assert "evidence for the class that the model predicts?" in ana.page(f"/item/{key}").text
        assert ana.decide(key, "supports").status_code == 200
        after = ana.facts(key)
        assert after["revealed"]["confidence"] == pytest.approx(row["confidence"])
        assert re.search("tumour|normal", ana.get(f"/item/{key}").text)
        assert after["arm"] is None  # until everything is reviewed


def test_the_class_is_shown_and_nothing_else_of_the_prediction(run, ana):
    """Without --blind-class the question names the class; label, confidence and signals stay hidden."""
    rows, judged, names = run.rows(queued(run)), triage_column(run, "class"), by_key(run)
    assert len(set(judged.values())) == 2
    for one in (entries := ana.list())[:6]:
        key, name = one["key"], names[one["key"]]
        facts = ana.facts(key)
        assert facts["blinded"]
        assert one["class"] == facts["class"] == judged[name]
        assert all(facts.get(field) is None for field in (*HIDDEN, "revealed") if field != "class")
        assert f"Does this map show evidence for {judged[name]} ?" in ana.page(f"/item/{key}").text
        assert_hidden(ana.texts(key), f"{rows[name]['confidence']:.3f}", "</td>")  # which ends a label
    named = judged[names[entries[0]["key"]]]
    found = {names[key] for key in ana.list_keys(**{"class": named})}
    assert found == {name for name, one in judged.items() if one == named}
    assert ana.progress()["classes"][named] == len(found)


@pytest.mark.parametrize("options", [{}, {"blind_class": True}, {"blind": False}], ids=str)
def test_verdicts_are_defined_and_abbreviations_spelled_out(run, options):
    assert set(VERDICT_MEANINGS) == set(VERDICTS)
    client = Server(run, **options).client()
    text, tally = client.page(f"/item/{client.list_keys()[0]}").text, client.get("/").text
    for number, (value, label) in enumerate(VERDICTS.items(), start=1):
        assert f"{label} {VERDICT_MEANINGS[value]} {number}" in text  # no key is glued to its label
        assert f"<span>{label}</span> <b" in tally
    assert "PEUM" in text
    assert [UNSPELLED(one) for one in (text, client.page().text)] == [[], []]


def test_the_log_says_whether_the_class_was_shown(run):
    """As for blinding: whoever reviewed with the class shown is not blinded to it later."""
    hidden, shown = Server(run, blind_class=True), Server(run)
    ana, bo = hidden.client("ana"), shown.client("bo")
    first, second = ana.list_keys()[:2]
    ana.decide(first, "supports")
    bo.decide(first, "supports")
    later = hidden.client("bo")
    later.decide(second, "supports", mark="bo-on-the-second")
    modes = [(e.actor, e.payload["blind"], e.payload["blind_class"]) for e in events(run)]
    assert modes == [("ana", True, True), ("bo", True, False), ("bo", True, False)]
    registered = [e.payload["blind_class"] for e in events(run, "reviewer registered")]
    assert registered[:2] == [True, False]
    assert [row["blind_class"] for row in exported(later)] == ["False", "False"]


def test_blank_maps_come_last(run):
    for blind in (True, False):
        flat = [one["flat"] for one in Server(run, blind=blind).client().list()]
        assert any(flat)
        assert flat == sorted(flat)


def test_verdicts_of_others_stay_hidden_until_ones_own(server, ana):
    bo, key = server.client("bo"), ana.list_keys()[0]
    ana.decide(key, "wrong-region", reason="the fat cell, surely")
    ana.post("/api/note", {"key": key, "text": "see slide 4", "mark": "note-0001"})
    shown = ("fat cell", "slide 4", "by</span> <bdi>ana")
    before = "".join(bo.texts(key))
    assert not any(words in before for words in (*shown, '"wrong-region", "previous_event"'))
    bo.decide(key, "supports")
    after = "".join(bo.texts(key))
    assert all(words in after for words in shown[:2])


def test_the_order_is_a_shuffle_that_only_the_runs_key_decides(tmp_path):
    run = large_run(tmp_path / "large", 20_000)
    items = QueueLoader(run, blind=True).current().items
    control = np.array([item.arm == "control" for item in items])
    assert control.sum() == 4000
    assert np.abs(control.reshape(10, 2000).sum(axis=1) - 400).max() < 90  # > 4 standard deviations
    assert np.diff(np.flatnonzero(control)).std() > 3  # a constant distance would reveal them
    ranks = triage_column(run, "rank")
    order = [ranks[item.id] for item in items]
    assert abs(np.corrcoef(order, range(len(order)))[0, 1]) < 0.04
    again = QueueLoader(run, blind=True).current().items
    assert [item.key for item in again] == [item.key for item in items]
    (run.folder / "review.key").unlink()
    other = QueueLoader(run, blind=True).current().items
    assert not {item.key for item in other} & {item.key for item in items}
    assert [item.id for item in other] != [item.id for item in items]


def test_without_blinding_all_is_shown_in_order_of_rank(run):
    client = Server(run, blind=False).client()
    rows, arms, ranks, names = client.list(), queued(run), triage_column(run, "rank"), by_key(run)
    order = [ranks[names[row["key"]]] for row in rows if not row["flat"]]
    assert order == sorted(order)
    facts = [client.facts(row["key"]) for row in rows]
    assert facts[0]["revealed"]["class"]
    assert facts[0]["rank"] == order[0]
    assert facts[0]["arm"] == arms[names[rows[0]["key"]]]
    defined = next(one for one in facts if not one["revealed"]["peum_undefined"])
    text = client.page(f"/item/{defined['key']}").text
    assert f"{int(100 * defined['revealed']['peum_above'])}% of the run’s images" in text
    controls = {name for name, arm in arms.items() if arm == "control"}
    assert {names[key] for key in client.list_keys(arm="control")} == controls
    counted = client.progress()
    assert (counted["total"], counted["arms"]["control"]) == (len(arms), len(controls))
    flags = triage_column(run, "flags")
    assert counted["flags"]["flipped"] == sum("flipped" in one for one in flags.values())


def test_filters(run):
    server = Server(run, blind_class=True)
    ana, bo = server.client("ana"), server.client("bo")
    first, second, third = (keys := ana.list_keys())[:3]
    ana.decide(first, "shortcut")
    ana.decide(second, "unsure")
    assert ana.list_keys(verdict="shortcut") == [first]
    assert ana.list_keys(verdict="reviewed") == [first, second]
    assert len(ana.list_keys(verdict="unreviewed")) == len(keys) - 2
    # under blinding flags and classes find only reviewed images, else the filter would reveal the others
    blank = key_of(run, BLANK)
    assert ana.list_keys(flag="blank") == [] or blank in (first, second)
    ana.decide(blank, "unsure")
    assert ana.list_keys(flag="blank") == [blank]
    named = ana.facts(first)["revealed"]["class"]
    assert {first} <= {*ana.list_keys(**{"class": named})} <= {first, second, blank}
    assert ana.list_keys(verdict="nonsense") == []
    ana.decide(third, "second-reviewer")
    assert [one.list_keys(verdict="awaits-second") for one in (bo, ana)] == [[third], []]
    bo.decide(third, "supports")
    assert bo.list_keys(verdict="awaits-second") == []


@pytest.mark.slow
def test_a_page_of_the_list_is_bounded_and_pages_cover_it_once(tmp_path):
    ana = Server(large_run(tmp_path)).client()
    response = ana.get("/api/queue?limit=1000000")
    assert len(response.json()["items"]) == MAX_ITEMS_PER_RESPONSE
    assert len(response.content) < 60_000
    assert len(ana.get("/").content) < 20_000
    keys = [key for start in range(0, 1000, 100) for key in ana.list_keys(offset=start, limit=100)]
    assert len(set(keys)) == len(keys) == 1000
    last = ana.get("/api/queue?offset=99990").json()
    assert (last["matching"], len(last["items"])) == (100_000, 10)
    assert ana.get("/api/queue?offset=-5&limit=-5").json()["offset"] == 0
    assert ana.get("/api/queue?offset=1e9").status_code == 422


def test_a_change_is_a_new_event_that_keeps_the_old(run, ana):
    key = ana.list_keys()[0]
    first = ana.decide(key, "supports").json()["number"]
    refused = ana.decide(key, "unsure", previous_event=first)
    assert refused.status_code == 422
    assert "a changed verdict needs a reason" in refused.json()["error"]
    second = ana.decide(key, "unsure", previous_event=first, reason="looked again").json()["number"]
    kept = events(run)
    assert [e.payload["verdict"] for e in kept] == ["supports", "unsure"]
    assert [e.payload["changes"] for e in kept] == [None, first]
    assert [e.payload["blind"] for e in kept] == [True, False]
    assert all(e.actor == "ana" and e.time.endswith("+00:00") for e in kept)
    assert all(b.previous == a.hash for a, b in pairwise(Log(run.folder).events()))
    assert Log(run.folder).problems() == []
    assert second > first
    page = ana.get(f"/item/{key}").text
    assert all(words in page for words in ("looked again", f"changes event {first}"))


def test_sent_again_it_counts_once_and_an_outdated_window_is_refused(run, ana):
    first, second = ana.list_keys()[:2]
    responses = [ana.decide(first, "supports", mark="the-same-mark") for _ in range(3)]
    assert [a.status_code for a in responses] == [200] * 3
    assert len({a.json()["number"] for a in responses}) == 1
    assert ana.decide(first, "unsure", mark="the-same-mark").status_code == 409
    assert len(events(run)) == 1
    ana.decide(second, "supports")
    late = ana.decide(second, "unsure", previous_event=0, reason="from the other tab", mark="another-mark")
    assert late.status_code == 409
    assert len(events(run)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "stable"}, {"verdict": 3}, {"verdict": "supports", "more": 1}, {"key": "../../etc"}, {"key": "f" * 20}, {"previous_event": -1}, {"previous_event": "0"}, {"mark": "short"},
        {"mark": "x" * 65}, {"reason": "x" * 2001}, {"reason": "x" * 5000}, {"reason": "\ud800"}, {"reason": "a\x00b"}, {"reason": None},
    ],
)  # fmt: skip
def test_a_malformed_post_is_refused(run, ana, change):
    body = {"key": ana.list_keys()[0], "verdict": "supports", "previous_event": 0, "mark": "12345678"}
    assert ana.post("/api/verdict", {"reason": ""} | body | change).status_code in (404, 422)
    assert events(run) == []


def test_a_reviewer_has_a_name_of_one_visible_line(server, ana):
    for name in ("", " ", "x" * 61, "two\nlines", "\u202eevil", "a\x00"):
        assert ana.post("/api/reviewer", {"name": name}).status_code == 422, name
    assert "reviewing as</span> <bdi>ana" in ana.get("/").text
    nobody = server.client(None)
    assert nobody.get("/").headers["location"] == "/reviewer"
    assert nobody.get("/api/queue").status_code == 422


def test_two_reviewers_at_once_lose_nothing(server, run):
    clients = [server.client(name) for name in ("ana", "bo")]
    keys = clients[0].list_keys()
    assert all(client.csrf for client in clients)

    def give_verdicts(client):
        return [client.decide(key, list(VERDICTS)[i % 5]).status_code for i, key in enumerate(keys)]

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(give_verdicts, clients)] == [[200] * len(keys)] * 2
    assert len(events(run)) == 2 * len(keys)
    assert Log(run.folder).problems() == []
    log = ReviewLog(run.folder)
    log.refresh()
    assert all({v.reviewer for v in log.verdicts(name)} == {"ana", "bo"} for name in queued(run))


def test_two_servers_over_one_run_see_each_other(run):
    one, two = Server(run).client("ana"), Server(run).client("bo")
    key = one.list_keys()[0]
    one.decide(key, "supports", mark="from-one")
    two.decide(key, "unsure", mark="from-two")
    assert "Unsure" in one.get(f"/item/{key}").text.split("Verdicts so far")[1]
    assert Server(run).client("ana").list()[0]["verdict"] == "supports"


def test_a_new_triage_during_the_review(run, ana):
    before = ana.get("/api/queue").json()
    # it stays in the queue
    key = next(key_of(run, name) for name, arm in queued(run).items() if arm == "queue")
    ana.decide(key, "supports")
    rank(run, budget="90%")
    after = ana.get("/api/queue").json()
    assert after["version"] != before["version"]
    assert after["matching"] > before["matching"]
    rows = {row["key"]: row for row in ana.list()}
    assert len(rows) == len(ana.list())
    assert rows[key]["verdict"] == "supports"
    rank(run, budget=1)
    gone = [k for k in rows if ana.get(f"/item/{k}").status_code == 404]
    assert len(gone) == len(rows) - 1


def test_an_unfinished_run_can_be_reviewed(run, ana):
    """Shards written later change nothing on the page."""
    (run.folder / "manifest.json").write_text(replace(run.manifest, shard_size=20).dumps())
    run = RunStore(run.folder)
    assert run.pending()
    client = Server(run).client("ana")
    before = client.list_keys()
    (run.path("items", 1).parent / ".shard-000001.parquet.x.tmp").write_bytes(b"half")
    assert client.decide(before[0], "supports").status_code == 200
    for kind in ("maps", "items"):
        write_table(run.path(kind, 1), read_table(run.path(kind, 0)).slice(0, 0))
    assert client.list_keys() == before
    assert client.get(f"/item/{before[1]}").status_code == 200


def test_hostile_names_are_text(run):
    client, names = Server(run, blind=False).client(), by_key(run)
    for key in client.list_keys():
        page = client.page(f"/item/{key}")
        assert not [a for a in page.every("img") if "onerror" in a or a.get("src") == "x"]
        assert all(a.get("src", "").startswith("/static/") for a in page.every("script"))
        text = client.get(f"/item/{key}").text
        assert not any(c in text for c in "\u202e\u200f\x00\x1b")
        assert not re.search(r"[/=]" + re.escape(names[key][:6]), key)
    assert {names[key] for key in client.list_keys()} & set(HOSTILE)


def test_images_are_rendered_and_cached_by_etag(run, ana):
    key = next(key_of(run, name) for name in queued(run) if name not in (MISSING, CHANGED, BLANK))
    before, after = (
        ("input", "original", "map", "thumb", "thumb-plain"),
        ("presented", "peum", "view-3", "strip", "thumb-4"),
    )
    status = {kind: ana.get(f"/image/{key}/{kind}").status_code for kind in before + after}
    assert status == dict.fromkeys(before, 200) | dict.fromkeys(after, 404)
    ana.decide(key, "supports")
    for kind in before + after:
        response = ana.get(f"/image/{key}/{kind}")
        assert response.headers["content-type"] in ("image/png", "image/jpeg")
        assert ana.image(key, kind).std() > 5
        again = ana.get(f"/image/{key}/{kind}", headers={"if-none-match": response.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    layers = [ana.image(key, kind, "RGBA") for kind in ("map", "view-3", "view-9")]
    assert all(layer[..., 3].min() < 30 for layer in layers)  # transparent where it is low
    assert all(np.abs(a - b).mean() > 1 for a, b in pairwise(layers))


def test_the_original_has_the_pixels_of_the_part_the_model_saw(run, tmp_path):
    """Also of a file much larger than the page shows; the part is cut, not scaled."""
    special = (MISSING, CHANGED, BLANK)
    name = next(one for one in queued(run) if one.startswith("slide-") and one not in special)
    pixels = np.random.default_rng(0).integers(0, 255, (1500, 2600, 3), dtype=np.uint8)
    path = tmp_path / "large.png"
    Image.fromarray(pixels).save(path)
    change = {"path": str(path), "sha256": file_digest(path), "bytes": path.stat().st_size}
    change |= {"input_box": [300.0, 100.0, 1300.4, 1099.7]}
    rows = [row | change if row["id"] == name else row for row in run.read_items().to_pylist()]
    write_table(run.path("items", 0), pa.Table.from_pylist(rows, schema=ITEMS))
    shown = Server(RunStore(run.folder), blind=False).client().image(key_of(run, name), "original")
    assert shown.shape == (1000, 1000, 3)
    assert np.abs(shown - pixels[100:1100, 300:1300]).mean() < 12  # of JPEG on noise
    assert np.abs(shown - pixels[101:1101, 300:1300]).mean() > 40


def test_the_colour_bar_is_the_layer_of_a_rising_map(run, ana):
    """Column v of the bar has the colour and the transparency that a map has where its value is v."""
    bar, queue = ana.image("scale", "scale", "RGBA")[0], QueueLoader(run, blind=True).current()
    item = queue.items[0]
    assert not item.flat
    layer = ana.image(item.key, "map", "RGBA").reshape(-1, 4)
    values = stretch(queue.maps(item).map, (LAYER_PX, LAYER_PX)).ravel()
    assert np.ptp(values) == 1
    expected = bar[np.rint(values * (len(bar) - 1)).astype(int)]
    assert np.abs(layer - expected)[values > 0.05].max() <= 3
    assert len(np.unique(layer, axis=0)) > 1000  # no steps


def test_an_image_other_than_the_one_explained_is_not_shown(run, ana):
    rank(run, budget="100%")
    for name, why in ((MISSING, "no longer where it was"), (CHANGED, "has changed since")):
        key = key_of(run, name)
        assert [ana.get(f"/image/{key}/{kind}").status_code for kind in ("input", "map")] == [404, 200]
        assert why in ana.get(f"/item/{key}").text


def test_a_row_that_points_elsewhere_sends_no_file(run, ana, tmp_path):
    """A row of the run opens no file except an image with the recorded digest."""
    secret, link = tmp_path / "secret.txt", tmp_path / "link.png"
    secret.write_text("root:x:0:0")
    link.symlink_to(secret)
    key, path = ana.list_keys()[0], run.path("items", 0)
    for target in (secret, link, tmp_path / "images" / ".." / "secret.txt"):
        set_column(path, "path", lambda table, target=target: [[str(target)] * table.num_rows])
        response = ana.get(f"/image/{key}/input")
        assert (response.status_code, b"root" in response.content) == (404, False)


def test_arms_and_the_verdicts_of_others_open_when_everything_is_reviewed(server, run, ana):
    bo, keys = server.client("bo"), ana.list_keys()
    ana.decide(keys[0], "supports", reason="=HYPERLINK(1)")
    bo.decide(keys[1], "unsure", reason="bo's own")
    bo.post("/api/note", {"key": keys[1], "text": "bo's note", "mark": "note-of-bo"})
    own = ana.get("/export/verdicts.json")
    assert own.headers["content-disposition"] == 'attachment; filename="verdicts.json"'
    assert ([row["reviewer"] for row in own.json()["verdicts"]], own.json()["notes"]) == (["ana"], [])
    assert "arm" not in own.text
    (row,) = exported(ana)
    assert row["reason"] == "'=HYPERLINK(1)"
    assert (row["hash"], row["previous"]) == (events(run)[0].hash, events(run)[0].previous)
    assert ana.get("/api/queue?arm=control").status_code == 422
    assert 'name="arm"' not in ana.get("/").text
    ana.decide_all(keys[1:])
    controls = [*queued(run).values()].count("control")
    assert ana.get("/api/queue?arm=control").json()["matching"] == controls > 0
    assert ana.facts(keys[-1])["arm"] in ("queue", "control")
    assert 'name="arm"' in ana.get("/").text
    full = ana.get("/export/verdicts.json").json()
    assert full["complete"]
    assert [note["text"] for note in full["notes"]] == ["bo's note"]
    assert {row["reviewer"] for row in full["verdicts"]} == {"ana", "bo"}
    for rows in (full["verdicts"], exported(ana)):
        assert {row["arm"] for row in rows} == {"queue", "control"}


def test_every_image_and_control_has_a_label(ana):
    for path in ("/", f"/item/{ana.list_keys()[0]}", "/reviewer"):
        page = ana.page(path)
        assert all("alt" in a for a in page.every("img"))
        labelled = {a["for"] for a in page.every("label") if "for" in a} | {"opacity", "go-on"}
        for a in [a for tag in ("input", "select", "textarea") for a in page.every(tag)]:
            assert a.get("id") in labelled or a.get("name") in ("verdict", "flag", "class", "arm")
        assert page.every("html") == [{"lang": "en"}]
        assert [a for a in page.every("p") if a.get("aria-live") == "polite"]
        assert len([1 for name, _ in page.elements if name == "h1"]) == 1
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids))


def test_the_page_never_imports_torch():
    modules = "cli.app runs.review.app runs.review.images runs.report.render"
    lines = [f"import equicam.{one}" for one in modules.split()]
    code = "\n".join(
        ["import sys", "sys.modules['torch'] = None", *lines, "print('scipy.stats' in sys.modules)"]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


@pytest.mark.parametrize(
    "name",
    ["../../../../etc/passwd", "/etc/passwd", "..\\..\\x'\"<img src=x onerror=alert(1)>\n\u202e.png", "%2e%2e%2f"],
)  # fmt: skip
def test_a_name_with_a_path_in_it_is_only_a_name(run, name):
    old = next(i for i in queued(run) if i.startswith("slide-") and i not in (MISSING, CHANGED))
    for file in ("sample", "triage", "items/shard-000000", "maps/shard-000000"):
        path = run.folder / f"{file}.parquet"
        set_column(path, "id", lambda table: pc.if_else(pc.equal(table["id"], old), name, table["id"]))
    client, key = Server(run, blind=False).client(), key_of(run, name)
    page = client.page(f"/item/{key}")
    assert "root:" not in page.text
    assert not [a for a in page.every("img") if a.get("src") == "x"]
    assert client.image(key, "input").shape == (96, 96, 3)
    assert client.decide(key, "supports").status_code == 200
    assert events(run)[0].payload["item"] == exported(client)[0]["item"] == name
    assert [client.get(f"/item/{quote(name, safe)}").status_code for safe in ("/", "")] == [404, 404]


def test_what_is_left_is_stated_only_to_reviewers_who_have_finished(tmp_path):
    run = fake_run(tmp_path, calibrate=0)
    opened = Run(run)
    opened.triage(10, control=0.3)
    server = Server(run)
    ana, bo = server.client("ana"), server.client("bo")
    for i, key in enumerate(ana.list_keys()):
        assert ana.progress()["remainder"] is None
        ana.decide(key, "shortcut" if i % 2 else "supports")
    stated = opened.bound().sentence
    assert stated.startswith("Of the ")
    assert ana.progress()["remainder"] == stated
    assert stated in ana.get("/").text
    last, *others = bo.list_keys()
    bo.decide_all(others)
    for path in ("/", "/api/progress", "/api/queue", f"/api/item/{last}"):
        text = bo.get(path).text  # one image to go, whose verdict might tell its arm
        assert "nobody opened" not in text
        assert "confidence;" not in text
    bo.decide(last, "supports")
    both = opened.bound().sentence
    assert both != stated
    assert {one.progress()["remainder"] for one in (ana, bo)} == {both}
    opened.triage(more=4)
    assert ana.progress()["remainder"] is None
    open_to = Server(run, blind=False).client("cy")
    assert open_to.progress()["remainder"].endswith("not reviewed yet.")


def test_a_queue_that_is_being_written_states_nothing(tmp_path):
    run = fake_run(tmp_path, calibrate=0)
    refused = Server(run).client().get("/api/queue")
    assert (refused.status_code, "equicam triage" in refused.json()["error"]) == (422, True)
    Run(run).triage(10)
    client = Server(run, blind=False).client("ana")
    assert client.progress()["remainder"]
    for change in (
        lambda: rank(run, budget=12),
        (run.folder / "triage.json").unlink,
    ):  # rank: triage.parquet alone
        change()
        assert client.progress()["remainder"] is None
    assert "hidden" in re.search(r'<p class="remainder"[^>]*>', client.get("/").text)[0]
