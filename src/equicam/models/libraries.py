"""Models from torchvision, timm, open_clip, Hugging Face and this package: `Request` → `Model`."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from equicam.errors import EquicamError
from equicam.models.images import standard_preprocessing
from equicam.models.layers import wrap
from equicam.models.weights import (
    build_with_weights,
    from_hf_hub,
    from_torch_hub,
    load_weights,
    read_state_dict,
)
from equicam.readers.layout import Layout
from equicam.readers.model import Model
from equicam.readers.names import RANDOM, Task, weights_file


@dataclass(frozen=True)
class Request:
    """The model a caller wants: its name within the library, its weights and the overrides."""

    name: str
    weights: str | Path | None
    classes: Sequence[str] | None
    templates: Sequence[str]
    layer: str | None
    layout: Layout | None
    rectify_weights: bool | None
    task: Task | None = None

    @property
    def file(self) -> Path | None:
        """The weights file, if `weights` is one and not the name of published weights."""
        return weights_file(self.weights)

    @property
    def published(self) -> str | None:
        """The name of published weights, if `weights` is one."""
        return None if self.weights in (None, RANDOM) or self.file else str(self.weights)

    def build(
        self, build: Callable[[int | None], nn.Module], published: Callable[[], nn.Module]
    ) -> tuple[nn.Module, bool]:
        """A classifier with the weights, and whether its classes are those of the published ones."""
        if self.file:
            return build_with_weights(build, self.file)
        return build(None) if self.weights == RANDOM else published(), True

    def fill(self, module: nn.Module) -> None:
        """Copy the weights of the file, if there is one, into the module, which is then in evaluation mode."""
        if self.file:
            load_weights(module, read_state_dict(self.file), self.file)
        module.eval()

    def wrap(self, module: nn.Module, *, layer: str | None = None, **defaults: Any) -> Model:
        """The module with the library's defaults and the caller's overrides."""
        defaults |= {"layout": self.layout, "rectify_weights": self.rectify_weights, "task": self.task}
        model = wrap(module.eval(), self.layer or layer, **defaults)
        return model if self.classes is None else replace(model, classes=tuple(self.classes))


def unknown_name(kind: str, name: str, known: Sequence[str]) -> EquicamError:
    """The error for a name that is not known, with the closest known ones."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
    return EquicamError(kind, "a known name", repr(name), " or ".join(map(repr, close)) or "another file")


TEMPLATES = ("a photo of a {}.",)


