"""A solver with everything a blinded reviewer can fetch, and everything but the run's key, stays at chance."""

import base64
import csv
import hashlib
import hmac
import json
import re
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from scipy.stats import rankdata

from equicam.errors import EquicamError
from equicam.runs.bounds import summarise_reviews
from equicam.runs.log import Log
from equicam.runs.queue_files import rank_again, rank_run, write_csv, write_queue
from equicam.runs.review.images import ImageRenderer
from equicam.runs.review.queue import QueueLoader
from equicam.runs.triage import _controls, triage
from equicam.runs.verdicts import ReviewKey, ReviewLog, read_review_key
from equicam.shards import read_table
from tests.audit.faked import fake_run, table
from tests.audit.test_triage import VIEWS
from tests.audit.test_triage import run as random_rows
from tests.web.conftest import Server, events, key_of, large_run, queued

KINDS = ("input", "original", "map", "thumb", "peum")
STANDARD_DEVIATIONS = 3
KEY = bytes(range(32))  # the same in every run of the tests, so that chance cannot fail them now and then


def auc(scores, control):
    """How well scores find the controls; 0.5 is chance, whichever way round."""
    scores, control = np.asarray(scores, float), np.asarray(control, bool)
    positive, negative = control.sum(), (~control).sum()
    area = (rankdata(scores)[control].sum() - positive * (positive + 1) / 2) / (positive * negative)
    return max(area, 1 - area)


def bound(control):
    positive, negative = int(np.sum(control)), len(control) - int(np.sum(control))
    return 0.5 + STANDARD_DEVIATIONS * np.sqrt((len(control) + 1) / (12 * positive * negative))


# --- keys and order ---------------------------------------------------------------------------------------------


def old_listing(run):
    """What the list was before there was a secret: keys are hashes of names, and `version` places the controls."""
    path = run.folder / "triage.parquet"
    version = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    rows = sorted(read_table(path, ["id", "arm", "rank"]).to_pylist(), key=lambda row: row["rank"])
    queue = [row["id"] for row in rows if row["arm"] == "queue"]
    key = {row["id"]: hashlib.sha256(row["id"].encode()).hexdigest()[:20] for row in rows}
    share = {name: (i + 0.5) / len(queue) for i, name in enumerate(queue)}
    for row in rows:
        if row["arm"] == "control":
            digest = hashlib.sha256(f"{version} {key[row['id']]}".encode()).hexdigest()
            share[row["id"]] = int(digest[:13], 16) / 16**13
    ids = sorted(share, key=share.__getitem__)
    return {"version": version, "keys": [key[name] for name in ids]}, ids


def new_listing(run):
    """What a blinded reviewer's browser gets, page by page."""
    client, keys = Server(run).client(), []
    total = client.get("/api/queue").json()["matching"]
    while len(keys) < total:
        answer = client.get(f"/api/queue?limit=200&offset={len(keys)}").json()
        keys += [item["key"] for item in answer["items"]]
    page = client.get("/").text
    listing = {"version": answer["version"], "keys": keys, "run": re.search(r'data-run="([^"]+)"', page)[1]}
    id_of = {item.key: item.id for item in QueueLoader(run, blind=True).current().items}
    return listing, [id_of[key] for key in keys]  # only to score the solver: it gets the listing alone


def solve(listing, manifest, names):
    """The solver's best guess for every place: how likely it is a control, by any derivation from public values.

    A control stands where a hash of its key puts it; under a shuffle by a hash, the order follows the hash.
    """
    keys, guesses, order = listing["keys"], [], []
    place = (np.arange(len(keys)) + 0.5) / len(keys)
    salts = [listing["version"], listing.get("run", ""), manifest.data, manifest.weights, "", "0"]
    for salt, purpose in product(salts, ("", "order", "item")):
        texts = [f"{salt} {key}" for key in keys]
        if purpose:
            texts = [json.dumps([purpose, listing["version"], key]) for key in keys]
        hashed = [hashlib.sha256(text.encode()).hexdigest() for text in texts]
        keyed = [hmac.digest(salt.encode(), text.encode(), "sha256").hex() for text in texts]
        for digests in (hashed, keyed):
            share = np.array([int(digest[:13], 16) / 16**13 for digest in digests])
            guesses.append(-np.abs(share - place))
            order.append(abs(np.corrcoef(rankdata(share), place)[0, 1]))
    guesses += [place, [int(key, 16) for key in keys]]
    hashes = (hashlib.sha256, hashlib.sha1, hashlib.md5)
    every = product(hashes, salts, names)
    tags = {make(f"{salt}{name}".encode()).hexdigest()[:20] for make, salt, name in every}
    return guesses, max(order), sum(key in tags for key in keys) / len(keys)


