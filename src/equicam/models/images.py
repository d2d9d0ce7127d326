"""From images to a batch on the model's device, and from a batch back to images that can be displayed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw
from torch import Tensor

from equicam.errors import EquicamError
from equicam.images.arrow_streams import refuse_in_memory
from equicam.images.formats import to_rgb
from equicam.images.items import Box, open_image
from equicam.readers.failures import finite, finite_images, named_failure, not_finite
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD, Model

ImageLike = Image.Image | str | Path | np.ndarray
Images = Tensor | ImageLike | Sequence[ImageLike | Tensor]
CHANNELS = (1, 3, 4)
"""Of pixels: grey, RGB, RGB with transparency."""


def as_batch(model: Model | None, images: Images, *, check: bool = True) -> Float[Tensor, "b c H W"]:
    """A checked batch, float32 or wider, on the model's device; a tensor counts as already preprocessed.

    The check for NaN and infinity waits for the device; `check=False` leaves it to the caller.
    """
    x = images
    if not isinstance(x, Tensor):
        x = stack_images([preprocess_image(model, image) for image in open_images(images)])
    if x.ndim != 4 or 0 in x.shape or not x.is_floating_point():
        raise EquicamError(
            "images", "a floating-point batch [b, c, H, W], 8-bit pixels, PIL images or paths",
            f"a {str(x.dtype).removeprefix('torch.')} tensor {tuple(x.shape)}",
            "x[None] for one image, or the PIL image itself",
        )  # fmt: skip
    device, dtype = (x.device, x.dtype) if model is None else (model.device, model.dtype)
    x = x.to(device, torch.promote_types(dtype, torch.float32))
    x = x.detach().clone() if x.is_inference() else x.detach()
    if check and not finite(x):
        raise not_finite(finite_images(x))
    return x


def read_arrays(images: Any) -> Any:
    """What the caller gave, with 8-bit pixels as PIL images and an array of floats as a tensor, which is preprocessed."""
    if isinstance(images, np.ndarray) and np.issubdtype(images.dtype, np.floating):
        return _preprocessed(images)
    if isinstance(images, np.ndarray | Tensor):
        return _pixels(images) if _is_8_bit(images) or isinstance(images, np.ndarray) else images
    if isinstance(images, list | tuple) and any(map(_is_8_bit, images)):
        return [image for one in images for image in (_pixels(one) if _is_8_bit(one) else [one])]
    return images


def _is_8_bit(one: Any) -> bool:
    return isinstance(one, np.ndarray | Tensor) and one.dtype in (np.uint8, torch.uint8)


def _preprocessed(array: np.ndarray) -> Float[Tensor, "b c H W"]:
    shape = array.shape
    if len(shape) != 4 or (shape[-1] in CHANNELS and shape[1] not in CHANNELS):
        raise EquicamError(
            "images", "8-bit pixels, or preprocessed floats [b, c, H, W]", f"an array of {array.dtype} {shape}",
            "images.astype(np.uint8) for pixels from 0 to 255, (255 * images).round().astype(np.uint8) for pixels in [0, 1]; they are preprocessed like image files",
        )  # fmt: skip
    return torch.from_numpy(np.ascontiguousarray(array))


def _pixels(given: np.ndarray | Tensor) -> list[Image.Image]:
    """8-bit pixels as images. Channels are last in arrays and first in tensors, unless only the other way fits."""
    array, last_first = (given.cpu().numpy(), False) if isinstance(given, Tensor) else (given, True)
    batch = array[None, ..., None] if array.ndim == 2 else array if array.ndim == 4 else array[None]
    first, last = (batch.shape[axis] in CHANNELS for axis in (1, -1))
    if array.dtype != np.uint8 or batch.ndim != 4 or 0 in batch.shape or not (first or last):
        raise EquicamError(
            "images", "8-bit pixels [H, W, 3], [b, H, W, 3] or [b, 3, H, W]", f"{array.dtype} {tuple(array.shape)}",
            "pixels from 0 to 255 as np.uint8, or preprocessed floats [b, c, H, W]; values above 255 need a scale of your choice",
        )  # fmt: skip
    if not last or (first and not last_first and array.ndim > 2):
        batch = batch.transpose(0, 2, 3, 1)
    batch = batch[..., 0] if batch.shape[-1] == 1 else batch
    return [Image.fromarray(np.ascontiguousarray(one)) for one in batch]


def open_images(images: Any) -> Iterator[Image.Image]:
    """PIL images of what the caller gave."""
    kinds = (Image.Image, str, Path)
    refuse_in_memory(images, "images")
    images = [images] if isinstance(images, kinds) else as_list(images)
    if not images or not all(isinstance(image, kinds) for image in images):
        got = ", ".join(sorted({_kind(image) for image in images})) or "an empty list"
        fix = "a path"
        if any(isinstance(image, np.ndarray) for image in images):
            fix = "np.stack on preprocessed arrays [c, H, W] of one size, or pixels from 0 to 255 as np.uint8"
        elif any(isinstance(image, Tensor) for image in images):
            fix = "torch.stack on tensors"
        raise EquicamError("images", "a tensor, arrays of 8-bit pixels, PIL images or paths", got, fix)
    return (image if isinstance(image, Image.Image) else open_image(image) for image in images)


def as_list(images: Any) -> list[Any]:
    """The images of anything that can be iterated."""
    if not isinstance(images, Iterable):
        raise EquicamError(
            "images", "a tensor, arrays of 8-bit pixels, PIL images or paths", type(images).__name__, "a path"
        )
    return list(images)


def _kind(image: Any) -> str:
    """The type of something, and of the values of an array."""
    kind = "array" if isinstance(image, np.ndarray) else type(image).__name__
    return f"{kind} of {image.dtype}" if isinstance(image, np.ndarray | Tensor) else kind


def stack_images(tensors: Sequence[Float[Tensor, "c H W"]]) -> Float[Tensor, "b c H W"]:
    """Preprocessed images as one batch."""
    require_one_size(tensors)
    return torch.stack(list(tensors))


def require_one_size(tensors: Sequence[Float[Tensor, "c H W"]]) -> None:
    """Refuse images that differ in size."""
    shapes = sorted({tuple(t.shape) for t in tensors})
    if len(shapes) != 1:
        raise EquicamError(
            "preprocessing", "to bring every image to one size", shapes, "a crop or resize in it"
        )


def preprocess_image(model: Model | None, image: Image.Image) -> Float[Tensor, "c H W"]:
    """One image as the model's input."""
    preprocess, rgb = preprocessing_of(model), to_rgb(image)
    with preprocessing_failure(rgb):
        found = preprocess(rgb)
    if not isinstance(found, Tensor) or found.ndim != 3:
        raise EquicamError(
            "the model's preprocessing", "to return a tensor [c, H, W]",
            f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__,
            "torchvision.transforms.v2 with PILToTensor, or torch.from_numpy on an array [c, H, W]",
        )  # fmt: skip
    return found


