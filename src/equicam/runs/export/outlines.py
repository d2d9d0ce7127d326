"""Outlines of areas of a mask: polygons with holes along the borders of cells."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ring = list[tuple[int, int]]
"""Corners of cells as (column, row), the first again at the end."""


def trace(mask: NDArray[np.bool_]) -> list[tuple[list[Ring], NDArray[np.intp]]]:
    """Of each area of cells that share sides: its rings, the outer one first, and its cells as [2, n] rows and columns."""
    from scipy import ndimage

    labels, _ = ndimage.label(mask)
    found = []
    for number, box in enumerate(ndimage.find_objects(labels), 1):
        area = labels[box] == number
        top, left = box[0].start, box[1].start
        rings = [[(c + left, r + top) for c, r in ring] for ring in _rings(area)]
        rings.sort(key=_area, reverse=True)
        found.append((rings, np.stack(np.nonzero(area)) + np.array([[top], [left]])))
    return found


def _rings(area: NDArray[np.bool_]) -> list[Ring]:
    """Closed lines around an area, its cells to the right of their direction: clockwise outside, the other way around holes."""
    padded = np.pad(area, 1)
    inside = padded[1:-1, 1:-1]
    steps: dict[tuple[int, int], list[tuple[int, int]]] = {}
    sides = (
        (padded[:-2, 1:-1], (0, 0), (1, 0)),  # above: along the top from left to right
        (padded[1:-1, 2:], (1, 0), (1, 1)),
        (padded[2:, 1:-1], (1, 1), (0, 1)),
        (padded[1:-1, :-2], (0, 1), (0, 0)),
    )
    for neighbour, start, end in sides:
        for row, column in np.argwhere(inside & ~neighbour).tolist():
            steps.setdefault((column + start[0], row + start[1]), []).append((column + end[0], row + end[1]))
    found = []
    while steps:
        first = next(iter(steps))
        ring = [first]
        while len(ring) == 1 or ring[-1] != first:
            ring.append(_next(steps, ring))
        found.append(_corners(ring))
    return found


def _next(steps: dict[tuple[int, int], list[tuple[int, int]]], ring: Ring) -> tuple[int, int]:
    """The next corner. Where two cells of an area touch in a corner only, the line goes left, to the other cell: the
    rings then touch there, and none crosses itself.
    """
    here = ring[-1]
    choices = steps[here]
    if len(choices) == 2 and len(ring) > 1:
        before = ring[-2]
        left = (here[0] + here[1] - before[1], here[1] - here[0] + before[0])
        chosen = left if left in choices else choices[0]
    else:
        chosen = choices[0]
    choices.remove(chosen)
    if not choices:
        del steps[here]
    return chosen


def _corners(ring: Ring) -> Ring:
    """Without the points that lie on a straight line."""
    points = ring[:-1]
    kept = [
        here
        for before, here, after in zip([points[-1], *points], points, [*points[1:], points[0]], strict=False)
        if (here[0] - before[0]) * (after[1] - here[1]) != (here[1] - before[1]) * (after[0] - here[0])
    ]
    return [*kept, kept[0]]


def _area(ring: Ring) -> float:
    """Above 0 for a ring that is clockwise with rows downwards."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairwise(ring)) / 2