def test_arms_and_names_cannot_be_computed_from_the_list(tmp_path):
    run = large_run(tmp_path, 3000)
    (run.folder / "review.key").write_bytes(KEY)
    arm = queued(run)
    found = {}
    for scheme, (listing, ids) in {"old": old_listing(run), "new": new_listing(run)}.items():
        control = [arm[name] == "control" for name in ids]
        guesses, order, named = solve(listing, run.manifest, arm)
        found[scheme] = max(auc(guess, control) for guess in guesses), order, named
    best, _, named = found["old"]
    assert (best > 0.99, named) == (True, 1)  # the solver solves what can be solved
    best, order, named = found["new"]
    assert best < bound(control)
    assert order < STANDARD_DEVIATIONS / np.sqrt(len(control))
    assert named == 0


# --- everything else on the page --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    """A run with as many controls as queued images, so that few images show a leak."""
    run = fake_run(tmp_path_factory.mktemp("ranked"), count=70, calibrate=0)
    (run.folder / "review.key").write_bytes(KEY)
    options = {"by": "peum", "budget": "90%", "control": 0.5, "seed": 0}
    write_queue(run, rank_run(run, options), options)
    return run


def features(client, entry):
    """Every number that a solver can read off the responses on one image."""
    key = entry["key"]
    facts, page = client.get(f"/api/item/{key}"), client.get(f"/item/{key}")
    found = {
        "entry": len(json.dumps(entry)), "facts": len(facts.content), "page": len(page.content), "key": int(key, 16),
        "position": entry["position"], "flags": len(entry["flags"]), "reasons": len(facts.json()["reasons"]),
        "views": len(facts.json()["views"]), "lines": page.text.count("\n"), "missing": "missing" in page.text,
    }  # fmt: skip
    for kind in KINDS:
        response = client.get(f"/image/{key}/{kind}")
        found |= {f"{kind} status": response.status_code, f"{kind} size": len(response.content)}
        found[f"{kind} headers"] = sum(len(k) + len(v) for k, v in response.headers.items())
        assert response.status_code == (404 if kind == "peum" else 200) or found["missing"]
    return found


def test_no_number_in_any_response_finds_the_controls(ranked):
    client = Server(ranked).client()  # with the class shown, the more revealing mode
    items = {item.key: item for item in QueueLoader(ranked, blind=True).current().items}
    entries = client.list()
    control = [items[entry["key"]].arm == "control" for entry in entries]
    assert len(entries) == len(items) > 60
    assert 0.45 < np.mean(control) < 0.55
    with client.http:  # one event loop for all requests
        table = [features(client, entry) for entry in entries]
    found = {name: auc([row[name] for row in table], control) for name in table[0]}
    assert {name: area for name, area in found.items() if area >= bound(control)} == {}
    # what blinding withholds would have found them
    queue = QueueLoader(ranked, blind=True).current()
    renderer = ImageRenderer(ranked.manifest.transforms, ReviewKey(b""))
    sizes = [len(renderer.render(queue, items[entry["key"]], "peum")[0]) for entry in entries]
    assert auc(sizes, control) > bound(control)
    assert auc([len(items[entry["key"]].flags) for entry in entries], control) > bound(control)


