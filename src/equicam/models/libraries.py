"""Models from torchvision, timm, open_clip and Hugging Face: `Request` → `Model`."""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.models.request import Request, unknown_name
from equicam.models.weights import (
    build_with_weights,
    from_hf_hub,
    from_torch_hub,
    load_weights,
    read_state_dict,
)
from equicam.models.zeroshot import ZeroShot, require_classes, text_features
from equicam.readers.model import Model


def from_torchvision(request: Request) -> Model:
    """A torchvision classifier; without `weights`, the first published ones, which the paper used too."""
    from torchvision import models

    names = models.list_models(module=models)
    if request.name not in names:
        raise unknown_name("torchvision model", request.name, [*names, "embedded"])
    offered = models.get_model_weights(request.name)
    chosen = next(iter(offered.__members__)) if request.published is None else request.published
    if chosen not in offered.__members__:
        raise unknown_name(f"weights of {request.name}", chosen, list(offered.__members__))
    published = offered[chosen]

    def build(classes: int | None = None) -> nn.Module:
        options = {} if classes is None else {"num_classes": classes}
        built: nn.Module = models.get_model(request.name, **options)
        return built

    own_head = True
    if request.random:
        module = build()
    elif request.file:
        module, own_head = build_with_weights(build, request.file)
    else:
        module = from_torch_hub(
            request.name,
            lambda: models.get_model(request.name, weights=published),
            file=Path(published.url).name,
        )
    transform = published.transforms()
    defaults: dict[str, Any] = {"preprocess": transform, "mean": transform.mean, "std": transform.std}
    if own_head:
        defaults["classes"] = published.meta["categories"]
    return request.wrap(module.to(memory_format=torch.channels_last), **defaults)


def from_timm(request: Request) -> Model:
    """A timm classifier."""
    import timm
    from timm.data import create_transform, infer_imagenet_subset, resolve_model_data_config
    from timm.data.imagenet_info import ImageNetInfo

    arch, _, tag = request.name.partition(".")
    if not timm.is_model(arch):
        raise unknown_name("timm model", request.name, timm.list_models())
    if tag and request.name not in timm.list_pretrained(f"{arch}.*"):
        raise unknown_name(f"weights of timm's {arch}", request.name, timm.list_pretrained(f"{arch}.*"))

    def build(classes: int | None = None, *, pretrained: bool = False) -> nn.Module:
        options = {} if classes is None else {"num_classes": classes}
        built: nn.Module = timm.create_model(request.name, pretrained=pretrained, **options)
        return built

    own_head = True
    if request.file:
        module, own_head = build_with_weights(build, request.file)
    elif request.random:
        module = build()
    else:
        module = from_hf_hub(request.name, lambda: build(pretrained=True))
    if not getattr(module, "num_classes", 1):
        raise EquicamError(
            f"{request.name!r}",
            needs="a classifier",
            got="a backbone without classes",
            fix="weights=FILE with a head, or wrap",
        )
    config = resolve_model_data_config(module)
    subset = infer_imagenet_subset(module) if own_head else None
    defaults: dict[str, Any] = {
        "preprocess": create_transform(**config, is_training=False),
        "example": torch.zeros(1, *config["input_size"]),
        "mean": config["mean"],
        "std": config["std"],
    }
    if subset:
        info = ImageNetInfo(subset)
        defaults["classes"] = [info.index_to_description(i) for i in range(info.num_classes())]
    return request.wrap(module.to(memory_format=torch.channels_last), **defaults)


def from_open_clip(request: Request) -> Model:
    """An open_clip model as a zero-shot classifier."""
    open_clip = _import("open_clip", extra="clip")
    arch, _, tag = request.name.partition("/")
    if arch not in open_clip.list_models():
        raise unknown_name("open_clip architecture", arch, open_clip.list_models())
    classes = require_classes(request.name, request.classes)
    pretrained = None if request.weights else tag or None
    tags = open_clip.list_pretrained_tags_by_model(arch)
    if pretrained is not None and pretrained not in tags:  # open_clip would take it for a file
        raise unknown_name(f"weights of open_clip's {arch}", pretrained, tags)
    if pretrained is None and request.weights is None:
        raise EquicamError(
            f"open_clip {arch!r}",
            needs="pretrained weights",
            got="none",
            fix=" or ".join(f"{arch}/{t}" for t in tags[:3]),
        )
    model, _, preprocess = from_hf_hub(
        request.name, lambda: open_clip.create_model_and_transforms(arch, pretrained=pretrained)
    )
    if request.file:
        load_weights(model, read_state_dict(request.file), request.file)
    model.eval()
    tokenize = open_clip.get_tokenizer(arch)
    text = text_features(lambda prompts: model.encode_text(tokenize(prompts)), classes, request.templates)
    zero_shot = ZeroShot(model.visual, text, scale=model.logit_scale.exp(), bias=model.logit_bias)
    mean, std = model.visual.image_mean, model.visual.image_std
    return request.wrap(zero_shot, preprocess=preprocess, mean=mean, std=std)


def from_hf(request: Request) -> Model:
    """A Hugging Face image classifier, or a CLIP model as a zero-shot classifier."""
    transformers = _import("transformers", extra="hf")

    def fetch() -> tuple[Any, Any, Any, Any]:
        safe = {"trust_remote_code": False}  # code of a repository is never executed
        config = transformers.AutoConfig.from_pretrained(request.name, **safe)
        processor = transformers.AutoImageProcessor.from_pretrained(request.name, **safe)
        zero_shot = hasattr(config, "text_config")
        kind = transformers.AutoModel if zero_shot else transformers.AutoModelForImageClassification
        untrained = request.random or request.file
        model = kind.from_config(config, **safe) if untrained else kind.from_pretrained(request.name, **safe)
        tokenizer = transformers.AutoTokenizer.from_pretrained(request.name, **safe) if zero_shot else None
        return config, processor, model, tokenizer

    config, processor, model, tokenizer = from_hf_hub(request.name, fetch)
    if request.file:
        load_weights(model, read_state_dict(request.file), request.file)
    model.eval()

    def preprocess(image: Image.Image) -> Tensor:
        pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels

    defaults = {"preprocess": preprocess, "mean": processor.image_mean, "std": processor.image_std}
    if tokenizer is None:
        names = [str(config.id2label[i]) for i in range(config.num_labels)]
        return request.wrap(model, **defaults, classes=names)
    classes = require_classes(request.name, request.classes)

    def encode(prompts: list[str]) -> Tensor:
        tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
        features = model.get_text_features(**tokens)
        # some versions of transformers return the tensor, others an object that contains it
        pooled: Tensor = features if isinstance(features, Tensor) else features.pooler_output
        return pooled

    text = text_features(encode, classes, request.templates)
    vision = HfVision(model.vision_model, getattr(model, "visual_projection", nn.Identity()))
    scale, bias = model.logit_scale.exp(), getattr(model, "logit_bias", None)
    return request.wrap(ZeroShot(vision, text, scale=scale, bias=bias), **defaults)


class HfVision(nn.Module):
    """The image encoder of a Hugging Face CLIP model."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """Image features in the shared space."""
        features: Tensor = self.projection(self.tower(pixel_values=x).pooler_output)
        return features


def _import(package: str, *, extra: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise EquicamError(
            "this source",
            needs=f"the package {package}",
            got="no such package here",
            fix=f"pip install 'equicam[{extra}]'",
        )
    return importlib.import_module(package)
