"""Maps in small: a few steady and a few unsteady ones, chosen by their stability alone, and one of every image for the table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from equicam.overlay import RgbImage, overlay
from equicam.runs.manifest import Manifest
from equicam.runs.report import render
from equicam.runs.store import RunStore, StoredMaps

MAX_EXAMPLES = 4  # of each word
MAX_VIEWS = 6  # of each example
IMAGE_PX, TILE_PX = 160, 64  # the longer side of an image, and of a view
MAX_THUMBNAILS = 200  # images of a table; more would make the page slow
THUMBNAIL_PX, THUMBNAIL_QUALITY = 72, 55


@dataclass(frozen=True)
class Example:
    """One map in small: the image, the network's own map of it, and that of some views, aligned."""

    id: str
    class_name: str
    confidence: float | None
    output: float | None
    steadiness: str
    stability: float
    image: str | None
    missing: str | None  # why the image cannot be shown
    map: str
    views: tuple[render.ViewTile, ...]


@dataclass(frozen=True)
class Examples:
    """The maps with the highest and with the lowest stability."""

    best: list[Example]  # steady ones; where there is none, those with the highest stability
    worst: list[Example]  # unsteady ones


def choose_examples(store: RunStore, manifest: Manifest, items: pa.Table) -> Examples | None:
    """A few steady and a few unsteady maps of a run; None where no map could be judged.

    Arms play no part: another draw of the control arm gives the same examples.
    """
    ok = items.filter(pc.equal(items["status"], "ok"))
    known = ok.filter(pc.is_valid(ok["stability"])).select(["id", "stability", "steadiness"])
    words = {word: known.filter(pc.equal(known["steadiness"], word)) for word in ("steady", "unsteady")}
    if not any(one.num_rows for one in words.values()):
        return None
    best = _first(words["steady"] if words["steady"].num_rows else known, "descending")
    worst = _first(words["unsteady"], "ascending")
    rows, maps = store.rows({*best, *worst}), store.maps({*best, *worst})

    def draw(ids: list[str]) -> list[Example]:
        return [_example(rows[i], maps[i], manifest, fetch=i in store.moved) for i in ids if i in maps]

    return Examples(draw(best), draw(worst))


def draw_thumbnails(store: RunStore, manifest: Manifest, items: pa.Table) -> dict[str, str]:
    """The network's own map over every explained image, by id; none where there are too many images for one page."""
    explained = items.filter(pc.equal(items["status"], "ok"))
    if explained.num_rows > MAX_THUMBNAILS:
        return {}
    ids = set(explained["id"].to_pylist())
    rows, found = store.rows(ids), {}
    for name, maps in store.maps(ids).items():
        size = render.fit((maps.map.shape[0], maps.map.shape[1]), THUMBNAIL_PX)
        image = render.read_input(rows[name], size, manifest, fetch=name in store.moved)
        found[name] = _draw_own_map(maps, manifest, render.background(image, size), quality=THUMBNAIL_QUALITY)
    return found


def _draw_own_map(maps: StoredMaps, manifest: Manifest, under: RgbImage, *, quality: int = 80) -> str:
    """The presented view's own map over an image; where it is not among the views, the map of all."""
    presented = manifest.presented
    own = maps.map if presented is None else maps.view_maps[presented]
    pixels = overlay(under, render.stretch(own, (under.shape[0], under.shape[1])))
    return render.data_url(pixels, quality=quality)


def _first(rows: pa.Table, order: str) -> list[str]:
    found = pc.select_k_unstable(rows, MAX_EXAMPLES, [("stability", order), ("id", "ascending")])
    ids: list[str] = rows.take(found)["id"].to_pylist()
    return ids


def _example(row: Mapping[str, Any], maps: StoredMaps, manifest: Manifest, *, fetch: bool) -> Example:
    grid = maps.map.shape[0], maps.map.shape[1]
    size, small = render.fit(grid, IMAGE_PX), render.fit(grid, TILE_PX)
    image = render.read_input(row, size, manifest, fetch=fetch)
    under, missing = render.background(image, size), image if isinstance(image, str) else None
    return Example(
        id=row["id"],
        class_name=manifest.output_name(row["target"]),
        confidence=row["confidence"],
        output=row["output"],
        steadiness=row["steadiness"] or "cannot say",
        stability=row["stability"],
        image=None if missing else render.data_url(under),
        missing=missing,
        map=_draw_own_map(maps, manifest, under),
        views=render.view_strip(
            row, maps, manifest.transforms, render.background(image, small), most=MAX_VIEWS
        ),
    )
