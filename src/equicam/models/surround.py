"""The surround of a model's input: what its preprocessing resizes and then crops away.

Views cut from the surround show at their corners what is there, where views of the input alone reflect. A preprocessing
that crops the centre, as torchvision's and timm's do, leaves a margin; any other leaves none. The surround has the same
size for all images: margin that is missing is reflected, as `Views.act` would.
"""

import copy
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from equicam.core.transforms import canvas_size
from equicam.data.image_files import to_rgb
from equicam.models.images import input_bytes, preprocess_image, preprocessing_of, stack_images
from equicam.readers.model import Model


@dataclass(frozen=True)
class Surround:
    """An input in its surround."""

    whole: Float[Tensor, "c H W"]  # of the size that every rotation of the input needs
    size: tuple[int, int]  # of the input, in its middle
    margin: tuple[
        int, int
    ]  # rows and columns around the input that the image has; beyond them it is reflected


def preprocess_surround(model: Model | None, image: Image.Image) -> Surround:
    """One image as the model's input with its surround; cropped to its middle it is `preprocess_image`."""
    found = _without_crop(preprocessing_of(model), to_rgb(image))
    if found is None:
        plain = preprocess_image(model, image)
        return _surround(plain, (plain.shape[-2], plain.shape[-1]))
    return _surround(*found)


def pixels_with_context(model: Model | None, image: Image.Image) -> Float[Tensor, "c H W"]:
    """One image as the model's input, in the middle of its surround."""
    return preprocess_surround(model, image).whole


def surround_bytes(model: Model, context: str) -> int:
    """Approximate bytes of one preprocessed image, with its surround if it has context."""
    plain = input_bytes(model)
    if context == "none":
        return plain
    height, width = input_size(model)
    rows, columns = canvas_size((height, width))
    return plain * rows * columns // (height * width)


def crops_centre(model: Model | None) -> bool:
    """Whether the model's preprocessing crops the centre, in a way whose margin can be used."""
    return _without_crop(preprocessing_of(model), Image.new("RGB", (640, 512))) is not None


def input_size(model: Model | None) -> tuple[int, int]:
    """Height and width of the model's input."""
    plain = preprocess_image(model, Image.new("RGB", (512, 512)))
    return plain.shape[-2], plain.shape[-1]


def _surround(whole: Float[Tensor, "c H W"], size: tuple[int, int]) -> Surround:
    """The middle of a preprocessed image, `size` of it the input, with as much around it as rotations need."""
    borders: list[int] = []  # as `pad` takes them: the last axis first
    margin: list[int] = []
    for axis, (part, canvas) in enumerate(zip(size, canvas_size(size), strict=True), start=1):
        spare, needed = whole.shape[axis] - part, (canvas - part) // 2
        start = round(spare / 2)  # where torchvision's centre crop begins
        there = min(needed, start, spare - start)
        whole = whole.narrow(axis, start - there, part + 2 * there)
        margin.append(there)
        borders = [needed - there, needed - there, *borders]
    return Surround(pad(whole, borders, mode="reflect"), size, (margin[0], margin[1]))


def _without_crop(
    preprocess: Any, image: Image.Image
) -> tuple[Float[Tensor, "c H W"], tuple[int, int]] | None:
    """The preprocessed image before the centre crop, and the crop's size; None where there is no such step."""
    if hasattr(preprocess, "crop_size") and hasattr(preprocess, "resize_size"):  # torchvision's presets
        from torchvision.transforms import functional

        resized = functional.resize(
            image,
            preprocess.resize_size,
            interpolation=preprocess.interpolation,
            antialias=preprocess.antialias,
        )
        size = _pair(preprocess.crop_size)
        if size is None or not _fits(size, resized):
            return None
        uncropped = copy.copy(preprocess)
        uncropped.crop_size = [resized.height, resized.width]
        return uncropped(resized), size
    steps = getattr(preprocess, "transforms", None)
    if not isinstance(steps, list | tuple):
        return None
    crops = [i for i, step in enumerate(steps) if type(step).__name__ == "CenterCrop"]
    if len(crops) != 1:
        return None
    value: Any = image
    crop: tuple[int, int] | None = None
    for i, step in enumerate(steps):
        if i == crops[0]:
            crop = _pair(step.size)
            if not isinstance(value, Image.Image) or crop is None or not _fits(crop, value):
                return None
        else:
            value = step(value)
    return None if crop is None or not isinstance(value, Tensor) or value.ndim != 3 else (value, crop)


def _pair(size: Any) -> tuple[int, int] | None:
    values = [size] if isinstance(size, int) else list(size)
    if len(values) not in (1, 2):
        return None
    return int(values[0]), int(values[-1])


def _fits(crop: tuple[int, int], image: Image.Image) -> bool:
    return crop[0] <= image.height and crop[1] <= image.width


def stack_surrounds(found: list[Surround]) -> tuple[Float[Tensor, "b c H W"], tuple[int, int]]:
    """Surrounds of one size as a batch, and the size of the input in them."""
    return stack_images([one.whole for one in found]), found[0].size
