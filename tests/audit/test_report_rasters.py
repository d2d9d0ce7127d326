"""The overview of rasters in the report: the right numbers at the right places, and never another raster."""

import io
import json
import re
from base64 import b64decode
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from equicam.runs.report import rasters
from equicam.runs.report.page import write_report
from equicam.runs.report.rasters import _label_outlines, _mean_over_windows, _Outline, raster_overview
from equicam.runs.store import RASTERS, RunStore
from equicam.runs.triage import triage
from equicam.shards import read_table, write_table
from tests.audit.faked import Page, fake_run, triaged
from tests.audit.faked_rasters import TILE, fake_raster_run, write_map


def rank(run):
    views = {"transforms": run.manifest.transforms, "classes": run.manifest.classes}
    return triage(run.read_items(), budget="30%", **views)


def overview(run, found=None):
    rows = (found or rank(run)).rows.sort_by("rank").to_pylist()
    queue = [row for row in rows if row["arm"] == "queue"]
    return raster_overview(run, run.read_items(), queue, by="stability", cards=len(queue))


def north(run, found=None):
    return next(one for one in overview(run, found).cards if one.facts["id"] == "north.tif")


def with_values(table, name, values):
    at = table.column_names.index(name)
    return table.set_column(at, table.schema.field(name), pa.array(values, pa.float64()))


