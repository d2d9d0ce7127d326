"""Pictures in, one batch on the model's device out."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from equicam.data.image_files import open_picture, rgb
from equicam.errors import EquicamError
from equicam.readers.finite import finite, not_finite
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD, Model

Picture = Image.Image | str | Path
Images = Tensor | Picture | Sequence[Picture]


def as_batch(model: Model | None, images: Images, *, check: bool = True) -> Float[Tensor, "b c H W"]:
    """A checked batch, float32 or wider, on the model's device; a tensor is taken as preprocessed.

    Whether pixels are finite costs a wait for a device: `check=False` leaves that to the caller.
    """
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
    if check and not finite(x):
        raise not_finite(x)
    return x


def preprocessed(model: Model | None, picture: Image.Image) -> Float[Tensor, "c H W"]:
    """One picture as the model's input."""
    tensor: Tensor = (
        (model.preprocess if model else None) or standard(256, 224, IMAGENET_MEAN, IMAGENET_STD)
    )(rgb(picture))
    return tensor


def picture_bytes(model: Model) -> int:
    """About how many bytes a prepared picture has: as a small one does, or one of 224² where that cannot be prepared."""
    try:
        return 4 * preprocessed(model, Image.new("RGB", (64, 64))).numel()
    except Exception:  # noqa: BLE001  # a preprocessing of the caller's may want other pictures, and say so as it likes
        return 4 * 3 * 224**2


def stacked(tensors: Sequence[Float[Tensor, "c H W"]]) -> Float[Tensor, "b c H W"]:
    """Preprocessed pictures as one batch."""
    shapes = sorted({tuple(t.shape) for t in tensors})
    if len(shapes) != 1:
        raise EquicamError(
            "preprocessing",
            needs="to bring every picture to one size",
            got=shapes,
            fix="a crop or resize in it",
        )
    return torch.stack(list(tensors))


def framed(model: Model, size: tuple[int, int], box: Sequence[float]) -> Float[Tensor, "H W"]:
    """A box of a picture of this size (width, height) as the model sees it: 1 inside, 0 outside, soft at its edge.

    A white box on black goes through the model's own preprocessing, so that whatever resizes and crops is followed.
    """
    width, height = size
    x0, x1 = (round(min(max(v, 0), width)) for v in box[::2])
    y0, y1 = (round(min(max(v, 0), height)) for v in box[1::2])
    drawn = Image.new("RGB", size)
    if x1 > x0 and y1 > y0:
        ImageDraw.Draw(drawn).rectangle((x0, y0, x1 - 1, y1 - 1), fill="white")
    seen = preprocessed(model, drawn)[0].double()
    return (seen * model.std[0] + model.mean[0]).clamp(0, 1)


@cache
def seen_box(model: Model, size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Which part of a picture of this size (width, height) the model sees: x0, y0, x1, y1 in the picture's pixels.

    Ramps along both sides go through the model's own preprocessing; where they come out as no ramp, it is all of it.
    """
    width, height = size
    across = np.broadcast_to(np.linspace(0, 255, width)[None, :], (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    found: list[tuple[float, float]] = []
    for ramp, length, along in ((across, width, 0), (down, height, 1)):
        drawn = Image.fromarray(ramp.round().astype(np.uint8)).convert("RGB")
        seen = preprocessed(model, drawn)[0].double() * model.std[0] + model.mean[0]
        line = seen.mean(along).numpy() * (length - 1)  # the source pixel under each of the model's
        inner = np.arange(len(line))[len(line) // 8 : -(len(line) // 8) or None]  # away from what borders do
        slope, start = np.polyfit(inner, line[inner], 1)
        miss = np.abs(line[inner] - (slope * inner + start)).max() if slope > 0 else np.inf
        if miss > max(1.0, 0.02 * length):
            return 0.0, 0.0, float(width), float(height)
        low, high = start + 0.5 - slope / 2, start + 0.5 + slope * (len(line) - 0.5)
        found.append((float(low), float(high)))
    (x0, x1), (y0, y1) = found
    return x0, y0, x1, y1


def as_pictures(model: Model, x: Float[Tensor, "b c H W"]) -> UInt8[np.ndarray, "b H W 3"]:
    """Preprocessed pictures as people see them: mean and deviation put back, grey as RGB."""
    mean, std = (
        torch.tensor(v, dtype=x.dtype, device=x.device)[:, None, None] for v in (model.mean, model.std)
    )
    shown = ((x * std + mean).clamp(0, 1) * 255).round().byte()
    shown = shown[:, :1].expand(-1, 3, -1, -1) if shown.shape[1] != 3 else shown
    return shown.permute(0, 2, 3, 1).cpu().numpy()


def _stacked(model: Model | None, images: Any) -> Tensor:
    pictures = [images] if isinstance(images, Image.Image | str | Path) else list(images)
    if not pictures or not all(isinstance(p, Image.Image | str | Path) for p in pictures):
        kinds = sorted({type(p).__name__ for p in pictures}) or "an empty list"
        raise EquicamError(
            "images", needs="a tensor, PIL images or paths", got=kinds, fix="torch.stack on tensors"
        )
    return stacked(
        [preprocessed(model, p if isinstance(p, Image.Image) else open_picture(p)) for p in pictures]
    )


@cache
def standard(resize: int, crop: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    """Short side resized, centre cropped, scaled to [0, 1], normalised."""
    from torchvision.transforms import v2

    steps = [v2.Resize(resize), v2.CenterCrop(crop), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*steps, v2.Normalize(mean, std)])
