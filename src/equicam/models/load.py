"""`load`: a ready model by name. The only module that knows the model libraries.

resnet50                         torchvision
timm:vit_small_patch16_224       timm
open_clip:ViT-B-16/openai        open_clip, zero-shot over classes=[…]
hf:google/vit-base-patch16-224   Hugging Face image classifiers, and CLIP models over classes=[…]
models.py:build                  a function of yours that returns a module or what `wrap` returns
embedded                         the small synthetic one in the package
"""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.models.heads import head_name, resize_head
from equicam.models.images import standard_preprocessing
from equicam.models.weights import (
    build_with_weights,
    from_hf_hub,
    from_torch_hub,
    load_weights,
    read_state_dict,
    stored_classes,
)
from equicam.models.wrap import wrap
from equicam.models.zeroshot import TEMPLATES, ZeroShot, require_classes, text_features
from equicam.readers.layout import Layout
from equicam.readers.model import Model, as_layout, layer_name

RANDOM = "random"


@dataclass(frozen=True)
class _Asked:
    """What the caller wants of a source."""

    name: str
    weights: str | Path | None
    classes: Sequence[str] | None
    templates: Sequence[str]
    layer: str | None
    layout: Layout | None
    rectify_weights: bool | None

    @property
    def file(self) -> Path | None:
        """The weights file, where `weights` is one and not the name of published ones."""
        if self.weights is None or self.weights == RANDOM:
            return None
        path = Path(self.weights)
        return path if isinstance(self.weights, Path) or path.suffix or path.exists() else None

    def by_file_only(self) -> None:
        """Refuse the name of published weights, where a source has none to choose from."""
        if self.weights not in (None, RANDOM) and self.file is None:
            raise EquicamError(
                f"weights of {self.name!r}",
                needs='an existing file or "random"',
                got=repr(self.weights),
                fix="its full path",
            )

    def wrapped(self, module: nn.Module, **known: Any) -> Model:
        """The module with what the source knows of it and what the caller has set."""
        found = wrap(
            module.eval(), self.layer, layout=self.layout, rectify_weights=self.rectify_weights, **known
        )
        return found if self.classes is None else replace(found, classes=tuple(self.classes))


def load(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    classes: Sequence[str] | None = None,
    templates: Sequence[str] = TEMPLATES,
    layer: str | None = None,
    layout: Layout | str | None = None,
    rectify_weights: bool | None = None,
    device: str | torch.device | None = None,
) -> Model:
    """A model with its target layer, preprocessing and class names, in eval mode.

    `weights` is a safetensors or state-dict file, the name of published weights ("IMAGENET1K_V2"), or "random";
    without it the published ones come from the ordinary caches or are downloaded.
    """
    name = str(name)
    source, _, rest = name.partition(":")
    build: Callable[[_Asked], Model]
    if ".py:" in name or name.endswith(".py"):
        build, rest = _factory, name
    elif name == "embedded":
        build, rest = _embedded, name
    elif not rest:
        build, rest = _torchvision, name
    elif source in SOURCES:
        build = SOURCES[source]
    else:
        raise EquicamError(
            "a model's source", needs=f"one of {', '.join(SOURCES)}, a file.py:factory or none", got=repr(name),
            fix="a name that `equicam models` lists",
        )  # fmt: skip
    if isinstance(classes, str):
        raise EquicamError(
            "classes", needs="a list of names", got=repr(classes), fix=f"classes=[{classes!r}, …]"
        )
    asked = _Asked(rest, weights, classes, tuple(templates), layer, as_layout(layout), rectify_weights)
    if build is not _torchvision:
        asked.by_file_only()
    if asked.classes is None and asked.file and source not in ("open_clip", "hf"):
        asked = replace(asked, classes=stored_classes(asked.file))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # random weights are the same ones every time
        found = build(asked)
    if device is not None:
        try:
            found.module.to(device)
        except (RuntimeError, AssertionError) as error:
            raise EquicamError(
                "device",
                needs="a device torch can use here",
                got=f"{device!r}: {str(error).splitlines()[0]}",
                fix="cpu",
            ) from error
    return replace(found, name=name)


def _torchvision(asked: _Asked) -> Model:
    from torchvision import models

    names = models.list_models(module=models)
    if asked.name not in names:
        raise _unknown("torchvision model", asked.name, [*names, "embedded"])
    published = models.get_model_weights(asked.name)
    member = _published(asked, published)

    def build(classes: int | None = None) -> nn.Module:
        made: nn.Module = models.get_model(
            asked.name, **({} if classes is None else {"num_classes": classes})
        )
        return made

    if asked.weights == RANDOM:
        module = build()
    elif asked.file:
        module = build_with_weights(build, asked.file)
    else:
        module = from_torch_hub(
            asked.name, lambda: models.get_model(asked.name, weights=member), file=Path(member.url).name
        )
    transform = member.transforms()
    known: dict[str, Any] = {"preprocess": transform, "mean": transform.mean, "std": transform.std}
    if not asked.file:
        known["classes"] = member.meta["categories"]
    return asked.wrapped(module.to(memory_format=torch.channels_last), **known)


