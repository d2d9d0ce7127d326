"""Where a PEUM stands among those of reference images: ImageNet photographs in equally many views.

`scripts/peum_reference.py` writes the quantiles, `peum_reference.json`. The first network of the file is the reference.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from equicam.core.transforms import Transform
from equicam.recipe import Recipe

METHODS = ("grad-cam", "equigrad-cam", "equigrad-cam-combined", "equigrad-cam-fine", "equigrad-cam-out")
"""Methods with the same PEUM: that of each view's Grad-CAM map, aligned, with equal weights."""
PEUM_NOTE = (
    "PEUM (per-image explanation uncertainty) is the variance of the views' aligned maps, mean over pixels; "
    "it depends on the number of views"
)
"""What is printed where PEUM is."""
INTERPOLATED_FROM = 6
"""Views from which on quantiles change smoothly with their number; 4 views, exact rotations, have a PEUM far below 3 and 6."""


@dataclass(frozen=True)
class PeumPlace:
    """The share of the reference images whose PEUM is lower."""

    higher_than: float
    images: int
    network: str
    views: int

    def __str__(self) -> str:
        return f"{self.short} of {self.images:,} ImageNet images with {self.network} and {self.views} views"

    @property
    def short(self) -> str:
        """Without what it is compared with."""
        if self.higher_than in (0, 1):
            return "lower than all" if self.higher_than == 0 else "higher than all"
        return f"higher than {min(max(round(100 * self.higher_than), 1), 99)} %"


def has_reference(recipe: Recipe) -> bool:
    """Whether the recipe's PEUM is the one that was measured on the reference images, if its views are."""
    return (
        isinstance(recipe.method, str)
        and recipe.method in METHODS
        and not recipe.as_published
        and recipe.fill in (None, "reflect")
        and recipe.context == "none"
    )


def place_peum(score: float, views: Sequence[Transform]) -> PeumPlace | None:
    """The place of a PEUM over these views; None unless they are rotations, evenly spaced from 0°, of a known number.

    Between tabulated numbers of views n, from 6 on, quantiles are interpolated in 1/n.
    """
    n = len(views)
    if {one.key for one in views} != {Transform(360.0 * t / n).key for t in range(n)}:
        return None
    network, found = next(iter(_networks().items()))
    quantiles = _quantiles(network, n)
    if quantiles is None or not score >= 0:
        return None
    return PeumPlace(_share_below(score, quantiles), found["images"], network, n)


@cache
def _networks() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return found


@cache
def _quantiles(network: str, views: int) -> list[float] | None:
    known = {int(count): values for count, values in _networks()[network]["quantiles"].items()}
    if views in known:
        return list(known[views])
    for few, many in pairwise(sorted(known)):
        if INTERPOLATED_FROM <= few < views < many:
            t = (1 / few - 1 / views) / (1 / few - 1 / many)
            return [(1 - t) * a + t * b for a, b in zip(known[few], known[many], strict=True)]
    return None


def _share_below(score: float, quantiles: Sequence[float]) -> float:
    """The level of a score among evenly spaced quantiles, the least and the greatest included."""
    above = bisect_left(quantiles, score)
    if above in (0, len(quantiles)):
        return float(above > 0)
    low, high = quantiles[above - 1], quantiles[above]
    return (above - 1 + (score - low) / (high - low)) / (len(quantiles) - 1)
