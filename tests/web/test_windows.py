"""Windows of rasters on the review page: their surroundings, the windows beside them, and what both may not tell."""

import io
import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from equicam.rasters.options import raster_id
from equicam.runs.review.images import BLOCK_BYTES
from equicam.runs.review.queue import QueueLoader
from equicam.runs.store import RunStore
from equicam.shards import read_table
from tests.audit.faked_rasters import TILE, fake_raster_run, write_map
from tests.web.conftest import Server, key_of, rank


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
    queued = read_table(run.folder / "triage.parquet")["id"].to_pylist()
    return run.rows(queued)


def picture(response):
    assert response.status_code == 200, response.text
    return np.asarray(Image.open(io.BytesIO(response.content)).convert("RGB")).astype(float)


def test_surroundings_show_the_window_in_its_raster_and_no_map(run, ana):
    name, row = next((n, r) for n, r in rows_of(run).items() if TILE < r["x"] < 400 and 40 < r["y"] < 300)
    key = key_of(run, name)
    shown, alone = (picture(ana.get(f"/image/{key}/{kind}")) for kind in ("surroundings", "input"))
    assert shown.shape == (3 * TILE, 3 * TILE, 3)
    inner = shown[TILE + 2 : 2 * TILE - 2, TILE + 2 : 2 * TILE - 2]
    np.testing.assert_allclose(inner, alone[2:-2, 2:-2], atol=2)
    assert (shown[TILE - 1, TILE : 2 * TILE] > 250).all()  # the outline lies outside the window
    import rasterio

    with rasterio.open(row["path"]) as file:
        left, top = int(row["x"]) - TILE, int(row["y"]) - TILE
        whole = np.moveaxis(file.read(window=rasterio.windows.Window(left, top, TILE - 5, TILE - 5)), 0, -1)
        valid = (whole > 0).any(-1)
    np.testing.assert_allclose(shown[: TILE - 5, : TILE - 5][valid], whole[valid], atol=2)


def test_the_original_of_a_window_has_the_rasters_own_pixels(run, ana):
    name, row = next((n, r) for n, r in rows_of(run).items() if r["x"] < 400 and r["y"] < 300)
    shown = picture(ana.get(f"/image/{key_of(run, name)}/original"))
    import rasterio

    with rasterio.open(row["path"]) as file:
        window = rasterio.windows.Window(int(row["x"]), int(row["y"]), int(row["side"]), int(row["side"]))
        whole = np.moveaxis(file.read(window=window), 0, -1)
    assert shown.shape[:2] == whole.shape[:2]
    valid = (whole > 0).any(-1)
    assert valid.mean() > 0.5
    np.testing.assert_allclose(shown[valid], whole[valid], atol=2)


def test_beyond_the_raster_it_is_white(run, ana):
    name = next(n for n, r in rows_of(run).items() if r["y"] == 0 and r["x"] > TILE)
    shown = picture(ana.get(f"/image/{key_of(run, name)}/surroundings"))
    assert (shown[: TILE - 6] == 255).all()


def test_surroundings_are_padded_and_shown_before_the_verdict(run, ana):
    sizes = set()
    for one in ana.list()[:12]:
        response = ana.get(f"/image/{one['key']}/surroundings")
        assert response.status_code == 200
        sizes.add(len(response.content))
        assert ana.get(f"/image/{one['key']}/peum").status_code == 404
    assert sizes == {BLOCK_BYTES}
    # nothing in the image comes from the map or the verdict
    key = ana.list()[0]["key"]
    before = ana.get(f"/image/{key}/surroundings").content
    ana.decide(key, "supports")
    assert ana.get(f"/image/{key}/surroundings").content == before


def test_windows_reveal_neither_name_nor_signal_before_the_verdict(run):
    ana = Server(run, blind_class=True).client("ana")
    rows = rows_of(run)
    for one in ana.list()[:6]:
        facts = ana.get(f"/api/item/{one['key']}").text
        page = ana.get(f"/item/{one['key']}").text
        name = next(n for n in rows if key_of(run, n) == one["key"])
        for text in (facts, page):
            assert raster_id(name) not in text
            assert "tumour" not in text
            assert f"{rows[name]['stability']:.3f}" not in text
            assert f"x={rows[name]['x']:g}" not in text
            assert not re.search(r"\b(control|arm|rank)\b", re.sub(r'"(arm|rank)": ?null', "", text))


