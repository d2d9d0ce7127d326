"""One contract for every family of models, built with random weights and live heads."""

import json

import pytest
import torch
import torchvision
from torch import nn

import equicam
from tests.conftest import assert_alive

FAMILIES = {
    # name: (layer, picture side, feature grid side)
    "resnet18": ("layer4", 128, 4),
    "vgg11": ("features.19", 64, 4),
    "densenet121": ("features", 96, 3),
    "mobilenet_v2": ("features", 96, 3),
    "mobilenet_v3_small": ("features", 96, 3),
    "efficientnet_b0": ("features", 96, 3),
    "convnext_tiny": ("features", 96, 3),
    "regnet_y_400mf": ("trunk_output", 96, 3),
    "vit_b_16": ("encoder.layers.encoder_layer_11.ln_1", 224, 14),
    "swin_t": ("norm", 224, 7),
    "timm:resnet18": ("layer4", 128, 4),
    "timm:convnext_atto": ("stages", 96, 3),
    "timm:vit_tiny_patch16_224": ("blocks.11.norm1", 224, 14),
    "timm:deit_tiny_distilled_patch16_224": ("blocks.11.norm1", 224, 14),
    "timm:swin_tiny_patch4_window7_224": ("norm", 224, 7),
    "timm:coatnet_nano_rw_224": ("norm", 224, 7),  # a LayerNorm2d, channels first
    "timm:maxvit_nano_rw_256": ("norm", 256, 8),  # takes no other size
    "open_clip:ViT-S-32-alt": ("vision.transformer.resblocks.11.ln_1", 224, 7),
    "open_clip:RN50": ("vision.layer4", 224, 7),
    "embedded": ("layer4", 96, 12),
}


def live(module: nn.Module) -> nn.Module:
    """The head drawn anew: some libraries start it at zero, and then nothing can be explained."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = [m for m in module.modules() if isinstance(m, nn.Linear)][-1]
        nn.init.normal_(head.weight, std=0.02)
    return module


def contract(model: equicam.Model, layer: str, side: int, grid: int, *, views: int = 4) -> None:
    assert model.layer == layer
    live(model.module)
    coarse = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    x = nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    straight = equicam.explain(model, x, views=views)
    assert straight.layer == layer
    assert straight.map.shape == x[:, 0].shape
    assert straight.view_maps.shape == (len(x), views, grid, grid)
    assert_alive(straight.map)
    tolerance = {"atol": 2e-3, "rtol": 0}  # float32 networks; the theorem itself is held in float64 elsewhere
    turned = equicam.explain(model, torch.rot90(x, 1, (-2, -1)), views=views, target=straight.target)
    torch.testing.assert_close(turned.map, torch.rot90(straight.map, 1, (-2, -1)), **tolerance)
    torch.testing.assert_close(turned.peum, torch.rot90(straight.peum, 1, (-2, -1)), **tolerance)
    alone = equicam.explain(model, x[1:], views=views)
    torch.testing.assert_close(alone.map, straight.map[1:], **tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    zero_shot = {"classes": ["a forest", "a river", "a street"]} if name.startswith("open_clip") else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = equicam.load(name, weights="random", **zero_shot)
    contract(model, *FAMILIES[name])


def test_dinov2_with_registers():
    """Published as a backbone; with a head of its user's it is a classifier like any other."""
    import timm

    module = timm.create_model("vit_small_patch14_reg4_dinov2", num_classes=5, img_size=224)
    contract(equicam.wrap(module), "blocks.11.norm1", 224, 16)