class ZeroShot(nn.Module):
    """Logits scale · cos(image, text of class) + bias, with text features computed once."""

    text: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(
        self, vision: nn.Module, text: Float[Tensor, "y d"], *, scale: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.vision = vision
        self.register_buffer("text", text)
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("bias", torch.zeros_like(self.scale) if bias is None else bias.detach().clone())

    def forward(self, x: Float[Tensor, "n c H W"]) -> Float[Tensor, "m y"]:
        """Class logits with the scale the model was trained with."""
        return self.scale * normalize(self.vision(x), dim=-1) @ self.text.T + self.bias


def _text_features(
    encode: Callable[[list[str]], Float[Tensor, "m d"]], classes: Sequence[str], templates: Sequence[str]
) -> Float[Tensor, "y d"]:
    """One unit vector per class: the normalised mean of its normalised prompts; `_` in a name reads as a space."""
    wrong = [t for t in templates if "{}" not in t]
    if wrong or not templates:
        raise EquicamError("templates", "a {} for the class name", wrong or templates, repr(TEMPLATES[0]))
    with torch.no_grad():
        words = [name.replace("_", " ") for name in classes]
        prompts = [normalize(encode([t.format(name) for t in templates]), dim=-1).mean(0) for name in words]
    return normalize(torch.stack(prompts), dim=-1)


def _require_classes(name: str, classes: Sequence[str] | None) -> tuple[str, ...]:
    """The class names, which a zero-shot model needs."""
    if classes is None or isinstance(classes, str) or len(classes) < 2:
        fix = 'classes=["forest", "river"]'
        raise EquicamError(f"the zero-shot model {name!r}", "two class names or more", classes, fix)
    return tuple(classes)


EMBEDDED_WEIGHTS = Path(__file__).with_name("embedded.safetensors")


class EmbeddedNet(nn.Module):
    """A small residual network for the synthetic patches of `scripts/synthetic.py`, for demonstrations and tests.

    `scripts/embedded_model.py` trains it on synthetic images alone: it is not for clinical use.
    """

    image_size = 96
    classes = ("no tumour in the centre", "tumour in the centre")
    mean, std = (0.77, 0.56, 0.71), (0.15, 0.13, 0.09)  # of the channels of the patches, in [0, 1]

    def __init__(self) -> None:
        super().__init__()
        convolution = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.stem = nn.Sequential(convolution, nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = _stage(16, 16, stride=1)
        self.layer2 = _stage(16, 32, stride=2)
        self.layer3 = _stage(32, 48, stride=2)
        self.layer4 = _stage(48, 64, stride=1)  # stride 1 keeps the grid fine: 12×12
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, len(self.classes))

    def forward(self, x: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "m 2"]:
        """Logits of `classes`."""
        x = self.layer4(self.layer3(self.layer2(self.layer1(self.stem(x)))))
        return cast(Tensor, self.fc(self.avgpool(x).flatten(1)))


class _BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut: the identity, or a 1×1 convolution where the shape changes."""

    def __init__(self, width_in: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or width_in != width:
            convolution = nn.Conv2d(width_in, width, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(width))

    def forward(self, x: Float[Tensor, "b k h w"]) -> Float[Tensor, "b l i j"]:
        """ReLU(F(x) + shortcut(x))."""
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return cast(Tensor, self.relu(out + self.downsample(x)))


def _stage(width_in: int, width: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(_BasicBlock(width_in, width, stride=stride), _BasicBlock(width, width, stride=1))


def from_package(request: Request) -> Model:
    """The embedded model."""
    module = EmbeddedNet()
    file = request.file or EMBEDDED_WEIGHTS
    if request.weights != RANDOM:
        load_weights(module, read_state_dict(file), file)
    size, mean, std = module.image_size, module.mean, module.std
    preprocess = standard_preprocessing(size, size, mean, std)
    # stating the layer that `choose_layer` finds saves a forward pass in every `load`
    return request.wrap(
        module, layer="layer4", preprocess=preprocess, mean=mean, std=std, classes=module.classes
    )


def _number_of(classes: int | None) -> dict[str, int]:
    return {} if classes is None else {"num_classes": classes}


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

    def build(classes: int | None, **options: Any) -> nn.Module:
        return cast(nn.Module, models.get_model(request.name, **options, **_number_of(classes)))

    with_published = partial(build, None, weights=published)
    module, own_head = request.build(
        build, lambda: from_torch_hub(request.name, with_published, file=Path(published.url).name)
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

    def build(classes: int | None, *, pretrained: bool = False) -> nn.Module:
        options: dict[str, Any] = {"pretrained": pretrained, **_number_of(classes)}
        return cast(nn.Module, timm.create_model(request.name, **options))

    with_published = partial(build, None, pretrained=True)
    module, own_head = request.build(build, lambda: from_hf_hub(request.name, with_published))
    if not getattr(module, "num_classes", 1):
        got, fix = "a backbone without classes", "weights=FILE with a head, or wrap"
        raise EquicamError(f"{request.name!r}", "a classifier", got, fix)
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
    classes = _require_classes(request.name, request.classes)
    pretrained = None if request.weights else tag or None
    tags = open_clip.list_pretrained_tags_by_model(arch)
    if pretrained is not None and pretrained not in tags:  # open_clip would take it for a file
        raise unknown_name(f"weights of open_clip's {arch}", pretrained, tags)
    if pretrained is None and request.weights is None:
        fix = " or ".join(f"{arch}/{t}" for t in tags[:3])
        raise EquicamError(f"open_clip {arch!r}", "pretrained weights", "none", fix)
    model, _, preprocess = from_hf_hub(
        request.name, lambda: open_clip.create_model_and_transforms(arch, pretrained=pretrained)
    )
    request.fill(model)
    tokenize = open_clip.get_tokenizer(arch)
    text = _text_features(lambda prompts: model.encode_text(tokenize(prompts)), classes, request.templates)
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
        untrained = request.weights == RANDOM or request.file
        model = kind.from_config(config, **safe) if untrained else kind.from_pretrained(request.name, **safe)
        tokenizer = transformers.AutoTokenizer.from_pretrained(request.name, **safe) if zero_shot else None
        return config, processor, model, tokenizer

    config, processor, model, tokenizer = from_hf_hub(request.name, fetch)
    request.fill(model)

    def preprocess(image: Image.Image) -> Tensor:
        return cast(Tensor, processor(images=image, return_tensors="pt")["pixel_values"][0])

    defaults = {"preprocess": preprocess, "mean": processor.image_mean, "std": processor.image_std}
    if tokenizer is None:
        names = [str(config.id2label[i]) for i in range(config.num_labels)]
        return request.wrap(model, **defaults, classes=names)
    classes = _require_classes(request.name, request.classes)

    def encode(prompts: list[str]) -> Tensor:
        tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
        features = model.get_text_features(**tokens)
        # some versions of transformers return the tensor, others an object that contains it
        return cast(Tensor, getattr(features, "pooler_output", features))

    text = _text_features(encode, classes, request.templates)
    vision = _HfVision(model.vision_model, getattr(model, "visual_projection", nn.Identity()))
    scale, bias = model.logit_scale.exp(), getattr(model, "logit_bias", None)
    return request.wrap(ZeroShot(vision, text, scale=scale, bias=bias), **defaults)


class _HfVision(nn.Module):
    """The image encoder of a Hugging Face CLIP model."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """Image features in the shared space."""
        return cast(Tensor, self.projection(self.tower(pixel_values=x).pooler_output))


def _import(package: str, *, extra: str) -> Any:
    if importlib.util.find_spec(package) is None:
        needs, fix = f"the package {package}", f"pip install 'equicam[{extra}]'"
        raise EquicamError("this source", needs, "no such package here", fix)
    return importlib.import_module(package)
