import io
import json
import re
import shutil
import sqlite3
import time
from base64 import b64decode
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from PIL import Image
from scipy import ndimage

from equicam.drawing.text import visible
from equicam.errors import EquicamError
from equicam.reasons import describe
from equicam.runs.log import Log
from equicam.runs.report import page as pages
from equicam.runs.report import render
from equicam.runs.report.page import EXAMPLE, MAX_EXAMPLES, choose_examples, draw_thumbnails, write_report
from equicam.runs.store import RunStore
from equicam.runs.verdicts import ReviewLog
from equicam.shards import read_table, write_table
from equicam.steadiness import STEADY_FROM, WORDS, judge_row
from tests.audit.faked import BLANK, CHANGED, HOSTILE, MISSING, Page, fake_run, triaged


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = fake_run(tmp_path_factory.mktemp("made"))
    triage = triaged(run)
    path = write_report(run, triage)
    return SimpleNamespace(
        run=run,
        triage=triage,
        path=path,
        html=path.read_text(),
        page=Page(path.read_text()),
        facts=json.loads(path.with_suffix(".json").read_text()),
    )


def explained(items):
    return items.filter(pc.equal(items["status"], "ok"))


def test_the_page_needs_nothing_else_and_runs_nothing(made):
    policy = [
        a["content"] for a in made.page.every("meta") if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    tags = {name for name, _ in made.page.elements}
    assert not tags & {"script", "iframe", "object", "embed", "link", "base", "form", "foreignobject", "i"}
    for tag, attributes in made.page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            if key.endswith(("src", "href")):
                assert value.startswith(("data:image/jpeg;base64,", "#")), value[:60]
    style = made.html[made.html.index("<style>") : made.html.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "http:" not in made.html
    assert "https:" not in made.html


def test_hostile_names_are_text(made):
    queued = made.triage.rows.filter(pa.compute.equal(made.triage.rows["arm"], "queue"))["id"].to_pylist()
    assert set(HOSTILE) <= set(queued)
    assert "</td><b>tumour</b>" in made.page.text
    for name in HOSTILE:
        assert " ".join(visible(name).split()) in made.page.text
    for hidden in "\u202e\x1b\x00\u2028":
        assert hidden not in made.html
    assert r"invoice\u202egnp.exe" in made.html
    assert r"two\nlines\tand\x1b[31m red\x00.png" in made.html
    assert "{{ 7*7 }}" in made.page.text


def test_numbers_in_the_json_are_those_of_the_run(made):
    rows = {row["id"]: row for row in made.run.read_items().to_pylist()}
    ok = [row for row in rows.values() if row["status"] == "ok"]
    summary = made.facts["summary"]
    assert summary["images"] == summary["done"] == len(rows)
    assert (summary["ok"], summary["bad"], summary["queue"]) == (len(ok), 3, 16)
    assert summary["median_peum"] == np.median([row["peum_score"] for row in ok])
    assert summary["flipping"] == np.mean([row["flip_rate"] > 0 for row in ok])
    assert summary["calibrated"] == sum(row["eq"] is not None for row in ok)
    assert [q["rank"] for q in made.facts["queue"]] == list(range(1, 17))
    for q in made.facts["queue"]:
        same = (
            "peum_score",
            "confidence",
            "target",
            "label",
            "flip_rate",
            "eq",
            "flags",
            "view_confidence",
            "view_top1",
        )
        assert {key: q[key] for key in same} == {key: rows[q["id"]][key] for key in same}
    assert made.facts["manifest"]["weights"] == made.run.manifest.weights
    assert made.facts["log"]["last_hash"] == Log(made.run.folder).last()
    assert {row["id"] for row in made.facts["bad"]} == {
        row["id"] for row in rows.values() if row["status"] == "bad"
    }


def test_the_page_shows_the_numbers_of_the_json(made):
    text, queue = made.page.text, made.facts["queue"]
    assert made.triage.unstable.sentence in text
    assert made.triage.quality.sentence[1:] in text
    assert f"{made.facts['summary']['median_peum']:.3g}" in text
    assert {q["peum_undefined"] for q in queue} == {True, False}
    for q in queue:
        if not q["peum_undefined"]:
            assert f"{q['peum_score']:.4f} above {int(100 * q['peum_above'])}% of the run" in text
            assert 0 <= q["peum_above"] < 1
        assert all(reason in text for reason in q["reasons"])
    for shown in (made.run.manifest.weights[:12], Log(made.run.folder).last(), "equicam verify"):
        assert shown in text

    def refuse(name):
        raise AssertionError(name)

    json.loads(made.path.with_suffix(".json").read_text(), parse_constant=refuse)  # undefined is null
    assert made.facts["unstable"]["undefined"] is None


def test_the_control_arm_is_not_revealed(made, tmp_path):
    rows = made.triage.rows.to_pylist()
    controls = [row["id"] for row in rows if row["arm"] == "control"]
    queue = [row["id"] for row in rows if row["arm"] == "queue"]
    ok = [row["id"] for row in made.run.read_items().to_pylist() if row["status"] == "ok"]
    others = [name for name in ok if name not in controls + queue]
    assert len(others) >= len(controls) > 0
    assert all(not {"arm", "place"} & {*q} for q in made.facts["queue"])
    swapped = {"control": others[: len(controls)]}
    swapped = [row if row["arm"] == "queue" else row | {"id": swapped["control"].pop()} for row in rows]
    other = SimpleNamespace(
        rows=pa.Table.from_pylist(swapped, schema=made.triage.rows.schema), by="peum", quotas={},
        unstable=made.triage.unstable, quality=made.triage.quality,
    )  # fmt: skip
    again = write_report(made.run, other, out=tmp_path / "other.html")

    def timeless(text):
        return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d\+00:00)?", "", text)

    assert timeless(again.read_text()) == timeless(made.html)  # another control arm, the same report
    assert timeless((tmp_path / "other.json").read_text()) == timeless(
        made.path.with_suffix(".json").read_text()
    )


def test_verdicts_of_the_control_arm_name_no_image(made, tmp_path):
    """Numbers alone: which images outside the queue have verdicts is in neither file."""
    run = RunStore(shutil.copytree(made.run.folder, tmp_path / "run"))
    rows = made.triage.rows.to_pylist()
    control = [row["id"] for row in rows if row["arm"] == "control"]
    log = ReviewLog(run.folder)
    for i, name in enumerate(control):
        log.add_verdict(name, "ana", "shortcut", blind=True, previous_event=0, mark=f"mark-{i:04d}")
    path = write_report(run, made.triage, out=tmp_path / "with.html")
    facts = json.loads(path.with_suffix(".json").read_text())
    assert facts["review"]["counts"]["control"]["shortcut"] == len(control)
    without = json.loads(made.path.with_suffix(".json").read_text())
    assert facts["images"] == without["images"]
    for name in control:
        # in the table and perhaps among the examples, whether it has verdicts or not
        assert path.read_text().count(f">{visible(name)}<") == made.html.count(f">{visible(name)}<") >= 1


def test_the_first_lines_say_which_maps_can_be_trusted_and_why(made):
    rows = [row for row in made.run.read_items().to_pylist() if row["status"] == "ok"]
    words = Counter(row["steadiness"] for row in rows)
    assert len(words) == 3  # every word is there
    assert made.facts["steadiness"]["words"] == {word: words[word] for word in WORDS}
    text = made.page.text
    first = text[text.index("Which of these maps") : text.index("Summary")]
    changing = [row for row in rows if row["steadiness_reason"] == "prediction-changes"]
    following = sum(row["stability"] >= STEADY_FROM for row in changing)
    assert made.facts["steadiness"]["changing_but_following"] == following
    for count in (
        f"{words['steady']} are steady",
        f"{words['unsteady']} maps are unsteady",
        "the map is blank",
    ):
        assert count in first
    assert (f"in {following} of them it follows the image" in first) == bool(following)
    assert "has random weights" not in text


def test_the_table_has_every_image_with_its_word_and_reason(made):
    rows = {row["id"]: row for row in made.run.read_items().to_pylist() if row["status"] == "ok"}
    table = made.facts["images"]
    assert [row["id"] for row in table] != sorted(rows)
    assert {row["id"] for row in table} == set(rows)
    order = [WORDS.index(row["steadiness"]) for row in table]
    assert order == sorted(order)
    for row in table:
        judged = judge_row(rows[row["id"]], made.run.manifest.labels, made.run.manifest.presented)
        assert (row["steadiness"], row["reason"]) == (judged.word, describe(judged.reason))
        assert row["steadiness"] == rows[row["id"]]["steadiness"]
        assert row["confidence"] == rows[row["id"]]["confidence"]
        tops = rows[row["id"]]["view_top1"]
        assert row["flips"] == sum(top != rows[row["id"]]["target"] for top in tops)
        assert visible(row["reason"]) in made.page.text
    assert all(q["steadiness"] == rows[q["id"]]["steadiness"] for q in made.facts["queue"])
    shown = ["show-all", "show-unsteady", "show-unjudged", "show-steady"]
    assert [a["id"] for a in made.page.every("input")] == shown


def test_steady_and_unsteady_maps_are_shown_in_small(made):
    found = choose_examples(made.run, explained(made.run.read_items()))
    by_word = {
        word: [
            row
            for row in made.run.read_items().to_pylist()
            if (row["status"], row["steadiness"]) == ("ok", word) and row["stability"] is not None
        ]
        for word in ("steady", "unsteady")
    }
    assert all(by_word.values())
    highest = sorted(by_word["steady"], key=lambda row: (-row["stability"], row["id"]))
    lowest = sorted(by_word["unsteady"], key=lambda row: (row["stability"], row["id"]))
    assert [one.row["id"] for one in found["best"]] == [row["id"] for row in highest[:MAX_EXAMPLES]]
    assert [one.row["id"] for one in found["worst"]] == [row["id"] for row in lowest[:MAX_EXAMPLES]]
    for one in found["best"] + found["worst"]:
        assert len(one.strip) == EXAMPLE["most"]
        assert one.presented in made.html
    assert "Steady: the highest stability" in made.page.text
    assert made.html.index('id="examples"') < made.html.index('id="queue"')


def test_a_run_without_a_steady_map_shows_the_most_stable(made):
    items = made.run.read_items()
    word = pa.array(["unsteady" if one == "steady" else one for one in items["steadiness"].to_pylist()])
    items = items.set_column(items.column_names.index("steadiness"), "steadiness", word)
    found = choose_examples(made.run, explained(items))
    known = [r for r in items.to_pylist() if r["status"] == "ok" and r["stability"] is not None]
    assert found["best"][0].row["stability"] == max(row["stability"] for row in known)
    unjudged = explained(items).filter(pc.not_equal(explained(items)["steadiness"], "unsteady"))
    assert choose_examples(made.run, unjudged) is None


def test_the_table_has_the_own_map_of_every_image(made, monkeypatch):
    """The word is about that map, so it is shown and not the average over the views."""
    store, items = made.run, explained(made.run.read_items())
    found = draw_thumbnails(store, items)
    rows = {row["id"]: row for row in items.to_pylist()}
    assert found.keys() == rows.keys()
    table = made.html[made.html.index('id="images"') : made.html.index('id="queue"')]
    assert all(url in table for url in found.values())
    assert table.count("<img") == len(rows)
    name = next(i for i, row in rows.items() if not {"blank", "constant"} & {*row["flags"]})
    (maps,) = store.maps({name}).values()
    for own, same in ((maps.view_maps[store.manifest.presented], True), (maps.map, False)):
        planes = np.broadcast_to(own, maps.view_maps.shape)
        monkeypatch.setattr(store, "maps", lambda _ids, p=planes: {name: replace(maps, view_maps=p)})
        assert (draw_thumbnails(store, items)[name] == found[name]) == same
    monkeypatch.setattr(pages, "MAX_THUMBNAILS", len(rows) - 1)
    assert draw_thumbnails(store, items) == {}


def test_abbreviations_are_spelled_out_where_they_are_first_used(made):
    text = made.page.text
    for word, meaning in (("PEUM", "per-image explanation uncertainty"), ("Eq", "equivariance")):
        first = re.search(rf"\b{word}\b", text)
        assert text[first.end() :].startswith(f" ({meaning})")


def test_plots_have_the_colours_of_the_page(made):
    """Which are light or dark; a colour written into a plot would vanish on one of them."""
    drawn = "".join(
        re.findall(r'<svg viewBox.*?role="img" aria-label="(?:Hist|PEUM).*?</svg>', made.html, re.DOTALL)
    )
    assert drawn.count("<svg") >= 3
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == {"ink", "accent", "bar", "mark", "paper"}
    assert re.findall(r"#[0-9a-f]{6}\b", drawn) == []


def contrast(one, other):
    """WCAG 2."""

    def luminance(colour):
        digits = colour.lstrip("#")
        digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("report/templates/report.html.j2", ("warn", "steady", "unsteady", "unjudged")),
        ("review/static/review.css", ("warn", "supports")),
    ],
)
def test_text_can_be_read_in_light_and_in_dark(path, text):
    style = (Path(render.__file__).parents[1] / path).read_text()
    blocks = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block))
        for block in re.findall(r":root[^{]*{[^}]*}", style)
    ]
    light, dark = (block for block in blocks if "ink" in block)
    assert contrast(light["ink"], dark["ink"]) > 4.5  # one is dark on light, the other light on dark
    for block in (light, dark):
        for name in ("ink", "soft", "accent", *text):
            for ground in ("paper", "background"):
                assert contrast(block[name], block[ground]) >= 4.5, (name, ground)


