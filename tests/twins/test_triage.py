"""Triage by columns against the slow way, row by row."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from equicam.core.views import Views
from equicam.reasons import from_rows
from equicam.runs.queue_files import _same
from equicam.runs.signals import ROWS, flagged, signal_values
from equicam.runs.store import ITEMS, MAPS, StoredMaps
from equicam.runs.triage import _by_class, triage
from equicam.shards import finite_table, json_ready

TRANSFORMS = Views([0, 60, 120, 180, 240, 300]).transforms


def test_stored_maps_of_a_table_are_those_of_its_rows():
    rng = np.random.default_rng(0)
    rows = [
        StoredMaps(*(rng.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (3, 4), (2, 3, 4)))).to_row(str(i))
        for i in range(9)
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=MAPS)
    found = StoredMaps.from_table(pa.concat_tables([table.slice(6), table.slice(0, 5)]))
    assert [*found] == ["6", "7", "8", "0", "1", "2", "3", "4"]
    for row in table.to_pylist():
        if row["id"] in found:
            slow, quick = StoredMaps.from_row(row), found[row["id"]]
            for name in ("map", "peum", "view_maps"):
                assert np.array_equal(getattr(slow, name), getattr(quick, name))


def test_classes_get_their_first_images():
    rng = np.random.default_rng(0)
    target, order = rng.integers(-1, 6, 400), rng.permutation(400)[:300]
    places = {-1: 3, 0: 0, 1: 7, 2: 500, 4: 1}
    left, expected = dict(places), []
    for i in order.tolist():
        if left.get(int(target[i]), 0):
            left[int(target[i])] -= 1
            expected.append(i)
    assert len(expected) > 50
    assert _by_class(order, target, places).tolist() == expected
    assert _by_class(order[:0], target, places).tolist() == []


def random_items(count):
    rng = np.random.default_rng(1)
    rows = []
    for i in range(count):
        top1 = np.where(rng.random(6) < 0.2, 1, 0).tolist()
        rows.append(
            {
                "id": f"{(7 * i) % count:04d}", "status": "bad" if i % 11 == 5 else "ok", "target": i % 3,
                "confidence": rng.random(), "peum_score": float("nan") if i % 31 == 3 else rng.random(),
                "stability": rng.random(), "stability_by_view": [1.0, *rng.random(5)],
                "views_kept": i % 7, "view_confidence": rng.random(6).tolist(), "view_top1": top1,
                "view_agreement": rng.random(6).tolist(), "flags": ["blank"] if i % 17 == 2 else [], "eq": None,
            }
        )  # fmt: skip
    return pa.Table.from_pylist(rows, schema=ITEMS)


@pytest.mark.parametrize("by", ["stability", "peum", "risk"])
def test_rows_of_a_triage_are_what_each_image_says(by):
    items = random_items(220)
    found = triage(items, by=by, budget="40%", transforms=TRANSFORMS, classes=["a", "b"])
    ok = items.filter(pa.compute.equal(items["status"], "ok")).sort_by("id")
    known = {row["id"]: row for row in ok.to_pylist()}
    signal = dict(zip(ok["id"].to_pylist(), signal_values(ok, by).tolist(), strict=True))
    undefined = dict(zip(ok["id"].to_pylist(), flagged(ok, {"blank"}).tolist(), strict=True))
    if by == "peum":
        for name, row in known.items():
            undefined[name] |= not math.isfinite(signal[name]) or row["views_kept"] <= 1
    review_first = {name: 1 - value if by == "stability" else value for name, value in signal.items()}
    score = {name: math.inf if undefined[name] else value for name, value in review_first.items()}
    peum = [
        row["peum_score"]
        for row in known.values()
        if math.isfinite(row["peum_score"]) and row["views_kept"] > 1 and "blank" not in row["flags"]
    ]
    rows = found.rows.to_pylist()
    assert [row["place"] for row in rows] == list(range(1, len(rows) + 1))
    assert {row["arm"] for row in rows} == {"queue", "control"}
    for row in rows:
        image = known[row["id"]]
        higher = sum(value > score[row["id"]] for value in score.values())
        ties = sum(value == score[row["id"]] for value in score.values())
        assert higher < row["rank"] <= higher + ties
        assert row["class"] == (["a", "b"][image["target"]] if image["target"] < 2 else "2")
        assert (row["confidence"], row["flags"]) == (image["confidence"], image["flags"])
        defined = math.isfinite(image["peum_score"])
        assert row["peum_score"] == (image["peum_score"] if defined else None)
        below = sum(one < image["peum_score"] for one in peum) / len(peum)
        assert row["peum_above"] == (pytest.approx(below) if defined else None)
        reasons = {reason.code: reason.values for reason in from_rows(row["reasons"])}
        assert ("signal-percentile" in reasons) != math.isinf(score[row["id"]])
        if "signal-percentile" in reasons:
            lower = sum(value < score[row["id"]] for value in score.values())
            expected = {"signal": by, "value": signal[row["id"]], "above_percent": 100 * lower // len(score)}
            assert reasons["signal-percentile"] == expected
        presented, *_ = top1 = image["view_top1"]  # whichever class is explained
        flips = [view.label for view, top in zip(TRANSFORMS, top1, strict=True) if top != presented]
        assert reasons.get("prediction-changes", {"views": []})["views"] == flips
        column = "view_agreement" if by == "peum" else "stability_by_view"
        low = sorted((r, one.label) for one, r in zip(TRANSFORMS, image[column], strict=True) if r < 0.5)
        told = reasons.get("views-disagree" if by == "peum" else "map-moves", {"views": []})["views"]
        assert told == ([] if "blank" in image["flags"] else [label for _, label in low])


def test_null_for_what_json_does_not_have():
    rows = pa.table({"a": [1.0, math.nan, math.inf, None], "b": ["x", None, "y", "z"]})
    found = finite_table(rows).to_pylist()
    assert found == json_ready(rows.to_pylist())
    json.dumps(found, allow_nan=False)


def test_of_reasons_those_that_were_computed_are_compared():
    def queue(first, second, rank=1):
        rows = []
        for name, some in (("a", first), ("b", second)):
            reasons = None if some is None else [{"code": code, "values": "{}"} for code in some]
            row = {"id": name, "arm": "queue", "rank": rank, "place": 1, "risk": math.nan}
            rows.append(row | {"reasons": reasons})
        return pa.Table.from_pylist(rows, ROWS)

    written = queue(["blank", "edge"], ["edge"])
    assert _same(queue(["blank", "edge"], ["edge"]), written)
    assert _same(queue(["blank", "edge"], None), written)
    assert _same(queue(None, None), written)
    assert not _same(queue(["edge", "blank"], None), written)
    assert not _same(queue(None, []), written)
    assert not _same(queue(None, None, rank=2), written)
    assert not _same(queue(None, None).slice(1), written)
