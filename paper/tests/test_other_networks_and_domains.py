"""Experiments on stand-ins: each answers every claim of its own once, and names the command for the others."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.models import VisionTransformer

import equicam
from equicam.evaluate import statistics
from equicam.images.items import Item
from equicam.methods import METHODS
from equicam.models.libraries import ZeroShot
from equicam.readers import masking
from equicam_paper import load_experiment, plots, sanity, signals
from equicam_paper import measure as paper_measure
from equicam_paper.claims import claims
from equicam_paper.context import Context
from equicam_paper.kept import KeptRows
from equicam_paper.provenance import provenance
from equicam_paper.reproduce import run_experiment
from equicam_paper.rows import VERDICTS, not_run
from equicam_paper.trainings import missing_domain
from stand_ins import cnn, small, vit
from tests.conftest import Cnn, Vit, light, seeded


@pytest.fixture
def light_rise(monkeypatch):
    """RISE with few masks, by both protocols."""
    for name in ("rise", "rise-400"):
        monkeypatch.setitem(METHODS, name, light(name))


@pytest.fixture
def in_domain(tiles, out, tuned):
    """A context of a small network for two classes, with more weights, in a domain."""
    arch, files = tuned

    def make(domain="RESISC45", more=(), **options):
        extra = files | dict(more)
        return Context(equicam.load(arch), tiles, out, n=4, domain=domain, extra=extra, **options)

    return make


def other_heads(state, folder, names):
    """Files of weights whose heads differ from `state` by noise."""
    files = {}
    for i, name in enumerate(names, 1):
        (folder / name).mkdir()
        files[name] = folder / name / "weights.safetensors"
        noise = torch.randn(state["head.weight"].shape, generator=torch.Generator().manual_seed(i))
        save_file(state | {"head.weight": state["head.weight"] + noise}, files[name])
    return files


def by_label(name, context):
    return {row.label: row for row in load_experiment(name).run(context)}


def answered(name, context):
    """The rows of an experiment by claim, having checked that each claim of its own is there once and makes sense."""
    one = load_experiment(name)
    rows = list(one.run(context))
    wanted = [claim for claim in claims() if one.answers and claim.startswith(one.answers)]
    assert sorted(found.claim for found in rows if found.claim) == sorted(wanted)
    for found in rows:
        assert found.note != "not answered by this run", found  # a claim of this network that no row answers
        json.dumps(found.as_json(), allow_nan=False)
        assert found.verdict not in ("matches", "differs", "artefact"), found  # on a few images
        numbers = [e for e in (found.clean, found.as_published) if e is not None]
        if found.verdict == "not run":
            assert not numbers, found
            assert len(found.note) > 10, found
        elif found.label != "figure":
            assert found.verdict in VERDICTS, found
            assert numbers or found.claim == "const.eq_angles", found
            assert all(np.isfinite(e.value) for e in numbers), found
    return {found.claim: found for found in rows if found.claim}


def ran(rows):
    return {claim for claim, found in rows.items() if found.verdict != "not run"}


@pytest.mark.parametrize("costly", [False, True])
def test_equal_compute(tiles, out, light_rise, costly):
    context = Context(cnn(), tiles, out, n=2, costly=costly)
    rows = answered("equal-compute", context)
    assert ran(rows) == ({"equal.rise400", "equal.scorecam80"} if costly else set())
    if not costly:
        assert "400 forward passes" in rows["equal.rise400"].note
        other = Context(cnn(), tiles, out, n=2, backbone="vgg16")
        assert "--model resnet50" in answered("equal-compute", other)["equal.rise400"].note


def test_stretched_maps_of_masks_are_measured_too(tiles, tmp_path, light_rise, monkeypatch):
    """By the same scores of masked images; by our protocol it is the same number."""
    scored, score = [], masking.predict
    monkeypatch.setattr(masking, "predict", lambda *a, **k: scored.append(len(a[1])) or score(*a, **k))
    context = Context(cnn(), tiles, tmp_path, n=2, costly=True)
    rows = by_label("equal-compute", context)
    for method in ("rise-400", "score-cam-80"):
        alone, stretched = rows[method], rows[f"{method}, stretched to [0, 1]"]
        assert (stretched.claim, stretched.clean) == ("", alone.clean)
        assert stretched.as_published.n == 2
    alone, stretched = (rows[f"rise-400{end}"].as_published for end in ("", ", stretched to [0, 1]"))
    assert abs(alone.value - stretched.value) > 0.01
    with pytest.raises(ValueError, match="names of other methods: rise-400"):
        context.evaluate({"rise-400": METHODS["rise-400"]}, protocol="paper")
    assert sum(scored) == 2 * 8 * (12 + 6)  # images, presentations, masks and channels, each scored once


def test_costly_rows_of_other_networks_stand_alone(tiles, out, light_rise):
    context = Context(cnn(), tiles, out, n=2, costly=True, backbone="mobilenet_v2")
    known = {"equal-compute": {"rise-400", "score-cam-80"}, "constant-maps": {"score-cam: constant maps"}}
    for name, labels in known.items():
        rows = [row for row in load_experiment(name).rows(context) if row.verdict != "not run"]
        assert labels <= {row.label for row in rows}
        assert not any(row.claim for row in rows)
    assert all(row.claim for row in load_experiment("constant-maps").run(replace(context, costly=False)))


def test_claims_of_the_first_classes_have_images_enough_to_decide(tiles, out):
    """Sixty of 300 images are of the first fifth of the classes: the source has others, and only these methods need them."""
    source = [Item(f"{c:03}-{i}", Path("x"), label=c) for c in range(200) for i in range(4)]
    context = Context(cnn(), tiles, out, n=100)
    context.__dict__["listing"] = source
    own = context.by_class[:20]
    assert len(context.first_images) == 100
    assert context.first_images[:20] == own
    assert {item.label for item in context.first_images} == set(range(40))
    assert len({item.id for item in context.first_images}) == 100
    large = Context(cnn(), tiles, out)
    large.__dict__["listing"] = source
    assert large.first_images == large.by_class[:160]  # enough of its own
    few = Context(cnn(), tiles, out, costly=True, max_passes=50)  # Recipro-CAM
    rows = [row for row in load_experiment("main").run(few) if row.label.startswith("recipro-cam")]
    first, every = rows
    assert (first.clean.n, every.clean.n) == (len(few.first_images), len(few.sample)) == (1, 6)
    assert (first.claim, every.claim) == ("main.Recipro-CAM.resnet50.eq", "")
    assert (first.label, every.label) == ("recipro-cam, first classes", "recipro-cam")
    assert first.why.code != "other-sample"
    assert "first fifth of the classes" in first.note
    other = load_experiment("main").run(replace(few, backbone="mobilenet_v2"))
    (alone,) = (row for row in other if row.label == "recipro-cam")
    # nothing is published for its first classes
    assert (alone.clean.n, alone.claim, alone.note) == (6, "", "")


def test_transformer_rows(tiles, out):
    context = Context(vit(), tiles, out, n=2, backbone="vit_b_16")
    assert len(ran(answered("vit-attribution", context))) == 2
    assert ran(answered("vit-l", context)) == set()
    large = answered("vit-l", Context(vit(), tiles, out, n=2, backbone="vit_l_16"))
    gc, eg = (large[f"vitl.{short}"].as_published.value for short in ("gc", "eg"))
    assert large["vitl.gain"].as_published.value == pytest.approx(100 * (eg / gc - 1))
    assert not ran(answered("vit-attribution", Context(cnn(), tiles, out)))


def of_tokens(kind, tiles, out):
    """A context of a transformer, and its layers after the last attention."""
    torch.manual_seed(0)
    if kind == "torchvision":
        net = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16, num_classes=3)
        torch.nn.init.normal_(net.heads.head.weight)  # torchvision's starts at zero
        layers = ("encoder.layers.encoder_layer_1.ln_2", "encoder.layers.encoder_layer_1")
    else:
        sizes = {
            "img_size": 32,
            "patch_size": 8,
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "num_classes": 3,
        }
        net, layers = timm.models.VisionTransformer(**sizes), ("blocks.1.norm2", "blocks.1")
    model = equicam.wrap(net.eval(), preprocess=lambda p: small(p).float())
    return Context(model, tiles, out, backbone="vit_b_16"), layers


@pytest.mark.parametrize("kind", ["torchvision", "timm"])
def test_after_the_last_attention_every_map_is_constant(tiles, out, kind):
    context, layers = of_tokens(kind, tiles, out)
    rows = answered("hooks", context)
    for claim, layer in zip(("vit.hook.ln_2", "vit.hook.block"), layers, strict=True):
        found = rows[claim]
        assert (found.verdict, found.label, found.clean.value) == ("by definition", layer, 1.0)
        assert "only the class token feeds the head" in found.note


def test_constants_and_hooks_have_plots(tiles, out):
    of_vit, _ = of_tokens("timm", tiles, out)
    for name, context in (("constants", Context(cnn(), tiles, out, n=4)), ("hooks", of_vit)):
        run_experiment(name, context)
        with Image.open(out / f"{name}.png") as plot:
            assert np.asarray(plot.convert("L")).std() > 10
        assert all((out / f"{name}.{kind}").is_file() for kind in ("pdf", "svg", "csv", "tex"))


def test_hooks_need_a_transformer(tiles, out):
    assert "--model vit_b_16" in answered("hooks", Context(cnn(), tiles, out))["vit.hook.ln_2"].note
    plain = equicam.wrap(torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3)), layer="0", preprocess=small)
    assert not ran(answered("hooks", Context(plain, tiles, out, backbone="vit_b_16")))


def test_clip(tiles, out):
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    net = ZeroShot(seeded(Vit), torch.nn.functional.normalize(text), scale=torch.tensor(10.0))
    model = equicam.wrap(net.double(), layer="vision.blocks.1.norm1", preprocess=small, classes=("no", "yes"))
    context = Context(model, tiles, out, n=3, domain="RESISC45")
    rows = answered("clip", context)
    assert ran(rows) == set(rows)
    assert rows["clip.acc"].clean.n == 3
    share, rest = rows["const.clip.eg"].as_published.value, rows["clip.eg.cond"].as_published.value
    assert rows["clip.EquiGrad-CAM.Eq"].as_published.value == pytest.approx((1 - share) * rest)
    assert "open_clip" in answered("clip", Context(cnn(), tiles, out))["clip.acc"].note


def test_cub(birds, tiles, out):
    rows = answered("cub", Context(cnn(), birds, out, backbone="vgg16"))
    assert ran(rows) == {"cub.pg.vgg16", *(f"cub.iou.vgg16.{short}" for short in ("eg", "gc", "gcpp"))}
    assert "the whole frame gets" in rows["cub.iou.vgg16.gc"].note
    assert "--data CUB_200_2011" in answered("cub", Context(cnn(), tiles, out))["cub.pg.vgg16"].note


def test_boxes_alone_are_not_birds(tiles, out, tmp_path, in_domain):
    """Other images, also those with boxes as ImageNet's validation images have, answer no claim about CUB-200-2011."""
    lines = "".join(f"{path},0,10 20 60 50\n" for path in sorted(tiles.rglob("*.png")))
    (tmp_path / "items.csv").write_text("path,label,boxes\n" + lines)
    context = Context(cnn(), tmp_path / "items.csv", out)
    assert list(load_experiment("localisation").run(context))
    assert not ran(answered("cub", context))
    rows = list(load_experiment("cub-rotation").rows(in_domain("")))
    assert {row.verdict for row in rows if row.claim} == {"not run"}
    assert any("on CUB-200-2011" in row.published for row in rows if not row.claim)


