"""Does a map point at what is known to matter: energy in the label region, pointing game, box overlap."""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy import ndimage
from torch import Tensor

Box = tuple[float, float, float, float]
THRESHOLD = 0.3
"""Of a map's maximum, above which a pixel belongs to the object."""


def energy(maps: Float[Tensor, "*v H W"], region: Bool[Tensor, "H W"]) -> Float[Tensor, "*v"]:
    """Saliency inside the region over all of it; NaN for a map that is 0 everywhere."""
    return (maps * region).sum((-2, -1)) / maps.sum((-2, -1))


def disc_of_equal_area(region: Float[Tensor, "H W"]) -> Bool[Tensor, "H W"]:
    """The disc with a region's area and centre: as much picture, the same at every angle about its middle."""
    height, width = region.shape
    area = float(region.sum())
    y = torch.arange(height, dtype=region.dtype, device=region.device)[:, None]
    x = torch.arange(width, dtype=region.dtype, device=region.device)[None, :]
    middle_y, middle_x = ((region * axis).sum() / area for axis in (y, x))
    return (x - middle_x) ** 2 + (y - middle_y) ** 2 <= area / math.pi


def pointing(plane: Float[Tensor, "H W"], regions: Bool[Tensor, "r H W"]) -> bool:
    """Whether the first maximum lies in any of the regions."""
    return bool(regions.flatten(1)[:, plane.argmax()].any())


def found_box(plane: Float[Tensor, "H W"]) -> Box | None:
    """Around the largest 4-connected part above 0.3 of the maximum, half-open; None for a map without positives."""
    values = plane.detach().cpu().numpy()
    parts, count = ndimage.label(values > THRESHOLD * values.max())
    if values.max() <= 0 or count == 0:
        return None
    biggest = int(np.bincount(parts.ravel())[1:].argmax()) + 1
    rows, columns = ndimage.find_objects(parts)[biggest - 1]
    return float(columns.start), float(rows.start), float(columns.stop), float(rows.stop)


def box_around(region: Bool[Tensor, "H W"]) -> Box | None:
    """The half-open box around a region; None for an empty one."""
    rows, columns = region.any(1).nonzero().flatten(), region.any(0).nonzero().flatten()
    if not len(rows):
        return None
    return float(columns[0]), float(rows[0]), float(columns[-1]) + 1, float(rows[-1]) + 1


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes."""
    wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    high = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = wide * high
    either = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both
    return both / either if either else 0.0