def _published(asked: _Asked, published: Any) -> Any:
    """The weights named; else the first published ones, which the paper and most others used."""
    if isinstance(asked.weights, str) and asked.weights != RANDOM and not asked.file:
        if asked.weights not in published.__members__:
            raise _unknown(f"weights of {asked.name}", asked.weights, list(published.__members__))
        return published[asked.weights]
    return next(iter(published))


def _timm(asked: _Asked) -> Model:
    import timm
    from timm.data import create_transform, infer_imagenet_subset, resolve_model_data_config
    from timm.data.imagenet_info import ImageNetInfo

    arch, _, tag = asked.name.partition(".")
    if not timm.is_model(arch):
        raise _unknown("timm model", asked.name, timm.list_models())
    if tag and asked.name not in timm.list_pretrained(f"{arch}.*"):
        raise _unknown(f"weights of timm's {arch}", asked.name, timm.list_pretrained(f"{arch}.*"))

    def build(classes: int | None = None, *, pretrained: bool = False) -> nn.Module:
        kwargs = {} if classes is None else {"num_classes": classes}
        made: nn.Module = timm.create_model(asked.name, pretrained=pretrained, **kwargs)
        return made

    if asked.file:
        module = build_with_weights(build, asked.file)
    elif asked.weights == RANDOM:
        module = build()
    else:
        module = from_hf_hub(asked.name, lambda: build(pretrained=True))
    if not getattr(module, "num_classes", 1):
        raise EquicamError(
            f"{asked.name!r}",
            needs="a classifier",
            got="a backbone without classes",
            fix="weights=FILE with a head, or wrap",
        )
    data = resolve_model_data_config(module)
    subset = None if asked.file else infer_imagenet_subset(module)
    known: dict[str, Any] = {
        "preprocess": create_transform(**data, is_training=False),
        "example": torch.zeros(1, *data["input_size"]),
        "mean": data["mean"],
        "std": data["std"],
    }
    if subset:
        info = ImageNetInfo(subset)
        known["classes"] = [info.index_to_description(i) for i in range(info.num_classes())]
    return asked.wrapped(module.to(memory_format=torch.channels_last), **known)


def _open_clip(asked: _Asked) -> Model:
    open_clip = _extra("open_clip", "clip")
    arch, _, tag = asked.name.partition("/")
    if arch not in open_clip.list_models():
        raise _unknown("open_clip architecture", arch, open_clip.list_models())
    classes = require_classes(asked.name, asked.classes)
    pretrained = None if asked.weights else tag or None
    if pretrained is None and asked.weights is None:
        tags = open_clip.list_pretrained_tags_by_model(arch)
        raise EquicamError(
            f"open_clip {arch!r}",
            needs="pretrained weights",
            got="none",
            fix=" or ".join(f"{arch}/{t}" for t in tags[:3]),
        )
    model, _, preprocess = from_hf_hub(
        asked.name, lambda: open_clip.create_model_and_transforms(arch, pretrained=pretrained)
    )
    if asked.file:
        load_weights(model, read_state_dict(asked.file), asked.file)
    model.eval()
    tokenize = open_clip.get_tokenizer(arch)
    text = text_features(lambda prompts: model.encode_text(tokenize(prompts)), classes, asked.templates)
    zero_shot = ZeroShot(model.visual, text, scale=model.logit_scale.exp(), bias=model.logit_bias)
    mean, std = model.visual.image_mean, model.visual.image_std
    return asked.wrapped(zero_shot, preprocess=preprocess, mean=mean, std=std)