@pytest.mark.parametrize("name", ["rotation-augmentation", "cub-rotation", "seeds"])
def test_without_weights_the_commands_that_make_them_are_named(tiles, out, name):
    rows = answered(name, Context(cnn(), tiles, out, domain="RESISC45"))
    assert not ran(rows)
    assert all("equicam-paper finetune DATA --arch resnet50" in found.note for found in rows.values())
    assert all(f"equicam-paper reproduce {name} --data DATA" in found.note for found in rows.values())


def test_rotation_augmentation(in_domain):
    context = in_domain()
    rows = answered("rotation-augmentation", context)
    assert ran(rows) == {claim for claim in rows if "RESISC45" in claim}
    same = answered("cub-rotation", context)
    for words in ("GC Eq no aug", "acc rot aug"):
        assert same[f"rotaug.CUB.{words}"].clean == rows[f"rotaug.RESISC45.{words}"].clean
    low = min(rows[f"rotaug.RESISC45.EG Eq {words}"].as_published.value for words in ("no aug", "rot aug"))
    assert same["rotaug.CUB.EG Eq either model"].as_published.value == low


def test_seeds(in_domain):
    context = in_domain("PatchCamelyon")
    rows = answered("seeds", context)
    assert ran(rows) == {claim for claim in rows if "PatchCamelyon" in claim}
    every = by_label("seeds", context)
    each = [every[f"grad-cam, seed {i}"].clean for i in range(3)]
    assert all(one.n == 4 for one in each)
    assert every["grad-cam, mean"].clean.value == pytest.approx(np.mean([one.value for one in each]))
    same = dict.fromkeys(("seed0", "seed2"), context.extra["seed1"])
    alike = answered("seeds", in_domain("PatchCamelyon", same))
    for claim in ("seeds.gc.sd", "seeds.eg.sd", "acc_seed_sd"):
        assert alike[f"app.PatchCamelyon.{claim}"].clean.value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("costly", [False, True])
