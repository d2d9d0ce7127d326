"""Pixels as 8-bit levels with the model's number for each: a quarter of the bytes to pass to another process or a device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class LevelPixels:
    """A model's input whose every number depends on one 8-bit level alone."""

    levels: NDArray[np.uint8]  # [c, H, W]
    numbers: NDArray[np.float32]  # [c, 256], of every level

    def to_numbers(self) -> NDArray[np.float32]:
        """The model's input."""
        found = np.empty(self.levels.shape, np.float32)
        for levels, numbers, out in zip(self.levels, self.numbers, found, strict=True):
            np.take(numbers, levels, out=out)
        return found