def preprocessing_failure(image: Image.Image) -> AbstractContextManager[None]:
    """Names an exception out of the preprocessing of this image."""
    needs = f"to take an image of {image.width}×{image.height}"
    return named_failure("the model's preprocessing", needs=needs)


def preprocessing_of(model: Model | None) -> Any:
    """The model's preprocessing; ImageNet's, where it has none of its own."""
    preprocess = model.preprocess if model else None
    return preprocess or standard_preprocessing(256, 224, IMAGENET_MEAN, IMAGENET_STD)


@cache
def standard_preprocessing(
    resize: int, crop: int, mean: tuple[float, ...], std: tuple[float, ...], interpolation: str = "bilinear"
) -> Any:
    """Resize the short side, crop the centre, scale to [0, 1], normalise."""
    from torchvision.transforms import InterpolationMode, v2

    return _compose([v2.Resize(resize, InterpolationMode(interpolation)), v2.CenterCrop(crop)], mean, std)


def training_transform(model: Model, size: int) -> Any:
    """A random resized crop and a random flip, then the scaling and normalisation of the model's preprocessing."""
    from torchvision.transforms import v2

    geometry = [v2.RandomResizedCrop(size, scale=(0.5, 1.0)), v2.RandomHorizontalFlip()]
    return _compose(geometry, model.mean, model.std)


