"""Experiments on stand-ins: each answers every claim of its own once, and says what would run the others."""

import json

import h5py
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torchvision.models import VisionTransformer

import equicam
from equicam.data.synthetic import draw_many
from equicam.methods import METHODS
from equicam.models.zeroshot import ZeroShot
from equicam.paper import named
from equicam.paper.context import Bench, claims
from equicam.paper.domains import _otherwise
from tests.conftest import Cnn, Vit, light, seeded

SIDE = 32
FACTORY = """
import equicam
from tests.conftest import Cnn, seeded
from tests.experiments.test_second_group import small

def tiny():
    return equicam.wrap(seeded(lambda: Cnn(classes=2)), layer="trunk", preprocess=small, classes=("no", "yes"))
"""


def small(picture):
    pixels = np.asarray(picture.convert("RGB").resize((SIDE, SIDE)), dtype=np.float64)
    return torch.from_numpy(pixels).permute(2, 0, 1) / 128 - 1


LEVELS = {"preprocess": small, "mean": (128 / 255,) * 3, "std": (128 / 255,) * 3}


def cnn():
    return equicam.wrap(seeded(Cnn), layer="trunk", **LEVELS)


def vit():
    return equicam.wrap(seeded(Vit), layer="blocks.1.norm1", preprocess=small)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """Three drawn patches of either class, a folder a class."""
    root = tmp_path_factory.mktemp("tiles")
    for i, patch in enumerate(draw_many(6)):
        folder = root / ("no", "yes")[i % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(patch.image).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def patches(tmp_path_factory):
    """StoredMaps patches as PatchCamelyon keeps them."""
    root = tmp_path_factory.mktemp("pcam")
    drawn = list(draw_many(5, seed=3))
    for name, values in (("x", [p.image for p in drawn]), ("y", [[[[p.label]]] for p in drawn])):
        with h5py.File(root / f"camelyonpatch_level_2_split_test_{name}.h5", "w") as file:
            file[name] = np.concatenate(values) if name == "y" else np.stack(values)
    return root


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """Three drawn patches as CUB-200-2011 keeps birds."""
    root = tmp_path_factory.mktemp("cub")
    (root / "images").mkdir()
    files = {"images": "{i} {i}.png", "image_class_labels": "{i} {i}", "bounding_boxes": "{i} 10 20 60 50"}
    files["train_test_split"] = "{i} 0"
    for name, text in files.items():
        (root / f"{name}.txt").write_text("".join(text.format(i=i) + "\n" for i in (1, 2, 3)))
    for i, patch in enumerate(draw_many(3, seed=5), 1):
        Image.fromarray(patch.image).save(root / "images" / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A factory, and files of weights for it that differ a little."""
    root = tmp_path_factory.mktemp("models")
    (root / "nets.py").write_text(FACTORY)
    arch, files = f"{root / 'nets.py'}:tiny", {}
    for i, name in enumerate(("plain", "turned", "seed0", "seed1", "seed2")):
        (root / name).mkdir()
        files[name] = root / name / "weights.safetensors"
        state = equicam.load(arch).module.state_dict()
        state["head.bias"] = state["head.bias"] + torch.tensor([0.5, 0]) * i
        save_file({key: value.contiguous() for key, value in state.items()}, files[name])
    return arch, files


def answered(name, bench):
    """An experiment's lines by claim, having checked that each claim of its own is there once and makes sense."""
    one = named(name)
    lines = list(one.run(bench))
    wanted = [claim for claim in claims() if one.answers and claim.startswith(one.answers)]
    assert sorted(found.claim for found in lines if found.claim) == sorted(wanted)
    for found in lines:
        json.dumps(found.as_json(), allow_nan=False)
        numbers = [e for e in (found.clean, found.as_published) if e is not None]
        if found.verdict == "not run":
            assert not numbers, found
            assert len(found.reason) > 10, found
        elif found.what != "figure":
            assert found.verdict in ("matches", "differs", "artefact", "undecided", "measured"), found
            assert numbers or found.claim == "const.eq_angles", found
            assert all(np.isfinite(e.value) for e in numbers), found
    return {found.claim: found for found in lines if found.claim}


def ran(lines):
    return {claim for claim, found in lines.items() if found.verdict != "not run"}


@pytest.mark.parametrize("costly", [False, True])
def test_equal_compute(tiles, tmp_path, monkeypatch, costly):
    monkeypatch.setitem(METHODS, "rise-400", light("rise-400"))
    bench = Bench(cnn(), tiles, tmp_path, n=2, costly=costly)
    lines = answered("equal-compute", bench)
    assert ran(lines) == ({"equal.rise400", "equal.scorecam80"} if costly else set())
    if not costly:
        assert "400 forward passes" in lines["equal.rise400"].reason
        other = Bench(cnn(), tiles, tmp_path, n=2, backbone="vgg16")
        assert "--model resnet50" in answered("equal-compute", other)["equal.rise400"].reason


def test_transformer_rows(tiles, tmp_path):
    bench = Bench(vit(), tiles, tmp_path, n=2, backbone="vit_b_16")
    assert len(ran(answered("vit-attribution", bench))) == 2
    assert ran(answered("vit-l", bench)) == set()
    large = answered("vit-l", Bench(vit(), tiles, tmp_path, n=2, backbone="vit_l_16"))
    gc, eg = (large[f"vitl.{short}"].as_published.value for short in ("gc", "eg"))
    assert large["vitl.gain"].as_published.value == pytest.approx(100 * (eg / gc - 1))
    assert not ran(answered("vit-attribution", Bench(cnn(), tiles, tmp_path)))


def tokens(kind):
    torch.manual_seed(0)
    if kind == "torchvision":
        net = VisionTransformer(32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16, num_classes=3)
        torch.nn.init.normal_(net.heads.head.weight)  # torchvision's starts at zero
        return net.eval(), ("encoder.layers.encoder_layer_1.ln_2", "encoder.layers.encoder_layer_1")
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.models.VisionTransformer(**sizes).eval(), ("blocks.1.norm2", "blocks.1")


@pytest.mark.parametrize("kind", ["torchvision", "timm"])
def test_behind_the_last_attention_every_map_is_constant(tiles, tmp_path, kind):
    net, (norm, block) = tokens(kind)
    bench = Bench(
        equicam.wrap(net, preprocess=lambda p: small(p).float()), tiles, tmp_path, backbone="vit_b_16"
    )
    lines = answered("hooks", bench)
    for claim, layer in (("vit.hook.ln_2", norm), ("vit.hook.block", block)):
        found = lines[claim]
        assert (found.verdict, found.what, found.clean.value) == ("matches", layer, 1.0)
        assert "only the class token feeds the head" in found.reason


def test_hooks_need_a_transformer(tiles, tmp_path):
    assert "--model vit_b_16" in answered("hooks", Bench(cnn(), tiles, tmp_path))["vit.hook.ln_2"].reason
    plain = equicam.wrap(torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3)), layer="0", preprocess=small)
    assert not ran(answered("hooks", Bench(plain, tiles, tmp_path, backbone="vit_b_16")))