def test_domains(tiles, out, costly):
    net = seeded(lambda: Cnn(classes=2))
    model = equicam.wrap(net, layer="trunk", preprocess=small, classes=("no", "yes"))
    context = Context(model, tiles, out, n=4, domain="RESISC45", costly=costly)
    rows = answered("domains", context)
    left = {claim for claim, found in rows.items() if found.verdict == "not run" and "RESISC45" in claim}
    assert left == {"app.RESISC45.acc_seed_sd"} | (
        set() if costly else {f"app.RESISC45.{w}" for w in ("Aug. Score-CAM.Eq", "augsc.const", "augsc.cond")}
    )
    for score in ("ins", "del"):  # four images give no p < 1e-25, and n.s. means nothing
        assert rows[f"app.p.resisc.{score}"].verdict == "undecided"
    assert "--domain PatchCamelyon" in rows["app.p.pcam"].note
    if costly:
        share, rest = (rows[f"app.RESISC45.augsc.{w}"].as_published.value for w in ("const", "cond"))
        zeros = rows["app.RESISC45.Aug. Score-CAM.Eq"].as_published.value
        assert zeros == pytest.approx((1 - share) * rest)


def test_no_domain_is_no_answer(tiles, out):
    context = Context(cnn(), tiles, out)
    assert not ran(answered("domains", context))
    assert not ran(answered("triage", context))


