"""A run that equicam 0.1.0 wrote is read, ranked, reviewed and reported; what it cannot do is refused."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import equicam
from equicam.auditing.log import Log
from equicam.auditing.queue_files import read_queue
from equicam.auditing.review_key import read_review_key
from equicam.auditing.review_log import ReviewLog
from equicam.auditing.store import ITEMS, RunStore
from equicam.auditing.triage import triage
from equicam.errors import EquicamError
from equicam.reasons import Reason, describe, from_rows
from tests.audit.conftest import equicam_command
from tests.audit.faked import BLANK, UNREADABLE, fake_run

# The names 0.1.0 used, in its order.
OLD_ITEMS = {
    "id": "id", "path": "path", "index": "index", "sha256": "sha256", "bytes": "bytes", "mtime_ns": "mtime_ns",
    "width": "width", "height": "height", "frame": "input_box", "label": "label", "target": "target",
    "prob": "confidence", "top5": "top5", "top5_prob": "top5_confidence", "peum": "peum_score",
    "flip_rate": "flip_rate", "kept": "views_kept", "prob_by_view": "view_confidence", "top1_by_view": "view_top1",
    "agree_by_view": "view_agreement", "flags": "flags", "eq": "eq", "status": "status", "reason": "reason",
    "seconds": "seconds",
}  # fmt: skip
OLD_TRIAGE = {
    "id": "id", "arm": "arm", "rank": "rank", "place": "place", "by": "by", "peum": "peum_score",
    "target": "target", "class": "class", "prob": "confidence", "flags": "flags",
}  # fmt: skip
PEUM_SENTENCE = "PEUM 0.03: more uncertain than 90 % of the pictures"


def old_manifest(manifest) -> dict:
    """manifest.json as 0.1.0 wrote it."""
    recipe = manifest.recipe
    return {
        "model": manifest.model, "weights": manifest.weights, "weights_from": manifest.weights_from,
        "layer": manifest.layer, "layout": manifest.layout, "preprocess": manifest.preprocessing,
        "classes": list(manifest.classes), "method": recipe.method, "method_is": "tap · grad_cam",
        "angles": list(recipe.views), "fill": recipe.fill, "as_published": False, "dtype": manifest.dtype,
        "device": manifest.device, "part": manifest.shard_size, "calibrate": manifest.calibration_size, "seed": 0,
        "source": manifest.source, "split": None, "pictures": manifest.images, "data": manifest.data,
        "versions": [list(pair) for pair in manifest.versions], "tau": None, "gamma": None, "compiled": False,
        "schema": 1,
    }  # fmt: skip


def rewrite_as_010(run: RunStore, folder) -> RunStore:
    """The same run in the layout of 0.1.0."""
    for kind in ("items", "maps"):
        (folder / kind).mkdir(parents=True)
    items = run.read_items()
    columns = {old: items[new] for old, new in OLD_ITEMS.items()}
    columns["reason"] = pa.array([why(row) for row in items.to_pylist()], pa.string())
    pq.write_table(pa.table(columns), folder / "items" / "part-000000.parquet")
    maps = pq.read_table(run.path("maps", 0))
    names = [name.replace("view_maps", "planes") for name in maps.column_names]
    pq.write_table(maps.rename_columns(names), folder / "maps" / "part-000000.parquet")
    sample = run.sample()
    names = [{"shard": "part", "calibration": "calibrated"}.get(name, name) for name in sample.column_names]
    pq.write_table(sample.rename_columns(names), folder / "sample.parquet")
    (folder / "manifest.json").write_text(json.dumps(old_manifest(run.manifest)))
    found = triage(
        items, by="peum", budget=8, transforms=run.manifest.transforms, classes=run.manifest.classes
    )
    columns = {old: found.rows[new] for old, new in OLD_TRIAGE.items()}
    columns["reasons"] = pa.array([[PEUM_SENTENCE]] * found.rows.num_rows, pa.list_(pa.string()))
    pq.write_table(pa.table(columns), folder / "triage.parquet")
    (folder / "triage.json").write_text(json.dumps({"options": {"by": "peum", "budget": 8}}))
    return RunStore(folder)


def why(row) -> str | None:
    if row["reason"] is None:
        return None
    return describe(Reason.from_row({"code": row["reason"], "values": row["reason_values"]}))


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("new"))


@pytest.fixture
def old(new, tmp_path):
    return rewrite_as_010(new, tmp_path / "run")


def test_rows_have_the_present_names_and_values(new, old):
    found, expected = equicam.open_run(old.folder).items, new.read_items()
    assert found.column_names == ITEMS.names
    for column in ("stability", "stability_by_view", "steadiness"):
        assert found[column].null_count == found.num_rows
    codes = {code for code in found["reason"].to_pylist() if code}
    assert codes == {"text"}
    assert [why(row) for row in found.to_pylist()] == [why(row) for row in expected.to_pylist()]
    other = (
        "stability", "stability_by_view", "reason", "reason_values", "steadiness", "steadiness_reason",
    )  # fmt: skip
    same = [n for n in ITEMS.names if n not in other]
    assert found.select(same).to_pylist() == expected.select(same).to_pylist()
    some = ["peum_score", "id", "reason_values"]
    assert old.read_items(some).column_names == some


def test_maps_and_manifest_are_those_of_the_run(new, old):
    ids = new.read_items(["id"])["id"].to_pylist()[:3]
    for name, maps in new.maps(ids).items():
        np.testing.assert_array_equal(old.maps(ids)[name].view_maps, maps.view_maps)
        np.testing.assert_array_equal(old.maps(ids)[name].map, maps.map)
    assert old.manifest.recipe == new.manifest.recipe
    assert (old.manifest.schema, old.manifest.images) == (1, new.manifest.images)
    assert old.pending() == []


def test_it_is_ranked_by_peum_as_before_and_reported(new, old):
    run = equicam.open_run(old.folder)
    assert [describe(r) for r in from_rows(run.queue()[0]["reasons"])] == [PEUM_SENTENCE]
    assert run.report().is_file()  # of the queue that 0.1.0 wrote
    found = run.triage(8, by="peum")
    options = {
        "transforms": new.manifest.transforms,
        "classes": new.manifest.classes,
        "key": read_review_key(old.folder),
    }
    expected = triage(new.read_items(), by="peum", budget=8, **options)
    same = ["id", "arm", "rank", "place", "peum_score", "reasons"]
    assert found.rows.select(same).equals(expected.rows.select(same))
    assert set(found.quality.signals) == {"stability", "peum", "risk"}
    assert run.report().is_file()


def test_its_stability_comes_from_its_maps_and_ranks_by_default(new, old):
    run = equicam.open_run(old.folder)
    found = run.triage(8)
    assert found.by == "stability"
    measured = run.stored_stability().to_pylist()
    rows = {row["id"]: row for row in run.items.to_pylist()}
    assert sum(rows[one["id"]]["stability"] == one["stability"] for one in measured) == len(measured) > 20
    assert all(len(rows[one["id"]]["stability_by_view"]) == 18 for one in measured)
    assert rows[UNREADABLE]["stability"] is None
    stored = {row["id"]: row["stability"] for row in new.read_items().to_pylist() if row["status"] == "ok"}
    pairs = [(stored[one["id"]], one["stability"]) for one in measured if one["id"] != BLANK]
    assert np.corrcoef(np.array(pairs).T)[0, 1] > 0.95  # the whole square there, the disc here
    assert run.read_items(["id", "stability"]).column_names == ["id", "stability"]
    assert run.report().is_file()  # the same ranks again, without torch
    assert "stability.parquet" in Log(old.folder).events("triaged")[-1].payload["files"]
    (old.folder / "stability.parquet").unlink()
    with pytest.raises(EquicamError, match="needs a run that stores it"):
        run.report()


def test_resuming_is_refused_with_a_way_out(old, new):
    with pytest.raises(EquicamError, match=r"can be read but not continued; try equicam audit with another"):
        old.begin(new.manifest, [], [])


def test_blinding_hides_its_sentences(old):
    from equicam.auditing.signals import REVEALING

    for row in read_queue(old).to_pylist():
        assert all(reason.code in REVEALING["peum"] for reason in from_rows(row["reasons"]))


def test_its_verdicts_are_read(old):
    log = ReviewLog(old.folder)
    log.log.add("verdict", {"item": "a", "verdict": "second-reader", "blind": True}, who="ana")
    log.refresh()
    assert log.standing("ana")["a"].verdict == "second-reviewer"
    assert log.second_requested() == {"a"}


@pytest.mark.parametrize("column", ["prob", "class"])
def test_a_queue_of_other_values_is_not_reported(old, column):
    path = old.folder / "triage.parquet"
    table = pq.read_table(path)
    cells = table[column].to_pylist()
    changed = pa.array([*cells[:-1], "other" if column == "class" else 0.25], table.schema.field(column).type)
    pq.write_table(table.set_column(table.column_names.index(column), column, changed), path)
    with pytest.raises(EquicamError, match=r"try equicam triage again"):
        equicam.open_run(old.folder).report()


def test_a_demo_in_its_folder_is_refused_with_the_command_for_a_demo(old):
    folder = old.folder.parent / "demo"
    folder.mkdir()
    old.folder.rename(folder / "run-10")
    code, output = equicam_command("demo", "--out", folder, "--count", "10")
    assert code == 2
    assert "try equicam demo --out with another folder" in output
    assert [path.name for path in folder.iterdir()] == ["run-10"]