def _hf(asked: _Asked) -> Model:
    transformers = _extra("transformers", "hf")

    def fetch() -> tuple[Any, Any, Any, Any]:
        config = transformers.AutoConfig.from_pretrained(asked.name)
        processor = transformers.AutoImageProcessor.from_pretrained(asked.name)
        zero_shot = hasattr(config, "text_config")
        kind = transformers.AutoModel if zero_shot else transformers.AutoModelForImageClassification
        fresh = asked.weights == RANDOM or asked.file
        model = kind.from_config(config) if fresh else kind.from_pretrained(asked.name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(asked.name) if zero_shot else None
        return config, processor, model, tokenizer

    config, processor, model, tokenizer = from_hf_hub(asked.name, fetch)
    if asked.file:
        load_weights(model, read_state_dict(asked.file), asked.file)
    model.eval()

    def preprocess(picture: Image.Image) -> Tensor:
        pixels: Tensor = processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return pixels

    known = {"preprocess": preprocess, "mean": processor.image_mean, "std": processor.image_std}
    if tokenizer is None:
        names = [str(config.id2label[i]) for i in range(config.num_labels)]
        return asked.wrapped(model, **known, classes=names)
    classes = require_classes(asked.name, asked.classes)

    def encode(prompts: list[str]) -> Tensor:
        tokens = tokenizer(prompts, padding="max_length", truncation=True, return_tensors="pt")
        return _pooled(model.get_text_features(**tokens))

    text = text_features(encode, classes, asked.templates)
    vision = HfVision(model.vision_model, getattr(model, "visual_projection", nn.Identity()))
    scale, bias = model.logit_scale.exp(), getattr(model, "logit_bias", None)
    return asked.wrapped(ZeroShot(vision, text, scale=scale, bias=bias), **known)


class HfVision(nn.Module):
    """The image half of a Hugging Face CLIP model."""

    def __init__(self, tower: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.tower = tower
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """Image features in the shared space."""
        features: Tensor = self.projection(self.tower(pixel_values=x).pooler_output)
        return features


def _factory(asked: _Asked) -> Model:
    path, _, function = asked.name.rpartition(":") if ".py:" in asked.name else (asked.name, "", "")
    file = Path(path)
    if not function or not file.is_file():
        raise EquicamError(
            "a factory",
            needs="an existing file.py and a function in it",
            got=repr(asked.name),
            fix="models.py:build",
        )
    spec = importlib.util.spec_from_file_location(f"equicam_factory_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise EquicamError("a factory", needs="a Python file", got=repr(path), fix="models.py:build")
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    build = getattr(code, function, None)
    if not callable(build):
        offered = [n for n, v in vars(code).items() if callable(v) and not n.startswith("_")]
        raise _unknown(f"factory in {file.name}", function, offered)
    made = build()
    if not isinstance(made, Model | nn.Module):
        raise EquicamError(
            f"the factory {function!r}", needs="to return a module or what equicam.wrap returns",
            got=type(made).__name__, fix="return equicam.wrap(module)",
        )  # fmt: skip
    module = made.module if isinstance(made, Model) else made
    if asked.file:
        given = read_state_dict(asked.file)
        last = (
            f"{head_name(module)}.weight" if any(isinstance(m, nn.Linear) for m in module.modules()) else ""
        )
        if last in given:
            resize_head(module, given[last].shape[0])
        load_weights(module, given, asked.file)
    if isinstance(made, nn.Module):
        return asked.wrapped(module.to(memory_format=torch.channels_last))
    set_here: dict[str, Any] = {
        "layer": asked.layer and layer_name(module, asked.layer),
        "layout": asked.layout,
        "rectify_weights": asked.rectify_weights,
        "classes": asked.classes and tuple(asked.classes),
    }
    module.eval()
    return replace(made, **{key: value for key, value in set_here.items() if value is not None})


def _embedded(asked: _Asked) -> Model:
    from equicam.models.embedded import CLASSES, MEAN, STD, EmbeddedNet, embedded

    module = EmbeddedNet() if asked.weights == RANDOM else embedded()
    if asked.file:
        load_weights(module, read_state_dict(asked.file), asked.file)
    preprocess = standard_preprocessing(EmbeddedNet.image_size, EmbeddedNet.image_size, MEAN, STD)
    return asked.wrapped(module, preprocess=preprocess, mean=MEAN, std=STD, classes=CLASSES)


def names() -> list[str]:
    """The embedded model, and every torchvision and timm name `load` knows, as it wants them."""
    import timm
    from torchvision import models

    return ["embedded", *models.list_models(module=models), *(f"timm:{name}" for name in timm.list_models())]


SOURCES: dict[str, Callable[[_Asked], Model]] = {"timm": _timm, "open_clip": _open_clip, "hf": _hf}


def _extra(package: str, extra: str) -> Any:
    if importlib.util.find_spec(package) is None:
        raise EquicamError(
            "this source",
            needs=f"the package {package}",
            got="no such package here",
            fix=f"pip install 'equicam[{extra}]'",
        )
    return importlib.import_module(package)


def _pooled(found: Any) -> Tensor:
    """Text features, whichever way this version of transformers hands them out."""
    pooled: Tensor = found if isinstance(found, Tensor) else found.pooler_output
    return pooled


def _unknown(what: str, name: str, known: Sequence[str]) -> EquicamError:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)[:3]
    return EquicamError(
        what, needs="a known name", got=repr(name), fix=" or ".join(map(repr, close)) or "another file"
    )
