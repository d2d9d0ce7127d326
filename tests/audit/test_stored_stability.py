"""Stability from stored maps against the value of the rows: what layer resolution and float16 cost."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch

import equicam
from equicam.auditing.store import RunStore
from equicam.auditing.stored_maps import StoredMaps
from equicam.auditing.stored_stability import correlate_stored
from equicam.core.views import Views
from tests.audit.conftest import ENV
from tests.audit.faked import fake_run


def test_enlarged_maps_give_the_rows_value_and_maps_as_stored_do_not(whole):
    """On the embedded model: figures in docs/audit.md."""
    run = equicam.open_run(whole)
    rows = run.items.sort_by("id")
    exact = rows["stability"].to_numpy()
    by_view = np.array(rows["stability_by_view"].to_pylist())
    enlarged, as_stored = (run.stored_stability(side=side).sort_by("id") for side in (224, None))
    assert enlarged["id"].to_pylist() == rows["id"].to_pylist()
    assert exact.std() > 0.05
    large, small = (np.abs(one["stability"].to_numpy() - exact) for one in (enlarged, as_stored))
    assert large.max() < 0.002
    assert 0.005 < small.max() < 0.05
    assert large.mean() < small.mean() / 5
    assert np.abs(np.array(enlarged["stability_by_view"].to_pylist()) - by_view).max() < 0.01


def test_it_is_the_mean_of_plain_correlations_in_the_disc():
    rng, angles = (
        np.random.default_rng(0),
        (90.0, 0.0, 180.0, 270.0),
    )  # exact rotations, the presented view second
    base = rng.random((224, 224)).astype(np.float32)
    aligned = np.stack([base + k * rng.random((224, 224)).astype(np.float32) for k in range(4)])
    planes = (
        Views(tuple(-a for a in angles)).align(torch.from_numpy(aligned)[:, None], "reflect")[:, 0].numpy()
    )
    y, x = np.mgrid[:224, :224] - 111.5
    inside = np.hypot(x, y) <= 112
    slow = [np.corrcoef(plane[inside], aligned[1][inside])[0, 1] for plane in aligned]
    found = correlate_stored(StoredMaps(base, base, planes), Views(angles))
    assert float(found.stability) == pytest.approx(np.mean([slow[t] for t in (0, 2, 3)]), abs=1e-5)
    assert found.with_presented[:, 0].tolist() == pytest.approx([slow[t] for t in (1, 0, 2, 3)], abs=1e-5)


def test_a_run_that_cannot_have_it_has_nulls(tmp_path):
    for name, angles in (("one", (0.0,)), ("none presented", (20.0, 40.0))):
        found = equicam.open_run(fake_run(tmp_path / name, angles=angles).folder).stored_stability()
        assert found.num_rows > 20
        assert found["stability"].null_count == found["stability_by_view"].null_count == found.num_rows


def test_a_constant_map_correlates_with_nothing(tmp_path):
    run = RunStore(fake_run(tmp_path).folder)
    flat = np.zeros((18, 12, 12), np.float32)
    assert (
        float(correlate_stored(StoredMaps(flat[0], flat[0], flat), Views(run.manifest.transforms)).stability)
        == 0
    )


def test_ranking_and_reading_a_run_imports_no_torch(whole, tmp_path):
    code = f"""
import sys
import equicam
run = equicam.open_run({str(whole)!r})
run.items, run.read_items(["stability"])
from equicam.auditing.queue_files import rank_run
rank_run(run.store, {{"budget": "50%"}})
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert done.returncode == 0, done.stderr


def test_the_schema_is_that_of_the_items(whole):
    found = equicam.open_run(whole).stored_stability(side=None)
    assert found.schema.field("stability").type == pa.float64()
    assert found.column_names == ["id", "stability", "stability_by_view"]
