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
    """A report with the run and the triage it is of, and rows by id: all, and those of explained images."""
    run = fake_run(tmp_path_factory.mktemp("made"))
    path = write_report(run, triage := triaged(run))
    html, rows = path.read_text(), {row["id"]: row for row in run.read_items().to_pylist()}
    found = SimpleNamespace(run=run, triage=triage, path=path, html=html, page=Page(html), rows=rows)
    found.ok = {name: row for name, row in rows.items() if row["status"] == "ok"}
    found.facts = json.loads(path.with_suffix(".json").read_text())
    return found


def of_arm(made, arm):
    return [row["id"] for row in made.triage.rows.to_pylist() if row["arm"] == arm]


def explained(items):
    return items.filter(pc.equal(items["status"], "ok"))


def test_the_page_needs_nothing_else_and_runs_nothing(made):
    metas = made.page.every("meta")
    policy = [a["content"] for a in metas if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]
    tags = {name for name, _ in made.page.elements}
    assert not tags & {"script", "iframe", "object", "embed", "link", "base", "form", "foreignobject", "i"}
    for tag, attributes in made.page.elements:
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key)
            if key.endswith(("src", "href")):
                assert value.startswith(("data:image/jpeg;base64,", "#")), value[:60]
    style = made.html[made.html.index("<style>") : made.html.index("</style>")]
    assert not any(word in style for word in ("url(", "@import"))
    assert not any(word in made.html for word in ("http:", "https:"))


def test_hostile_names_are_text(made):
    assert set(HOSTILE) <= set(of_arm(made, "queue"))
    for name in HOSTILE:
        assert " ".join(visible(name).split()) in made.page.text
    assert not any(hidden in made.html for hidden in "\u202e\x1b\x00\u2028")
    for text in (r"invoice\u202egnp.exe", r"two\nlines\tand\x1b[31m red\x00.png"):
        assert text in made.html
    for text in ("{{ 7*7 }}", "</td><b>tumour</b>"):
        assert text in made.page.text


def test_numbers_in_the_json_are_those_of_the_run(made):
    summary, ok = made.facts["summary"], made.ok.values()
    assert summary["images"] == summary["done"] == len(made.rows)
    assert (summary["ok"], summary["bad"], summary["queue"]) == (len(ok), 3, 16)
    assert summary["median_peum"] == np.median([row["peum_score"] for row in ok])
    assert summary["flipping"] == np.mean([row["flip_rate"] > 0 for row in ok])
    assert summary["calibrated"] == sum(row["eq"] is not None for row in ok)
    assert [q["rank"] for q in made.facts["queue"]] == list(range(1, 17))
    for q in made.facts["queue"]:
        columns = "peum_score", "confidence", "target", "label", "flip_rate", "eq", "flags"
        for key in (*columns, "view_confidence", "view_top1"):
            assert q[key] == made.rows[q["id"]][key]
    assert made.facts["manifest"]["weights"] == made.run.manifest.weights
    assert made.facts["log"]["last_hash"] == Log(made.run.folder).last()
    assert {row["id"] for row in made.facts["bad"]} == made.rows.keys() - made.ok.keys()


def test_the_page_shows_the_numbers_of_the_json(made):
    text, queue = made.page.text, made.facts["queue"]
    assert {q["peum_undefined"] for q in queue} == {True, False}
    for q in queue:
        if not q["peum_undefined"]:
            assert f"{q['peum_score']:.4f} above {int(100 * q['peum_above'])}% of the run" in text
            assert 0 <= q["peum_above"] < 1
        assert all(reason in text for reason in q["reasons"])
    sentences = made.triage.unstable.sentence, made.triage.quality.sentence[1:]
    median = f"{made.facts['summary']['median_peum']:.3g}"
    for shown in (*sentences, median, made.facts["log"]["last_hash"], "equicam verify"):
        assert shown in text
    assert made.run.manifest.weights[:12] in text
    json.dumps(made.facts, allow_nan=False)  # undefined is null
    assert made.facts["unstable"]["undefined"] is None


