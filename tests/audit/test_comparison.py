"""Two runs compared: the intervals are those of the pairs, nothing is found where there is nothing, and only like is compared."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
import torch

import equicam
from equicam import EquicamError
from equicam.runs.comparison import MIN_PAIRS, _difference, _direction
from equicam.runs.store import RunStore
from tests.audit.conftest import PATCHES, run_command
from tests.audit.faked import HOSTILE, Page, fake_run


@pytest.fixture(scope="module")
def symmetric(patches, tmp_path_factory):
    """The same images explained with kernels averaged over quarter rotations: by construction steadier maps."""
    model = equicam.load("embedded")
    with torch.no_grad():
        for kernel in model.module.parameters():
            if kernel.ndim == 4:
                kernel.copy_(torch.stack([torch.rot90(kernel, k, (-2, -1)) for k in range(4)]).mean(0))
    out = tmp_path_factory.mktemp("symmetric") / "symmetric"
    return equicam.audit(patches, model, out, views=6, shard_size=4).folder


@pytest.fixture
def other(whole, tmp_path):
    """A copy of the finished run, for a test that changes it."""
    return shutil.copytree(whole, tmp_path / "other")


def rewrite(folder, change):
    """The rows of a run, shard by shard, as `change` returns them."""
    store = RunStore(folder)
    for path in (store.path("items", number) for number in range(store.shard_count)):
        rows = [row for row in map(change, pq.read_table(path).to_pylist()) if row]
        pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(path)), path)


def test_a_run_compared_with_itself_shows_no_difference(whole):
    found = equicam.compare(whole, equicam.open_run(whole))
    assert (found.direction, found.images, found.notes) == ("no difference shown", PATCHES, [])
    for name, one in found.differences.items():
        assert one.first == one.second, name
        assert (one.difference.value, one.difference.low, one.difference.high) == (0, 0, 0), name
    assert found.became_steady == found.became_unsteady == 0
    assert sum(sum(row.values()) for row in found.words.values()) == PATCHES
    assert "No difference shown" in found.sentence


def test_differences_are_those_of_the_pairs(whole, symmetric):
    found = equicam.compare(whole, symmetric)
    tables = (equicam.open_run(run).items.to_pylist() for run in (whole, symmetric))
    before, after = ({row["id"]: row for row in rows} for rows in tables)
    names = sorted(before)
    for metric, column in (("stability", "stability"), ("peum", "peum_score"), ("flip_rate", "flip_rate")):
        kept = [n for n in names if not {"blank", "constant"} & {*before[n]["flags"], *after[n]["flags"]}]
        kept = names if metric == "flip_rate" else kept
        d = np.array([after[n][column] - before[n][column] for n in kept])
        assert d.std() > 1e-3, metric
        one = found.differences[metric].difference
        assert one.n == len(kept) >= MIN_PAIRS
        assert one.value == pytest.approx(d.mean(), abs=1e-6)
        slow = scipy.stats.bootstrap((d,), np.mean, n_resamples=4000, method="percentile", rng=1)
        tolerance = 0.1 * (one.high - one.low)
        assert (one.low, one.high) == pytest.approx(tuple(slow.confidence_interval), abs=tolerance), metric
    steady = [[rows[n]["steadiness"] == "steady" for n in names] for rows in (before, after)]
    share = found.differences["steady"]
    assert (share.first, share.second) == pytest.approx((np.mean(steady[0]), np.mean(steady[1])))
    mended = [n for n in names if (before[n]["steadiness"], after[n]["steadiness"]) == ("unsteady", "steady")]
    assert found.became_steady == len(mended) > 0
    moved = [abs(one.difference) for one in found.changes]
    assert moved == sorted(moved, reverse=True)
    first = found.changes[0]
    assert (first.first, first.second) == (before[first.id]["stability"], after[first.id]["stability"])
    assert found.other_targets == sum(before[n]["target"] != after[n]["target"] for n in names)
    assert found.sentence.startswith("The maps of") == (2 * found.other_targets <= len(names))
    apart = replace(found, direction="does not compare", other_targets=len(names) // 2 + 1)
    assert apart.sentence.startswith(f"The runs explain different classes in {len(names) // 2 + 1} of")


def test_a_steadier_model_is_found_and_the_command_is_a_gate(whole, symmetric, tmp_path):
    better, worse = equicam.compare(whole, symmetric), equicam.compare(symmetric, whole)
    assert (better.direction, worse.direction) == ("steadier", "less steady")
    assert better.became_steady == worse.became_unsteady > 10
    a, b = worse.differences["stability"].difference, better.differences["stability"].difference
    assert (a.value, a.low, a.high) == pytest.approx((-b.value, -b.high, -b.low))
    output = run_command("compare", symmetric, whole, "--out", page := tmp_path / "pages" / "c.html", code=3)
    assert "The maps of 'run' are less steady than those of 'symmetric'" in output
    assert page.is_file()
    document = json.loads(run_command("compare", whole, symmetric, "--json", "--quiet"))
    assert (document["direction"], document["report"], len(document["changes"])) == ("steadier", None, 20)
    assert document["differences"]["stability"]["difference"]["low"] > 0
    assert "manifest.json" in run_command("compare", whole, tmp_path, code=2)
    pdf = run_command("compare", whole, symmetric, "--out", tmp_path / "compare.pdf", code=2)
    assert "ends in .html" in pdf


def of_stabilities(first, second):
    """The differences of two runs by the stabilities of their images; steady from 0.7."""
    pairs = {"stability": (first, second), "steady": ((first >= 0.7) * 1.0, (second >= 0.7) * 1.0)}
    return {name: _difference(*pair) for name, pair in pairs.items()}


@pytest.mark.parametrize("n", [MIN_PAIRS, 60])
def test_noise_alone_is_seldom_a_difference(n):
    """Two runs of one model on disjoint noise: both wrong answers together in about 5 % of the cases, and a shift is found."""
    rng, found, shifted = np.random.default_rng(n), [], []
    for _ in range(400):
        first, second = (np.clip(rng.normal(0.7, 0.2, n), -1, 1) for _ in range(2))
        found.append(_direction(of_stabilities(first, second)))
        shifted.append(_direction(of_stabilities(first, second + 0.25)))
    assert 0.01 < 1 - found.count("no difference shown") / 400 < 0.10
    assert min(found.count("steadier"), found.count("less steady")) > 1
    assert shifted.count("steadier") > 380
    assert "less steady" not in shifted


STEADY = {"steadiness": "steady", "flags": [], "stability": 0.9}


@pytest.fixture
def steady(whole, tmp_path):
    """Two runs, the first with steady maps alone."""
    before, after = (shutil.copytree(whole, tmp_path / name) for name in ("before", "after"))
    rewrite(before, lambda row: row | STEADY)
    return before, after


def test_maps_that_became_blank_are_less_steady(steady):
    """They have no stability to compare: the share of steady maps shows it."""
    before, after = steady
    blank = {"steadiness": "cannot say", "flags": ["blank"], "stability": None}
    rewrite(after, lambda row: row | (blank if int(row["id"][:2]) % 2 else STEADY))
    found = equicam.compare(before, after)
    assert found.differences["stability"].difference.value == 0
    assert found.differences["steady"].difference.high < 0
    assert found.direction == "less steady"
    assert "Share of steady maps 100% before and 50% after" in found.sentence
    run_command("compare", before, after, code=3)
    assert equicam.compare(after, before).direction == "steadier"


def test_images_that_cannot_be_explained_any_more_are_less_steady(steady):
    before, after = steady
    rewrite(after, lambda row: row | STEADY | ({"status": "bad"} if int(row["id"][:2]) % 2 else {}))
    found = equicam.compare(before, after)
    assert len(found.pairs.lost) == found.images == PATCHES // 2
    assert found.direction == "less steady"
    assert any("could not explain images that before explains" in line for line in found.notes)
    unmatched = found.to_json()["unmatched"]
    assert (unmatched["lost"], unmatched["only_first"]) == ([name for name, _ in found.pairs.lost], [])


def test_maps_of_other_classes_do_not_compare(whole, other):
    rewrite(other, lambda row: row | {"target": 1 - row["target"]})
    found = equicam.compare(whole, other)
    assert found.direction == "does not compare"
    assert found.sentence.startswith("The runs explain different classes in 24 of 24 images")
    run_command("compare", whole, other, code=3)


def test_a_handful_of_images_shows_no_difference(whole, symmetric, tmp_path):
    few = shutil.copytree(symmetric, tmp_path / "few")
    rewrite(few, lambda row: row if int(row["id"][:2]) < MIN_PAIRS - 1 else None)
    found = equicam.compare(whole, few)
    assert found.differences["stability"].difference.low > 0
    assert found.direction == "no difference shown"
    assert f"{MIN_PAIRS} images are needed" in found.sentence
    assert len(found.pairs.only_first) == PATCHES - MIN_PAIRS + 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe": {"method": "grad-cam"}}, "the same method, got equigrad-cam and grad-cam"),
        ({"recipe": {"views": [0.0, 60.0, 120.0]}}, "the same views, got 6 of them and 3 of them"),
        ({"recipe": {"context": "auto"}}, "the same context, got none and auto"),
        ({"recipe": {"fill": "zeros"}}, "the same fill, got reflect and zeros"),
        ({"recipe": {"tau": 0.3}}, "the same tau"),
        ({"target": 1}, "the same target, got None and tumour in the centre"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_like_is_compared(whole, other, change, named):
    change_manifest(other, change)
    with pytest.raises(EquicamError, match=named):
        equicam.compare(whole, other)


def change_manifest(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    recipe = manifest["recipe"] | change.get("recipe", {})
    (folder / "manifest.json").write_text(json.dumps(manifest | change | {"recipe": recipe}))


def test_how_a_run_was_computed_does_not_matter(whole, other):
    views = json.loads((whole / "manifest.json").read_text())["recipe"]["views"]
    recipe = {"views": views[::-1], "seed": 5, "compiled": True}
    change_manifest(other, {"recipe": recipe, "layer": "layer3", "device": "cuda"})
    found = equicam.compare(whole, other)
    assert found.direction == "no difference shown"
    assert found.notes == ["the runs also differ in layer: layer4 and layer3"]


def test_images_without_a_partner_are_counted_and_named(whole, symmetric, tmp_path):
    first, second = (shutil.copytree(run, tmp_path / run.name / "copy") for run in (whole, symmetric))
    rewrite(first, lambda row: row | ({"status": "bad"} if row["id"] == "03.png" else {}))
    rewrite(second, lambda row: None if row["id"] in ("05.png", "06.png") else row)
    rewrite(second, lambda row: row | ({"sha256": "0" * 64} if row["id"] == "07.png" else {}))
    found = equicam.compare(first, second)
    assert found.images == PATCHES - 4
    assert (found.pairs.only_first, found.pairs.only_second) == (("05.png", "06.png"), ())
    assert ([name for name, _ in found.pairs.gained], found.pairs.other_content) == (["03.png"], ("07.png",))
    assert "left out, only in copy: 2 (05.png, 06.png)" in found.notes
    assert "left out, another image under the same name: 1 (07.png)" in found.notes
    assert found.to_json()["unmatched"]["other_content"] == ["07.png"]
    ids = [table["id"].to_pylist() for table in (found.pairs.first, found.pairs.second)]
    assert ids[0] == ids[1] == sorted(ids[0])


def test_runs_without_common_images_or_stability_are_refused(whole, other):
    rewrite(other, lambda row: row | {"stability": None, "stability_by_view": None})
    with pytest.raises(EquicamError, match="24 images explained in both, none of them with a stability"):
        equicam.compare(whole, other)
    rewrite(other, lambda row: row | {"id": f"other-{row['id']}"})
    with pytest.raises(EquicamError, match="0 images explained in both"):
        equicam.compare(whole, other)


def test_the_page_shows_both_maps_and_is_safe(tmp_path):
    first, second = fake_run(tmp_path / "a").folder, fake_run(tmp_path / "b").folder
    first = first.rename(first.with_name("<b>before"))

    def moved(row):
        if row["status"] != "ok":
            return row
        row["steadiness"] = "<i>steady</i>" if row["id"] == HOSTILE[0] else "steady"
        return row | {"stability": -1.0 if row["id"] in HOSTILE else row["stability"], "target": 1}

    rewrite(second, moved)
    found = equicam.compare(first, second)
    assert set(HOSTILE[:3]) <= {one.id for one in found.changes}
    page = Page(found.report(tmp_path / "compare.html").read_text())
    assert not page.every("script")
    assert all(image["src"].startswith("data:image/jpeg;base64,") for image in page.every("img"))
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    for text in ("<script>alert(1)</script>.png", "<b>before", "<i>steady</i>", found.sentence):
        assert text in page.text
    assert page.text.count("Second run , map") == len(found.changes)
    json.dumps(found.to_json(), allow_nan=False)
