"""An audit of rasters: rows, context, resuming, verifying, and what killing it loses."""

import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from torch import nn

import equicam
from equicam.core.views import crop_centre
from equicam.engines.devices import Devices
from equicam.images import limited
from equicam.images.files import RemotePath
from equicam.images.items import read_item
from equicam.models.surround import preprocess_window
from equicam.rasters.options import RasterWindow, Tiling
from equicam.rasters.raster import open_raster
from tests.audit.conftest import equicam_command, equicam_process, run_command
from tests.conftest import recipe
from tests.rasters.conftest import scene, write_geotiff, write_pyramid

pytest.importorskip("openslide")
pytest.importorskip("rasterio")
OPTIONS = ("--tile", "96", "--views", "4", *recipe("run.shard_size = 4"))


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    path = tmp_path_factory.mktemp("slides") / "slide.ome.tif"
    write_pyramid(path, scene(seed=4), ome=True)
    return path


@pytest.fixture(scope="module")
def run(slide, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    run_command("audit", slide, *OPTIONS, "--mpp", "0.75", "--out", out)
    return equicam.open_run(out)


def test_rows_are_windows_with_their_place(run, slide):
    rows = run.items.to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * 7 * 6
    first = rows[0]
    assert first["id"] == "slide.ome.tif#x=0,y=0,s=96,mpp=0.75"
    assert (first["x"], first["y"], first["side"]) == pytest.approx((0, 0, 144))
    assert [(row["y"], row["x"]) for row in rows] == sorted((row["y"], row["x"]) for row in rows)
    (raster,) = run.store.rasters().to_pylist()
    assert raster["reader"].startswith("tifffile ")
    assert (raster["windows"], raster["background"], raster["error"]) == (42, 0, None)
    assert ("tifffile", pytest.importorskip("tifffile").__version__) in run.manifest.versions
    assert run.manifest.recipe.context == "auto"
    # four views are multiples of 90°, which need no margin
    assert not any("edge" in row["flags"] for row in rows)


def test_edges_of_the_raster_are_flagged(slide, tmp_path):
    model = equicam.load("embedded")
    run = equicam.audit(slide, model, tmp_path / "run", views=6, tiling=Tiling(96))
    flagged = {(row["x"], row["y"]) for row in run.items.to_pylist() if "edge" in row["flags"]}
    places = {(row["x"], row["y"]) for row in run.items.to_pylist()}
    (raster,) = run.store.rasters().to_pylist()
    right, bottom = raster["width"] - 96, raster["height"] - 96
    # 96 pixels need 20 around them
    assert flagged == {(x, y) for x, y in places if min(x, y, right - x, bottom - y) < 20}
    assert places - flagged


def test_a_row_is_the_explanation_of_its_window(run, slide):
    row = run.items.to_pylist()[20]
    window = RasterWindow(row["x"], row["y"], row["side"], run.manifest.tiling, run.manifest.margin)
    content = read_item(run.manifest.item_of(row, slide))
    assert content.item.window == window
    assert content.sha256 == row["sha256"]
    model = equicam.load("embedded")
    x = preprocess_window(model, content.pixels)[None]
    assert x.shape == (1, 3, 136, 136)
    found = equicam.explain(model, x, window=96, views=4)
    assert found.confidence.item() == pytest.approx(row["confidence"], abs=1e-5)
    assert found.peum_score.item() == pytest.approx(row["peum_score"], abs=1e-6)
    shown = np.asarray(content.decode().image, np.float32)
    mean, std = (torch.tensor(of)[:, None, None] for of in (model.mean, model.std))
    inner = crop_centre(x, (96, 96))[0] * std + mean
    assert np.abs(shown - 255 * inner.permute(1, 2, 0).numpy()).max() < 1.01


def test_a_run_of_windows_is_verified_ranked_and_reported(run):
    assert run.verify(4).ok
    run_command("triage", run.folder, "--budget", "6")
    assert "images (fewer than 100)" in run_command("causal", run.folder)
    assert "no longer" not in run.report().read_text()


@pytest.mark.slow
def test_the_same_windows_on_several_devices(run, slide, tmp_path):
    engine = Devices(("cpu", "cpu"))
    options = {"views": 4, "shard_size": 4, "tiling": Tiling(96, input=equicam.Input(mpp=0.75))}
    again = equicam.audit(slide, equicam.load("embedded"), tmp_path / "run", engine=engine, **options)
    columns = ["id", "x", "sha256", "target", "flags"]
    assert again.read_items(columns).equals(run.read_items(columns))


@pytest.mark.slow
def test_the_same_windows_on_a_ray_cluster(run, slide, tmp_path):
    pytest.importorskip("ray")
    on_ray = recipe("run.shard_size = 4", "run.engine = 'ray'", "run.actors = 2")
    windows = ("--tile", 96, "--mpp", 0.75, "--views", 4)
    run_command("audit", slide, "--out", tmp_path / "run", *windows, *on_ray)
    columns = ["id", "x", "sha256", "target", "flags", "stability", "peum_score"]
    assert equicam.open_run(tmp_path / "run").read_items(columns).equals(run.read_items(columns))


def test_deep_bands_through_a_model_that_declares_its_input(tmp_path):
    image = scene(5, "uint16", seed=9)
    image[:, :, 700:] = 0
    path = write_geotiff(tmp_path / "sentinel.tif", image, nodata=0)
    trunk = nn.Conv2d(4, 8, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    net, colours = nn.Sequential(*trunk, nn.Linear(8, 3)).eval(), {"mean": (0.5,) * 4, "std": (0.25,) * 4}
    model = equicam.wrap(net, layer="0", input=equicam.Input(bands="4,3,2,5", scale=10_000), **colours)
    run = equicam.audit(path, model, tmp_path / "run", views=4, tiling=Tiling(64))
    rows = run.items.to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    (raster,) = run.store.rasters().to_pylist()
    assert (raster["nodata"] > 0, raster["crs"]) == (True, "EPSG:32618")
    assert any("nodata" in row["flags"] for row in rows)
    assert run.manifest.tiling.input.scale == 10_000
    pixels = read_item(run.manifest.item_of(rows[0], path)).pixels
    twin = (image[[3, 2, 1, 4], :64, :64] / 10_000 - 0.5) / 0.25
    found = crop_centre(preprocess_window(model, pixels), (64, 64)).numpy()
    np.testing.assert_allclose(found, twin, rtol=0, atol=1e-5)


def test_one_class_can_be_explained_everywhere(slide, tmp_path):
    model = equicam.load("embedded")
    options = {"target": model.classes[1], "tiling": Tiling(96, 200)}
    run = equicam.audit(slide, model, tmp_path / "run", views=4, **options)
    assert set(run.items["target"].to_pylist()) == {1}
    assert run.manifest.target == 1
    assert run.verify(2).ok
    with pytest.raises(equicam.EquicamError, match="target needs a class"):
        equicam.audit(slide, model, tmp_path / "other", target="no such", tiling=Tiling(96))


def test_a_folder_of_rasters_with_labels_and_a_bad_one(slide, tmp_path):
    for name in ("a/1.ome.tif", "b/2.ome.tif"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        shutil.copy(slide, tmp_path / "in" / name)
    (tmp_path / "in/b/3.svs").write_bytes(b"not a slide")
    out = tmp_path / "run"
    run_command("audit", tmp_path / "in", *OPTIONS, "--stride", "200", "--out", out)
    run = equicam.open_run(out)
    rows = run.items.to_pylist()
    assert {row["label"] for row in rows} == {"a", "b"}
    (bad,) = [row for row in rows if row["status"] == "bad"]
    assert bad["id"] == "b/3.svs"
    assert run.verify(3).ok
    run.triage(4)
    assert "3.svs" in run.report().read_text()
    # the rasters have moved
    (tmp_path / "in").rename(tmp_path / "elsewhere")
    assert not run.verify(2).ok
    moved = equicam.open_run(out, str(tmp_path / "elsewhere"))
    assert moved.verify(2, source=str(tmp_path / "elsewhere")).ok
    assert all("elsewhere" in row["path"] for row in moved.items.to_pylist())


def test_a_changed_raster_is_not_resumed(slide, tmp_path):
    path = shutil.copy(slide, tmp_path / "slide.ome.tif")
    arguments = ("audit", path, *OPTIONS, "--out", tmp_path / "run")
    for _ in range(2):
        run_command(*arguments)
    (tmp_path / "run/items/shard-000001.parquet").unlink()
    write_pyramid(path, scene(seed=8), ome=True)
    code, said = equicam_command(*arguments)
    assert code != 0
    assert "changed since it was explained" in " ".join(said.split())


def test_other_windows_are_another_run_and_options_need_a_tile(slide, run, tmp_path):
    other = (*OPTIONS, "--mpp", "1"), run.folder, "the images it was started with"
    no_tile = "mpp needs tile, the size of windows, got none; try --tile 224"
    for options, out, refusal in (other, (("--mpp", "0.5"), tmp_path / "run", no_tile)):
        code, said = equicam_command("audit", slide, *options, "--out", out)
        assert code != 0
        assert refusal in " ".join(said.split())


@pytest.mark.slow
def test_reading_by_all_processes_after_a_fork_is_safe(slide, tmp_path):
    """The parent has the raster open when decoders are forked; each opens its own."""
    open_raster(slide).read((0, 0, 100, 100), (100, 100), (0, 1, 2))
    model, options = equicam.load("embedded"), {"views": 4, "tiling": Tiling(96)}
    one, three = (equicam.audit(slide, model, tmp_path / f"{n}", workers=n, **options) for n in (1, 3))
    assert one.read_items(["id", "sha256"]).equals(three.read_items(["id", "sha256"]))


def test_a_map_at_a_url_is_read_by_ranges(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    local = write_geotiff(tmp_path / "scene.tif", scene(seed=11), compress="deflate", overviews=(2, 4))
    store = fsspec.filesystem("memory")
    store.pipe("/scenes/scene.tif", local.read_bytes())
    monkeypatch.setattr(limited, "inside", lambda: True)  # that store is in the memory of this process
    counts, read = [], RemotePath.read_bytes
    monkeypatch.setattr(
        RemotePath, "read_bytes", lambda at, count=None: counts.append(count) or read(at, count)
    )
    model, tiling = equicam.load("embedded"), Tiling(96, 150)
    run = equicam.audit("memory://scenes/scene.tif", model, tmp_path / "run", views=4, tiling=tiling)
    assert set(run.items["status"].to_pylist()) == {"ok"}
    assert run.items["path"][0].as_py().startswith("memory://")
    assert set(counts) == {4096}
    same = equicam.audit(local, model, tmp_path / "same", views=4, tiling=tiling)
    columns = ["x", "y", "sha256", "target"]
    assert run.read_items(columns).equals(same.read_items(columns))
    assert run.verify(2, source="memory://scenes/scene.tif").ok
    store.pipe("/scenes/slide.svs", b"no map")
    with pytest.raises(equicam.EquicamError, match="at a URL"):
        equicam.audit("memory://scenes/slide.svs", model, tmp_path / "none", tiling=tiling)


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_audits_of_slides_lose_nothing(slide, run, tmp_path, kills):
    out = tmp_path / "run"
    arguments = ("audit", slide, *OPTIONS, "--mpp", "0.75", "--out", out)
    rng, killed = random.Random(0), 0
    while killed < kills:
        process = equicam_process(*arguments, start_new_session=True)
        time.sleep(rng.uniform(1.5, 5.0))
        if process.poll() is not None and out.joinpath("digests.json").is_file():
            shutil.rmtree(out)  # done before it was killed: start over
            continue
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        killed += 1
        written = list(out.glob("items/*.parquet"))
        if written and rng.random() < 0.2:
            rng.choice(written).write_bytes(b"half")
    run_command(*arguments)
    resumed = equicam.open_run(out)
    assert resumed.verify(4).ok
    columns = ["id", "x", "y", "side", "sha256", "target", "status", "flags"]
    assert resumed.read_items(columns).equals(run.read_items(columns))