@pytest.mark.parametrize(("backbone", "domain"), [("vgg16", "RESISC45"), ("resnet50", "histology")])
def test_other_domains_and_networks_stand_alone(in_domain, backbone, domain):
    context = in_domain(domain, backbone=backbone)
    for name, count in (("domains", 14), ("triage", 11), ("seeds", 11), ("rotation-augmentation", 9)):
        assert not ran(answered(name, context)), name
        own = [found for found in load_experiment(name).run(context) if not found.claim]
        assert len(own) == count, name
        assert {found.verdict for found in own} == {"measured"}


def test_alignment_against_rotated_training(in_domain):
    rows = by_label("rotation-augmentation", in_domain())
    for label, one, other in (
        ("EG without rotated training − GC with it", "EG Eq no aug", "GC Eq rot aug"),
        ("GC with rotated training − GC without", "GC Eq rot aug", "GC Eq no aug"),
    ):
        for side in ("clean", "as_published"):
            a, b, apart = (getattr(rows[name], side) for name in (one, other, label))
            assert apart.value == pytest.approx(a.value - b.value)
            assert apart.n == 4


def test_every_seed_of_rotated_training_is_reported(in_domain, tuned, tmp_path):
    further = {"plain2": tuned[1]["seed0"]}  # the third seed has no pair
    further |= other_heads(load_file(tuned[1]["plain"]), tmp_path, ("plain1", "rotated1"))
    rows = by_label("rotation-augmentation", in_domain(more=further))
    for label in ("GC Eq no aug", "acc no aug", "GC with rotated training − GC without"):
        each = [rows[f"{label}, seed {i}"].clean.value for i in (0, 1)]
        assert f"{label}, seed 2" not in rows
        assert rows[label].clean.value == pytest.approx(np.mean(each))
        assert f"mean of 2 seeds, {min(each):.3f} to {max(each):.3f}" in rows[label].note
    assert rows["GC Eq no aug, seed 0"].clean.value != rows["GC Eq no aug, seed 1"].clean.value


