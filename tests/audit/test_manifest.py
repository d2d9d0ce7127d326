"""One recipe travels whole into the manifest, and equal settings give equal manifests."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import pytest

import equicam
from equicam.audit.audit import _is_repaid, resolve_recipe
from equicam.core.views import Views
from equicam.errors import EquicamError
from equicam.recipe import Recipe
from equicam.runs.manifest import parse_manifest, refuse_difference
from equicam.runs.store import RunStore
from equicam.shards import from_plain
from tests.audit.conftest import ENV
from tests.audit.faked import fake_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("manifest"))


def test_a_manifest_reads_back_whole(run):
    found = run.manifest
    assert parse_manifest(found.dumps(), where="here") == found
    plain = json.loads(found.dumps())
    assert (plain["schema"], plain["recipe"]["method"]) == (2, "equigrad-cam")
    assert Recipe.from_json(plain["recipe"]) == found.recipe
    assert found.transforms == Views(found.recipe.views).transforms
    assert (found.labels[1], found.presented) == ("20°", 0)


def refused_to_parse(text):
    with pytest.raises(EquicamError, match="the run here needs"):
        parse_manifest(text, where="here")


def test_another_manifest_is_refused():
    for text in ("{", "[]", '{"schema": 2}'):
        refused_to_parse(text)


@pytest.mark.parametrize("schema", [1, 3, None])
def test_a_run_of_another_schema_is_refused_and_not_written_over(run, tmp_path, schema):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    for path in folder.glob("*/shard-*.parquet"):
        path.rename(path.with_name(path.name.replace("shard", "part")))
    text = json.dumps(run.manifest.to_json() | {"schema": schema})
    (folder / "manifest.json").write_text(text)
    sentence = f"needs schema version 2, got {schema}; try equicam audit again with another --out, or"
    with pytest.raises(EquicamError, match=sentence):
        equicam.open_run(folder).report()
    with pytest.raises(EquicamError, match=sentence):
        RunStore(folder).begin(run.manifest, [], [])
    assert (folder / "manifest.json").read_text() == text


@dataclass(frozen=True)
class Record:
    texts: tuple[str, ...]
    pair: tuple[float, int] | None
    choice: Literal["a", "b"] | None


GOOD = {"texts": ["x"], "pair": [1, 2], "choice": "a"}


def test_records_are_read_by_their_types():
    assert from_plain(Record, GOOD) == Record(("x",), (1.0, 2), "a")
    assert from_plain(Record, GOOD | {"texts": [], "pair": None, "choice": None}) == Record((), None, None)
    assert math.isnan(from_plain(Record, GOOD | {"pair": [None, 2]}).pair[0])
    with pytest.raises(KeyError):
        from_plain(Record, {})


PAIRS = [1], [1, 2, 3], ["1", 2], [True, 2], [1, 2.0], [1, -1], [1, True], [1, 10**9 + 1], [10**400, 1], {}
WRONG = {"texts": ("x", [1], ["\ud800"], None), "choice": ("c", []), "pair": PAIRS}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_values_of_other_types_are_refused(name, value):
    with pytest.raises((ValueError, OverflowError)):
        from_plain(Record, GOOD | {name: value})


def test_views_read_back_as_transforms(run):
    views = Views.dihedral(6) * Views.scales(0.9, 1)
    found = replace(run.manifest, recipe=replace(run.manifest.recipe, views=views))
    again = parse_manifest(found.dumps(), where="here")
    assert again == found
    assert (again.transforms, again.labels) == (views.transforms, views.labels)
    refuse_difference(again, found, where="here")


@pytest.mark.parametrize(
    "views",
    [
        [], "auto", 18, None, [True], ["0"], [float("nan")], [float("inf")], [10**400], [0.0] * 10_001, [{}],
        [[0.0, False, 1.0, 0.0]], [[0.0, 0, 1.0, 0.0, 0.0]], [[0.0, False, 0.0, 0.0, 0.0]],
        [[0.0, False, -1.0, 0.0, 0.0]], [[0.0, False, 1.0, 1e300, 0.0]], [[0.0, False, 1e-300, 0.0, 0.0]],
        [[0.0, False, 1.0, None, 0.0]], [[0.0, False, True, 0.0, 0.0]],
    ],
)  # fmt: skip
def test_views_that_are_none_are_refused(run, views):
    plain = run.manifest.to_json()
    refused_to_parse(json.dumps(plain | {"recipe": plain["recipe"] | {"views": views}}))


@pytest.fixture
def settled():
    return partial(resolve_recipe, equicam.load("embedded"))


def test_views_that_see_less_are_filled_by_coverage(settled):
    smaller = Views.scales(0.8, 1), Views.shifts((0, 0), (0.1, 0))
    for views in (Views.dihedral(6), *smaller):
        fill = "coverage" if views in smaller else "reflect"
        given = {"views": views}, {"views": views, "fill": "zeros"}, {"views": views, "protocol": "paper"}
        assert [settled(Recipe(**one))[0].fill for one in given] == [fill, "zeros", "zeros"]


def test_settings_that_mean_the_same_are_the_same_recipe(settled):
    usual = settled(Recipe())
    assert settled(Recipe(views=18, fill="reflect", dtype="float32")) == usual
    assert usual[0].views == tuple(20.0 * t for t in range(18))
    assert settled(Recipe(views=usual[0].views)) == usual
    assert settled(Recipe(dtype="bfloat16"))[0].dtype == "bfloat16"
    published, described = settled(Recipe(protocol="paper"))
    assert (published.fill, published.views[0]) == ("zeros", -180.0)
    assert described != usual[1]
    with pytest.raises(EquicamError, match="at most 10,000 views"):  # a manifest could not hold them
        settled(Recipe(views=10_001))


def test_each_difference_is_named_and_places_are_free(run):
    before = run.manifest
    refuse_difference(before, replace(before, source="elsewhere", weights_from="elsewhere"), where="here")
    for changed, word in (
        ({"weights": "0" * 64}, "weights was"),
        ({"recipe": replace(before.recipe, seed=1)}, "seed was 0, is 1"),
        ({"recipe": replace(before.recipe, method="grad-cam")}, "method was"),
        ({"shard_size": 7}, "shard_size was 1000, is 7"),
    ):
        with pytest.raises(EquicamError, match=word):
            refuse_difference(before, replace(before, **changed), where="here")


def test_reading_a_run_imports_no_torch(run):
    code = (
        "import sys, equicam\n"
        f"run = equicam.open_run({str(run.folder)!r})\n"
        "from equicam.runs.queue_files import rank_run\n"
        "rank_run(run.store, {'budget': '50%'})\n"
        "print(run.items.num_rows, run.manifest.images, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(run.manifest.images)] * 2 + ["False"], done.stderr


def test_only_a_gpu_with_images_enough_compiles_by_itself():
    works = [("cuda", 20_000), ("cuda", 1_000), ("cpu", 10_000_000)]
    assert [_is_repaid(device, images, 18) for device, images in works] == [True, False, False]
