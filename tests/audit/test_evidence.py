"""Signal or noise is told in degrees, from numbers that can be checked."""

import json
import math
import shutil
from dataclasses import asdict, astuple, replace

import numpy as np
import pytest
import torch
from PIL import Image

import equicam
import equicam.auditing.evidence as auditing_evidence
import equicam.auditing.sanity as auditing_sanity
from equicam.auditing.audit import calibration_subset
from equicam.auditing.evidence import _LEANINGS, evidence, leaning, verdict
from equicam.auditing.log import Log
from equicam.auditing.random_weights import RandomWeights
from equicam.auditing.reload import reload_run
from equicam.auditing.sanity import mean_stability
from equicam.auditing.store import RunStore
from equicam.cli.evidence import IN_WORDS
from equicam.core.views import rotate
from equicam.data.digests import file_digest
from equicam.data.sources import find_items, list_source
from equicam.evaluation import causal
from equicam.evaluation.controls import item_seed, randomise_weights
from equicam.evaluation.equivariance import ANGLES
from equicam.evaluation.faithfulness import blur_out
from equicam.evaluation.statistics import Estimate, bootstrap, mean
from equicam.explain import explain_batch
from equicam.models.images import preprocess_image
from equicam.recipe import Recipe
from equicam.report.text import RANDOM_EQ
from equicam.runtime.executor import Executor
from tests.audit.conftest import equicam_command


def at(value: float, around: float = 0.01) -> Estimate:
    return Estimate(value, value - around, value + around, 7)


STEADY = Estimate(0.0, 0.0, 0.18, 18)
COSTS = {"drift": np.full(7, 0.2), "agreement": np.full(7, 0.3), "drift-of-another": np.full(7, np.nan)}


@pytest.mark.parametrize(
    ("shape", "saliency", "lean"),
    [
        (at(0.1), at(0.05), "Leans to signal"),
        (at(0.1), at(0.012, 0.001), "Undecided"),  # surely above 0, and too little to speak of
        (at(0.0), at(-0.02), "Leans to noise"),
        (at(0.1), at(0.0), "Undecided"),
        (at(0.02, 0.05), at(0.02, 0.05), "Undecided"),
        (Estimate(math.nan, math.nan, math.nan, 0), at(0.1), "Cannot be judged"),
    ],
)
def test_the_verdict_leans_as_the_intervals_do_and_shows_them(shape, saliency, lean):
    code = leaning(COSTS, shape, saliency)
    said = verdict(code, shape, saliency, STEADY, 0.9, 0.5)
    assert said.startswith(lean)
    assert "The prediction itself changes" not in said
    turning = verdict(code, shape, saliency, Estimate(0.6, 0.4, 0.8, 18), 0.9, 0.5)
    if not math.isnan(shape.value):
        assert f"{round(shape.value, 3) + 0.0:+.3f} [" in said
        assert "keeps 80% of its distance from other images" in said
        assert "The prediction itself changes" in turning


def test_where_hiding_changes_nothing_nothing_is_said():
    """A saturated prediction: neither signal nor noise can be told."""
    still = {name: values * 0.01 for name, values in COSTS.items()}
    code = leaning(still, at(1e-5, 1e-6), at(1e-5, 1e-6))
    said = verdict(code, at(1e-5, 1e-6), at(1e-5, 1e-6), STEADY, 0.9, 0.5)
    assert said.startswith(
        "Cannot be judged: hiding a tenth of the image, wherever, changes the probability by less than 0.02"
    )


def test_evidence_is_that_of_one_image_and_one_pass_at_a_time(patches):
    """Every region of every angle hidden in a pass of its own: no batches, no region left out, nothing reused."""
    model, items = equicam.load("embedded"), find_items(patches)[:4]
    rows = {
        i.id: {"sha256": file_digest(i.path), "flip_rate": 3 / 18, "view_top1": [0] * 15 + [1] * 3}
        for i in items
    }
    found = evidence(model, items, rows, Recipe(seed=3))
    images = [preprocess_image(model, Image.open(i.path))[None] for i in items]
    features = [[pooled(model, rotate(x, a) if a else x) for x in images] for a in (0, *ANGLES)]
    regions = {}
    for i, x in enumerate(images):
        stream = torch.Generator().manual_seed(item_seed(3, items[i].id, "causal"))
        own = equicam.explain(model, x, method="grad-cam")
        for a in ANGLES:
            moved = equicam.explain(model, rotate(x, a), method="grad-cam", target=own.target).map
            aligned = rotate(moved[:, None], -a)[:, 0]
            regions[i, a] = causal.regions(own.map, aligned, "disc", [stream], as_published=False)
    leanings = set()
    for i, x in enumerate(images):
        lost = {name: [] for name in causal.CONTROLS}
        blurred, before = blur_out(x), probabilities(model, x)
        for a in ANGLES:
            lender = regions[(i - 1) % len(images), a]
            lent = {f"{name}-of-another": lender[name] for name in ("drift", "agreement")}
            for name, mask in (regions[i, a] | lent).items():
                after = probabilities(model, torch.where(mask[:, None], blurred, x))
                lost[name].append(float((before - after)[before.argmax()]))
        lost = {name: np.array(values) for name, values in lost.items()}
        one = found[items[i].id]
        for name, values in (
            ("moving", lost["drift"]),
            ("staying", lost["agreement"]),
            ("above_shape", lost["drift"] - lost["drift-elsewhere"]),
            ("above_saliency", lost["drift"] - lost["same-saliency"]),
        ):
            assert values.std() > 0, name
            assert astuple(getattr(one, name)) == pytest.approx(astuple(bootstrap(mean, values)), abs=1e-5)
        assert one.leaning == leaning(lost, one.above_shape, one.above_saliency)
        leanings.add(one.leaning)
        cosines = [[float(at_angle[i] @ other) for other in features[0]] for at_angle in features[1:]]
        assert one.feature_cosine == pytest.approx(np.mean([row[i] for row in cosines]), abs=1e-5)
        others = [value for row in cosines for j, value in enumerate(row) if j != i]
        assert one.unrelated_cosine == pytest.approx(np.mean(others), abs=1e-5)
        assert one.flips.value == pytest.approx(3 / 18)
        assert len(one.lines) == 4
        plain = one.to_json()
        assert plain["id"] == items[i].id
        assert all(np.isfinite(plain["moving"][key]) for key in ("value", "low", "high", "n"))
    assert len(leanings) > 1, leanings