@pytest.mark.parametrize("blind_class", [True, False])
def test_no_filter_count_or_export_separates_images_before_a_verdict(ranked, blind_class):
    client = Server(ranked, blind_class=blind_class).client(f"counts {blind_class}")
    total = client.get("/api/queue").json()["matching"]
    of_class = ("class=tumour", "class=normal") if blind_class else ()
    for query in ("flag=flipped", "flag=blank", "verdict=reviewed", *of_class):
        assert client.get(f"/api/queue?{query}").json()["matching"] == 0
    assert client.get("/api/queue?verdict=unreviewed").json()["matching"] == total
    assert client.get("/api/queue?arm=control").status_code == 422
    progress = client.progress()
    assert (progress["arms"], progress["flags"]) == (None, {})
    assert len(progress["classes"]) == (0 if blind_class else 2)
    assert client.get("/export/verdicts.json").json() == {"complete": False, "verdicts": [], "notes": []}
    first, second = client.list_keys()[:2]
    around = client.get(f"/item/{first}").text
    assert re.search(r'id="next"[^>]*href="/item/([0-9a-f]{20})"', around)[1] == second


def test_a_cached_image_is_not_confirmed_before_the_verdict(ranked):
    """An ETag from elsewhere confirms nothing about an image that is still hidden."""
    shown, hidden = Server(ranked, blind=False).client(), Server(ranked).client("cached")
    key = hidden.list_keys()[0]
    tag = shown.get(f"/image/{key}/peum").headers["etag"]
    assert hidden.get(f"/image/{key}/peum", headers={"if-none-match": tag}).status_code == 404


def test_the_key_is_in_no_response(ranked):
    client = Server(ranked).client("key")
    secret = (ranked.folder / "review.key").read_bytes()
    key = client.list_keys()[0]
    client.decide(key, "supports")
    paths = f"""/ /reviewer /api/queue /api/progress /api/item/{key} /item/{key} /image/{key}/map
        /export/verdicts.csv /export/verdicts.json /static/review.js /review.key /static/../review.key"""
    forms = (secret, secret.hex().encode(), base64.b64encode(secret), base64.urlsafe_b64encode(secret)[:40])
    for path in paths.split():
        response = client.get(path)
        everything = response.content + repr(response.headers).encode()
        assert not any(form in everything for form in forms)


# --- the files for reviewers ------------------------------------------------------------------------------------


def _entropy(seed, ids):
    """As the queue has it."""
    return int.from_bytes(hashlib.sha256(json.dumps([seed, *ids]).encode()).digest())


def by_permutation(count, total, controls, seed, ids):
    """The arms of a queue in order of place, if the seed alone had drawn them."""
    rng = np.random.default_rng(_entropy(seed, ids))
    rng.permutation(total)
    rng.choice(total - (count - controls), controls, replace=False)
    return rng.permutation(count) >= count - controls


def by_position(listed, total, controls, seed, ids):
    """The arms of the listed names: the seed alone says which places of the list outside the queue it draws.

    Names are walked in order; a name that is not listed takes a place outside the queue, and so does a control.
    """
    rng = np.random.default_rng(_entropy(seed, ids))
    rng.permutation(total)
    drawn = set(rng.choice(total - (len(listed) - controls), controls, replace=False).tolist())
    found, place = {}, 0
    for name in ids:
        if name in listed:
            found[name] = place in drawn
            place += found[name]
        else:
            place += 1
    return found


@pytest.mark.parametrize("keyed", [False, True])
def test_the_seed_does_not_give_away_the_control_arm_of_the_exports(tmp_path, keyed):
    items = table(random_rows(1500))
    key = ReviewKey(KEY) if keyed else None
    found = triage(items, by="peum", budget="20%", control=0.4, quotas=False, transforms=VIEWS, key=key)
    write_csv(found, tmp_path / "queue.csv")
    with (tmp_path / "queue.csv").open(newline="") as file:
        listed = [row["id"] for row in csv.DictReader(file)]
    arm = {row["id"]: row["arm"] == "control" for row in found.rows.to_pylist()}
    control = [arm[name] for name in listed]
    ids = sorted(row["id"] for row in items.to_pylist() if row["status"] == "ok")
    known = (len(ids), _controls(len(listed), len(ids), 0.4), 0, ids)
    position = by_position(set(listed), *known)
    drawn = auc(by_permutation(len(listed), *known), control)
    placed = auc([position[name] for name in listed], control)
    assert max(drawn, placed) < bound(control) if keyed else (drawn == 1 and placed > 0.8)


