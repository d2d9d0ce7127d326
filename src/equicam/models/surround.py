"""The surround of a model's input: what its preprocessing resizes and then crops away.

Views cut from the surround show at their corners what is there, where views of the input alone reflect. A preprocessing
that crops the centre, as torchvision's and timm's do, leaves a margin; any other leaves none. The surround has the same
size for all images: margin that is missing is reflected, as `Views.act` would.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from equicam.core.transforms import canvas_size
from equicam.core.views import crop_centre
from equicam.errors import EquicamError
from equicam.images.formats import LevelPixels, to_rgb
from equicam.models.images import (
    Images,
    as_batch,
    input_bytes,
    open_images,
    preprocess_image,
    preprocessing_failure,
    preprocessing_of,
    stack_images,
)
from equicam.models.preprocessing import read_steps
from equicam.rasters.options import Tiling
from equicam.rasters.windows import WindowPixels
from equicam.readers.model import IMAGENET_MEAN, IMAGENET_STD, Model


@dataclass(frozen=True)
class Surround:
    """An input in its surround."""

    whole: Float[Tensor, "c H W"]  # of the size that every rotation of the input needs
    size: tuple[int, int]  # of the input, in its middle
    # rows and columns around the input that the image has; beyond them it is reflected
    margin: tuple[int, int]


def preprocess_surround(model: Model | None, image: Image.Image) -> Surround:
    """One image as the model's input with its surround; cropped to its middle it is `preprocess_image`."""
    steps = read_steps(preprocessing_of(model))
    if steps.crop is not None and steps.has_margin:
        rgb = to_rgb(image)
        with preprocessing_failure(rgb):
            whole = steps.without_crop(rgb)
        if whole is not None:
            return _surround(whole, steps.crop)
    plain = preprocess_image(model, image)
    return _surround(plain, (plain.shape[-2], plain.shape[-1]))


def preprocess_pixels(
    model: Model | None, image: Image.Image | WindowPixels, context: str
) -> Float[Tensor, "c H W"]:
    """One image as the model's input; with context, in the middle of its surround."""
    if isinstance(image, WindowPixels):
        return preprocess_window(model, image)
    return preprocess_image(model, image) if context == "none" else preprocess_surround(model, image).whole


def preprocess_window(model: Model | None, window: WindowPixels) -> Float[Tensor, "c H W"]:
    """A window of a raster as the model's input: values over the scale, normalised. Where there is no data, the mean."""
    values = torch.from_numpy(np.ascontiguousarray(window.values, dtype=np.float32)) / window.scale
    mean, std = _normalisation(model, window)
    if len(mean) != len(std) or len(mean) not in (1, len(values)):
        raise EquicamError(
            "mean and std", f"one number for each of {len(values)} bands", f"{len(mean)} and {len(std)}",
            "Input(mean=…, std=…) of the model, or mean and std in the recipe file",
        )  # fmt: skip
    centre, spread = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, std))
    x = (values - centre) / spread
    valid = torch.from_numpy(window.valid)
    return x if bool(valid.all()) else torch.where(valid, x, 0.0)


def _normalisation(
    model: Model | None, window: WindowPixels
) -> tuple[tuple[int | float, ...], tuple[int | float, ...]]:
    """Mean and standard deviation of a window's bands: its own, or else those of the model."""
    mean = window.mean or (model.mean if model else IMAGENET_MEAN)
    return tuple(mean), tuple(window.std or (model.std if model else IMAGENET_STD))


def window_levels(model: Model | None, window: WindowPixels) -> LevelPixels | None:
    """A window of 8-bit values as levels; None where values are others, or some of it has no data."""
    if window.values.dtype != np.uint8 or not window.valid.all():
        return None
    numbers = _level_numbers(len(window.values), window.scale, *_normalisation(model, window))
    return LevelPixels(np.ascontiguousarray(window.values), numbers)


@lru_cache(maxsize=16)
def _level_numbers(
    bands: int, scale: int | float, mean: tuple[int | float, ...], std: tuple[int | float, ...]
) -> NDArray[np.float32]:
    """What `preprocess_window` makes of every level."""
    levels = np.broadcast_to(np.arange(256, dtype=np.uint8), (bands, 1, 256))
    every = WindowPixels(levels, np.ones((1, 256), bool), (0, 0), 256, scale, mean, std)
    found: NDArray[np.float32] = preprocess_window(None, every)[:, 0].numpy()
    return found