def cards(made):
    """The text of each card by the id it is of."""
    parts = re.split(r'(?=<article class="card")', made.html)[1:]
    return {q["id"]: part.split("</article>")[0] for q, part in zip(made.facts["queue"], parts, strict=True)}


def test_a_missing_or_changed_image_is_named_and_not_shown(made):
    shown = cards(made)
    assert "no longer where it was" in shown[MISSING]
    assert "has changed since it was explained" in shown[CHANGED]
    for name in (MISSING, CHANGED):
        images = [a["src"] for a in Page(shown[name]).every("img")]
        assert len(images) == 3 + 18  # the maps are still there, on grey
        first = np.asarray(Image.open(io.BytesIO(b64decode(images[0].split(",")[1]))))
        assert abs(first[0, 0].astype(int) - render.NO_IMAGE_GREY).max() < 90
    assert len(Page(shown[HOSTILE[0]]).every("img")) == 4 + 18
    flipping = next(q for q in made.facts["queue"] if q["flip_rate"] > 0 and not q["peum_undefined"])
    marked = [a for a in Page(shown[flipping["id"]]).every("li") if a.get("class") == "flips"]
    assert len(marked) == sum(t != flipping["target"] for t in flipping["view_top1"])


def test_a_blank_map_shows_the_image_alone(made):
    shown = cards(made)[BLANK]
    assert "blank: no positive value" in shown
    assert "undefined" in shown
    _, single, fused, spread, *strip = (a["src"] for a in Page(shown).every("img"))
    assert single == fused == spread
    assert len(strip) == 18


