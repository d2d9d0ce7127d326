"""Why an image may deserve a review, as codes and values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.auditing.signals import FLAT
from equicam.auditing.stored_maps import StoredMaps, ViewMaps
from equicam.core.transforms import Transform, inner_radius, presented_index
from equicam.errors import EquicamError
from equicam.reasons import Reason

LOW_CORRELATION = 0.5  # of a view with the presented one, or with the mean of the others
LOW_CONFIDENCE = 0.5
LARGE_JUMP = 0.25  # of the image's diagonal
ViewNames = Sequence[tuple[str, bool]]
"""The label of every view, and whether it is the presented one."""
PeakJump = tuple[float, str]


def triage_reasons(
    row: Mapping[str, Any],
    by: str,
    views: ViewNames,
    *,
    value: float,
    above_percent: int | None,
    jump: PeakJump | None = None,
) -> list[Reason]:
    """The reasons of one row; `above_percent` of the images have a lower score, None where it says nothing."""
    flags = row["flags"] or ()
    flat = bool(FLAT & {*flags})
    found = [Reason(flag) for flag in ("blank", "constant", "none-kept") if flag in flags]
    if not found and row["views_kept"] in (0, 1):
        found.append(Reason("one-kept" if row["views_kept"] else "none-kept"))
    if above_percent is not None:
        values = {"signal": by, "value": value, "above_percent": above_percent}
        found.append(Reason("signal-percentile", values))
    elif not flat and not (found and by == "peum"):  # those say it themselves
        found.append(Reason("signal-undefined", {"signal": by}))
    found += _view_reasons(row, by, views, flat=flat)
    if jump is not None and not flat and jump[0] >= LARGE_JUMP:
        found.append(Reason("peak-jumps", {"share": jump[0], "view": jump[1]}))
    found += [
        Reason(flag) for flag in ("orientation-unread", "low-coverage", "odd-size", "edge") if flag in flags
    ]
    if row["confidence"] is not None and row["confidence"] < LOW_CONFIDENCE:
        found.append(Reason("low-confidence", {"confidence": row["confidence"]}))
    return found


def view_column(by: str) -> str:
    """The column with the correlations of views that explain this signal."""
    # PEUM and disagreement compare all views; the other signals are about the presented view's own map
    return "view_agreement" if by in ("peum", "disagreement") else "stability_by_view"


def _view_reasons(row: Mapping[str, Any], by: str, views: ViewNames, *, flat: bool) -> list[Reason]:
    column, n = view_column(by), len(views)
    top1, correlations = row["view_top1"] or (), row[column] or ()
    if not {len(top1), len(correlations)} <= {0, n}:
        raise EquicamError(
            "transforms", needs=f"those of {row['id']!r}", got=f"{n} for {len(top1)} views", fix="the run's"
        )
    found = []
    # a flip is a change against the presented view's prediction, whichever class is explained
    predicted = next((top for (_, shown), top in zip(views, top1, strict=False) if shown), row["target"])
    flips = [name for (name, _), top in zip(views, top1, strict=False) if top != predicted]
    if flips:
        # without the presented view among them, all views are other ones
        found.append(
            Reason("prediction-changes", {"views": flips, "of": n + (not any(shown for _, shown in views))})
        )
    moves, known = column == "stability_by_view", zip(views, () if flat else correlations, strict=False)
    odd = [
        (r, name)
        for (name, is_presented), r in known
        if r is not None and r < LOW_CORRELATION and not (moves and is_presented)
    ]
    if odd:
        odd.sort(key=lambda pair: pair[0])
        values = {"views": [name for _, name in odd], "correlations": [r for r, _ in odd], "of": n}
        found.append(Reason("map-moves" if moves else "views-disagree", values))
    return found


def peak_jump(maps: StoredMaps, transforms: Sequence[Transform]) -> PeakJump:
    """The largest distance from the presented view's peak to another view's, aligned, and that view's label.

    The distance is a share of the image's diagonal. Peaks are of the stored maps, at the layer's resolution, inside the
    disc that every view covers. (0, "") without a presented view.
    """
    return peak_jumps({"": maps}, transforms)[""]


def peak_jumps(
    every: Mapping[str, StoredMaps | ViewMaps], transforms: Sequence[Transform]
) -> dict[str, PeakJump]:
    """`peak_jump` of several images, by id."""
    by_grid: dict[tuple[int, ...], list[str]] = {}
    for name, maps in every.items():
        by_grid.setdefault(maps.view_maps.shape[1:], []).append(name)
    found: dict[str, PeakJump] = {}
    for names in by_grid.values():
        planes = np.stack([every[name].view_maps for name in names], axis=1)
        found |= zip(names, _jumps(planes, transforms), strict=True)
    return found


def _jumps(planes: NDArray[np.float32], transforms: Sequence[Transform]) -> Iterator[PeakJump]:
    """The jumps of images of one grid, from their view maps [t, b, h, w]."""
    height, width = planes.shape[2:]
    side, presented = min(height, width), presented_index(transforms)
    down, right = np.meshgrid(
        np.arange(height) - (height - 1) / 2, np.arange(width) - (width - 1) / 2, indexing="ij"
    )
    radius = (
        inner_radius(transforms) * side / 2 + 1e-9
    )  # cells on the edge are inside, however they are rounded
    peaks: list[list[tuple[float, float] | None]] = []
    for one, plane in zip(transforms, planes, strict=True):
        x, y = one.inverse().move(right, down, side=side)
        inside = np.hypot(x, y) <= radius
        cells, values = list(zip(x[inside].tolist(), y[inside].tolist(), strict=True)), plane[:, inside]
        if not cells:
            peaks.append([None] * len(plane))
            continue
        at, flat = values.argmax(1).tolist(), (np.ptp(values, axis=1) == 0).tolist()
        peaks.append([None if no_peak else cells[cell] for cell, no_peak in zip(at, flat, strict=True)])
    labels, diagonal = [one.label for one in transforms], math.hypot(height, width)
    for each in zip(*peaks, strict=True):
        start = None if presented is None else each[presented]
        if start is None:
            yield 0.0, ""
            continue
        jumps = [0.0 if peak is None else math.dist(peak, start) / diagonal for peak in each]
        farthest = max(jumps)
        yield farthest, labels[jumps.index(farthest)]
