"""As many views as an image needs: nested view grids, until their mean has converged or the map is plainly unstable.

Views of the next grid are added to those already read; none is read twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.combine import Combine
from equicam.core.fusion import FusedMap, Fusion, fuse
from equicam.core.uncertainty import correlate_views, mean_converged
from equicam.core.views import Fill, Views
from equicam.runtime.view_reader import ViewReader


def until_converged(
    reader: ViewReader,
    x: Float[Tensor, "b c H W"],
    target: Int[Tensor, " b"] | None,
    combine: Combine,
    fusion: Fusion,
    fill: Fill,
) -> Iterator[tuple[Int[Tensor, " r"], FusedMap]]:
    """Images, by their index in x, with the fusion of the views they needed; every image once."""
    adaptive = fusion.adaptive
    assert adaptive is not None  # noqa: S101  # the caller checked
    rows = torch.arange(len(x), device=x.device)
    readings = reader.read(x, Views.evenly(adaptive.counts[0]), target)
    for count, more in pairwise((*adaptive.counts, 0)):
        fused = fuse(readings, combine, replace(fusion, adaptive=None, views=Views.evenly(count)), fill)
        done = torch.ones_like(rows, dtype=torch.bool)
        if more:
            done = mean_converged(fused.aligned_maps, fused.alignment, adaptive.tolerance)
            if count >= adaptive.unstable_from:
                done |= correlate_views(fused.maps_in_presented_frame).below(adaptive.unstable_below)
        converged = done.nonzero().flatten()
        if len(converged):
            yield rows[converged], fused.of_images(converged)
        remaining = (~done).nonzero().flatten()
        if not len(remaining):
            return
        rows = rows[remaining]
        readings = reader.extend(readings.of_images(remaining), x[rows], Views.evenly(more))


def merge_images(
    parts: list[tuple[Int[Tensor, " r"], FusedMap]],
    measure: Callable[[FusedMap], dict[str, Tensor]],
    views: Views,
    by_view: dict[str, float],
) -> dict[str, Tensor]:
    """Images that used different views, in their order again, each view at its index among all `views`.

    `by_view` names the tensors [b, t, …] and the value of a view that an image did not use.
    """
    order = torch.cat([rows for rows, _ in parts]).argsort()
    merged: dict[str, list[Tensor]] = {}
    for _, fused in parts:
        index = torch.tensor(fused.views.indices_in(views), device=order.device)
        for name, value in measure(fused).items():
            if name in by_view:
                whole = value.new_full((len(value), len(views), *value.shape[2:]), by_view[name])
                whole[:, index] = value
                value = whole
            merged.setdefault(name, []).append(value)
    return {name: torch.cat(values)[order] for name, values in merged.items()}