def test_every_image_has_a_label_and_headings_are_in_order(made):
    assert all(a.get("alt") for a in made.page.every("img"))
    assert all(a.get("aria-label") for a in made.page.every("svg"))
    assert made.page.every("html") == [{"lang": "en"}]
    levels = [int(name[1]) for name, _ in made.page.elements if re.fullmatch(r"h[1-6]", name)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(a.get("scope") for a in made.page.every("th"))
    ids = [a["id"] for _, a in made.page.elements if "id" in a]
    assert len(ids) == len(set(ids))


def test_a_report_of_forty_images_is_small_and_quick(tmp_path):
    def photograph(i):
        rng = np.random.default_rng(i)
        rough = ndimage.gaussian_filter(rng.standard_normal((224, 224, 3)), (1.2, 1.2, 0)) * 110
        return np.clip(128 + rough + 30 * rng.standard_normal((224, 224, 1)), 0, 255).astype(np.uint8)

    run = fake_run(tmp_path, count=48, draw_image=photograph)
    start = time.process_time()
    path = write_report(run, triaged(run, queue=40), top=40)
    assert time.process_time() - start < 15
    assert path.stat().st_size < 8_000_000
    assert len(re.findall(r'<article class="card"', path.read_text())) == 40


def random_weights(run):
    path = run.folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_from": "random"}))


def unfinished(run):
    manifest, sample = run.manifest, read_table(run.folder / "sample.parquet")
    write_table(run.folder / "sample.parquet", pa.concat_tables([sample, sample]))
    (run.folder / "manifest.json").write_text(replace(manifest, images=2 * len(sample)).dumps())


def broken_log(run):
    with sqlite3.connect(run.folder / "events.sqlite") as database:
        database.execute("DROP TRIGGER no_change")
        database.execute("UPDATE events SET who = 'nobody' WHERE number = 1")


def as_made(_run):
    pass


NO_QUEUE = {"queue": 0, "controls": 0}


@pytest.mark.parametrize(
    ("made", "change", "ranked", "said"),
    [
        ({}, random_weights, {}, ["This network has random weights."]),
        ({}, unfinished, {}, ["This run is not finished."]),
        ({}, broken_log, {}, ["event 1 was changed"]),
        ({"bad": 130}, as_made, {}, ["The first 100 of 130", "And 30 more."]),
        (
            {"calibrate": 0, "bad": 0},
            as_made,
            NO_QUEUE,
            ["have a stability below 0.5", "Nothing is in the queue."],
        ),
        ({"angles": (0.0,)}, as_made, {}, ["A single view has no spread."]),
        ({"angles": (-60.0, 60.0, 180.0)}, as_made, {}, ["do not include the presented one"]),
    ],
)
def test_what_is_special_about_a_run_is_said(tmp_path, made, change, ranked, said):
    change(fake_run(tmp_path, **made))
    run = RunStore(tmp_path / "run")
    page = Page(write_report(run, triaged(run, **{"queue": 2} | ranked)).read_text())
    assert all(words in page.text for words in said)
    assert ("Quality of the queue" in page.text) == (made.get("calibrate") != 0)
    if made.get("bad"):
        bad = page.text[page.text.index("Images that could not be read") :]
        assert bad.count("truncated bytes") == 100


def test_top_cuts_the_cards_and_a_large_run_has_no_table(made, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "MAX_TABLE_ROWS", 5)
    path = write_report(made.run, made.triage, out=tmp_path / "deep" / "few.html", top=3)
    text = Page(path.read_text()).text
    assert "The first 3 of 16 images" in text
    assert path.read_text().count('<article class="card"') == 3
    assert json.loads(path.with_suffix(".json").read_text())["images"] is None
    assert "too many for a table here" in text
    assert 'class="scroll images"' not in path.read_text()


def test_a_triage_of_another_run_and_names_that_would_hurt_the_run_are_refused(made):
    rows = made.triage.rows.slice(0, 1).to_pylist()
    other = pa.Table.from_pylist([{**rows[0], "id": "elsewhere.png", "arm": "queue"}])
    stranger = SimpleNamespace(rows=other, by="peum", unstable=made.triage.unstable, quality=None)
    with pytest.raises(EquicamError, match=r"needs a triage of this run, got 'elsewhere.png'"):
        write_report(made.run, stranger)
    for name in ("report.txt", "manifest.html", "digests.html"):
        with pytest.raises(EquicamError, match=r"a report needs a name that ends in \.html"):
            write_report(made.run, made.triage, out=made.run.folder / name)