def _compose(geometry: list[Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    from torchvision.transforms import v2

    values = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    return v2.Compose([*geometry, *values])


def input_bytes(model: Model) -> int:
    """Approximate bytes of one preprocessed image; 224×224 is assumed where a small test image is refused."""
    try:
        return 4 * preprocess_image(model, Image.new("RGB", (64, 64))).numel()
    except Exception:  # noqa: BLE001  # a custom preprocessing may refuse the test image with any exception
        return 4 * 3 * 224**2


def box_mask(model: Model, size: tuple[int, int], box: Sequence[float]) -> Float[Tensor, "H W"]:
    """A box in an image of this size (width, height) as a mask of the model's input: 1 inside, 0 outside.

    A white box on black passes through the model's own preprocessing, which resizes and crops it; edges are soft.
    """
    width, height = size
    x0, x1 = (round(min(max(v, 0), width)) for v in box[::2])
    y0, y1 = (round(min(max(v, 0), height)) for v in box[1::2])
    image = Image.new("RGB", size)
    if x1 > x0 and y1 > y0:
        ImageDraw.Draw(image).rectangle((x0, y0, x1 - 1, y1 - 1), fill="white")
    return _first_channel(model, image).clamp(0, 1)


def visible_box(model: Model, size: tuple[int, int]) -> Box:
    """The box of an image of this size (width, height) that the model sees: x0, y0, x1, y1 in pixels of the image.

    Ramps along both axes pass through the model's own preprocessing; where none comes out as a ramp, the box is
    the whole image.
    """
    width, height = size
    across = np.broadcast_to(np.linspace(0, 255, width)[None, :], (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    found: list[tuple[float, float]] = []
    for ramp, length, axis in ((across, width, 0), (down, height, 1)):
        image = Image.fromarray(ramp.round().astype(np.uint8)).convert("RGB")
        # the position in the image of each pixel of the input
        line = _first_channel(model, image).mean(axis).numpy() * (length - 1)
        inner = np.arange(len(line))[len(line) // 8 : -(len(line) // 8) or None]  # borders may be padded
        slope, start = np.polyfit(inner, line[inner], 1)
        miss = np.abs(line[inner] - (slope * inner + start)).max() if slope > 0 else np.inf
        if miss > max(1.0, 0.02 * length):
            return 0.0, 0.0, float(width), float(height)
        low, high = start + 0.5 - slope / 2, start + 0.5 + slope * (len(line) - 0.5)
        found.append((float(low), float(high)))
    (x0, x1), (y0, y1) = found
    return x0, y0, x1, y1


@dataclass(frozen=True)
class VisibleBoxes:
    """`visible_box` of one model, computed once per image size for as long as the caller keeps this object."""

    model: Model
    by_size: dict[tuple[int, int], Box] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, size: tuple[int, int]) -> Box:
        """The box of an image of this size (width, height) that the model sees."""
        if size not in self.by_size:
            self.by_size[size] = visible_box(self.model, size)
        return self.by_size[size]


def denormalise(
    x: Float[Tensor, "b c H W"], mean: Sequence[float] | None, std: Sequence[float] | None
) -> UInt8[np.ndarray, "b H W 3"]:
    """Preprocessed images as 8-bit RGB: the normalisation is inverted and grey repeated over the channels.

    Where it is not known, or of other channels, each image is scaled to its range.
    """
    if mean is None or std is None or len(mean) not in (1, x.shape[1]) or len(std) not in (1, x.shape[1]):
        low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
        inside = (low >= 0) & (high <= 1)
        low, high = torch.where(inside, 0.0, low), torch.where(inside, 1.0, high)
        shown = (x - low) / (high - low).clamp(min=torch.finfo(x.dtype).tiny)
    else:
        scale, offset = (torch.tensor(v, dtype=x.dtype, device=x.device)[:, None, None] for v in (std, mean))
        shown = x * scale + offset
    images = (shown.clamp(0, 1) * 255).round().byte()
    images = images[:, :1].expand(-1, 3, -1, -1) if images.shape[1] != 3 else images
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).cpu().numpy())


def _first_channel(model: Model, image: Image.Image) -> Float[Tensor, "H W"]:
    """The first channel of the preprocessed image in [0, 1]."""
    return preprocess_image(model, image)[0].double() * model.std[0] + model.mean[0]
