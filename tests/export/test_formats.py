"""Each format, read back by the library that others read it with."""

import builtins
import gzip
import json
import re
import uuid
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from equicam.audit.run import Run
from equicam.audit.verify import check_files, check_log
from equicam.errors import EquicamError
from equicam.images import limited
from equicam.rasters.raster import open_raster
from equicam.runs.export.export import FORMATS, ExportOptions
from equicam.runs.export.features import _geometry, _trace, qupath_regions, write_features
from equicam.runs.export.files import write_geotiff, write_ome_tiff
from equicam.runs.export.stitching import BANDS, RasterWindows, StitchedMap
from equicam.runs.log import Log
from equicam.runs.queue_files import feature_id
from equicam.runs.review.verdict_files import import_verdicts
from tests.audit.conftest import equicam_answer, equicam_command
from tests.export.faked import fake_raster_run, raster_row

WAVE = 400.0  # pixels of level 0
UTM = "EPSG:32618"
ROTATED = (8.0, 3.0, 500_000.0, 3.0, -8.0, 4_600_000.0)


def utm_row(name="map.tif", width=1500, height=1400, transform=(10.0, 0.0, 5e5, 0.0, -10.0, 4.6e6)):
    """A map with coordinates on Earth."""
    return raster_row(name, width, height, kind="map", crs=UTM, transform=transform)


def features_of(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["features"]


def export_one(run, to, **options):
    """The one file of an export."""
    (path,) = run.export(to, **options).files
    return path


def area(ring):
    """Positive if counter-clockwise."""
    return sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise(ring)) / 2


def wave(x, y):
    return 2 + np.sin(2 * np.pi * x / WAVE) + np.cos(2 * np.pi * y / WAVE)


def displacement(values, x, y):
    """By how many pixels along x and y a wave has moved, by least squares."""
    slope_x = 2 * np.pi / WAVE * np.cos(2 * np.pi * x / WAVE)
    slope_y = -2 * np.pi / WAVE * np.sin(2 * np.pi * y / WAVE)
    off = values - wave(x, y)
    found, *_ = np.linalg.lstsq(np.stack([slope_x, slope_y, np.ones_like(x)], 1), off, rcond=None)
    return np.abs(found[:2]).max()


def stitched(bands, cell=16.0, **given):
    facts = {"version": "1", "run digest": "0" * 64, "raster": "a", "class": "tumour", "method": "grad-cam"}
    plain = {"kind": "slide", "mpp": 0.5, "crs": None, "transform": None, "origin": (0.0, 0.0), "rows": ()}
    plain |= {"width": int(bands.shape[2] * cell), "height": int(bands.shape[1] * cell)}
    return StitchedMap(RasterWindows("a", **plain | given), bands, cell, facts)


def some_bands(rows, columns):
    rng = np.random.default_rng(0)
    bands = rng.random((4, rows, columns)).astype(np.float32)
    bands[:3, :40, :30] = np.nan
    bands[3, :40, :30] = 0
    return bands


@pytest.mark.parametrize(("scale", "stride"), [(2.0040080160320644, 67), (1.0, "tile"), (3.37, "disc")])
def test_a_wave_lies_where_it_was_up_to_the_far_corner(tmp_path, scale, stride):
    rasterio = pytest.importorskip("rasterio")
    store = fake_raster_run(tmp_path, field=wave, scale=scale, stride=stride)
    with rasterio.open(export_one(Run(store), "geotiff")) as file:
        values, coverage = file.read(1), file.read(4)
        rows, columns = np.nonzero(coverage > 0)
        x, y = ((v + 0.5) * file.transform.a for v in (columns, rows))
        assert file.crs is None
    edge = 4 * scale  # half a layer cell: beyond it a map is constant
    far = (x > 2220 - 96 * scale) & (x < 2220 - edge) & (y > 2967 - 96 * scale) & (y < 2967 - edge)
    assert far.sum() >= 70
    assert displacement(values[rows, columns][far], x[far], y[far]) / scale < 1
    assert displacement(values[rows, columns], x, y) / scale < 0.2


