"""One part: what a row says of how its views agree, and images whose preprocessing went wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit.compute import AuditContext, compute_shard
from equicam.core import views
from equicam.images.decoding import DecodedImage, decode_image
from equicam.images.items import Item
from equicam.reasons import Reason, describe
from equicam.recipe import Recipe
from equicam.runs.store import StoredMaps
from tests.conftest import Cnn, assert_alive, pictures, seeded


def opened(x):
    return [DecodedImage(Item(f"{i}", Path(f"{i}.png")), one) for i, one in enumerate(x)]


def context_of(views):
    model = equicam.wrap(seeded(Cnn).float(), layer="trunk")
    return AuditContext(model, Recipe(views=views, fill="reflect"), frozenset())


@pytest.fixture
def plans():
    return context_of(4)


def test_agreement_is_each_view_against_the_mean_of_the_others(plans):
    items, maps = compute_shard(plans, opened(pictures(3).float().numpy()))
    for row, kept in zip(items.to_pylist(), maps.to_pylist(), strict=True):
        planes = StoredMaps.from_row(kept).view_maps
        assert_alive(torch.from_numpy(planes / planes.max()))
        back = [np.rot90(plane, -turn) for turn, plane in enumerate(planes)]  # 0°, 90°, 180°, 270°
        side = back[0].shape[-1]
        y, x = np.mgrid[:side, :side] - (side - 1) / 2
        inside = x**2 + y**2 <= (side / 2) ** 2
        for t, said in enumerate(row["view_agreement"]):
            others = np.mean([plane for s, plane in enumerate(back) if s != t], axis=0)
            expected = np.corrcoef(back[t][inside], others[inside])[0, 1]
            assert said == pytest.approx(expected, abs=2e-3)  # maps are kept in half precision
    assert len({round(r, 3) for row in items.to_pylist() for r in row["view_agreement"]}) > 6


def test_an_image_that_preprocessing_made_nan_of_is_a_row_and_the_others_are_done(plans, tmp_path):
    x = pictures(3).float().numpy()
    whole, _ = compute_shard(plans, opened(x[[0, 2]]))
    x[1, 0, 5, 5] = np.nan
    Image.new("RGB", (8, 8)).save(tmp_path / "any.png")

    def decoded(i):
        item = Item(f"{i}", tmp_path / "any.png")
        return decode_image(item, lambda _image: x[i], lambda _size: (0.0, 0.0, 8.0, 8.0))

    items, maps = compute_shard(plans, [decoded(i) for i in range(3)])
    assert items["status"].to_pylist() == ["ok", "bad", "ok"]
    assert items["reason"].to_pylist() == [None, "not-finite", None]
    assert "NaN or infinity" in describe(Reason("not-finite"))
    assert maps["id"].to_pylist() == ["0", "2"]
    assert items["peum_score"].to_pylist()[::2] == pytest.approx(whole["peum_score"].to_pylist(), rel=1e-5)


def test_constants_are_made_for_the_first_shard_alone(monkeypatch):
    """On a GPU, making one waits for everything that runs there."""
    made = []
    usual = views._sampling_grid.__wrapped__
    counted = views.constant(lambda *args: made.append(args) or usual(*args))
    monkeypatch.setattr(views, "_sampling_grid", counted)
    context, decoded = context_of(5), opened(pictures(3).float().numpy())
    compute_shard(context, decoded)
    assert made
    made.clear()
    compute_shard(context, decoded)
    assert not made
