"""Signal or noise: one paired effect over random images of a run, from numbers that can be checked."""

import json
import math
import shutil
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
from PIL import Image

import equicam
from equicam.audit import causal as auditing_causal
from equicam.audit.causal import REGIONS, _cost_computer, _measure_costs, _summarise_costs
from equicam.audit.verify import reload_run
from equicam.core.views import rotate
from equicam.errors import EquicamError
from equicam.evaluate import causal
from equicam.evaluate.controls import item_seed
from equicam.evaluate.equivariance import ANGLES
from equicam.evaluate.faithfulness import blur_out
from equicam.evaluate.statistics import Estimate, bootstrap, mean
from equicam.images.sources import find_items
from equicam.models.images import preprocess_image
from equicam.recipe import Recipe
from equicam.runs.causal_result import CausalTest, Costs, read_causal
from equicam.runs.log import Log
from tests.audit.conftest import PATCHES, equicam_answer, run_command


def at(value: float, around: float = 0.01) -> Estimate:
    return Estimate(value, value - around, value + around, 100)


def costing(effect: Estimate, drift=0.2, elsewhere=0.2, agreement=0.3, blank=0) -> Costs:
    return Costs(at(drift), at(elsewhere), at(agreement), effect, blank)


NONE = costing(at(0.001, 0.002), 0.001, 0.001, 0.001)


def result(trained: Costs, random: Costs = NONE, *, images=100, explained=1000) -> CausalTest:
    ids = tuple(map(str, range(images)))
    return CausalTest(ids, 0, explained, 100, {"seed": 0}, "0" * 64, trained, random)


@pytest.mark.parametrize(
    ("trained", "random", "code"),
    [
        (costing(at(0.05)), NONE, "signal"),
        (costing(at(0.05)), costing(at(0.03)), "as-random"),
        (costing(at(0.012, 0.001)), NONE, "noise"),  # surely above 0, and too little to speak of
        (costing(at(-0.04, 0.05)), NONE, "noise"),
        (costing(at(0.02, 0.05)), NONE, "undecided"),
        (costing(at(0.015)), NONE, "undecided"),
        (costing(Estimate(0.05, math.nan, math.nan, 1)), NONE, "undecided"),  # of one image or group
        (costing(at(0.0), 0.01, 0.01, 0.01), NONE, "no-effect"),
        (costing(at(0.0), 0.01, 0.01, 0.3), NONE, "noise"),  # it answers to blurring, but not of what drifts
        (costing(at(0.0, 0.0), 0.0, 0.0, 0.0, blank=100), NONE, "all-blank"),
    ],
)
def test_the_answer_follows_the_interval(trained, random, code):
    assert result(trained, random).reason.code == code


def test_the_sentences_of_the_answers():
    cost = "blurring what drifts, minus blurring as much elsewhere, costs"
    hundred, few = "on 100 random images", "images (fewer than 100)"
    signal, one = costing(at(0.05)), costing(Estimate(-0.0001, math.nan, math.nan, 1))
    uses, unsure = "Signal, because the network uses what drifts", "The test could not tell"
    high, control = "+0.050 [+0.040, +0.060]", "of the probability (+0.001 with random weights)"
    alike = "of the probability (+0.050 with random weights)"
    for found, sentence in (
        (result(signal), f"{uses}: {hundred}, {cost} {high} {control}."),
        (result(signal, signal), f"{unsure}, because random weights pass it too: {hundred}, {cost} {high} {alike}."),
        (result(costing(at(0.0))), f"Noise, because the network does not use what drifts: {hundred}, {cost} +0.000 [-0.010, +0.010] {control}."),
        (result(costing(at(0.02, 0.05))), f"{unsure}: {hundred}, {cost} +0.020 [-0.030, +0.070] {control}."),
        (result(NONE), f"{unsure}: {hundred}, blurring a tenth of the image, wherever, changes the probability by less than 0.02."),
        (result(replace(NONE, blank=100)), f"{unsure}: {hundred}, every map is blank."),
        (result(signal, images=24, explained=24), f"{uses}: on all 24 {few}, {cost} {high} {control}."),
        (result(one, images=1, explained=2), f"{unsure}: on 1 of 2 {few}, {cost} +0.000 {control}."),
    ):  # fmt: skip
        assert found.sentence == sentence