@torch.no_grad()
def probabilities(model, x):
    return model.module(x).softmax(1)[0]


@torch.no_grad()
def pooled(model, x):
    """The mean over the grid of the layer's features, of length 1."""
    kept = []
    handle = model.module.layer4.register_forward_hook(lambda _m, _i, out: kept.append(out))
    model.module(x)
    handle.remove()
    vector = kept[0].mean((-2, -1))[0]
    return vector / vector.norm()


def test_a_picture_that_went_away_or_changed_is_left_out(patches, tmp_path):
    from dataclasses import replace

    items = find_items(patches)[:2]
    items = [items[0], replace(items[1], path=tmp_path / "gone.png"), find_items(patches)[2]]
    rows = {i.id: {"flip_rate": 0.0, "view_top1": [0], "sha256": file_digest(items[0].path)} for i in items}
    found = evidence(equicam.load("embedded"), items, rows)
    assert list(found) == [items[0].id]
    assert evidence(equicam.load("embedded"), items[1:], rows) == {}


@pytest.fixture
def run(whole, tmp_path):
    """A finished run with a queue of nine."""
    made = equicam.open_run(shutil.copytree(whole, tmp_path / "run"))
    made.triage(9, control=0.0)
    return made


def count_passes(monkeypatch) -> list[int]:
    """Collects how many images each call of `evidence` is given."""
    given = []
    measured = auditing_evidence.evidence

    def counted(model, items, *others):
        given.append(len(items))
        return measured(model, items, *others)

    monkeypatch.setattr(auditing_evidence, "evidence", counted)
    return given


def test_triage_computes_no_evidence_and_evidence_continues(run, monkeypatch):
    assert not (run.folder / "evidence.json").exists()
    monkeypatch.setattr(auditing_evidence, "IMAGES_PER_BATCH", 2)
    given, ticks = count_passes(monkeypatch), []
    head = [row["id"] for row in run.queue()]

    def stop_after_two(_count):
        ticks.append(_count)
        if sum(ticks) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.evidence(6, tick=stop_after_two)
    kept = json.loads((run.folder / "evidence.json").read_text())
    assert list(kept) == head[:2]
    assert run.verify(0).ok
    found = run.evidence(6)
    assert given == [2, 2, 2]  # the first two are not computed again
    assert list(found) == head[:6]
    assert {name: found[name] for name in kept} == kept
    assert run.evidence(6, model="no such model") == found  # there is nothing to load it for
    assert given == [2, 2, 2]
    assert run.verify(0).ok
    (run.folder / "evidence.json").unlink()
    assert run.evidence(6) == found  # interrupted or not, the same


def test_evidence_measures_the_same_network_with_random_weights(run):
    before = run.report().read_text()
    run.evidence(1)
    (event,) = Log(run.folder).events("sanity")
    assert event.payload["images"] == 8
    model = equicam.load("embedded")
    chosen = set(calibration_subset(list_source(run.manifest.source), 8, run.manifest.recipe.seed))
    rows = [row for row in run.items.to_pylist() if row["id"] in chosen]
    usual = [row["stability"] for row in rows if row["stability"] is not None]
    assert event.payload["stability"] == pytest.approx(
        sum(usual) / len(rows), abs=1e-3
    )  # a blank map counts 0
    assert event.payload["random_stability"] != pytest.approx(np.mean(usual), abs=1e-2)
    images = [preprocess_image(model, Image.open(run.manifest.source + "/" + row["id"])) for row in rows]
    others = [
        equicam.explain(
            randomise_weights(model, seed=seed), torch.stack(images), views=len(run.manifest.recipe.views)
        )
        for seed in range(3)
    ]
    stability = torch.stack([one.stability for one in others])
    assert stability.nanmean(1).std() > 0.01  # three networks
    assert event.payload["random_stability"] == pytest.approx(stability.nan_to_num(0).mean().item(), abs=1e-3)
    assert event.payload["random_steady"] == sum(s.word == "steady" for one in others for s in one.steadiness)
    assert event.payload["steady"] == sum(row["steadiness"] == "steady" for row in rows)
    after = run.report().read_text()
    assert (
        f"a MobileNetV2 reaches an Eq of {RANDOM_EQ['random']}, the trained one {RANDOM_EQ['trained']}"
        in before
    )
    assert asdict(run.random_weights) == event.payload
    assert ("With random weights this network is as steady" in after) == run.random_weights.as_steady
    assert (
        f"drawn 3 times, reaches a mean stability of {event.payload['random_stability']:.2f} "
        f"({event.payload['random_steady']} of 24 maps are steady)" in after
    )
    run.evidence(2)
    assert len(Log(run.folder).events("sanity")) == 1  # once for a run
    assert run.verify(0).ok