def test_clip(tiles, tmp_path):
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    net = ZeroShot(seeded(Vit), torch.nn.functional.normalize(text), scale=torch.tensor(10.0))
    model = equicam.wrap(net.double(), layer="vision.blocks.1.norm1", preprocess=small, classes=("no", "yes"))
    bench = Bench(model, tiles, tmp_path, n=3, domain="RESISC45")
    lines = answered("clip", bench)
    assert ran(lines) == set(lines)
    assert lines["clip.acc"].clean.n == 3
    share, rest = lines["const.clip.eg"].as_published.value, lines["clip.eg.cond"].as_published.value
    assert lines["clip.EquiGrad-CAM.Eq"].as_published.value == pytest.approx((1 - share) * rest)
    assert "open_clip" in answered("clip", Bench(cnn(), tiles, tmp_path))["clip.acc"].reason


def test_cub(birds, tiles, tmp_path):
    lines = answered("cub", Bench(cnn(), birds, tmp_path, backbone="vgg16"))
    assert ran(lines) == {"cub.pg.vgg16", *(f"cub.iou.vgg16.{short}" for short in ("eg", "gc", "gcpp"))}
    assert "the whole frame gets" in lines["cub.iou.vgg16.gc"].reason
    assert "--data CUB_200_2011" in answered("cub", Bench(cnn(), tiles, tmp_path))["cub.pg.vgg16"].reason


