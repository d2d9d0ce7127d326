"""The map of a whole raster: a known field comes back where it was."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equicam.errors import EquicamError
from equicam.runs.export import stitching as module
from equicam.runs.export.stitching import MIN_WEIGHT, Grid, RasterWindows, WindowMaps, make_grid, stitch
from tests.export.faked import GRID, places, window_maps


def grid_for(width, height, scale, every=8):
    cell = every * scale
    return Grid(cell, math.ceil(width / cell), math.ceil(height / cell))


def centres(grid):
    return (np.arange(grid.columns) + 0.5) * grid.cell, (np.arange(grid.rows) + 0.5) * grid.cell


@pytest.mark.parametrize("disc", [False, True])
def test_a_constant_field_comes_back_exactly(disc):
    value = np.float32(0.37)
    grid = grid_for(1000, 700, 2.004)
    bands = stitch(window_maps(lambda x, y: value, 1000, 700, 96 * 2.004, 67 * 2.004), grid, disc=disc)
    known = bands[3] > 0
    assert [np.unique(band[known]).tolist() for band in bands[:3]] == [[value], [value / 2], [0.5]]
    assert np.isnan(bands[:3, ~known]).all()
    # what lies in the raster is covered, but for what inscribed discs leave at its border
    x, y = centres(grid)
    assert known[np.outer(y < 700, x < 1000)].mean() > (0.93 if disc else 0.9999)
    assert not disc or known[6:-6, 6:-6].all()


def within(x, y, left, top, right, bottom):
    """Which cells have their centres in a box."""
    return np.outer((y >= top) & (y <= bottom), (x >= left) & (x <= right))


@settings(max_examples=40, deadline=None)
@given(
    scale=st.floats(0.5, 9.0), tile=st.integers(24, 100), every=st.integers(1, 12), overlap=st.floats(0.3, 1.0),
    width=st.integers(300, 3000), height=st.integers(300, 3000), disc=st.booleans(),
)  # fmt: skip
def test_a_linear_field_is_not_displaced(scale, tile, every, overlap, width, height, disc):
    """Also at the far corner, with any ratio of pixels, and last windows that are flush with the border."""
    side = tile * scale
    if side > min(width, height) or width * height / side**2 > 400:
        return
    grid = grid_for(width, height, scale, every)
    x, y = centres(grid)
    # away from the borders of windows, where their maps are constant beyond the last centre
    windows = list(window_maps(lambda x, y: (x + 2 * y) / width, width, height, side, overlap * side))
    edge, slack = side / GRID / 2, 1e-5 * grid.cell  # a centre this close to a border may count
    exact, spoilt = np.zeros((2, grid.rows, grid.columns), bool)
    for w in windows:
        boxes = [(w.x + d, w.y + d, w.x + side - d, w.y + side - d) for d in (-slack, edge)]
        around, inner = (within(x, y, *box) for box in boxes)
        exact |= inner
        spoilt |= around & ~inner
    bands = stitch(iter(windows), grid, disc=disc)
    wanted = (x[None, :] + 2 * y[:, None]) / width
    shown = exact & ~spoilt & (bands[3] > 0)
    displaced = np.abs(bands[0] - wanted)[shown] * width / scale  # pixels of the model's
    assert displaced.size == 0 or displaced.max() < 0.005


def test_overlapping_windows_keep_a_linear_field_within_a_pixel():
    scale, width, height = 2.0040080, 2220, 2967
    grid, side = grid_for(width, height, scale), 96 * scale
    windows = window_maps(lambda x, y: x + 3 * y, width, height, side, side / 2)
    x, y = centres(grid)
    far = within(x, y, width - 700, height - 700, width - side / 2, height - side / 2)
    wanted = x[None] + 3 * y[:, None]
    displaced = np.abs(stitch(windows, grid, disc=False)[0] - wanted)[far] / math.hypot(1, 3) / scale
    assert far.sum() > 500
    assert displaced.max() < 1


def slow_stitch(windows, grid, disc):
    """Cell by cell, window by window, value by value."""
    bands = np.full((4, grid.rows, grid.columns), np.nan)
    for r in range(grid.rows):
        for c in range(grid.columns):
            x, y, total = (c + 0.5) * grid.cell, (r + 0.5) * grid.cell, [0.0] * 5
            count = 0
            for w in windows:
                u, v = (x - w.x) / w.side, (y - w.y) / w.side
                if not (0 <= u <= 1 and 0 <= v <= 1) or (disc and math.hypot(u - 0.5, v - 0.5) > 0.5):
                    continue
                weight = 1.0
                for place in (u, v):
                    weight *= MIN_WEIGHT + (1 - MIN_WEIGHT) * math.sin(math.pi * place) ** 2
                high, wide = w.map.shape
                at_x, at_y = (min(max(p * n - 0.5, 0), n - 1) for p, n in ((u, wide), (v, high)))
                left, top = math.floor(at_x), math.floor(at_y)
                right, bottom = min(left + 1, wide - 1), min(top + 1, high - 1)
                for band, plane in ((0, w.map), (1, w.peum)):
                    upper = plane[top, left] * (1 - at_x + left) + plane[top, right] * (at_x - left)
                    lower = plane[bottom, left] * (1 - at_x + left) + plane[bottom, right] * (at_x - left)
                    total[band] += weight * (upper * (1 - at_y + top) + lower * (at_y - top))
                total[3] += weight
                if not math.isnan(w.stability):
                    total[2] += weight * w.stability
                    total[4] += weight
                count += 1
            bands[3, r, c] = count
            if total[3]:
                bands[:2, r, c] = total[0] / total[3], total[1] / total[3]
            if total[4]:
                bands[2, r, c] = total[2] / total[4]
    return bands


@pytest.mark.parametrize("disc", [False, True])
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (2, 1)])
def test_the_slow_twin_agrees(disc, shape):
    rng = np.random.default_rng(3)
    windows = [
        WindowMaps(x + 0.3, y, 96.7, *rng.random((2, *shape)).astype(np.float32), (i % 3) / 2 if i % 4 else math.nan)
        for i, (x, y) in enumerate(places(260, 190, 96.7, 61.3))
    ]  # fmt: skip
    grid = Grid(7.3, 38, 28)
    fast, slow = stitch(iter(windows), grid, disc=disc), slow_stitch(windows, grid, disc)
    assert np.nanstd(slow[0]) > 0.01
    np.testing.assert_allclose(fast, slow, rtol=1e-6, atol=1e-7)


def test_arrays_in_files_are_the_same(monkeypatch, tmp_path):
    grid = grid_for(900, 800, 1.5)
    made = lambda: window_maps(lambda x, y: np.sin(x / 90) * y, 900, 800, 144.0, 100.0)  # noqa: E731
    in_memory = stitch(made(), grid, disc=False)
    monkeypatch.setattr(module, "MAX_MEMORY_BYTES", 0)
    in_files = stitch(made(), grid, disc=False, folder=tmp_path)
    assert isinstance(in_files, np.memmap)
    np.testing.assert_array_equal(in_files, in_memory)
    assert not list(tmp_path.iterdir())


def test_cells_that_are_no_cells_are_refused():
    row = {"x": 0.0, "y": 0.0, "side": 192.0}
    raster = RasterWindows("a", "slide", 2**39, 2**39, None, None, None, (0.0, 0.0), (row,))
    for every, advice in ((8, "a larger --every"), (0, "--every 8"), (97, "--every 8")):
        with pytest.raises(EquicamError, match=advice):
            make_grid(raster, 96, every)
