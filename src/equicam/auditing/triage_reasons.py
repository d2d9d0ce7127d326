"""Why an image may deserve a review, as codes and values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equicam.auditing.signals import FLAT
from equicam.auditing.stored_maps import StoredMaps
from equicam.core.transforms import Transform, inner_radius, presented_index
from equicam.errors import EquicamError
from equicam.reasons import Reason

LOW_CORRELATION = 0.5  # of a view with the presented one, or with the mean of the others
LOW_CONFIDENCE = 0.5
LARGE_JUMP = 0.25  # of the image's diagonal


def triage_reasons(
    row: Mapping[str, Any],
    by: str,
    transforms: Sequence[Transform],
    *,
    value: float,
    above_percent: int | None,
    maps: StoredMaps | None = None,
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
    found += _view_reasons(row, by, transforms, flat=flat)
    if by in ("stability", "risk") and maps is not None and not flat:
        share, view = peak_jump(maps, transforms)
        if share >= LARGE_JUMP:
            found.append(Reason("peak-jumps", {"share": share, "view": view}))
    found += [
        Reason(flag) for flag in ("orientation-unread", "low-coverage", "odd-size", "edge") if flag in flags
    ]
    if row["confidence"] is not None and row["confidence"] < LOW_CONFIDENCE:
        found.append(Reason("low-confidence", {"confidence": row["confidence"]}))
    return found


def _view_reasons(
    row: Mapping[str, Any], by: str, transforms: Sequence[Transform], *, flat: bool
) -> list[Reason]:
    # PEUM and disagreement compare all views; the other signals are about the presented view's own map
    code, column = "map-moves", "stability_by_view"
    if by in ("peum", "disagreement"):
        code, column = "views-disagree", "view_agreement"
    top1, correlations, n = row["view_top1"] or (), row[column] or (), len(transforms)
    if not {len(top1), len(correlations)} <= {0, n}:
        raise EquicamError(
            "transforms", needs=f"those of {row['id']!r}", got=f"{n} for {len(top1)} views", fix="the run's"
        )
    found = []
    flips = [one.label for one, top in zip(transforms, top1, strict=False) if top != row["target"]]
    if flips:
        found.append(Reason("prediction-changes", {"views": flips, "of": n}))
    known = zip(transforms, () if flat else correlations, strict=False)
    odd = [(r, one) for one, r in known if r is not None and r < LOW_CORRELATION]
    if code == "map-moves":
        odd = [(r, one) for r, one in odd if not one.is_identity]
    if odd:
        odd.sort(key=lambda pair: pair[0])
        values = {"views": [one.label for _, one in odd], "correlations": [r for r, _ in odd], "of": n}
        found.append(Reason(code, values))
    return found


def peak_jump(maps: StoredMaps, transforms: Sequence[Transform]) -> tuple[float, str]:
    """The largest distance from the presented view's peak to another view's, aligned, and that view's label.

    The distance is a share of the image's diagonal. Peaks are of the stored maps, at the layer's resolution, inside the
    disc that every view covers. (0, "") without a presented view.
    """
    height, width = maps.map.shape
    side, presented = min(height, width), presented_index(transforms)
    down, right = np.meshgrid(
        np.arange(height) - (height - 1) / 2, np.arange(width) - (width - 1) / 2, indexing="ij"
    )
    radius = (
        inner_radius(transforms) * side / 2 + 1e-9
    )  # cells on the edge are inside, however they are rounded
    peaks: list[tuple[float, float] | None] = []
    for one, plane in zip(transforms, maps.view_maps, strict=True):
        x, y = one.inverse().move(right, down, side=side)
        inside = np.hypot(x, y) <= radius
        if not inside.any() or np.ptp(plane[inside]) == 0:
            peaks.append(None)
            continue
        at = np.unravel_index(np.where(inside, plane, -np.inf).argmax(), plane.shape)
        peaks.append((float(x[at]), float(y[at])))
    start = None if presented is None else peaks[presented]
    if start is None:
        return 0.0, ""
    jumps = [0.0 if peak is None else math.dist(peak, start) / math.hypot(height, width) for peak in peaks]
    worst = int(np.argmax(jumps))
    return jumps[worst], transforms[worst].label
