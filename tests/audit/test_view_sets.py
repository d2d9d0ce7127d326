"""A run of any set of transforms is computed, ranked, reported, reviewed and verified, with its views by name."""

import json

import numpy as np
import pytest

import equicam
from equicam.core.views import Views
from equicam.drawing import view_curve
from equicam.runs.report import render
from tests.audit.faked import Page
from tests.web.conftest import Server

SETS = {
    "dihedral": Views.dihedral(6),
    "rotated scales": Views.evenly(3) * Views.scales(1, 0.9),
    "shifts": Views.shifts((0, 0), (0.05, 0), (0, -0.05)),
}


OPTIONS = {"n": 8, "calibrate": 4, "shard_size": 4}


@pytest.fixture(scope="module", params=SETS)
def audited(request, patches, tmp_path_factory):
    """A run of one of the sets, ranked."""
    views, out = SETS[request.param], tmp_path_factory.mktemp("sets") / "run"
    run = equicam.audit(patches, equicam.load("embedded"), out, views=views, **OPTIONS)
    run.triage("100%")
    return views, run


def test_rows_and_manifest_are_of_the_set(audited):
    views, run = audited
    manifest = equicam.open_run(run.folder).manifest
    assert (manifest.transforms, manifest.labels, manifest.presented) == (views.transforms, views.labels, 0)
    assert manifest.recipe.fill == ("reflect" if views.radius == 1 else "coverage")
    for row in run.items.to_pylist():
        assert row["status"] == "ok"
        assert len(row["stability_by_view"]) == len(row["view_top1"]) == len(views)
        assert row["stability_by_view"][0] == pytest.approx(1, abs=1e-5)
        assert -1 <= row["stability"] <= 1


def test_the_report_names_the_views(audited):
    views, run = audited
    text = run.report().read_text()
    assert all(f"Map of the view {label}, aligned." in text for label in views.labels)
    for words in (view_curve.curve_order(views.transforms), "when the image is transformed?"):
        assert words in Page(text).text
    assert json.loads((run.folder / "report.json").read_text())["manifest"]["views"] == list(views.labels)


def test_the_review_page_names_the_views(audited):
    views, run = audited
    client = Server(run.store, blind=False).client()
    page = client.get("/").text
    shown = page.split("data-views='")[1].split("'")[0]
    assert json.loads(shown) == list(views.labels)
    item = client.list()[0]["key"]
    facts = client.get(f"/api/item/{item}").json()
    assert [view["label"] for view in facts["views"]] == list(views.labels)
    assert facts["presented_view"] == 0
    text = client.get(f"/item/{item}").text
    assert 'class="curve"' in text
    assert all(f'data-label="{label}"' in text for label in views.labels)
    for kind in ("presented", "strip", f"view-{len(views) - 1}", f"thumb-{len(views) - 1}"):
        assert client.get(f"/image/{item}/{kind}").status_code == 200
    assert client.get(f"/image/{item}/view-{len(views)}").status_code == 404


def test_it_resumes_and_verifies_and_another_set_is_refused(audited, patches):
    views, run = audited
    assert run.verify(2).ok
    command = patches, equicam.load("embedded"), run.folder
    equicam.audit(*command, views=views, **OPTIONS)
    with pytest.raises(equicam.EquicamError, match="views was"):
        equicam.audit(*command, views=Views.dihedral(8), **OPTIONS)


def test_no_part_that_every_view_covers_has_a_white_tile():
    views = Views.shifts((0, 0), (0.6, 0)).transforms
    plane = np.random.default_rng(0).random((9, 9)).astype(np.float32)
    tile = render.view_tile(np.zeros((32, 32, 3), np.uint8), plane, views[1], radius=0.0)
    assert (tile == 255).all()


def test_curves_are_over_angles_where_there_are_angles():
    correlations = [1.0, 0.4, 0.9, 0.2, 0.8, None]
    rotations = view_curve.view_curve(Views.evenly(6).transforms, correlations)
    assert "270°" in rotations
    assert (rotations.count("<polyline"), rotations.count("<path")) == (2, 2)
    assert "by angle; lowest 0.20 in the view 180°." in rotations
    mirrored = view_curve.view_curve(Views.dihedral(6).transforms, correlations)
    assert 'stroke-dasharray="2 2"' in mirrored
    assert "lowest 0.20 in the view 120° mirrored." in mirrored
    others = view_curve.view_curve((Views.evenly(3) * Views.scales(1, 0.9)).transforms, correlations)
    assert "in the order of the views; lowest 0.20 in the view 120°, × 0.9." in others
    assert "°</text>" not in others
    angle = "angle of rotation (°)"
    for drawn, label in ((rotations, angle), (mirrored, angle), (others, "view")):
        assert f">{label}</text>" in drawn
        assert ">correlation</text>" in drawn
    assert not view_curve.view_curve(Views.evenly(2).transforms, [None, 1.0])