def open_with_surround(
    model: Model, images: Images | Sequence[Surround], has_context: bool, window: int | tuple[int, int] | None
) -> tuple[Float[Tensor, "b c H W"], tuple[int, int] | None, list[tuple[int, int]]]:
    """The batch; the size of the window in it, if it has context; and the margin that each image has around that."""
    if isinstance(images, Tensor):
        if window is None and has_context:
            raise EquicamError(
                "context", "images, which the model's preprocessing crops, or a window in the tensor", "a tensor",
                "window=224",
            )  # fmt: skip
        if window is None:
            return as_batch(model, images, check=False), None, []
        _, x, size = crop_to_window(as_batch(model, images, check=False), window)
        margin = ((x.shape[-2] - size[0]) // 2, (x.shape[-1] - size[1]) // 2)
        return x, size, [margin] * len(x)
    if window is not None:
        raise EquicamError("window", "a tensor of preprocessed pixels", "images or paths", 'context="auto"')
    if not has_context:  # surrounds come with context only
        return as_batch(model, images, check=False), None, []  # type: ignore[arg-type]
    given = list(images) if isinstance(images, list | tuple) else []
    found = [one for one in given if isinstance(one, Surround)]
    if not found or len(found) < len(given):
        found = [preprocess_surround(model, image) for image in open_images(images)]
    whole, size = stack_surrounds(found)
    return as_batch(model, whole, check=False), size, [one.margin for one in found]


def crop_to_window(
    x: Tensor, window: int | tuple[int, int]
) -> tuple[Float[Tensor, "b c h w"], Float[Tensor, "b c H W"], tuple[int, int]]:
    """The window, the images around it (without a last row or column that would shift the centre), and its size."""
    height, width = (window, window) if isinstance(window, int) else window
    if not 2 <= height <= x.shape[-2] or not 2 <= width <= x.shape[-1]:
        raise EquicamError(
            "window", f"at least 2 and at most {x.shape[-2]}×{x.shape[-1]}, the size of the images", f"{height}×{width}",
            "window=224, or no window",
        )  # fmt: skip
    rows, columns = x.shape[-2] - (x.shape[-2] - height) % 2, x.shape[-1] - (x.shape[-1] - width) % 2
    x = x[..., :rows, :columns]
    return crop_centre(x, (height, width)), x, (height, width)


def surround_bytes(model: Model, context: str, tiling: Tiling | None = None) -> int:
    """Approximate bytes of one preprocessed image, with its surround if it has context."""
    if tiling is not None:
        side = tiling.tile if context == "none" else canvas_size((tiling.tile, tiling.tile))[0]
        return 4 * len(tiling.input.bands or (1, 2, 3)) * side**2
    plain = input_bytes(model)
    if context == "none":
        return plain
    height, width = input_size(model)
    rows, columns = canvas_size((height, width))
    return plain * rows * columns // (height * width)


def input_size(model: Model | None) -> tuple[int, int]:
    """Height and width of the model's input, which must not depend on the image."""
    blank = (Image.new("RGB", size) for size in ((512, 512), (640, 400)))
    sizes = {tuple(preprocess_image(model, image).shape[-2:]) for image in blank}
    if len(sizes) > 1:
        needs = "a preprocessing that brings every image to one size"
        raise EquicamError("context", needs, sorted(sizes), 'Recipe(context="none")')
    ((height, width),) = sizes
    return height, width


def _surround(whole: Float[Tensor, "c H W"], size: tuple[int, int]) -> Surround:
    """The middle of a preprocessed image, `size` of it the input, with as much around it as rotations need."""
    margin: list[int] = []
    for axis, (part, canvas) in enumerate(zip(size, canvas_size(size), strict=True), start=1):
        spare, needed = whole.shape[axis] - part, (canvas - part) // 2
        start = round(spare / 2)  # where torchvision's centre crop begins
        there = min(needed, start, spare - start)
        whole = _reflect(whole.narrow(axis, start - there, part + 2 * there), axis, needed - there)
        margin.append(there)
    return Surround(whole, size, (margin[0], margin[1]))


def _reflect(planes: Float[Tensor, "c H W"], axis: int, count: int) -> Float[Tensor, "c H2 W2"]:
    """As many rows or columns more on both sides, reflected about the border pixels, again where they do not suffice."""
    length = planes.shape[axis]
    places = torch.arange(-count, length + count).remainder(max(1, 2 * (length - 1)))
    return planes.index_select(axis, torch.minimum(places, 2 * (length - 1) - places).clamp(min=0))


def stack_surrounds(found: list[Surround]) -> tuple[Float[Tensor, "b c H W"], tuple[int, int]]:
    """Surrounds of one size as a batch, and the size of the input in them."""
    if len({one.size for one in found}) > 1:
        raise EquicamError(
            "surrounds", "inputs of one size", sorted({one.size for one in found}), "one call for each size"
        )
    return stack_images([one.whole for one in found]), found[0].size