def test_the_control_arm_is_not_revealed(made, tmp_path):
    controls, queue = of_arm(made, "control"), of_arm(made, "queue")
    others = [name for name in made.ok if name not in controls + queue]
    assert len(others) >= len(controls) > 0
    assert all(not {"arm", "place"} & {*q} for q in made.facts["queue"])
    swap = dict(zip(controls, others, strict=False))
    rows = [row | {"id": swap.get(row["id"], row["id"])} for row in made.triage.rows.to_pylist()]
    swapped = pa.Table.from_pylist(rows, schema=made.triage.rows.schema)
    again = write_report(
        made.run, SimpleNamespace(**vars(made.triage) | {"rows": swapped}), out=tmp_path / "other.html"
    )
    for suffix in (".html", ".json"):  # another control arm, the same report
        texts = (path.with_suffix(suffix).read_text() for path in (made.path, again))
        one, other = (re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d\+00:00)?", "", text) for text in texts)
        assert one == other


def test_verdicts_of_the_control_arm_name_no_image(made, tmp_path):
    """Numbers alone: which images outside the queue have verdicts is in neither file."""
    run = RunStore(shutil.copytree(made.run.folder, tmp_path / "run"))
    control, log = of_arm(made, "control"), ReviewLog(run.folder)
    for i, name in enumerate(control):
        log.add_verdict(name, "ana", "shortcut", blind=True, previous_event=0, mark=f"mark-{i:04d}")
    path = write_report(run, made.triage, out=tmp_path / "with.html")
    facts = json.loads(path.with_suffix(".json").read_text())
    assert facts["review"]["counts"]["control"]["shortcut"] == len(control)
    assert facts["images"] == made.facts["images"]
    for name in control:
        # in the table and perhaps among the examples, whether it has verdicts or not
        assert path.read_text().count(f">{visible(name)}<") == made.html.count(f">{visible(name)}<") >= 1


def test_the_first_lines_say_which_maps_can_be_trusted_and_why(made):
    words = Counter(row["steadiness"] for row in made.ok.values())
    assert len(words) == 3  # every word is there
    assert made.facts["steadiness"]["words"] == {word: words[word] for word in WORDS}
    text = made.page.text
    first = text[text.index("Which of these maps") : text.index("Summary")]
    changing = [row for row in made.ok.values() if row["steadiness_reason"] == "prediction-changes"]
    following = sum(row["stability"] >= STEADY_FROM for row in changing)
    assert made.facts["steadiness"]["changing_but_following"] == following
    counts = f"{words['steady']} are steady", f"{words['unsteady']} maps are unsteady", "the map is blank"
    assert all(count in first for count in counts)
    assert (f"in {following} of them it follows the image" in first) == bool(following)
    assert "has random weights" not in text


def test_the_table_has_every_image_with_its_word_and_reason(made):
    table = made.facts["images"]
    assert [row["id"] for row in table] != sorted(made.ok)
    assert {row["id"] for row in table} == set(made.ok)
    order = [WORDS.index(row["steadiness"]) for row in table]
    assert order == sorted(order)
    for row in table:
        known = made.ok[row["id"]]
        judged = judge_row(known, made.run.manifest.labels, made.run.manifest.presented)
        assert row["steadiness"] == known["steadiness"] == judged.word
        assert (row["reason"], row["confidence"]) == (describe(judged.reason), known["confidence"])
        assert row["flips"] == sum(top != known["target"] for top in known["view_top1"])
        assert visible(row["reason"]) in made.page.text
    assert all(q["steadiness"] == made.ok[q["id"]]["steadiness"] for q in made.facts["queue"])
    shown = ["show-all", "show-unsteady", "show-unjudged", "show-steady"]
    assert [a["id"] for a in made.page.every("input")] == shown


def test_steady_and_unsteady_maps_are_shown_in_small(made):
    found = choose_examples(made.run, explained(made.run.read_items()))
    for group, word, sign in (("best", "steady", -1), ("worst", "unsteady", 1)):
        rows = [row for row in made.ok.values() if row["steadiness"] == word and row["stability"] is not None]
        rows.sort(key=lambda row: (sign * row["stability"], row["id"]))
        assert rows
        assert [one.row["id"] for one in found[group]] == [row["id"] for row in rows[:MAX_EXAMPLES]]
        for one in found[group]:
            assert len(one.strip) == EXAMPLE["most"]
            assert one.presented in made.html
    assert "Steady: the highest stability" in made.page.text
    assert made.html.index('id="examples"') < made.html.index('id="queue"')


def test_a_run_without_a_steady_map_shows_the_most_stable(made):
    items = explained(made.run.read_items())
    word = pc.if_else(pc.equal(items["steadiness"], "steady"), "unsteady", items["steadiness"])
    items = items.set_column(items.column_names.index("steadiness"), "steadiness", word)
    found = choose_examples(made.run, items)
    assert found["best"][0].row["stability"] == pc.max(items["stability"]).as_py()
    assert choose_examples(made.run, items.filter(pc.not_equal(word, "unsteady"))) is None


