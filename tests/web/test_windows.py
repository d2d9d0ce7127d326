"""Windows of rasters on the review page: their surroundings, the windows beside them, and what both may not tell."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from equicam.rasters.options import raster_id
from equicam.runs.review.images import BLOCK_BYTES
from equicam.runs.review.queue import QueueLoader
from equicam.runs.store import RunStore
from tests.audit.faked import fake_run
from tests.audit.faked_rasters import TILE, fake_raster_run, write_map
from tests.web.conftest import Server, assert_hidden, by_key, key_of, queued, rank

rasterio = pytest.importorskip("rasterio")


@pytest.fixture(scope="session")
def shared_raster_run(tmp_path_factory):
    """Read only."""
    return rank(fake_raster_run(tmp_path_factory.mktemp("rasters")))


@pytest.fixture
def run(shared_raster_run, tmp_path):
    return RunStore(shutil.copytree(shared_raster_run.folder, tmp_path / "run"))


@pytest.fixture
def ana(run):
    return Server(run).client("ana")


def rows_of(run):
    return run.rows(queued(run))


def north(run):
    """The key of a window of the first raster."""
    return key_of(run, next(name for name in rows_of(run) if name.startswith("north.tif#")))


def read_window(path, *place):
    """Pixels of a raster, and which of them are no background."""
    with rasterio.open(path) as file:
        pixels = np.moveaxis(file.read(window=rasterio.windows.Window(*map(int, place))), 0, -1)
    return pixels, (pixels > 0).any(-1)


def test_surroundings_show_the_window_in_its_raster_and_no_map(run, ana):
    name, row = next((n, r) for n, r in rows_of(run).items() if TILE < r["x"] < 400 and 40 < r["y"] < 300)
    shown, alone = (ana.image(key_of(run, name), kind) for kind in ("surroundings", "input"))
    assert shown.shape == (3 * TILE, 3 * TILE, 3)
    inner = shown[TILE + 2 : 2 * TILE - 2, TILE + 2 : 2 * TILE - 2]
    np.testing.assert_allclose(inner, alone[2:-2, 2:-2], atol=2)
    assert (shown[TILE - 1, TILE : 2 * TILE] > 250).all()  # the outline lies outside the window
    whole, valid = read_window(row["path"], row["x"] - TILE, row["y"] - TILE, TILE - 5, TILE - 5)
    np.testing.assert_allclose(shown[: TILE - 5, : TILE - 5][valid], whole[valid], atol=2)
    at_the_top = next(n for n, r in rows_of(run).items() if r["y"] == 0 and r["x"] > TILE)
    beyond = ana.image(key_of(run, at_the_top), "surroundings")[: TILE - 6]
    assert (beyond == 255).all()


def test_the_original_of_a_window_has_the_rasters_own_pixels(run, ana):
    name, row = next((n, r) for n, r in rows_of(run).items() if r["x"] < 400 and r["y"] < 300)
    shown = ana.image(key_of(run, name), "original")
    whole, valid = read_window(row["path"], row["x"], row["y"], row["side"], row["side"])
    assert shown.shape[:2] == whole.shape[:2]
    assert valid.mean() > 0.5
    np.testing.assert_allclose(shown[valid], whole[valid], atol=2)


def test_surroundings_are_padded_and_shown_before_the_verdict(run, ana):
    keys = ana.list_keys()[:12]
    shown = {key: ana.get(f"/image/{key}/surroundings") for key in keys}
    assert {(one.status_code, len(one.content)) for one in shown.values()} == {(200, BLOCK_BYTES)}
    assert {ana.get(f"/image/{key}/peum").status_code for key in keys} == {404}
    ana.decide(keys[0], "supports")  # nothing in the image comes from the map or the verdict
    assert ana.get(f"/image/{keys[0]}/surroundings").content == shown[keys[0]].content


def test_windows_reveal_neither_name_nor_signal_before_the_verdict(run):
    ana = Server(run, blind_class=True).client("ana")
    rows, names = rows_of(run), by_key(run)
    for key in ana.list_keys()[:6]:
        name, row = names[key], rows[names[key]]
        assert_hidden(ana.texts(key), raster_id(name), "tumour", f"{row['stability']:.3f}", f"x={row['x']:g}")


CHANGES = {
    "gone": Path.unlink,
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "other pixels": lambda path: write_map(path, seed=99),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_surroundings_of_another_raster_are_not_shown(tmp_path, change):
    run = rank(fake_raster_run(tmp_path))
    ana, key = Server(run).client("ana"), north(run)
    assert ana.get(f"/image/{key}/surroundings").status_code == 200
    change(tmp_path / "rasters" / "0.tif")
    assert ana.get(f"/image/{key}/surroundings").status_code == 404
    page = ana.get(f"/item/{key}").text
    assert "surroundings-image" not in page
    assert "no longer where it was" in page or "has changed since" in page


def test_moved_rasters_are_shown_from_where_they_are_now(tmp_path):
    run, there = rank(fake_raster_run(tmp_path)), tmp_path / "there.tif"
    (tmp_path / "rasters" / "0.tif").rename(there)
    client = Server(RunStore(run.folder, moved={"north.tif": str(there)})).client("ana")
    assert min(client.image(north(run), kind).std() for kind in ("input", "original", "surroundings")) > 0


def test_neighbours_are_the_next_windows_of_the_grid_that_are_in_the_queue(run, ana):
    rows = rows_of(run)
    places = {(raster_id(n), r["x"], r["y"]): key_of(run, n) for n, r in rows.items()}
    steps = {"left": (-TILE, 0), "right": (TILE, 0), "above": (0, -TILE), "below": (0, TILE)}
    linked = 0
    for name, row in rows.items():
        key, x, y = key_of(run, name), row["x"], row["y"]
        wanted = {side: places.get((raster_id(name), x + dx, y + dy)) for side, (dx, dy) in steps.items()}
        assert ana.facts(key)["adjacent"] == wanted
        text = ana.get(f"/item/{key}").text
        links = re.findall(r'id="adjacent-\w+" href="/item/([0-9a-f]+)', text)
        assert set(links) == {*wanted.values()} - {None}
        assert text.count("is not in the queue or does not exist") == 4 - len(links)
        linked += len(links)
    assert linked > 20


def test_a_last_column_nearer_than_a_step_is_still_a_neighbour(tmp_path):
    """The grid ends at the border, so its last windows overlap the ones before."""
    run = rank(fake_raster_run(tmp_path))
    queue = QueueLoader(run, blind=True).current()
    queue = replace(queue, items=queue.items[:3])
    first, second, third = queue.items
    x, y, sides = np.array([96.0, 110.0, 144.0]), np.zeros(3), np.full(3, 48.0)
    queue.__dict__["_windows"] = (np.array([0, 0, 1]), (x, y), sides)
    assert queue.adjacent(first) == {"above": None, "below": None, "left": None, "right": second.key}
    assert queue.adjacent(second)["left"] == first.key
    assert set(queue.adjacent(third).values()) == {None}  # of another raster


def test_images_that_are_no_windows_have_neither(tmp_path):
    run = rank(fake_run(tmp_path, count=12))
    client = Server(run).client("ana")
    key = client.list_keys()[0]
    assert client.get(f"/image/{key}/surroundings").status_code == 404
    assert client.facts(key)["adjacent"] is None
    assert "surroundings" not in client.get(f"/item/{key}").text