@pytest.mark.parametrize(("given", "random"), [("float16", None), ("bfloat16", "bfloat16"), (None, None)])
def test_evidence_does_not_run_random_weights_in_float16(run, monkeypatch, given, random):
    """In float16 the maps of a random network may all be constant, and the warning could not appear."""
    ran = []

    def recorded(executor, x):
        ran.append((executor.model.name, executor.recipe.dtype))
        return explain_batch(Executor(executor.model, replace(executor.recipe, dtype=None)), x)

    monkeypatch.setattr(auditing_sanity, "explain_batch", recorded)
    store = RunStore(run.folder)
    reloaded = reload_run(store)
    recipe = replace(reloaded.context.recipe, dtype=given)
    auditing_sanity.log_sanity(store, replace(reloaded, context=replace(reloaded.context, recipe=recipe)))
    assert [dtype for _, dtype in ran] == [given, random, random, random]
    assert [name.endswith("random weights") for name, _ in ran] == [False, True, True, True]


def test_a_blank_map_counts_as_stability_0():
    assert mean_stability(torch.tensor([torch.nan, 0.8, 0.6, 0.2])) == pytest.approx(0.4)


def test_the_report_and_the_command_warn_where_random_weights_are_as_steady(run):
    few = RandomWeights(8, 0.9, 6, 3, 0.95, 18)
    assert few.as_steady  # 18 of 24, and 6 of 8
    assert not replace(few, random_steady=17).as_steady
    assert not replace(few, steady=0, random_steady=0).as_steady
    run.evidence(1)
    own = run.random_weights
    for found in (few, replace(few, random_steady=17)):
        Log(run.folder).add("sanity", asdict(found))
        warned = "With random weights this network is as steady" in run.report().read_text()
        assert warned == found.as_steady
        code, said = equicam_command("evidence", run.folder, "--top", "1")
        assert code == 0
        assert ("does not show that the network has learnt anything" in said) == found.as_steady
    Log(run.folder).add("sanity", asdict(own) | {"steady": "six"})
    assert run.random_weights is None
    # a run whose own weights are random has another warning
    Log(run.folder).add("sanity", asdict(few))
    manifest = run.folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"weights_from": "random"}))
    page = equicam.open_run(run.folder).report().read_text()
    assert "This network has random weights" in page
    assert "With random weights this network is as steady" not in page
    assert "has learnt anything" not in equicam_command("evidence", run.folder, "--top", "1")[1]


def test_an_extended_queue_keeps_its_evidence(run, monkeypatch):
    before = run.evidence(2)
    run.triage(more=4)
    assert run.verify(0).ok
    given = count_passes(monkeypatch)
    after = run.evidence(3)
    assert given == [len(after) - 2]
    assert before.items() <= after.items()
    page = run.report().read_text()
    assert page.count("Signal or noise</h4>") == 3


def test_evidence_that_the_log_does_not_know_is_reported_and_computed_again(run):
    found = run.evidence(2)
    path = run.folder / "evidence.json"
    first = next(iter(found))
    path.write_text(json.dumps(found | {first: found[first] | {"verdict": "Leans to signal: trust it"}}))
    run.triage(9, control=0.0)  # no other command makes it right
    assert any("evidence.json is not as it was written" in one for one in run.verify(0).problems)
    assert run.evidence(2) == found
    assert run.verify(0).ok
    assert [e.payload["images"] for e in Log(run.folder).events("evidence")] == [2, 2]


def test_the_command_and_the_report_use_the_same_words():
    assert {code for codes in IN_WORDS.values() for code in codes} == _LEANINGS.keys()
    for words, codes in IN_WORDS.items():
        assert all(_LEANINGS[code].lower().startswith(words) for code in codes)


def test_the_command_prints_how_the_head_leans(run):
    code, output = equicam_command("evidence", run.folder, "--top", "3")
    assert code == 0, output
    assert "evidence on 3 of 3 images: " in output
    assert f"equicam report {run.folder}" in output
    (run.folder / "triage.parquet").unlink()
    code, output = equicam_command("evidence", run.folder)
    assert code == 2
    assert "equicam triage first" in output