@pytest.mark.parametrize("change", ["gone", "shorter", "other pixels"])
def test_surroundings_of_another_raster_are_not_shown(tmp_path, change):
    run = rank(fake_raster_run(tmp_path))
    ana = Server(run).client("ana")
    path = tmp_path / "rasters" / "0.tif"
    name = next(n for n in rows_of(run) if n.startswith("north.tif#"))
    assert ana.get(f"/image/{key_of(run, name)}/surroundings").status_code == 200
    if change == "gone":
        path.unlink()
    elif change == "shorter":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        write_map(path, seed=99)
    assert ana.get(f"/image/{key_of(run, name)}/surroundings").status_code == 404
    page = ana.get(f"/item/{key_of(run, name)}").text
    assert "surroundings-image" not in page
    assert "no longer where it was" in page or "has changed since" in page


def test_moved_rasters_are_shown_from_where_they_are_now(tmp_path):
    run = rank(fake_raster_run(tmp_path))
    there = tmp_path / "there.tif"
    (tmp_path / "rasters" / "0.tif").rename(there)
    name = next(n for n in rows_of(run) if n.startswith("north.tif#"))
    moved = RunStore(run.folder, moved={"north.tif": str(there)})
    client = Server(moved).client("ana")
    for kind in ("input", "original", "surroundings"):
        assert client.get(f"/image/{key_of(run, name)}/{kind}").status_code == 200


def test_neighbours_are_the_next_windows_of_the_grid_that_are_in_the_queue(run, ana):
    rows = rows_of(run)
    places = {(raster_id(n), r["x"], r["y"]): key_of(run, n) for n, r in rows.items()}
    steps = {"left": (-TILE, 0), "right": (TILE, 0), "above": (0, -TILE), "below": (0, TILE)}
    some = 0
    for name, row in rows.items():
        found = ana.get(f"/api/item/{key_of(run, name)}").json()["adjacent"]
        for side, (dx, dy) in steps.items():
            wanted = places.get((raster_id(name), row["x"] + dx, row["y"] + dy))
            assert found[side] == wanted
            some += wanted is not None
    assert some > 20


def test_the_page_links_only_to_neighbours_in_the_queue(run, ana):
    keys = {one["key"] for one in ana.list()}
    linked = 0
    for key in list(keys)[:20]:
        text = ana.get(f"/item/{key}").text
        links = re.findall(r'id="adjacent-\w+" href="/item/([0-9a-f]+)', text)
        assert set(links) <= keys
        linked += len(links)
        assert text.count("is not in the queue or does not exist") == 4 - len(links)
    assert linked


def test_a_last_column_nearer_than_a_step_is_still_a_neighbour(tmp_path):
    """The grid ends at the border, so its last windows overlap the ones before."""
    from equicam.runs.review.queue import Place, _thousandths

    run = rank(fake_raster_run(tmp_path))
    queue = QueueLoader(run, blind=True).current()
    first, second, third = queue.items[:3]
    places = {
        first.key: Place("a", 96.0, 0.0, 48.0),
        second.key: Place("a", 110.0, 0.0, 48.0),
        third.key: Place("b", 144.0, 0.0, 48.0),
    }
    lines = {}
    for key, place in places.items():
        lines.setdefault((place.raster, 0, _thousandths(place.x)), []).append((place.y, key))
        lines.setdefault((place.raster, 1, _thousandths(place.y)), []).append((place.x, key))
    queue.__dict__.update(_places=places, _lines=lines)
    assert queue.adjacent(first) == {"above": None, "below": None, "left": None, "right": second.key}
    assert queue.adjacent(second)["left"] == first.key
    assert set(queue.adjacent(third).values()) == {None}  # of another raster


def test_images_that_are_no_windows_have_neither(tmp_path):
    from tests.audit.faked import fake_run

    run = rank(fake_run(tmp_path, count=12))
    client = Server(run).client("ana")
    key = client.list()[0]["key"]
    assert client.get(f"/image/{key}/surroundings").status_code == 404
    assert json.loads(client.get(f"/api/item/{key}").text)["adjacent"] is None
    assert "surroundings" not in client.get(f"/item/{key}").text