def test_costs_are_those_of_one_image_and_one_pass_at_a_time(patches):
    """Every region of every angle hidden in a pass of its own: no batches, nothing reused."""
    model, items = equicam.load("embedded"), find_items(patches)[:2]
    images = [preprocess_image(model, Image.open(item.path))[None] for item in items]
    computer = _cost_computer(model, Recipe(seed=3))
    found = _measure_costs(computer, [item.id for item in items], torch.cat(images))
    probabilities = torch.no_grad()(lambda x: model.module(x).softmax(1)[0])
    for i, (item, x) in enumerate(zip(items, images, strict=True)):
        stream = torch.Generator().manual_seed(item_seed(3, item.id, "causal"))
        own = equicam.explain(model, x, method="grad-cam")
        blurred, before = blur_out(x), probabilities(x)
        lost = {name: [] for name in REGIONS}
        for a in ANGLES:
            moved = equicam.explain(model, rotate(x, a), method="grad-cam", target=own.target).map
            aligned = rotate(moved[:, None], -a)[:, 0]
            masks = causal._regions(own.map, aligned, "disc", [stream])
            for name, region in REGIONS.items():
                after = probabilities(torch.where(masks[region][:, None], blurred, x))
                lost[name].append(float((before - after)[before.argmax()]))
        for name, values in lost.items():
            assert np.std(values) > 0, name
            assert found[name][i] == pytest.approx(np.mean(values), abs=1e-5)


def test_the_effect_is_paired_and_a_blank_map_counts_0():
    costs = {name: np.random.default_rng(i).normal(size=8) for i, name in enumerate(REGIONS)}
    for values in costs.values():
        values[5] = np.nan
    counted = {name: np.nan_to_num(values) for name, values in costs.items()}
    effect, groups = counted["drift"] - counted["elsewhere"], np.array(list("aabbccdd"), dtype=object)
    found, by_group = _summarise_costs(costs), _summarise_costs(costs, groups).effect
    assert (found.blank, found.effect) == (1, bootstrap(mean, effect))
    assert found.agreement == bootstrap(mean, counted["agreement"])
    assert by_group == bootstrap(mean, effect, group=groups)
    assert astuple(found.effect)[1:3] != astuple(by_group)[1:3]


def test_the_map_of_a_blank_image_is_blank():
    model, x = equicam.load("embedded"), torch.zeros(1, 3, 96, 96)
    found = _measure_costs(_cost_computer(model, Recipe()), ["a"], x)
    assert np.isnan(found["drift"]).all() == (equicam.explain(model, x, method="grad-cam").map.std() == 0)


def drawn_costs(_computer, ids, _x):
    """Costs by region, as no network has them."""
    seeds = [item_seed(0, name, "cost") for name in ids]
    draws = {name: [np.random.default_rng([i, s]).normal() for s in seeds] for i, name in enumerate(REGIONS)}
    return {name: np.array(values) for name, values in draws.items()}


@pytest.fixture(scope="module")
def tested(whole, tmp_path_factory):
    """A finished run with a queue and the test, of drawn costs: the commands of test_run.py measure them."""
    run = equicam.open_run(shutil.copytree(whole, tmp_path_factory.mktemp("tested") / "run"))
    run.triage(9, control=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auditing_causal, "_measure_costs", drawn_costs)
        run.causal()
    return run


@pytest.fixture
def run(tested, tmp_path):
    return equicam.open_run(shutil.copytree(tested.folder, tmp_path / "run"))


@pytest.fixture
def counted(monkeypatch) -> list[tuple[str, ...]]:
    """The images of each batch that is measured; their costs are drawn."""
    batches = []

    def measure(*given):
        batches.append(tuple(given[1]))
        return drawn_costs(*given)

    monkeypatch.setattr(auditing_causal, "_measure_costs", measure)
    return batches


def test_a_small_run_is_tested_whole_and_says_so(run):
    found = run.causal(model="no such model")  # there is nothing to load it for
    ids = [row["id"] for row in run.read_items(["id"]).to_pylist()]
    assert (sorted(found.images), found.explained, found.left_out) == (ids, PATCHES, 0)
    assert f"on all {PATCHES} images (fewer than 100)" in found.sentence
    assert found.weights == run.manifest.weights
    assert Recipe.from_json(found.recipe) == Recipe("grad-cam", context="none", compiled=False)
    for costs in (found.trained, found.random):
        assert costs.drift.n == PATCHES
        assert costs.effect.value == pytest.approx(costs.drift.value - costs.elsewhere.value)
        assert costs.effect.low < costs.effect.value < costs.effect.high
    (event,) = Log(run.folder).events("causal")
    assert event.payload["answer"] == found.reason.code
    assert run.verify(0).ok
    assert found == read_causal(run.store) == read_causal(run.store, as_logged=True)
    assert found.sentence in run.report().read_text()
    facts = json.loads((run.folder / "report.json").read_text())["causal"]
    assert facts == found.to_json() | {"sentence": found.sentence}