@pytest.mark.parametrize("name", ["rotation-augmentation", "cub-rotation", "seeds"])
def test_without_weights_the_commands_that_make_them_are_told(tiles, tmp_path, name):
    lines = answered(name, Bench(cnn(), tiles, tmp_path, domain="RESISC45"))
    assert not ran(lines)
    assert all("equicam finetune DATA --arch resnet50" in found.reason for found in lines.values())
    assert all(f"equicam reproduce {name} --data DATA" in found.reason for found in lines.values())


def test_rotation_augmentation(tiles, tmp_path, tuned):
    arch, files = tuned
    bench = Bench(equicam.load(arch), tiles, tmp_path, n=4, domain="RESISC45", extra=files)
    lines = answered("rotation-augmentation", bench)
    assert ran(lines) == {claim for claim in lines if "RESISC45" in claim}
    same = answered("cub-rotation", bench)
    for words in ("GC Eq no aug", "acc rot aug"):
        assert same[f"rotaug.CUB.{words}"].clean == lines[f"rotaug.RESISC45.{words}"].clean
    low = min(lines[f"rotaug.RESISC45.EG Eq {words}"].as_published.value for words in ("no aug", "rot aug"))
    assert same["rotaug.CUB.EG Eq either model"].as_published.value == low


def test_seeds(tiles, tmp_path, tuned):
    arch, files = tuned
    bench = Bench(equicam.load(arch), tiles, tmp_path, n=4, domain="PatchCamelyon", extra=files)
    lines = answered("seeds", bench)
    assert ran(lines) == {claim for claim in lines if "PatchCamelyon" in claim}
    equal = bench.extra | {"seed0": files["seed1"], "seed2": files["seed1"]}
    alike = answered("seeds", Bench(bench.model, tiles, tmp_path, n=4, domain="PatchCamelyon", extra=equal))
    for claim in ("seeds.gc.sd", "seeds.eg.sd", "acc_seed_sd"):
        assert alike[f"app.PatchCamelyon.{claim}"].clean.value == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("costly", [False, True])
def test_domains(tiles, tmp_path, costly):
    model = equicam.wrap(
        seeded(lambda: Cnn(classes=2)), layer="trunk", preprocess=small, classes=("no", "yes")
    )
    bench = Bench(model, tiles, tmp_path, n=4, domain="RESISC45", costly=costly)
    lines = answered("domains", bench)
    left = {claim for claim, found in lines.items() if found.verdict == "not run" and "RESISC45" in claim}
    assert left == {"app.RESISC45.acc_seed_sd"} | (
        set() if costly else {f"app.RESISC45.{w}" for w in ("Aug. Score-CAM.Eq", "augsc.const", "augsc.cond")}
    )
    for score in ("ins", "del"):  # four pictures give no p < 1e-25, and n.s. means nothing
        assert lines[f"app.p.resisc.{score}"].verdict == "undecided"
    assert "--domain PatchCamelyon" in lines["app.p.pcam"].reason
    if costly:
        share, rest = (lines[f"app.RESISC45.augsc.{w}"].as_published.value for w in ("const", "cond"))
        zeros = lines["app.RESISC45.Aug. Score-CAM.Eq"].as_published.value
        assert zeros == pytest.approx((1 - share) * rest)


def test_no_domain_is_no_answer(tiles, tmp_path):
    bench = Bench(cnn(), tiles, tmp_path)
    assert not ran(answered("domains", bench))
    assert not ran(answered("triage", bench))