def test_a_keyed_queue_is_ranked_again_for_the_report(ranked, tmp_path):
    options = json.loads((ranked.folder / "triage.json").read_text())["options"]
    assert rank_again(ranked).rows.equals(rank_run(ranked, options).rows)
    key = ranked.folder / "review.key"
    refusal = r"review\.key needs to be readable, got No such file.*equicam triage again"
    key.rename(tmp_path / "kept")
    try:
        with pytest.raises(EquicamError, match=refusal):
            rank_again(ranked)
        assert not key.exists()
    finally:
        (tmp_path / "kept").rename(key)


# --- the key ----------------------------------------------------------------------------------------------------


def test_one_key_for_all_servers_of_a_run(tmp_path):
    start = threading.Barrier(16)

    def read(_):
        start.wait()
        return read_review_key(tmp_path).digest("x")

    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(read, range(16)))) == 1
    (file,) = tmp_path.iterdir()
    assert file.name == "review.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_bytes()) == 32


@pytest.mark.parametrize("damage", [b"", b"short", bytes(64)])
def test_a_damaged_key_is_refused(tmp_path, damage):
    (tmp_path / "review.key").write_bytes(damage)
    with pytest.raises(EquicamError, match=r"review\.key needs 32 bytes"):
        read_review_key(tmp_path)


def test_a_new_key_changes_keys_and_keeps_verdicts(run, ana):
    key = ana.list_keys()[0]
    ana.decide(key, "shortcut")
    (run.folder / "review.key").unlink()
    after = Server(run).client("ana")
    assert after.get(f"/item/{key}").status_code == 404
    (reviewed,) = after.list(verdict="reviewed")
    assert reviewed["verdict"] == "shortcut"
    assert reviewed["key"] == key_of(run, Log(run.folder).events("verdict")[0].payload["item"]) != key


def test_purposes_and_values_are_apart():
    key = ReviewKey(bytes(32))
    values = [("a", "b"), ("b", "a"), ("a",), ("a", "b", ""), ("ab",)]
    assert len({key.digest(*some) for some in values}) == len(values)
    assert key.digest("a") != ReviewKey(bytes([1]) * 32).digest("a")


# --- notes and names --------------------------------------------------------------------------------------------


def test_a_note_reveals_nothing_of_an_image_without_a_verdict(run, server, ana):
    item = next(i for i in QueueLoader(run, blind=True).current().items if i.id.startswith("slide-"))
    note = {"key": item.key, "text": "bo was here", "mark": "note-of-bo-1"}
    server.client("bo").post("/api/note", note)
    answer = ana.post("/api/note", {"key": item.key, "text": "is this fat?", "mark": "note-of-ana-1"})
    assert set(answer.json()) == {"number"}
    facts = ana.facts(item.key)
    assert facts["blinded"]
    assert [note["text"] for note in facts["notes"]] == ["is this fat?"]
    exported = ana.get("/export/verdicts.json")
    assert [(n["item"], n["text"]) for n in exported.json()["notes"]] == [(None, "is this fat?")]
    for text in (json.dumps(facts), exported.text, ana.get(f"/item/{item.key}").text, json.dumps(ana.list())):
        assert item.id not in text
        assert "bo was here" not in text
    ana.decide(item.key, "supports")
    assert [n["item"] for n in ana.get("/export/verdicts.json").json()["notes"]] == [item.id]
    assert "bo was here" in ana.get(f"/item/{item.key}").text


def registrations(run):
    return [(e.kind, e.actor) for e in events(run, "reviewer registered", "also known as")]


def blind_verdicts(run):
    return [(e.actor, e.payload["blind"]) for e in events(run)]


def test_a_second_name_in_one_browser_does_not_review_blinded_what_the_first_revealed(run, server, ana):
    first, second = ana.list_keys()[:2]
    ana.decide(first, "supports")
    ana.post("/api/reviewer", {"name": "bo"})
    assert ana.facts(first)["blinded"]
    ana.decide(first, "shortcut", mark="bo-on-the-first")
    ana.decide(second, "shortcut", mark="bo-on-the-second")
    ana.post("/api/reviewer", {"name": "ana"})
    ana.decide(second, "supports", mark="ana-on-the-second")
    assert blind_verdicts(run) == [("ana", True), ("bo", False), ("bo", True), ("ana", False)]
    known = ("also known as", "bo"), ("also known as", "ana")
    assert registrations(run) == [("reviewer registered", "ana"), *known]
    log = ReviewLog(run.folder)
    log.refresh()
    arms = queued(run)
    summary = summarise_reviews(log, arms)
    assert (summary.reviewers, summary.reviewed_twice, summary.pairs) == ({"ana = bo": 2}, 0, ())
    assert sum(summary.counts["queue"].values()) + sum(summary.counts["control"].values()) == 2
    server.client("cy").decide(first, "supports")
    log.refresh()
    assert [pair.reviewers for pair in summarise_reviews(log, arms).pairs] == [("ana = bo", "cy")]
    assert Log(run.folder).problems() == []


