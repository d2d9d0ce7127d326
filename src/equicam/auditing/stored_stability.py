"""Stability from the maps a run stores, for runs that do not store the value itself.

Stored maps have the resolution of the layer and float16, where an explanation correlates maps at pixel size: they are
enlarged first, as the explanation did.
"""

from collections.abc import Callable

import pyarrow as pa
import torch
from torch.nn.functional import interpolate

from equicam.auditing.store import ITEMS, RunStore
from equicam.auditing.stored_maps import StoredMaps
from equicam.core.chain import unit
from equicam.core.uncertainty import ViewCorrelations, correlate_views
from equicam.core.views import Views, select

LONGER_SIDE_PX = 224
STABILITY = pa.schema([ITEMS.field(name) for name in ("id", "stability", "stability_by_view")])


def stored_stability(
    store: RunStore, *, side: int | None = LONGER_SIDE_PX, tick: Callable[[int], None] = lambda _count: None
) -> pa.Table:
    """id, stability and stability_by_view of every image with maps; `side` None compares maps as they are stored.

    Both are null for a run of one view, and for one that does not store the presented view.
    """
    views = Views(store.manifest.transforms)
    ordered, order = views.presented_first()
    measurable = len(order) == len(ordered) > 1
    tables = [STABILITY.empty_table()]
    for number in filter(store.has_shard, range(store.shard_count)):
        rows = store.read_shard("maps", number).to_pylist()
        found = [{"id": row["id"], "stability": None, "stability_by_view": None} for row in rows]
        for row, maps in zip(found, map(StoredMaps.from_row, rows), strict=True):
            if measurable:
                every = correlate_stored(maps, views, side=side)
                by_view = select(every.with_presented, order)[:, 0]
                row |= {"stability": float(every.stability), "stability_by_view": by_view.tolist()}
        tables.append(pa.Table.from_pylist(found, schema=STABILITY))
        tick(len(rows))
    return pa.concat_tables(tables)


def correlate_stored(
    maps: StoredMaps, views: Views, *, side: int | None = LONGER_SIDE_PX
) -> ViewCorrelations:
    """The correlations of one image's view maps, the presented view first."""
    ordered, _ = views.presented_first()
    rows = ordered.indices_in(views)
    planes = torch.from_numpy(maps.view_maps)[rows]
    grid = planes.shape[-2:]
    if side is not None and max(grid) < side:
        size = [max(2, round(side * length / max(grid))) for length in grid]
        planes = interpolate(planes[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    # every view has seen this part of the disc, so the fill does not matter
    return correlate_views(ordered.align(unit(planes)[:, None], "reflect"), radius=ordered.radius)