@pytest.mark.parametrize(("backbone", "domain"), [("vgg16", "RESISC45"), ("resnet50", "histology")])
def test_other_domains_and_networks_stand_alone(tiles, tmp_path, tuned, backbone, domain):
    arch, files = tuned
    bench = Bench(equicam.load(arch), tiles, tmp_path, n=4, backbone=backbone, domain=domain, extra=files)
    for name, count in (("domains", 14), ("triage", 6), ("seeds", 5), ("rotation-augmentation", 7)):
        assert not ran(answered(name, bench)), name
        own = [found for found in named(name).run(bench) if not found.claim]
        assert len(own) == count, name
        assert {found.verdict for found in own} == {"measured"}


def test_alignment_against_turned_training(tiles, tmp_path, tuned):
    arch, files = tuned
    bench = Bench(equicam.load(arch), tiles, tmp_path, n=4, domain="RESISC45", extra=files)
    lines = {found.what: found for found in named("rotation-augmentation").run(bench)}
    for side in ("clean", "as_published"):
        eg, gc = (getattr(lines[w], side).value for w in ("EG Eq no aug", "GC Eq rot aug"))
        ahead = getattr(lines["EG without turned training − GC with it"], side)
        assert ahead.value == pytest.approx(eg - gc)
        assert ahead.n == 4


def test_localisation(birds, tiles, tmp_path):
    lines = list(named("localisation").run(Bench(cnn(), birds, tmp_path, backbone="vgg16")))
    assert {found.what for found in lines} >= {"grad-cam, pointing", "equigrad-cam, box-iou"}
    assert not any(found.claim for found in lines)
    with pytest.raises(equicam.EquicamError, match="pictures with boxes"):
        list(named("localisation").run(Bench(cnn(), tiles, tmp_path)))


def test_label_region(patches, tmp_path):
    lines = answered("label-region", Bench(cnn(), patches, tmp_path, domain="PatchCamelyon"))
    assert ran(lines) == set(lines)
    turned, first, drop = (
        lines[f"label.Grad-CAM.{words}"].clean.value
        for words in ("mass in disc rotated mean", "mass in disc 0deg", "drop")
    )
    assert drop == pytest.approx(first - turned)
    uniform = lines["label.uniform null.mass in disc 0deg"]
    assert uniform.clean.value == pytest.approx(1 / 9, abs=0.02)  # all of the patch is seen: a ninth
    null = lines["label.EquiGrad-CAM.drop"].reason
    assert f"{uniform.clean.value:.3f} by ours" in null
    assert f"{uniform.clean.value:.3f} by their" not in null


def test_the_label_region_of_the_paper_is_as_published(tiles, tmp_path):
    model = equicam.wrap(seeded(Cnn), layer="trunk")  # ImageNet's preprocessing
    lines = answered("label-region", Bench(model, tiles, tmp_path))
    assert ran(lines) == {"label.box_px", "label.disc_radius", "label.vignette_null"}
    assert all(lines[claim].verdict == "matches" for claim in ran(lines))


def test_triage(tiles, tmp_path):
    lines = answered("triage", Bench(cnn(), tiles, tmp_path, domain="RESISC45"))
    assert ran(lines) == {claim for claim in lines if "PatchCamelyon" not in claim}
    cap10, lift10, cap20 = (lines[f"peum.RESISC45.{w}"].clean.value for w in ("cap10", "lift10", "cap20"))
    assert lift10 == pytest.approx(6 * cap10)  # one of six pictures is reviewed
    assert cap20 >= cap10
    assert lines["peum.random"].clean.value == pytest.approx(1 / 6)


@pytest.mark.parametrize(("backbone", "cheap"), [("resnet50", 11), ("vit_b_16", 3)])
def test_matched(tiles, tmp_path, backbone, cheap):
    bench = Bench(cnn(), tiles, tmp_path, backbone=backbone)
    lines = answered("matched", bench)
    assert len(ran(lines)) == cheap
    assert "--costly" in lines[f"matched.Recipro-CAM.{backbone}"].reason
    assert "--model vgg16" in lines["matched.RISE.vgg16"].reason


