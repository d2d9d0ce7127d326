"""The last steps of a preprocessing, from 8-bit levels to the model's numbers, as a table of 256 levels per channel.

Scaling and normalising change each pixel on its own, so a look-up gives the same numbers to the bit, in a fifth of the time.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from equicam.images.formats import LevelPixels
from equicam.models.preprocessing import read_geometry

TRIED = ((640, 480), (375, 500), (256, 256), (1024, 333))
"""Widths and heights of the images on which the table must give what the preprocessing gives."""


@dataclass(frozen=True, eq=False)
class LevelTable:
    """Resize and crop as torchvision does, then a look-up."""

    size: Any  # of the short side, or height and width; None: as they are
    crop: tuple[int, int]
    interpolation: str
    numbers: NDArray[np.float32]  # [channel, level]

    def __call__(self, image: Image.Image) -> LevelPixels:
        """An RGB image as the model's input."""
        return LevelPixels(np.ascontiguousarray(self.resized(image).transpose(2, 0, 1)), self.numbers)

    def resized(self, image: Image.Image) -> NDArray[np.uint8]:
        """Its pixels, resized and cropped."""
        from torchvision.transforms import InterpolationMode, functional

        if self.size is not None:
            size = [self.size] if isinstance(self.size, int) else list(self.size)
            image = functional.resize(image, size, InterpolationMode(self.interpolation))
        return np.asarray(functional.center_crop(image, list(self.crop)))


def level_table(preprocess: Any) -> LevelTable | None:
    """The table of a preprocessing; None where its steps are others, or change a pixel by more than its level."""
    try:
        return _level_table(preprocess)
    except TypeError:  # it cannot be a key
        return _level_table.__wrapped__(preprocess)


@cache
def _level_table(preprocess: Any) -> LevelTable | None:
    geometry = read_geometry(preprocess)
    if geometry is None or geometry.crop is None:
        return None
    rng = np.random.default_rng(0)
    size = geometry.size or geometry.crop
    unresized = (size, size) if isinstance(size, int) else size[::-1]  # noise that stays, with all its levels
    sizes = (unresized, *TRIED)
    images = [Image.fromarray(rng.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    numbers = np.full((3, 256), np.nan, np.float32)
    table = LevelTable(geometry.size, geometry.crop, geometry.interpolation, numbers)
    try:
        levels, expected = table(images[0]).levels, preprocess(images[0])
        for channel in range(3):
            numbers[channel][levels[channel]] = expected[channel].numpy()
        same = all(
            torch.equal(torch.from_numpy(table(image).to_numbers()), preprocess(image)) for image in images
        )
    except (Exception, SystemExit):  # noqa: BLE001  # a custom preprocessing may refuse the images with any exception
        return None
    return table if same and not np.isnan(numbers).any() else None
