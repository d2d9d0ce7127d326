"""Why an image may deserve a review, as codes and values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equicam.auditing.stored_maps import StoredMaps
from equicam.errors import EquicamError
from equicam.reasons import Reason

LOW_CORRELATION = 0.5  # of a view with the presented one, or with the mean of the others
LOW_CONFIDENCE = 0.5
LARGE_JUMP = 0.25  # of the image's diagonal


def triage_reasons(
    row: Mapping[str, Any],
    by: str,
    angles: Sequence[int | float],
    *,
    value: float,
    above_percent: int | None,
    maps: StoredMaps | None = None,
) -> list[Reason]:
    """The reasons of one row; `above_percent` of the images have a lower score, None where it says nothing."""
    flags = row["flags"] or ()
    found = [Reason(flag) for flag in ("blank", "constant", "none-kept") if flag in flags]
    if not found and row["views_kept"] in (0, 1):
        found.append(Reason("one-kept" if row["views_kept"] else "none-kept"))
    if above_percent is not None:
        values = {"signal": by, "value": value, "above_percent": above_percent}
        found.append(Reason("signal-percentile", values))
    elif not {"blank", "constant"} & {*flags} and not (found and by == "peum"):  # those say it themselves
        found.append(Reason("signal-undefined", {"signal": by}))
    flat = bool({"blank", "constant"} & {*flags})
    found += _view_reasons(row, by, angles, flat=flat)
    if by in ("stability", "risk") and maps is not None and not flat:
        share, angle = peak_jump(maps, angles)
        if share >= LARGE_JUMP:
            found.append(Reason("peak-jumps", {"share": share, "angle": angle}))
    found += [Reason(flag) for flag in ("orientation-unread", "low-coverage", "odd-size") if flag in flags]
    if row["confidence"] is not None and row["confidence"] < LOW_CONFIDENCE:
        found.append(Reason("low-confidence", {"confidence": row["confidence"]}))
    return found


def _view_reasons(
    row: Mapping[str, Any], by: str, angles: Sequence[int | float], *, flat: bool
) -> list[Reason]:
    # PEUM and disagreement compare all views; the other signals are about the presented view's own map
    code, column = "map-moves", "stability_by_view"
    if by in ("peum", "disagreement"):
        code, column = "views-disagree", "view_agreement"
    top1, correlations, n = row["view_top1"] or (), row[column] or (), len(angles)
    if not {len(top1), len(correlations)} <= {0, n}:
        raise EquicamError(
            "angles", needs=f"those of {row['id']!r}", got=f"{n} for {len(top1)} views", fix="the run's"
        )
    found = []
    flips = [float(a) for a, top in zip(angles, top1, strict=False) if top != row["target"]]
    if flips:
        found.append(Reason("prediction-changes", {"angles": flips, "views": n}))
    known = zip(angles, () if flat else correlations, strict=False)
    odd = sorted((r, float(a)) for a, r in known if r is not None and r < LOW_CORRELATION)
    if code == "map-moves":
        odd = [(r, a) for r, a in odd if a % 360 != 0]
    if odd:
        values = {"angles": [a for _, a in odd], "correlations": [r for r, _ in odd]}
        found.append(Reason(code, values | ({"views": n} if code == "map-moves" else {})))
    return found


def peak_jump(maps: StoredMaps, angles: Sequence[int | float]) -> tuple[float, float]:
    """The largest distance from the presented view's peak to another view's, aligned, and that view's angle.

    The distance is a share of the image's diagonal. Peaks are of the stored maps, at the layer's resolution, inside the
    disc that every view covers. (0, 0) without a presented view.
    """
    height, width = maps.map.shape
    y = np.arange(height)[:, None] - (height - 1) / 2
    x = np.arange(width)[None, :] - (width - 1) / 2
    inside = np.hypot(x, y) <= min(height, width) / 2
    presented = next((t for t, angle in enumerate(angles) if angle % 360 == 0), None)
    flat = [np.ptp(plane[inside]) == 0 for plane in maps.view_maps]
    if presented is None or flat[presented]:
        return 0.0, 0.0
    peaks = []
    for angle, plane in zip(angles, maps.view_maps, strict=True):
        row, column = np.unravel_index(np.where(inside, plane, -np.inf).argmax(), plane.shape)
        theta, px, py = math.radians(angle), float(x[0, column]), float(y[row, 0])
        # rows count downwards: rotating the view back is clockwise as displayed
        peaks.append(
            (px * math.cos(theta) - py * math.sin(theta), px * math.sin(theta) + py * math.cos(theta))
        )
    jumps = [
        0.0 if flat[t] else math.dist(peak, peaks[presented]) / math.hypot(height, width)
        for t, peak in enumerate(peaks)
    ]
    worst = int(np.argmax(jumps))
    return jumps[worst], float(angles[worst])