@pytest.fixture
def few_methods(monkeypatch):
    monkeypatch.setattr(sanity, "METHODS", {name: METHODS[name] for name in ("grad-cam", "eigen-cam")})
    monkeypatch.setattr(sanity, "SEEDS", (0, 1))


@pytest.mark.parametrize("build", [cnn, vit])
def test_sanity(tiles, out, build, few_methods, monkeypatch, capsys):
    """Without the head, Eigen-CAM is what it was and Grad-CAM is not; without any weight, neither is."""
    context = Context(build(), tiles, out, n=3, progress=True)
    monkeypatch.setattr("equicam.progress.LINE_SECONDS", 0.0)
    rows = by_label("sanity", context)
    lines = re.findall(r"networks with and without trained weights: (\d) of 6", capsys.readouterr().err)
    assert "".join(lines) == "123456"  # the one given, two random ones here, and three of the cascade
    eq, *alike = plots.panels_of(KeptRows("sanity", context.backbone, "", {}, tuple(rows.values())))
    assert [one.label for one in alike] == ["Pearson", "SSIM"]
    for one in (eq, *alike):
        assert [name for name, _ in one.rows] == list(sanity.METHODS)
        assert all(None not in cells for _, cells in one.rows)
    assert [len(one.columns) for one in (eq, *alike)] == [5, 4, 4]
    axes = plots.compose([eq], "title").axes[0]
    first = eq.rows[0][1][0]
    shown = f"{first.value:.2f} ± {(first.high - first.low) / 2:.2f}".replace("0.", ".")
    assert axes.texts[0].get_text() == shown
    assert {found.verdict for found in rows.values()} == {"measured"}
    assert all(found.clean.n == 3 for found in rows.values())
    for method in sanity.METHODS:
        given = rows[f"{method}, weights as given: Eq"].clean
        assert given.value == pytest.approx(context.evaluate([method]).eq(method).value)
        assert "by seed" in rows[f"{method}, all random: Eq"].note
    like = "Pearson with the map of the weights as given"
    assert rows[f"eigen-cam, head random: {like}"].clean.value == pytest.approx(1, abs=1e-6)
    assert rows[f"grad-cam, head random: {like}"].clean.value < 0.99
    assert rows[f"eigen-cam, all random: {like}"].clean.value < 0.99


def test_sanity_has_every_method_that_works_on_the_network(tiles, out):
    contexts = (Context(net(), tiles, out, n=1) for net in (cnn, vit))
    of_cnn, of_vit = (sanity.methods_of(one, one.open_some(1)) for one in contexts)
    of_views = {name for name, method in METHODS.items() if method.reader.one_pass}
    assert len(of_views) > 10
    assert set(of_cnn) == of_views
    assert set(of_vit) == of_views | {"rollout", "transformer-attribution"}
    costly = Context(cnn(), tiles, out, n=1, costly=True, max_passes=2048)
    everything = sanity.methods_of(costly, costly.open_some(1))
    assert {"score-cam", "ablation-cam", "opti-cam", "smooth-grad-cam++"} <= set(everything)
    assert "rise" not in everything  # 8,000 passes