def test_a_second_name_of_the_one_who_requested_a_second_reviewer_is_none(server, ana):
    key = ana.list_keys()[0]
    ana.decide(key, "second-reviewer")
    ana.post("/api/reviewer", {"name": "bo"})
    ana.decide(key, "supports", mark="as-bo-on-it")
    cy = server.client("cy")
    assert cy.list_keys(verdict="awaits-second") == [key]
    cy.decide(key, "supports")
    assert server.client("dan").list(verdict="awaits-second") == []


def test_a_browser_is_recognised_after_a_restart_and_the_log_holds_no_cookie(run, ana):
    key = ana.list_keys()[0]
    ana.decide(key, "supports")
    back = Server(run).client(None, cookies=ana.http.cookies)
    assert "reviewing as</span> <bdi>ana" in back.get("/").text
    back.post("/api/reviewer", {"name": "bo"})
    back.decide(key, "shortcut", mark="bo-after-restart")
    assert blind_verdicts(run) == [("ana", True), ("bo", False)]
    text = (run.folder / "events.sqlite").read_bytes()
    cookies = {cookie.value for client in (ana, back) for cookie in client.http.cookies.jar}
    assert len(cookies) == 3  # two sessions of one browser
    assert not any(cookie.encode() in text for cookie in cookies)


def test_no_verdict_under_a_name_that_was_not_registered_before(run, server):
    first = QueueLoader(run, blind=True).current().items[0]
    assert server.client(None).decide(first.key, "supports").status_code == 422
    assert events(run) == []
    for preset in ("ana", None):
        client = Server(run, reviewer=preset).client(None if preset else "bo")
        client.decide(client.list_keys()[0], "supports")
    known = set()
    for event in events(run, "reviewer registered", "also known as", "verdict", "note"):
        if event.kind in ("reviewer registered", "also known as"):
            known.add(event.actor)
        assert event.actor in known


def test_a_personal_link_has_one_name(run):
    server = Server(run, personal=("ana", "bo"))
    assert set(server.access.tokens) == {"ana", "bo"}
    ana, bo = server.client(None, link="ana"), server.client(None, link="bo")
    page = ana.get("/reviewer").text
    assert ("Reviewing as" in page, 'id="reviewer-form"' in page) == (True, False)
    refused = ana.post("/api/reviewer", {"name": "bo"})
    assert (refused.status_code, "this link needs the name ana" in refused.json()["error"]) == (422, True)
    key = ana.list_keys()[0]
    ana.decide(key, "supports")
    bo.decide(key, "unsure")
    assert blind_verdicts(run) == [("ana", True), ("bo", True)]
    assert registrations(run) == [("reviewer registered", "ana"), ("reviewer registered", "bo")]


def test_what_was_open_without_blinding_is_not_reviewed_blinded_later(run):
    client = Server(run, blind=False).client("ana")
    key = client.list_keys()[0]
    client.get(f"/item/{key}")
    later, other = Server(run).client("ana"), Server(run).client("bo")
    later.decide(key, "supports")
    other.decide(key, "supports")
    assert blind_verdicts(run) == [("ana", False), ("bo", True)]


def test_the_login_name_is_offered_once(run):
    first = Server(run, login="root").client(None)
    assert "reviewing as</span> <bdi>root" in first.get("/").text
    assert registrations(run) == []  # nothing revealed, nothing done
    first.decide(first.list_keys()[0], "supports")
    second = Server(run, login="root").client(None)
    assert second.get("/").headers["location"] == "/reviewer"
    assert 'value="root"' in second.get("/reviewer").text