@pytest.fixture(scope="module")
def local_hf(tmp_path_factory):
    """Hugging Face models of published classes, tiny and random, saved as a download would be."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            **size, image_size=32, patch_size=4, num_labels=3, id2label={0: "a", 1: "b", 2: "c"}
        )
    )
    vit.save_pretrained(folder / "vit")
    processor.save_pretrained(folder / "vit")
    words = {w: i for i, w in enumerate(["<s>", "</s>", "<unk>", "a", "photo", "of", "cat", "dog", "."])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>",
        model_max_length=12,
    )
    text = {
        **size,
        "vocab_size": len(words),
        "max_position_embeddings": 12,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text, vision_config={**size, "image_size": 32, "patch_size": 4}, projection_dim=16
        )
    )
    clip.save_pretrained(folder / "clip")
    processor.save_pretrained(folder / "clip")
    fast.save_pretrained(folder / "clip")
    return folder


def test_hugging_face_classifier(local_hf):
    model = equicam.load(f"hf:{local_hf / 'vit'}")
    assert model.classes == ("a", "b", "c")
    layers = json.loads((local_hf / "vit" / "config.json").read_text())["num_hidden_layers"]
    contract(
        model,
        next(n for n, _ in model.module.named_modules() if n.endswith(f"{layers - 1}.layernorm_before")),
        32,
        8,
    )


def test_hugging_face_clip_is_a_zero_shot_classifier(local_hf):
    import transformers

    model = equicam.load(f"hf:{local_hf / 'clip'}", classes=["cat", "dog"])
    assert model.classes == ("cat", "dog")
    whole = transformers.CLIPModel.from_pretrained(local_hf / "clip").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(local_hf / "clip")(
        ["a photo of a cat.", "a photo of a dog."], padding="max_length", return_tensors="pt"
    )
    x = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = whole(pixel_values=x, **tokens).logits_per_image
        assert expected.std() > 1e-3
        torch.testing.assert_close(model.module(x), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(equicam.EquicamError, match="two class names or more"):
        equicam.load(f"hf:{local_hf / 'clip'}")


def test_open_clip_keeps_its_logits():
    import open_clip

    torch.manual_seed(0)
    whole = open_clip.create_model("ViT-S-32-alt").eval()
    state = whole.state_dict()
    classes, templates = ["forest", "river"], ["a satellite photo of {}.", "an aerial view of {}."]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = equicam.load("open_clip:ViT-S-32-alt", weights="random", classes=classes, templates=templates)
    model.module.vision.load_state_dict({k[7:]: v for k, v in state.items() if k.startswith("visual.")})
    tokenize = open_clip.get_tokenizer("ViT-S-32-alt")
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        image = whole.encode_image(x, normalize=True)
        text = [
            whole.encode_text(tokenize([t.format(c) for t in templates]), normalize=True).mean(0)
            for c in classes
        ]
        text = torch.nn.functional.normalize(torch.stack(text), dim=-1)
        expected = whole.logit_scale.exp() * image @ text.T
        assert expected.std() > 1e-3
        torch.testing.assert_close(model.module(x), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "block", "second_norm"),
    [
        ("vit_b_16", "encoder.layers.encoder_layer_11", "ln_2"),
        ("timm:vit_tiny_patch16_224", "blocks.11", "norm2"),
        ("timm:deit_tiny_distilled_patch16_224", "blocks.11", "norm2"),
    ],
)
def test_layers_behind_the_last_attention_are_refused(name, block, second_norm):
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    model = equicam.load(name, weights="random")
    live(model.module)
    for layer in (block, f"{block}.{second_norm}"):
        behind = equicam.wrap(model.module, layer)
        with pytest.raises(
            equicam.EquicamError, match=r"exactly zero at every patch.*try the last block's first LayerNorm"
        ):
            equicam.explain(behind, x, views=1)
    assert_alive(equicam.explain(model, x, views=1).map)


def test_a_head_that_starts_at_zero_is_what_is_told():
    model = equicam.load("vit_b_16", weights="random")
    assert not model.module.heads.head.weight.any()
    with pytest.raises(equicam.EquicamError, match="the model's head needs weights that are not all zero"):
        equicam.explain(model, torch.randn(1, 3, 224, 224), views=1)


def test_fused_attention_makes_no_difference():
    x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    model = equicam.load("timm:vit_tiny_patch16_224", weights="random")
    live(model.module)
    maps = []
    for fused in (True, False):
        for block in model.module.blocks:
            block.attn.fused_attn = fused
        maps.append(equicam.explain(model, x, views=2).map)
    assert_alive(*maps)
    torch.testing.assert_close(maps[0], maps[1], atol=1e-4, rtol=0)


def small_torchvision_vit() -> nn.Module:
    """vit_b_16 with 3 blocks of 48 channels: the same code, a hundredth of the work."""
    return torchvision.models.VisionTransformer(224, 16, 3, 3, 48, 96, num_classes=10).eval()


TRANSFORMERS = {
    "torchvision": lambda hf: equicam.wrap(small_torchvision_vit(), "encoder.layers.encoder_layer_2.ln_1"),
    "timm": lambda hf: equicam.load("timm:vit_tiny_patch16_224", weights="random"),
    "timm distilled": lambda hf: equicam.load("timm:deit_tiny_distilled_patch16_224", weights="random"),
    "open_clip": lambda hf: equicam.load("open_clip:ViT-S-32-alt", weights="random", classes=["a", "b", "c"]),
    "hugging face": lambda hf: equicam.load(f"hf:{hf / 'vit'}"),
    "hugging face clip": lambda hf: equicam.load(f"hf:{hf / 'clip'}", classes=["cat", "dog"]),
}


@pytest.mark.parametrize("source", TRANSFORMERS)
def test_attention_is_recorded_whatever_computes_it_and_everything_put_back(source, local_hf):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TRANSFORMERS[source](local_hf)
    if "open_clip" not in source and "clip" not in source:
        live(model.module)
    side = 32 if "hugging" in source else 224
    coarse = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    x = nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    fused, before = nn.functional.scaled_dot_product_attention, model.module(x)
    before = getattr(before, "logits", before)
    for method in ("rollout", "transformer-attribution", "recipro-cam"):
        e = equicam.explain(model, x, method=method)
        assert_alive(e.map)
        with torch.no_grad():
            expected = before.softmax(1).gather(1, e.target[:, None])[:, 0]
        torch.testing.assert_close(
            e.confidence, expected, atol=1e-4, rtol=1e-3
        )  # the formula written out says the same
        assert nn.functional.scaled_dot_product_attention is fused
    again = model.module(x)
    assert torch.equal(getattr(again, "logits", again), before)


def test_written_out_attention_of_hugging_face_is_the_same(local_hf):
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5))
    model = equicam.load(f"hf:{local_hf / 'vit'}")
    live(model.module)
    for method in ("rollout", "transformer-attribution"):
        maps = []
        for kind in ("sdpa", "eager"):
            model.module.set_attn_implementation(kind)
            maps.append(equicam.explain(model, x, method=method).map)
        assert_alive(*maps)
        torch.testing.assert_close(maps[0], maps[1], atol=1e-4, rtol=0)


def test_the_recorder_is_gone_after_an_exception():
    model = equicam.load("timm:vit_tiny_patch16_224", weights="random")
    live(model.module)
    fused = nn.functional.scaled_dot_product_attention
    model.module.head = nn.Linear(3, 3)
    with pytest.raises(equicam.EquicamError, match="RuntimeError: "):
        equicam.explain(model, torch.randn(1, 3, 224, 224), method="rollout")
    assert nn.functional.scaled_dot_product_attention is fused