def test_the_table_has_the_own_map_of_every_image(made, monkeypatch):
    """The word is about that map, so it is shown and not the average over the views."""
    store, items = made.run, explained(made.run.read_items())
    found = draw_thumbnails(store, items)
    assert found.keys() == made.ok.keys()
    table = made.html[made.html.index('id="images"') : made.html.index('id="queue"')]
    assert all(url in table for url in found.values())
    assert table.count("<img") == len(made.ok)
    name = next(i for i, row in made.ok.items() if not {"blank", "constant"} & {*row["flags"]})
    (maps,) = store.maps({name}).values()
    for own, same in ((maps.view_maps[store.manifest.presented], True), (maps.map, False)):
        planes = np.broadcast_to(own, maps.view_maps.shape)
        monkeypatch.setattr(store, "maps", lambda _ids, p=planes: {name: replace(maps, view_maps=p)})
        assert (draw_thumbnails(store, items)[name] == found[name]) == same
    monkeypatch.setattr(pages, "MAX_THUMBNAILS", len(made.ok) - 1)
    assert draw_thumbnails(store, items) == {}


def test_abbreviations_are_spelled_out_where_they_are_first_used(made):
    text = made.page.text
    for word, meaning in (("PEUM", "per-image explanation uncertainty"), ("Eq", "equivariance")):
        first = re.search(rf"\b{word}\b", text)
        assert text[first.end() :].startswith(f" ({meaning})")


def test_plots_have_the_colours_of_the_page(made):
    """Which are light or dark; a colour written into a plot would vanish on one of them."""
    plot = r'<svg viewBox.*?role="img" aria-label="(?:Hist|PEUM).*?</svg>'
    drawn = "".join(re.findall(plot, made.html, re.DOTALL))
    assert drawn.count("<svg") >= 3
    assert set(re.findall(r"var\(--(\w+)\)", drawn)) == {"ink", "accent", "bar", "mark", "paper"}
    assert re.findall(r"#[0-9a-f]{6}\b", drawn) == []


def luminance(colour):
    """WCAG 2."""
    digits = colour.lstrip("#")
    digits = "".join(2 * c for c in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    r, g, b = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


TEXTS = {
    "report/templates/report.html.j2": ("warn", "steady", "unsteady", "unjudged"),
    "review/static/review.css": ("warn", "supports"),
}


@pytest.mark.parametrize("path", TEXTS)
def test_text_can_be_read_in_light_and_in_dark(path):
    style = (Path(render.__file__).parents[1] / path).read_text()
    blocks = re.findall(r":root[^{]*{[^}]*}", style)
    blocks = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block)) for block in blocks]
    light, dark = (block for block in blocks if "ink" in block)
    assert contrast(light["ink"], dark["ink"]) > 4.5  # one is dark on light, the other light on dark
    for block in (light, dark):
        for name in ("ink", "soft", "accent", *TEXTS[path]):
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


NONE = {"queue": 0, "controls": 0}


@pytest.mark.parametrize(
    ("made", "change", "ranked", "said"),
    [
        ({}, random_weights, {}, ["This network has random weights."]),
        ({}, unfinished, {}, ["This run is not finished."]),
        ({}, broken_log, {}, ["event 1 was changed"]),
        ({"bad": 130}, None, {}, ["The first 100 of 130", "And 30 more."]),
        ({"calibrate": 0, "bad": 0}, None, NONE, ["have a stability below 0.5", "Nothing is in the queue."]),
        ({"angles": (0.0,)}, None, {}, ["A single view has no spread."]),
        ({"angles": (-60.0, 60.0, 180.0)}, None, {}, ["do not include the presented one"]),
    ],
)
def test_what_is_special_about_a_run_is_said(tmp_path, made, change, ranked, said):
    run = fake_run(tmp_path, **made)
    if change:
        change(run)
    run = RunStore(run.folder)
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
    with pytest.raises(EquicamError, match=r"needs a triage of this run, got 'elsewhere.png'"):
        write_report(made.run, SimpleNamespace(**vars(made.triage) | {"rows": other, "quality": None}))
    for name in ("report.txt", "manifest.html", "digests.html"):
        with pytest.raises(EquicamError, match=r"a report needs a name that ends in \.html"):
            write_report(made.run, made.triage, out=made.run.folder / name)