def test_the_geotiff_has_the_place_of_a_rotated_raster(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    raster = utm_row(width=800, height=700, transform=ROTATED)
    store = fake_raster_run(tmp_path, [raster], field=wave, scale=1.0, target=1)
    path = export_one(Run(store), "geotiff", every=4)
    assert path.name == "map.tif.class-1.tif"
    with rasterio.open(path) as file:
        assert (file.crs.to_string(), file.descriptions, file.dtypes) == (UTM, BANDS, ("float32",) * 4)
        assert np.isnan(file.nodata)
        a, b, c, d, e, f = ROTATED
        assert file.xy(20, 10, offset="ul") == pytest.approx((a * 40 + b * 80 + c, d * 40 + e * 80 + f))
        tags = {name.removeprefix("equicam_"): text for name, text in file.tags().items()}
        known = {"class": "tumour", "method": "equigrad-cam", "raster": "map.tif"}
        assert tags.items() >= known.items()
        assert len(tags["run_digest"]) == 64
        assert file.read(3)[0, 0] == pytest.approx(0.5)


def test_a_large_geotiff_is_cloud_optimised(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    bands = some_bands(1300, 1100)
    write_geotiff(tmp_path / "a.tif", stitched(bands, crs=UTM, transform=ROTATED))
    assert [p.name for p in tmp_path.iterdir()] == ["a.tif"]
    with rasterio.open(tmp_path / "a.tif") as file:
        np.testing.assert_array_equal(file.read(), bands)
        assert file.overviews(1) == [2, 4]
        assert file.block_shapes[0] == (512, 512)
        assert file.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert file.profile["compress"] == "deflate"
    cogeo = pytest.importorskip("rio_cogeo.cogeo", reason="rio-cogeo is not installed", exc_type=ImportError)
    valid, errors, warnings = cogeo.cog_validate(tmp_path / "a.tif")
    assert valid, (errors, warnings)


def test_ome_tiff_is_a_pyramid_with_names_and_sizes(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    path, bands = tmp_path / "a.ome.tif", some_bands(701, 1030)
    write_ome_tiff(path, stitched(bands))
    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        assert (file.is_ome, series.axes) == (True, "CYX")
        shapes = [level.shape for level in series.levels]
        assert shapes == [(4, 701, 1030), (4, 351, 515), (4, 176, 258), (4, 88, 129)]
        np.testing.assert_array_equal(series.asarray(), bands)
        half = series.levels[1].asarray()
        np.testing.assert_allclose(half[0, 60, 70], bands[0, 120:122, 140:142].mean(), rtol=1e-6)
        assert np.isnan(half[0, 0, 0])
        text = file.ome_metadata
    wanted = [f'Name="{name}"' for name in BANDS] + ['PhysicalSizeX="8.0"', 'PhysicalSizeXUnit="µm"']
    assert [one for one in wanted if one not in text] == []
    raster = open_raster(path)  # it is a slide for us, too
    assert (raster.info.mpp, raster.info.bands) == (pytest.approx(8.0), BANDS)
    raster.close()


def test_qupath_gets_its_tiles(tmp_path):
    facts = lambda i: {"stability": None} if i == 3 else {}  # noqa: E731
    raster = raster_row(origin=(100.0, 50.0))
    store = fake_raster_run(tmp_path, [raster], targets=lambda i: i % 2, facts=facts)
    content = json.loads(export_one(Run(store), "qupath").read_text())
    rows = store.read_items().to_pylist()
    assert (content["type"], len(content["features"])) == ("FeatureCollection", len(rows))
    one, row = content["features"][1], rows[1]
    x, y, side = row["x"] - 100, row["y"] - 50, row["side"]
    ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
    np.testing.assert_allclose(one["geometry"]["coordinates"], [ring], atol=6e-4)
    assert uuid.UUID(one["id"]).version == 5
    assert one["id"] == feature_id(store, row["id"])
    properties = one["properties"]
    assert properties == {
        "objectType": "tile",
        "name": row["id"].partition("#")[2],
        "isLocked": True,
        "classification": {"name": "tumour", "color": properties["classification"]["color"]},
        "measurements": {"stability": row["stability"], "PEUM": row["peum_score"], "flip rate": 0.25},
        "metadata": {"equicam id": one["id"], "equicam window": row["id"]},
    }
    assert "stability" not in content["features"][3]["properties"]["measurements"]
    colours = {tuple(f["properties"]["classification"]["color"]) for f in content["features"]}
    assert len(colours) == 2
    other = fake_raster_run(tmp_path / "predicted", target=1, facts=lambda _: {"top5": [0, 1]})
    features = features_of(export_one(Run(other), "qupath"))  # its class is the prediction, not the target
    assert {f["properties"]["classification"]["name"] for f in features} == {"normal"}


def test_one_view_has_no_peum_in_files(tmp_path):
    rasterio = pytest.importorskip("rasterio")
    run = Run(fake_raster_run(tmp_path, [utm_row()], views=(0.0,)))
    tile, window = (features_of(export_one(run, to))[0]["properties"] for to in ("qupath", "geojson"))
    assert {*tile["measurements"]} == {"stability", "flip rate"}
    assert window["peum"] is None
    with rasterio.open(export_one(run, "geotiff")) as file:
        assert file.descriptions[1] == "PEUM"
        assert np.isnan(file.read(2)).all()
        assert np.isfinite(file.read(1)).any()


def test_blind_files_reveal_nothing(tmp_path):
    store = fake_raster_run(tmp_path, [utm_row()], targets=lambda i: i % 2)
    run = Run(store)
    with pytest.raises(EquicamError, match="equicam triage first"):
        run.export("qupath", blind=True)
    queue = {feature_id(store, row["id"]): row for row in run.triage("50%").rows.to_pylist()}
    assert {row["arm"] for row in queue.values()} == {"queue", "control"}
    path = export_one(run, "qupath", blind=True, compress=True)
    assert path.name == "map.tif.blind.qupath.geojson.gz"
    features, places = features_of(path), range(1, len(queue) + 1)
    blind = {"objectType": "annotation", "isLocked": True, "metadata": {"equicam blind": "true"}}
    assert [f["properties"] for f in features] == [blind | {"name": str(place)} for place in places]
    assert [queue[f["id"]]["place"] for f in features] == [*places]
    pytest.importorskip("rasterio")
    found = run.export("geojson", blind=True)
    features = features_of(found.files[0])
    assert {tuple(f["properties"]) for f in features} == {("id", "place", "verdict", "equicam blind")}
    assert all(set(f) == {"type", "id", "geometry", "properties"} for f in features)
    assert (found.windows, found.left_out) == (len(queue), store.manifest.images - len(queue))
    for wrong in ({"to": "geotiff"}, {"to": "qupath", "target": 1}, {"to": "qupath", "regions": 0.1}):
        with pytest.raises(EquicamError, match="--blind alone"):
            ExportOptions(**wrong, blind=True)


def test_qgis_gets_degrees(tmp_path):
    warp = pytest.importorskip("rasterio.warp")
    raster, odd = (
        utm_row(width=1000, height=900, transform=ROTATED),
        {"flags": ["edge", "flipped"], "peum_score": np.nan},
    )
    store = fake_raster_run(tmp_path, [raster], scale=1.0, facts=lambda _: odd)
    one, row = features_of(export_one(Run(store), "geojson"))[5], store.read_items().to_pylist()[5]
    assert one["properties"] == {
        "id": feature_id(store, row["id"]), "item": row["id"], "class": "tumour", "confidence": pytest.approx(0.9),
        "explained": "tumour", "explained_confidence": pytest.approx(0.9), "steadiness": None,
        "stability": row["stability"], "peum": None, "flip_rate": 0.25, "flags": "edge,flipped", "verdict": None,
    }  # fmt: skip
    (ring,) = one["geometry"]["coordinates"]
    assert (len(ring), ring[0]) == (5, ring[-1])
    assert area(ring) > 0
    x, y = warp.transform("EPSG:4326", UTM, *zip(*ring, strict=True))
    a, b, c, d, e, f = ROTATED
    back = np.linalg.solve([[a, b], [d, e]], np.stack([np.array(x) - c, np.array(y) - f]))
    corners = {(row["x"] + i * row["side"], row["y"] + j * row["side"]) for i in (0, 1) for j in (0, 1)}
    assert {tuple(np.round(p, 3)) for p in back.T} == {tuple(np.round(p, 3)) for p in corners}


def test_windows_across_the_antimeridian_are_cut():
    ring = [(179.5, 10.0), (-179.5, 10.0), (-179.5, 11.0), (179.5, 11.0), (179.5, 10.0)]
    found = _geometry(ring)
    assert found["type"] == "MultiPolygon"
    boxes = sorted([min(p[0] for p in ring), max(p[0] for p in ring)] for (ring,) in found["coordinates"])
    assert boxes == [[-180.0, -179.5], [179.5, 180.0]]
    for x in (10.0, 179.0):
        square = [(x, 1.0), (x + 1, 1.0), (x + 1, 2.0), (x, 2.0), (x, 1.0)]
        assert _geometry(square)["type"] == "Polygon"


def test_a_map_across_the_antimeridian(tmp_path):
    pytest.importorskip("rasterio")
    place = {"crs": "EPSG:32660", "transform": (1000.0, 0.0, 650_000.0, 0.0, -1000.0, 2.0e6)}
    raster = raster_row("fiji.tif", 400, 400, kind="map", **place)
    path = export_one(Run(fake_raster_run(tmp_path, [raster], scale=1.0)), "geojson")
    kinds = [f["geometry"] for f in features_of(path)]
    assert {g["type"] for g in kinds} == {"Polygon", "MultiPolygon"}
    for kind in kinds:
        for (ring,) in kind["coordinates"] if kind["type"] == "MultiPolygon" else [kind["coordinates"]]:
            longitudes = [x for x, _ in ring]
            assert np.ptp(longitudes) < 3
            assert max(map(abs, longitudes)) <= 180


@pytest.mark.parametrize("seed", range(12))
def test_outlines_enclose_the_cells_of_a_mask(seed):
    mask = np.random.default_rng(seed).random((14, 17)) < (0.3, 0.5, 0.7)[seed % 3]
    painted = np.zeros_like(mask)
    for rings, (rows, columns) in _trace(mask):
        inside = np.zeros_like(mask)
        for ring in rings:
            assert ring[0] == ring[-1]
            assert len(set(ring)) == len(ring) - 1  # no ring touches itself
            for (x0, y0), (x1, y1) in pairwise(ring):
                if x0 == x1:  # a line to the right of a centre crosses it
                    inside[min(y0, y1) : max(y0, y1), :x0] ^= True
        outer, *holes = map(area, rings)
        assert outer > 0
        assert all(hole < 0 for hole in holes)
        assert outer + sum(holes) == len(rows) == inside.sum()
        assert inside[rows, columns].all()
        painted |= inside
    np.testing.assert_array_equal(painted, mask)


def test_regions_are_the_highest_share(tmp_path):
    store = fake_raster_run(tmp_path, [raster_row(origin=(10.0, 20.0))], field=wave, stride=48)
    path = export_one(run := Run(store), "qupath", regions=0.1)
    assert path.name == "slide.svs.class-1.regions-0.1.qupath.geojson"
    features = features_of(path)
    cells = sum(f["properties"]["measurements"]["cells"] for f in features)
    assert 0.09 < cells / (2220 * 2967 / (8 * 2.004) ** 2) < 0.11
    assert {f["properties"]["objectType"] for f in features} == {"annotation"}
    assert len({f["id"] for f in features}) == len(features)
    for feature in features:
        ring = np.asarray(feature["geometry"]["coordinates"][0]) + np.array([10, 20])
        assert wave(*ring.mean(0)) > 3
        assert (ring.max(0) <= (2220, 2967)).all()
    assert list(qupath_regions(store, stitched(np.zeros((4, 30, 30), np.float32)), 0.1)) == []
    with pytest.raises(EquicamError, match=r"regions 0\.05"):
        run.export("qupath", regions=1.5)


def test_maps_of_several_classes_are_not_mixed(tmp_path):
    store = fake_raster_run(tmp_path, targets=lambda i: int(i % 3 > 0), field=wave)
    run, rows = Run(store), store.read_items().to_pylist()
    count = sum(row["target"] == 1 for row in rows)
    for to, class_, match in (
        ("geotiff", None, rf"'tumour' \({count} windows\), 'normal'.*--class 'tumour'"),
        ("geotiff", "tumor", "a class of the model"),
        ("qupath", 7, "one class, of those"),
    ):
        with pytest.raises(EquicamError, match=match):
            run.export(to, class_=class_)
    rasterio = pytest.importorskip("rasterio")
    found = run.export("geotiff", class_="tumour")
    assert (found.windows, found.left_out) == (count, len(rows) - count)
    with rasterio.open(found.files[0]) as file:
        other = next(row for row in rows if row["target"] == 0)
        column, row = (int((other[k] + other["side"] / 2) / file.transform.a) for k in ("x", "y"))
        assert file.read(4)[row, column] == 0
        assert np.isnan(file.read(1)[row, column])
    assert len(features_of(export_one(run, "qupath", class_="normal"))) == len(rows) - count


def test_names_are_safe_and_the_rasters_apart(tmp_path):
    names = ["a/slide.svs", "b/slide.svs", "../../etc/passwd", "SLIDE.svs", "slide.svs", "con", ".hidden"]
    names += ["x" * 300, "a\n<b>.svs"]
    store = fake_raster_run(tmp_path, [raster_row(name, 250, 250) for name in names])
    files = Run(store).export("qupath").files
    assert len({p.name.casefold() for p in files}) == len(names)
    assert all(p.name.isascii() and len(p.name) < 130 and not p.name.startswith(".") for p in files)
    assert sorted(files) == sorted((store.folder / "export").iterdir())


def test_a_file_that_is_there_is_replaced_by_force_alone(tmp_path):
    store = fake_raster_run(tmp_path)
    run = Run(store)
    path = export_one(run, "qupath")
    written = path.read_text()
    drawn = written.replace("tumour", "shortcut")
    path.write_text(drawn)
    message = rf"{re.escape(path.name)} needs to be absent.*--force to replace it"
    with pytest.raises(EquicamError, match=message):
        run.export("qupath")
    command = ("export", store.folder, "--to", "qupath")
    code, said = equicam_command(*command)
    assert (code, "try --force" in said, path.read_text()) == (2, True, drawn)
    assert run.export("qupath", force=True).files == (path,)
    assert path.read_text() == written
    path.write_text(drawn)
    assert (equicam_command(*command, "--force")[0], path.read_text()) == (0, written)
    other, mine = tmp_path / "other", tmp_path / "mine"
    other.mkdir()
    mine.write_text("mine")
    (other / path.name).symlink_to(mine)
    (tmp_path / "taken" / path.name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(other)
    for out, force, match in (
        ("other", False, "an existing file"),
        ("taken", True, "a folder"),
        ("link", False, "to be a folder"),
    ):
        with pytest.raises(EquicamError, match=match):
            run.export("qupath", out=tmp_path / out, force=force)
    run.export("qupath", out=other, force=True)  # the link is replaced, not the file behind it
    assert mine.read_text() == "mine"
    assert not (other / path.name).is_symlink()


def test_a_file_that_comes_while_an_export_is_written_stays(tmp_path, monkeypatch):
    store = fake_raster_run(tmp_path)
    real, folder = write_features, store.folder / "export"

    def slow(path, features):
        real(path, features)
        (folder / path.name).write_text("mine")

    monkeypatch.setattr("equicam.runs.export.features.write_features", slow)
    with pytest.raises(EquicamError, match="--force"):
        Run(store).export("qupath")
    assert [path.read_text() for path in folder.iterdir()] == ["mine"]


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    store = fake_raster_run(tmp_path)
    monkeypatch.setattr("equicam.runs.export.features.feature_id", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Run(store).export("qupath")
    assert list((store.folder / "export").iterdir()) == []


def test_an_export_is_noted_and_the_run_stays_as_it_was(tmp_path):
    store = fake_raster_run(tmp_path)
    before = check_files(store)
    path = export_one(Run(store), "qupath")
    last = Log(store.folder).events()[-1]
    assert (last.kind, [*last.payload["files"]]) == ("exported", [f"export/{path.name}"])
    assert check_log(store)[1] == []
    assert check_files(store) == before


@pytest.mark.parametrize(
    ("to", "library", "extra"),
    [("geotiff", "rasterio", "geo"), ("geojson", "rasterio", "geo"), ("ome-tiff", "tifffile", "wsi")],
)
def test_a_missing_library_names_its_extra(tmp_path, monkeypatch, to, library, extra):
    store = fake_raster_run(tmp_path, [utm_row(width=300, height=300)])
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.partition(".")[0] == library:
            raise ImportError(f"no {name}", name=library)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr(limited, "inside", lambda: True)  # it would import by itself
    with pytest.raises(EquicamError, match=rf"pip install 'equicam\[{extra}\]'"):
        Run(store).export(to)


def test_damaged_runs_are_refused(tmp_path):
    unplaced = raster_row("m.tif", 300, 300, kind="map", crs="nonsense", transform=ROTATED)
    numbers = "sizes, places and classes that are numbers"
    cases = [
        ("qupath", {"facts": lambda _: {"x": np.nan}}, numbers),
        ("qupath", {"facts": lambda _: {"side": -5.0}}, numbers),
        ("qupath", {"facts": lambda _: {"target": None}}, numbers),
        ("ome-tiff", {"field": lambda x, y: np.nan * x * y}, "to be as they were written"),
        ("geotiff", {"rasters": [unplaced]}, "needs a coordinate system"),
        ("geojson", {"rasters": [unplaced]}, "needs a coordinate system"),
    ]
    for number, (to, options, match) in enumerate(cases):
        if to.startswith("geo"):
            pytest.importorskip("rasterio")
        with pytest.raises(EquicamError, match=match):
            Run(fake_raster_run(tmp_path / str(number), **options)).export(to)


def test_slides_have_no_degrees_and_images_no_windows(tmp_path, whole):
    with pytest.raises(EquicamError, match="--to qupath"):
        Run(fake_raster_run(tmp_path)).export("geojson")
    for to, said in (("qupath", "equicam audit --tile 224"), ("shapefile", ", ".join(FORMATS))):
        code, text = equicam_command("export", whole, "--to", to)
        assert (code, said in text) == (2, True)


def test_the_command(tmp_path):
    store, out = fake_raster_run(tmp_path, targets=lambda i: i % 2), tmp_path / "out"
    command = ("export", store.folder, "--to", "qupath", "--out")
    code, text = equicam_command(*command, out, "--class", "tumour", "--gzip")
    assert code == 0, text
    assert f"written: {out / 'slide.svs.class-1.qupath.geojson.gz'}" in text
    assert "explained for other classes and left out" in text
    found = equicam_answer(*command, tmp_path / "other")
    assert [Path(file).exists() for file in found["files"]] == [True]
    assert found["windows"] > 0


@pytest.mark.parametrize("to", ["qupath", "geojson"])
@pytest.mark.parametrize("blind", [True, False])
def test_verdicts_come_back_from_what_was_exported(tmp_path, to, blind):
    pytest.importorskip("rasterio")
    run = Run(fake_raster_run(tmp_path, [utm_row()]))
    queue = run.triage("50%").rows["id"].to_pylist()
    content = json.loads(export_one(run, to, blind=blind).read_text())
    wanted = {feature_id(run.store, name) for name in queue[:3]}
    given = {"verdict": "unsure"} if to == "geojson" else {"classification": {"name": "Unsure"}}
    for feature in content["features"]:
        feature["properties"] |= given if feature["id"] in wanted else {}
    back = tmp_path / "back.geojson"
    back.write_text(json.dumps(content))
    found = import_verdicts(run.store, back, reviewer="ana")
    assert (found.taken, found.without) == (3, len(content["features"]) - 3)
    assert import_verdicts(run.store, back, reviewer="ana").already == 3
    assert [e.payload["blind"] for e in Log(run.folder).events("verdict")] == [blind] * 3
