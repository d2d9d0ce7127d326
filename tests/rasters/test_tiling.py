"""Windows: where they lie, which are left out, and what they are called."""

import json
from dataclasses import replace

import numpy as np
import pytest

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.images.items import Item, _scan_order
from equicam.rasters import tiling as tilings
from equicam.rasters.geojson import read_regions
from equicam.rasters.options import Input, RasterWindow, Tiling, raster_id, window_id
from equicam.rasters.raster import open_raster
from equicam.rasters.tiling import _otsu, _tissue, cut_windows
from tests.rasters.conftest import HEIGHT, WIDTH, scene, write_geotiff, write_pyramid

pytest.importorskip("openslide")
pytest.importorskip("rasterio")


@pytest.fixture(scope="module")
def slide(tmp_path_factory):
    """White glass with a purple disc of tissue."""
    image = np.full((3, HEIGHT, WIDTH), 245, np.uint8)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    stained = (x - 400) ** 2 + (y - 380) ** 2 < 250**2
    texture = scene(1, seed=2)[0] // 4
    for band, colour in zip(image, (150, 60, 140), strict=True):
        band[stained] = colour + texture[stained]
    path = tmp_path_factory.mktemp("slide") / "s.ome.tif"
    write_pyramid(path, image, ome=True, mpp=0.5)
    return path, stained


def cut(path, margin=0, **options):
    windows, rows = cut_windows([Item(path.name, path)], Tiling(**options), margin)
    return windows, rows[0]


def test_windows_cover_the_raster_and_the_last_ends_at_its_border(slide):
    path, _ = slide
    windows, row = cut(path, tile=200)
    assert sorted({one.window.x for one in windows}) == [0, 200, 400, 600, 800]
    assert sorted({one.window.y for one in windows}) == [0, 200, 400, HEIGHT - 200]
    assert row.windows == len(windows) == 20
    covered = np.zeros((HEIGHT, WIDTH), int)
    for one in windows:
        x, y, side = (round(v) for v in (one.window.x, one.window.y, one.window.side))
        covered[y : y + side, x : x + side] += 1
    assert covered.min() == 1


def test_discs_cover_the_plane():
    assert [Tiling(224, stride).step for stride in ("disc", 100, "tile")] == [158, 100, 224]
    # the centre of four neighbouring windows is the worst place
    assert np.hypot(158 / 2, 158 / 2) <= 224 / 2


def test_resolution_is_exact_and_ids_say_it(slide):
    path, _ = slide
    windows, _ = cut(path, tile=96, input=Input(mpp=0.75))
    assert (windows[0].window.side, windows[1].window.x) == pytest.approx((144, 144))
    assert windows[1].id == "s.ome.tif#x=144,y=0,s=96,mpp=0.75"
    assert raster_id(windows[1].id) == "s.ome.tif"
    assert raster_id("a#x=b.png#x=1,y=2,s=3") == "a#x=b.png"
    assert window_id("a", RasterWindow(1 / 3, 2.0, 10, Tiling(10))) == "a#x=0.333,y=2,s=10"
    assert len({one.id for one in windows}) == len(windows)
    assert list(windows) == sorted(windows, key=_scan_order)


def test_missing_resolution_is_refused_and_can_be_given(tmp_path):
    path = tmp_path / "none.tif"
    write_pyramid(path, scene(), mpp=None)
    assert cut(path, tile=64)[1].mpp is None
    with pytest.raises(EquicamError, match="its resolution, for --mpp, got none in the file; try --mpp-is"):
        cut(path, tile=64, input=Input(mpp=0.5))
    windows, _ = cut(path, tile=64, mpp_is=0.25, input=Input(mpp=0.5))
    assert windows[0].window.side == 128


def test_background_is_counted_and_left_out(slide):
    path, stained = slide
    windows, row = cut(path, tile=50, tissue=0.5)
    everything, _ = cut(path, tile=50)
    assert row.background + row.windows == len(everything)
    kept = {one.id for one in windows}
    for one in everything:
        x, y = round(one.window.x), round(one.window.y)
        share = stained[y : y + 50, x : x + 50].mean()
        assert 0.4 <= share <= 0.6 or (one.id in kept) == (share > 0.6)
    assert 50 < row.windows < 250


def test_glass_alone_has_no_tissue():
    rng = np.random.default_rng(0)
    glass = rng.integers(240, 250, (3, 200, 200)).astype(np.uint8)
    assert _tissue(glass, np.ones((200, 200), bool)).mean() < 0.02
    values = np.concatenate([rng.normal(0.1, 0.02, 500), rng.normal(0.6, 0.05, 300)])
    assert 0.15 < _otsu(values.clip(0, 1).astype("float32")) < 0.5


def test_windows_without_data_are_counted_and_left_out(tmp_path):
    image = scene() + 1
    image[:, :, 500:] = 0
    path = write_geotiff(tmp_path / "half.tif", image, nodata=0)
    windows, row = cut(path, tile=100)
    assert (row.nodata, len(windows), max(one.window.x for one in windows)) == (40, 40, 400)