@pytest.mark.parametrize(("given", "kept"), [(torch.float16, "float64"), (torch.bfloat16, "bfloat16")])
def test_networks_of_random_weights_are_not_run_in_float16(
    tiles, tmp_path, few_methods, monkeypatch, given, kept
):
    """Their signals leave its range; the rows say what they were measured in."""
    evaluated, explained = [], []
    evaluate, explain = Context.evaluate, sanity.explain

    def recorded_evaluate(self, *given, **options):
        evaluated.append(self.options["dtype"])
        return evaluate(self, *given, **options)

    def recorded_explain(*given, **options):
        explained.append(options.get("dtype"))
        return explain(*given, **options)

    monkeypatch.setattr(Context, "evaluate", recorded_evaluate)
    monkeypatch.setattr(sanity, "explain", recorded_explain)
    context = Context(cnn(), tiles, tmp_path, n=2, options={"dtype": given})
    assert provenance(context)["dtype"] == str(given).removeprefix("torch.")
    assert run_experiment("sanity", context).provenance["dtype"] == kept
    assert set(evaluated) == {None if given is torch.float16 else given}
    assert torch.float16 not in explained
    assert (torch.bfloat16 in explained) == (given is torch.bfloat16)
    assert run_experiment("alignment", context).provenance["dtype"] == str(given).removeprefix("torch.")


def test_sanity_of_the_same_weights_is_the_same_map(tiles, out, few_methods, monkeypatch):
    monkeypatch.setattr(sanity, "randomise_weights", lambda model, **_options: model)
    rows = list(load_experiment("sanity").run(Context(cnn(), tiles, out, n=3)))
    alike = [found.clean.value for found in rows if "with the map" in found.label]
    assert alike == pytest.approx([1.0] * 16, abs=1e-6)


def test_localisation(birds, tiles, out):
    rows = list(load_experiment("localisation").run(Context(cnn(), birds, out, backbone="vgg16")))
    assert {found.label for found in rows} >= {"grad-cam, pointing", "equigrad-cam, box-iou"}
    assert not any(found.claim for found in rows)
    with pytest.raises(equicam.EquicamError, match="images with boxes"):
        list(load_experiment("localisation").run(Context(cnn(), tiles, out)))


def test_label_region(patches, out):
    rows = answered("label-region", Context(cnn(), patches, out, domain="PatchCamelyon"))
    assert ran(rows) == set(rows)
    sides = ("mass in disc rotated mean", "mass in disc 0deg", "drop")
    rotated, first, drop = (rows[f"label.Grad-CAM.{side}"].clean.value for side in sides)
    assert drop == pytest.approx(first - rotated)
    uniform = rows["label.uniform null.mass in disc 0deg"]
    assert uniform.clean.value == pytest.approx(1 / 9, abs=0.02)  # the input is the whole patch: a ninth
    null = rows["label.EquiGrad-CAM.drop"].note
    assert f"{uniform.clean.value:.3f} by ours" in null
    assert f"{uniform.clean.value:.3f} by their" not in null


def test_the_label_region_of_the_paper_is_as_published(tiles, out):
    model = equicam.wrap(seeded(Cnn), layer="trunk")  # ImageNet's preprocessing
    rows = answered("label-region", Context(model, tiles, out))
    assert ran(rows) == {"label.box_px", "label.disc_radius", "label.vignette_null"}
    assert all(rows[claim].verdict == "by definition" for claim in ran(rows))
    other = answered("label-region", Context(equicam.load("embedded"), tiles, out))
    found = {(other[claim].verdict, other[claim].why.code) for claim in ran(other)}
    assert found == {("undecided", "other-input")}  # its input is the whole patch


def test_triage(tiles, out):
    rows = answered("triage", Context(cnn(), tiles, out, domain="RESISC45"))
    assert ran(rows) == {claim for claim in rows if "PatchCamelyon" not in claim}
    cap10, lift10, cap20 = (rows[f"peum.RESISC45.{w}"].clean.value for w in ("cap10", "lift10", "cap20"))
    assert lift10 == pytest.approx(6 * cap10)  # one of six images is reviewed
    assert cap20 >= cap10
    assert rows["peum.random"].clean.value == pytest.approx(1 / 6)