def pixels(url):
    return np.asarray(Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")).astype(float)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = fake_raster_run(tmp_path_factory.mktemp("rasters"))
    path = write_report(run, found := rank(run))
    html, facts = path.read_text(), json.loads(path.with_suffix(".json").read_text())
    return SimpleNamespace(run=run, triage=found, html=html, page=Page(html), facts=facts)


def test_numbers_of_every_raster_are_in_page_and_json(made):
    known = {row["id"]: row for row in made.facts["rasters"]["rasters"]}
    assert set(known) == {"north.tif", "south<b>.tif", "broken.tif"}
    queued = [row["id"] for row in made.triage.rows.to_pylist() if row["arm"] == "queue"]
    for name in ("north.tif", "south<b>.tif"):
        assert (known[name]["windows"], known[name]["nodata"], known[name]["explained"]) == (72, 8, 72)
        assert known[name]["queue"] == sum(one.startswith(f"{name}#") for one in queued)
        assert name in made.page.text
    for text in ("480 × 384 pixels", "EPSG:32633", "needs a file that can be read"):
        assert text in made.page.text
    assert "path" not in known["north.tif"]
    order = [row["queue"] for row in made.facts["rasters"]["rasters"]]
    assert order == sorted(order, reverse=True)


def test_the_page_still_needs_nothing_else_and_stands_before_the_queue(made):
    assert made.html.index('id="rasters"') < made.html.index('id="queue"')
    for _, attributes in made.page.elements:
        for key, value in attributes.items():
            if key.endswith(("src", "href")):
                assert value.startswith(("data:image/jpeg;base64,", "#")), value[:60]
    assert "south<b>.tif" not in made.html
    assert not made.page.every("b") or "script" not in {name for name, _ in made.page.elements}


def test_the_queues_windows_are_outlined_with_their_ranks_and_no_others(made):
    ranks = {row["rank"] for row in made.triage.rows.to_pylist() if row["arm"] == "queue"}
    others = {row["rank"] for row in made.triage.rows.to_pylist() if row["arm"] == "control"}
    section = made.html[made.html.index('id="rasters"') : made.html.index('id="queue"')]
    written = {int(n) for n in re.findall(r'font-weight="600" fill="#fff">(\d+)</text>', section)}
    assert written == ranks
    assert not written & others
    assert all(f'href="#image-{n}"' in section for n in range(1, len(made.facts["queue"]) + 1))


def test_colours_lie_where_the_windows_are(made):
    found = overview(made.run, made.triage)
    card = north(made.run, made.triage)
    low, high = found.facts["scales"]["signal"]
    image = pixels(card.values["signal"])
    assert image.shape == (512, 640, 3)
    shades = []
    for row in made.run.read_items().to_pylist():
        if row["id"].startswith("north.tif#"):
            x, y = (int(640 / 480 * (row[axis] + TILE / 2)) for axis in "xy")
            shades.append((row["stability"], image[y - 8 : y + 8, x - 8 : x + 8].mean()))
    assert np.corrcoef(np.array(shades).T)[0, 1] < -0.8  # bright where the map moves
    assert low < high
    nothing = image[100:300, 8:40]  # no window there: pale grey
    assert np.ptp(nothing, axis=-1).max() < 12
    assert nothing.mean() > 180


def test_strength_is_the_mean_of_the_stored_map(made):
    items = made.run.read_items()
    name = items["id"][5].as_py()
    found = rasters._strengths(made.run, items, [5])
    assert found[5] == pytest.approx(made.run.maps([name])[name].map.mean(), rel=2e-3)
    assert np.isnan(np.delete(found, 5)).all()


@pytest.mark.parametrize("overlap", [1, 2])
def test_the_mean_over_windows_is_that_of_a_slow_loop(overlap):
    rng, size = np.random.default_rng(0), (64, 50)
    starts = rng.uniform(-5, 60, (40, 2))
    boxes = np.concatenate([starts, starts + 9 * overlap], axis=1)
    boxes[3] = np.nan
    values = rng.normal(size=40)
    values[5] = np.nan
    mean, covered = _mean_over_windows(boxes, values, size[::-1])
    total, count = np.zeros((50, 64)), np.zeros((50, 64))
    for box, value in zip(boxes, values, strict=True):
        if np.isfinite([*box, value]).all():
            first = [int(np.clip(np.rint(v), 0, n - 1)) for v, n in zip(box[:2], size, strict=True)]
            ends = zip(box[2:], first, size, strict=True)
            spans = [slice(a, int(np.clip(np.rint(v), a + 1, n))) for v, a, n in ends]
            total[spans[1], spans[0]] += value
            count[spans[1], spans[0]] += 1
    assert np.array_equal(covered, count > 0)
    np.testing.assert_allclose(mean[covered], (total / np.maximum(count, 1))[covered], atol=1e-12)
    _, covered = _mean_over_windows(np.array([[3.2, 4.1, 3.3, 4.2]]), np.array([1.0]), (8, 8))
    assert np.argwhere(covered).tolist() == [[4, 3]]  # a window smaller than a pixel has one


def test_labels_do_not_overlap_and_stay_inside():
    rng = np.random.default_rng(2)
    boxes = [tuple(float(v) for v in (x, y, x + 9, y + 9)) for x, y in rng.uniform(0, 190, (120, 2))]
    placed = _label_outlines([_Outline(box, i + 1, None) for i, box in enumerate(boxes)], (200, 200), 1.0)
    found = [one.label for one in placed if one.label]
    assert 10 < len(found) < 120
    for i, (x, y, w, h) in enumerate(found):
        assert min(x, y) >= -0.1
        assert max(x + w, y + h) <= 200.1
        for a, b, c, d in found[:i]:
            assert x >= a + c - 0.2 or x + w <= a + 0.2 or y >= b + d - 0.2 or y + h <= b + 0.2
    # one that is wider than the image is left out
    assert rasters._label_place((0.0, 0.0, 4.0, 4.0), 30.0, 12.0, (100, 8), []) is None


@pytest.mark.parametrize("change", ["gone", "shorter", "other pixels"])
def test_another_raster_is_not_shown_but_its_windows_are_drawn(tmp_path, change):
    run, path = fake_raster_run(tmp_path), tmp_path / "rasters" / "0.tif"
    before = path.stat().st_size
    if change == "gone":
        path.unlink()
    elif change == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        write_map(path, seed=99)
        assert path.stat().st_size == before
    card = north(run)
    assert "no longer" in card.missing or "has changed" in card.missing
    assert np.ptp(pixels(card.thumbnail)) < 3  # plain grey
    assert pixels(card.values["signal"]).std() > 10
    if change == "gone":
        assert write_report(run, rank(run), top=1).read_text().count(card.missing) > 1


def test_of_many_rasters_the_first_by_windows_in_the_queue(made, tmp_path, monkeypatch):
    monkeypatch.setattr(rasters, "MAX_RASTERS", 1)
    path = write_report(made.run, made.triage, top=1, out=tmp_path / "few.html")
    text = Page(path.read_text()).text
    facts = json.loads(path.with_suffix(".json").read_text())["rasters"]["rasters"]
    assert len(overview(made.run, made.triage).cards) == 1
    assert "The images are windows of 3 rasters. Here are the 1 with the most windows in the queue." in text
    assert f"have 72 windows, {facts[1]['queue']} of them in the queue" in text
    assert "1 of them could not be read" in text


def test_moved_rasters_are_found_where_they_are_now(tmp_path):
    run = fake_raster_run(tmp_path)
    there = (tmp_path / "rasters" / "0.tif").rename(tmp_path / "there.tif")
    moved = RunStore(run.folder, moved={"north.tif": str(there)})
    assert moved.rasters()["path"][0].as_py() == str(there)
    assert north(moved).missing is None


def test_damaged_tables_are_not_obeyed(tmp_path):
    run = fake_raster_run(tmp_path)
    rows = read_table(path := run.path("items", 0))
    for name in ("x", "side"):  # no numbers, or none of a raster
        rows = with_values(rows, name, [1e300, -1e300, float("nan"), None, *rows[name].to_pylist()[4:]])
    write_table(path, rows)
    assert all(card.values["signal"] for card in overview(run).cards if card.facts["width"])
    table = read_table(run.folder / "rasters.parquet").to_pylist()
    table[0] |= {"width": 0, "height": -4}
    table[1] |= {"width": 2**62, "crs": "<script>\u202e"}
    write_table(run.folder / "rasters.parquet", pa.Table.from_pylist(table, schema=RASTERS))
    text = write_report(RunStore(run.folder), rank(run), top=1).read_text()
    assert not any(hostile in text for hostile in ("<script>", "\u202e"))
    assert "did not record its size" in text


def test_a_run_of_images_has_no_overview(tmp_path):
    run = fake_run(tmp_path, count=12)
    path = write_report(run, triaged(run, queue=4))
    assert 'id="rasters"' not in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["rasters"] is None


def test_a_single_view_has_no_signal(made):
    items = made.run.read_items()
    items = with_values(items, "stability", [None] * items.num_rows)
    queue = [{"id": items["id"][0].as_py(), "rank": 1}]
    found = raster_overview(made.run, items, queue, by="stability", cards=1)
    assert found.facts["scales"]["signal"] is found.cards[0].values["signal"] is None
    assert found.cards[0].values["strength"]