def test_random_images_by_seed(run, counted, monkeypatch):
    monkeypatch.setattr(auditing_causal, "CAUSAL_IMAGES", 6)
    with pytest.raises(EquicamError, match="at least 6 images"):
        run.causal(5)
    ticks = []
    found = run.causal(10, tick=ticks.append)
    assert len(found.images) == sum(ticks) == 10
    assert [len(batch) for batch in counted] == [8, 8, 2, 2]  # each with both networks
    assert counted[0] == counted[1]
    assert found.sentence.count("on 10 random images") == 1
    assert run.causal(10) == found
    assert not counted[4:]  # the stored one
    assert set(run.causal(10, seed=1).images) != set(found.images)
    assert run.causal(10) == found  # computed again, the same
    assert len(Log(run.folder).events("causal")) == 4
    assert run.verify(0).ok


def test_intervals_are_over_groups_where_images_have_them(patches, tmp_path, counted):
    rows = [f"{path},g{i % 3}" for i, path in enumerate(sorted(patches.iterdir())[:9])]
    (tmp_path / "items.csv").write_text("\n".join(["path,group", *rows]))
    run = equicam.audit(tmp_path / "items.csv", equicam.load("embedded"), tmp_path / "run", views=2)
    found = run.causal()
    assert (found.trained.effect.n, found.trained.effect.groups) == (9, 3)
    assert read_causal(run.store) == found


@pytest.mark.parametrize(("given", "random"), [("float16", None), ("bfloat16", "bfloat16"), (None, None)])
def test_the_control_has_random_weights_and_no_float16(run, counted, monkeypatch, given, random):
    """In float16 the maps of a random network may all be constant."""
    ran = []
    monkeypatch.setattr(auditing_causal, "_cost_computer", lambda model, recipe: ran.append((model, recipe)))
    context, items = reload_run(run.store)
    context = replace(context, recipe=replace(context.recipe, dtype=given))
    auditing_causal.run_causal_test(run.store, lambda: (context, items), seed=1)
    assert [recipe.dtype for _, recipe in ran] == [given, random]
    assert [model.name.endswith("random weights") for model, _ in ran] == [False, True]


def test_a_result_that_the_log_does_not_know_is_reported_and_computed_again(run, counted):
    path = run.folder / "causal.json"
    plain = json.loads(path.read_text())
    plain["trained"]["effect"] = {"value": 0.5, "low": 0.4, "high": 0.6, "n": 24, "groups": None}
    path.write_text(json.dumps(plain))
    run.triage(9, control=0.0)  # no other command makes it right
    assert any("causal.json is not as it was written" in one for one in run.verify(0).problems)
    assert run.causal().trained.effect.value != 0.5
    assert counted
    assert run.verify(0).ok


def test_images_that_changed_are_left_out_and_counted(run, patches, tmp_path, counted):
    source = shutil.copytree(patches, tmp_path / "source")
    first, *others = run.causal().images
    Image.new("RGB", (96, 96), "red").save(source / first)
    found = run.causal(seed=1, source=str(source))
    assert (set(found.images), found.left_out) == (set(others), 1)
    assert f"on {PATCHES - 1} of {PATCHES} images" in found.sentence
    command = ("causal", run.folder, "--source", source, "--seed")
    assert "1 image left out: changed since the audit, or unreadable" in run_command(*command, "1")
    for name in others:
        Image.new("RGB", (96, 96), "red").save(source / name)
    assert "images that are as they were audited" in run_command(*command, "2", code=2)


def test_the_command_answers_in_one_sentence_and_has_the_numbers(run):
    found = run.causal()
    assert run_command("causal", run.folder, "--quiet") == f"{found.sentence}\n"
    run_command("causal", run.folder, "--quiet", "--verbose", code=2)
    output, effect = run_command("causal", run.folder, "--verbose"), found.trained.effect
    assert f"{effect.value:.3f} [{effect.low:.3f}, {effect.high:.3f}]" in output
    assert f"{PATCHES} of {PATCHES} explained images, seed 0" in output
    assert f"next: equicam report {run.folder}" in output
    answer = equicam_answer("causal", run.folder)
    assert (answer["answer"], answer["sentence"]) == (found.reason.code, found.sentence)
    assert answer["trained"]["effect"]["value"] == effect.value
    run_command("causal", run.folder, "--n", "99", code=2)