def test_matched_costly(tiles, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "rise", light("rise"))
    lines = answered("matched", Bench(cnn(), tiles, tmp_path, costly=True))
    assert {claim for claim in lines if claim.split(".")[-1] in ("margin", "cross", "zero_filled")}
    assert ran(lines) >= {claim for claim in lines if "resnet50" in claim}
    margin, eg = lines["matched.RISE.resnet50"].clean, lines["matched.RISE.resnet50.eg"].clean
    assert margin.n == eg.n == 2  # the first fifth of six pictures, at least two
    prefix, whole = (lines[f"matched.{w}"].clean for w in ("prefix591.resnet50.gc", "full10k.r50eg"))
    inflated = lines["matched.prefix591.resnet50.inflation"].clean.value
    assert prefix.n == 2
    assert whole.n == 6
    assert inflated < prefix.value


def test_matched_needs_labels(tiles, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, picture in enumerate(sorted(tiles.rglob("*.png"))):
        (flat / f"{i}.png").write_bytes(picture.read_bytes())
    assert not ran(answered("matched", Bench(cnn(), flat, tmp_path)))


def test_constants(tiles, tmp_path):
    lines = answered("constants", Bench(cnn(), tiles, tmp_path, n=4))
    ours = {claim for claim in lines if claim.startswith("const.")} - {"const.imagenet.other"}
    wrong = {claim for claim in ours if lines[claim].verdict != "matches"}
    assert wrong == {"const.significance_star_p"}
    assert "reproduce cost" in lines["code.time.Grad-CAM.r50"].reason
    assert {"xgrad.r50.agree", "code.readme.peum_r"} <= ran(lines)
    other = answered("constants", Bench(cnn(), tiles, tmp_path, n=4, backbone="vgg16"))
    assert "--model resnet50" in other["xgrad.r50.agree"].reason


def test_where_the_head_pools_xgrad_cam_is_grad_cam(tiles, tmp_path):
    model = equicam.wrap(seeded(Cnn), layer="after.0", preprocess=small)
    found = answered("constants", Bench(model, tiles, tmp_path, n=4))["xgrad.r50.agree"]
    assert found.verdict == "matches"
    assert found.clean.value < 1e-6


@pytest.mark.parametrize("costly", [False, True])
def test_constant_maps(tiles, tmp_path, costly):
    lines = answered("constant-maps", Bench(cnn(), tiles, tmp_path, costly=costly))
    assert ran(lines) == ({"const.scorecam.resnet50"} if costly else set())
    assert ran(lines) or "2,048 forward passes" in lines["const.scorecam.resnet50"].reason


@pytest.mark.parametrize("costly", [False, True])
def test_cost(tiles, tmp_path, costly):
    lines = answered("cost", Bench(cnn(), tiles, tmp_path, n=3, costly=costly))
    assert lines["cost.T18 lo"].as_published.value > 1
    assert "on cpu" in lines["cost.T6 hi"].reason
    against = lines["cost.t6_vs_scorecam"]
    assert (against.verdict != "not run") == costly
    if costly:
        assert min(against.clean.value, against.as_published.value) > 0
    else:
        assert "--costly" in against.reason


@pytest.mark.parametrize("name", ["pipeline", "signal-noise", "drift-strip"])
def test_figures_are_drawn(tiles, tmp_path, name):
    (found,) = named(f"figure-{name}").run(Bench(cnn(), tiles, tmp_path / "out", n=4))
    path = tmp_path / "out" / f"{name}.png"
    assert found.reason == f"drawn: {path}"
    with Image.open(path) as drawn:
        assert drawn.width > 500
        assert np.asarray(drawn.convert("L")).std() > 10


@pytest.mark.parametrize("domain", ["PatchCamelyon", "RESISC45", "histology"])
def test_a_claim_of_a_domain_names_the_command_that_answers_it(tmp_path, domain):
    bench = Bench(cnn(), tmp_path, tmp_path, domain=domain)
    for name, known in claims().items():
        if name.startswith("app.PatchCamelyon."):
            would = _otherwise(bench, known)
            assert ("reproduce seeds" in would) == name.endswith("acc_seed_sd")
            if "Score-CAM" in name or "augsc" in name:
                assert would.endswith(
                    "--domain PatchCamelyon --weights models/plain/weights.safetensors --costly --n 500"
                )
            elif domain != "PatchCamelyon":
                assert "--costly" not in would