def polygon(points, **properties):
    geometry = {"type": "Polygon", "coordinates": [points]}
    return {"type": "Feature", "geometry": geometry, "properties": properties}


def test_regions_choose_windows_and_name_them(slide, tmp_path):
    path, _ = slide
    square = [[100, 100], [400, 100], [400, 400], [100, 400], [100, 100]]
    triangle = [[600, 0], [1000, 0], [1000, 700], [600, 0]]
    file = tmp_path / "regions.geojson"
    features = [polygon(square, classification={"name": "tumour"}), polygon(triangle, label="other")]
    file.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    windows, row = cut(path, tile=50, regions=str(file))
    inside = [one for one in windows if one.label == "tumour"]
    assert len(inside) == 36
    assert all(100 <= one.window.x + 25 <= 400 for one in inside)
    assert {one.label for one in windows} == {"tumour", "other"}
    assert row.outside == 20 * 16 - len(windows)
    # what the border of the file is to QuPath is not always the border of the slide
    info = open_raster(path).info
    shifted = read_regions(replace(info, origin=(30.0, 50.0)), path, str(file))
    assert shifted[0][1][0][0].tolist() == [130, 150]


def test_regions_of_maps_are_in_degrees(tmp_path):
    from rasterio.warp import transform

    path = write_geotiff(tmp_path / "map.tif", scene())
    left, top = 500_000 + 200 * 10, 4_500_000 - 100 * 10
    corners = [(left, top), (left + 3000, top), (left + 3000, top - 3000), (left, top - 3000), (left, top)]
    lon, lat = transform("EPSG:32618", "EPSG:4326", *map(list, zip(*corners, strict=True)))
    file = tmp_path / "field.geojson"
    field = polygon([[x, y] for x, y in zip(lon, lat, strict=True)], label="field")
    file.write_text(json.dumps({"features": [field]}))
    windows, _ = cut(path, tile=50, regions=str(file))
    expected = {(x, y) for x in range(200, 500, 50) for y in range(100, 400, 50)}
    assert {(one.window.x, one.window.y) for one in windows} == expected


@pytest.mark.parametrize("text", ["", "[]x", "{}", '{"features": [{"geometry": {"type": "Point"}}]}', '{"features": [1]}',
    '{"features": [{"geometry": {"type": "Polygon", "coordinates": [[[1, 2]]]}}]}',
    '{"features": [{"geometry": {"type": "Polygon", "coordinates": [[["a", 2], [1, 2], [3, 4]]]}}]}', "[" * 10_000])  # fmt: skip
def test_regions_that_are_none_are_refused(slide, tmp_path, text):
    path, _ = slide
    file = tmp_path / "bad.geojson"
    file.write_text(text)
    with pytest.raises(EquicamError, match="regions"):
        cut(path, tile=50, regions=str(file))


def test_a_raster_that_cannot_be_opened_is_a_bad_item(slide, tmp_path):
    path, _ = slide
    (tmp_path / "broken.svs").write_bytes(b"II*\0" + bytes(100))
    items = [Item("broken.svs", tmp_path / "broken.svs"), Item("s", path)]
    windows, rows = cut_windows(items, Tiling(200), 0)
    assert rows[0].error
    assert [row.windows for row in rows] == [0, 20]
    assert (windows[0].id, windows[0].window.side) == ("broken.svs", 0)
    with pytest.raises(EquicamError, match=r"broken.svs.* needs a file that can be read"):
        cut_windows(items[:1], Tiling(200), 0)


WRONG = {"tile": 1, "stride": "circle", "tissue": 2.0, "mpp_is": -1.0}


@pytest.mark.parametrize("name", WRONG)
def test_options_are_checked(name):
    with pytest.raises(EquicamError, match=f"{name} needs"):
        Tiling(**{"tile": 224, name: WRONG[name]})


@pytest.mark.parametrize(
    "given",
    [{"bands": ""}, {"bands": []}, {"display": "1,2"}, {"scale": 0}, {"mpp": float("nan")}, {"std": (0.0, 1.0)},
     {"mean": (float("inf"),)}],
)  # fmt: skip
def test_inputs_are_checked(given):
    with pytest.raises(EquicamError):
        Input(**given)


def test_an_input_takes_what_it_leaves_open_from_the_model():
    model = Input(bands="B4,B3,B2", scale=10_000, mpp=10)
    assert Input(scale=3000).or_else(model) == Input(bands=("B4", "B3", "B2"), scale=3000, mpp=10)
    assert Input().or_else(None) == Input()


def test_a_tiling_survives_json():
    given = Input("4,3,2", 1e4, (0.1,) * 3, (0.2,) * 3, 10)
    made = Tiling(224, "disc", 0.1, mpp_is=0.25, regions="r.geojson", input=given)
    assert Tiling.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_windows_beyond_counting_are_refused(slide, monkeypatch):
    path, _ = slide
    monkeypatch.setattr(tilings, "MAX_WINDOWS", 100)
    monkeypatch.setattr(limited, "inside", lambda: True)
    with pytest.raises(EquicamError, match="at most 100 windows"):
        cut(path, tile=20)
