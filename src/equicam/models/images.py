"""Pictures in, one batch on the model's device out."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from equicam.data.pictures import open_picture, rgb
from equicam.errors import EquicamError
from equicam.models.model import IMAGENET_MEAN, IMAGENET_STD, Model

Picture = Image.Image | str | Path
Images = Tensor | Picture | Sequence[Picture]


def as_batch(model: Model | None, images: Images) -> Float[Tensor, "b c H W"]:
    """A checked batch, float32 or wider, on the model's device; a tensor is taken as preprocessed."""
    x = images if isinstance(images, Tensor) else _stacked(model, images)
    if x.ndim != 4 or 0 in x.shape or not x.is_floating_point():
        raise EquicamError(
            "images", needs="a floating-point batch [b, c, H, W], PIL images or paths",
            got=f"a {str(x.dtype).removeprefix('torch.')} tensor {tuple(x.shape)}",
            fix="x[None] for one picture, or the PIL image itself",
        )  # fmt: skip
    device, dtype = (x.device, x.dtype) if model is None else (model.device, model.dtype)
    x = x.to(device, torch.promote_types(dtype, torch.float32))
    x = x.detach().clone() if x.is_inference() else x.detach()
    if not bool(x.isfinite().all()):
        bad = (~x.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
        raise EquicamError(
            "images", needs="finite pixels", got=f"NaN or infinity in image {bad}", fix="leaving it out"
        )
    return x


def preprocessed(model: Model | None, picture: Image.Image) -> Float[Tensor, "c H W"]:
    """One picture as the model's input."""
    tensor: Tensor = (
        (model.preprocess if model else None) or standard(256, 224, IMAGENET_MEAN, IMAGENET_STD)
    )(rgb(picture))
    return tensor


def _stacked(model: Model | None, images: Any) -> Tensor:
    pictures = [images] if isinstance(images, Image.Image | str | Path) else list(images)
    if not pictures or not all(isinstance(p, Image.Image | str | Path) for p in pictures):
        kinds = sorted({type(p).__name__ for p in pictures}) or "an empty list"
        raise EquicamError(
            "images", needs="a tensor, PIL images or paths", got=kinds, fix="torch.stack on tensors"
        )
    return torch.stack(
        [preprocessed(model, p if isinstance(p, Image.Image) else open_picture(p)) for p in pictures]
    )


@cache
def standard(resize: int, crop: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    """Short side resized, centre cropped, scaled to [0, 1], normalised."""
    from torchvision.transforms import v2

    steps = [v2.Resize(resize), v2.CenterCrop(crop), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*steps, v2.Normalize(mean, std)])