def test_triage_counts_constant_maps(tiles, out, monkeypatch):
    context = Context(cnn(), tiles, out, n=3)
    first = {item.id: i == 0 for i, item in enumerate(context.sample)}
    monkeypatch.setattr(paper_measure, "constant_maps", lambda _found, _method: first)
    assert by_label("triage", context)[signals.CONSTANT].clean.value == pytest.approx(1 / 3)


@pytest.mark.parametrize(("statistic", "scale"), [(signals.IN_TENTH, 1.0), (signals.LIFT, 10.0)])
def test_finding_none_of_the_worst_is_not_certain(statistic, scale):
    """No resample finds any: a percentile interval would be [0, 0]."""
    drift = np.arange(100.0)
    for group, n in ((None, 10), (np.repeat(np.arange(5), 20), 5)):
        found = signals.over_seeds([signals.Pair(-drift, drift, group)], statistic)
        assert found.value == found.low == 0
        assert found.high == pytest.approx(scale * statistics.proportion(0, n).high)
    unrelated = signals.Pair(np.random.default_rng(0).normal(size=100), drift, None)
    some = signals.over_seeds([unrelated], statistic)
    assert some.low < some.high
    few = signals.over_seeds([signals.Pair(np.roll(drift, 5), drift, np.arange(100) // 25)], signals.IN_TENTH)
    assert 0 <= few.low < few.value < few.high <= 1  # few groups widen it, not beyond what a share can be
    unknown = signals.over_seeds([signals.Pair(np.full(100, np.nan), drift, None)], statistic)
    assert np.isnan(unknown.value)


def test_triage_is_over_all_seeds(tiles, out, tuned, tmp_path):
    arch, files = tuned
    extra = other_heads(load_file(files["plain"]), tmp_path, ("plain1", "plain2")) | {"plain": files["plain"]}
    context = Context(equicam.load(arch, weights=files["plain"]), tiles, out, domain="RESISC45", extra=extra)
    assert [one is context for one in signals.all_seeds(context)] == [True, False, False]
    rows = by_label("triage", context)
    for label in ("r of PEUM with 1 − Eq", "worst tenth found in a tenth, by 1 − stability, off the grid"):
        each = [rows[f"{label}, seed {i}"].clean.value for i in range(3)]
        assert rows[label].clean.value == pytest.approx(np.mean(each))
        assert rows[label].clean.n == 6
        assert f"mean of 3 seeds, {min(each):.3f} to {max(each):.3f}" in rows[label].note
    assert len({rows[f"r of PEUM with 1 − Eq, seed {i}"].clean.value for i in range(3)}) == 3


def test_triage_is_also_against_angles_that_no_view_has(tiles, out):
    """As in the PEUM audit, whose numbers it has."""
    context = Context(cnn(), tiles, out)
    ours, audit = by_label("triage", context), by_label("peum-audit", context)
    ends = ("", ", off the grid")
    own = [ours[f"r of PEUM with 1 − Eq{end}"].clean.value for end in ends]
    assert own == pytest.approx([audit[f"r of peum (full){end}"].clean.value for end in ends])
    assert own[0] != own[1]


@pytest.mark.parametrize(("backbone", "cheap"), [("resnet50", 11), ("vit_b_16", 3)])
def test_matched(tiles, out, backbone, cheap):
    context = Context(cnn(), tiles, out, backbone=backbone)
    rows = answered("matched", context)
    assert len(ran(rows)) == cheap
    assert "--costly" in rows[f"matched.Recipro-CAM.{backbone}"].note
    assert "--model vgg16" in rows["matched.RISE.vgg16"].note


@pytest.mark.slow
def test_matched_costly(tiles, out, light_rise):
    rows = answered("matched", Context(cnn(), tiles, out, costly=True))
    assert {claim for claim in rows if claim.split(".")[-1] in ("margin", "cross", "zero_filled")}
    assert ran(rows) >= {claim for claim in rows if "resnet50" in claim}
    margin, eg = rows["matched.RISE.resnet50"].clean, rows["matched.RISE.resnet50.eg"].clean
    assert margin.n == eg.n == 2  # the first fifth of six images, at least two
    prefix, whole = (rows[f"matched.{w}"].clean for w in ("prefix591.resnet50.gc", "full10k.r50eg"))
    assert (prefix.n, whole.n) == (2, 6)
    assert rows["matched.prefix591.resnet50.inflation"].clean.value < prefix.value


def test_matched_needs_labels(tiles, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, image in enumerate(sorted(tiles.rglob("*.png"))):
        (flat / f"{i}.png").write_bytes(image.read_bytes())
    assert not ran(answered("matched", Context(cnn(), flat, tmp_path)))


def test_constants(tiles, out):
    rows = answered("constants", Context(cnn(), tiles, out, n=4))
    ours = {claim for claim in rows if claim.startswith("const.")} - {"const.imagenet.other"}
    wrong = {claim for claim in ours if rows[claim].verdict != "by definition"}
    assert wrong == {"const.significance_star_p"}
    assert "reproduce cost" in rows["code.time.Grad-CAM.r50"].note
    assert {"xgrad.r50.agree", "code.readme.peum_r"} <= ran(rows)
    other = answered("constants", Context(cnn(), tiles, out, n=4, backbone="vgg16"))
    assert "--model resnet50" in other["xgrad.r50.agree"].note


def test_where_the_head_pools_xgrad_cam_is_grad_cam(tiles, out):
    model = equicam.wrap(seeded(Cnn), layer="after.0", preprocess=small)
    found = answered("constants", Context(model, tiles, out, n=4))["xgrad.r50.agree"]
    assert found.verdict == "by definition"
    assert found.clean.value < 1e-6


@pytest.mark.parametrize("costly", [False, True])
def test_constant_maps(tiles, out, costly):
    rows = answered("constant-maps", Context(cnn(), tiles, out, costly=costly))
    assert ran(rows) == ({"const.scorecam.resnet50"} if costly else set())
    assert ran(rows) or "2,048 forward passes" in rows["const.scorecam.resnet50"].note


def test_cost(tiles, out):
    rows = answered("cost", Context(cnn(), tiles, out, n=3))
    # an A100's times are not compared with a CPU's
    assert {rows[claim].verdict for claim in rows} == {"not run"}
    own = [found for found in load_experiment("cost").run(Context(cnn(), tiles, out, n=3)) if not found.claim]
    assert [row.label for row in own] == ["T = 18 over one Grad-CAM", "T = 6 over one Grad-CAM"]
    assert min(found.as_published.value for found in own) > 1
    assert "on a CPU" in own[0].note


@pytest.mark.parametrize("name", ["figure-pipeline", "figure-signal-noise", "figure-drift-strip"])
def test_figures_are_written_with_their_numbers(tiles, out, name):
    found, *numbers = run_experiment(name, Context(cnn(), tiles, out, n=4)).rows
    path = out / f"{name}.png"
    assert found.note == f"written: {path}"
    with Image.open(path) as figure:
        assert figure.width > 500
        assert figure.info["dpi"][0] == pytest.approx(200, abs=1)
        assert np.asarray(figure.convert("L")).std() > 10
    assert all(path.with_suffix(f".{kind}").stat().st_size > 1000 for kind in ("pdf", "svg"))
    assert len(numbers) >= 4
    assert not any(row.claim for row in numbers)
    table, latex = (path.with_suffix(end).read_text() for end in (".csv", ".tex"))
    assert table.count("\n") == len(numbers) + 2
    assert "\\bottomrule" in latex
    assert latex.count("measured") == len(numbers)


@pytest.mark.parametrize("domain", ["PatchCamelyon", "RESISC45", "histology"])
def test_a_claim_of_a_domain_names_the_command_that_answers_it(tmp_path, domain):
    context = Context(cnn(), tmp_path, tmp_path, domain=domain)
    for name, known in claims().items():
        if name.startswith("app.PatchCamelyon."):
            would = not_run(name, missing_domain(context, known)).note
            assert ("reproduce seeds" in would) == name.endswith("acc_seed_sd")
            if "Score-CAM" in name or "augsc" in name:
                assert would.endswith("--weights models/plain/weights.safetensors --costly --n 500")
            elif domain != "PatchCamelyon":
                assert "--costly" not in would
