"""GeoJSON of windows and regions: for QuPath in pixels of the slide, for QGIS in longitude and latitude."""

import colorsys
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError, needing
from equicam.images import limited
from equicam.rasters.raster import plain_crs
from equicam.runs.export.stitching import RasterWindows, Row, StitchedMap, predicted_class
from equicam.runs.queue_files import feature_id
from equicam.runs.store import RunStore

Feature = dict[str, Any]
REGION_COLOUR = (226, 120, 20)
GOLDEN = 0.618033988749895
DECIMALS = 9
"""Of degrees: a tenth of a millimetre."""
Point = tuple[int | float, int | float]
Points = list[Point]
Ring = list[tuple[int, int]]
"""Corners of cells as (column, row), the first again at the end."""


def write_features(path: Path, features: Iterable[Feature]) -> None:
    """A FeatureCollection, a feature a line; compressed where the name ends in .gz."""
    with path.open("wb") as plain:
        # no name and time in the file: the same run gives the same bytes
        file = gzip.GzipFile("", "wb", fileobj=plain, mtime=0) if path.suffix == ".gz" else plain
        file.write(b'{"type":"FeatureCollection","features":[')
        for number, feature in enumerate(features):
            text = json.dumps(feature, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            file.write((",\n" if number else "\n").encode() + text.encode())
        file.write(b"\n]}\n")
        if file is not plain:
            file.close()


def window_features(
    store: RunStore, raster: RasterWindows, *, qupath: bool, places: Mapping[str, int] | None = None
) -> Iterable[Feature]:
    """Windows with what the model made of them: QuPath's tiles in pixels, or squares in degrees with a column for every fact.

    With `places`, those under review alone, in order of place, and nothing that reveals what the model made of them.
    """
    rows = raster.rows
    if places is not None:
        rows = tuple(sorted((row for row in rows if row["id"] in places), key=lambda row: places[row["id"]]))
    squares = (_pixels_square(raster, row) for row in rows) if qupath else _lonlat_squares(raster, rows)
    for row, square in zip(rows, squares, strict=True):
        id_ = feature_id(store, row["id"])
        if places is not None:
            place = places[row["id"]]
            annotation = {"objectType": "annotation", "name": str(place), "isLocked": True}
            blind = annotation | {"metadata": {"equicam blind": "true"}}
            columns = {"id": id_, "place": place, "verdict": None, "equicam blind": True}
            yield _feature(id_, square, blind if qupath else columns)
        else:
            yield _feature(id_, square, (_tile_properties if qupath else _columns)(store, row, id_))


def _tile_properties(store: RunStore, row: Row, id_: str) -> dict[str, Any]:
    """A window as a tile of QuPath, with its measurements and the predicted class."""
    number, name = predicted_class(row, store.manifest)
    measured = {"stability": row["stability"], "PEUM": _peum(store, row), "flip rate": row["flip_rate"]}
    return {
        "objectType": "tile",
        "name": row["id"].rpartition("#")[2],
        "isLocked": True,
        "classification": {"name": name, "color": _class_colour(number)},
        "measurements": {name: v for name, v in _finite(measured).items() if v is not None},
        "metadata": {"equicam id": id_, "equicam window": row["id"]},
    }


def _columns(store: RunStore, row: Row, id_: str) -> dict[str, Any]:
    """The columns of a window, and an empty one for the verdict."""
    facts = {
        "confidence": (row["top5_confidence"] or [None])[0],
        "explained_confidence": row["confidence"],
        "stability": row["stability"],
        "peum": _peum(store, row),
        "flip_rate": row["flip_rate"],
    }
    return {
        "id": id_,
        "item": row["id"],
        "class": predicted_class(row, store.manifest)[1],
        "explained": store.manifest.output_name(row["target"]),
        **_finite(facts),
        "steadiness": row["steadiness"],
        "flags": ",".join(map(str, row["flags"] or ())),
        "verdict": None,
    }


def qupath_regions(store: RunStore, stitched: StitchedMap, share: float) -> Iterable[Feature]:
    """The areas where the stitched map is highest, `share` of the cells that have a value, as annotations."""
    values = stitched.bands[0]
    known = np.isfinite(values)
    threshold = np.quantile(values[known], 1 - share) if known.any() else math.inf
    # where more than the share has the lowest value, that value marks nothing
    high = known & (values >= threshold) & (values > np.min(values[known], initial=math.inf))
    raster, name = stitched.raster, stitched.facts["class"]
    for rings, (rows, columns) in _trace(high):
        measured = {
            label: float(np.nanmean(stitched.bands[band][rows, columns]))
            for band, label in enumerate(("map", "PEUM", "stability"))
            if np.isfinite(stitched.bands[band][rows, columns]).any()
        }
        corners = [[_pixel(raster, c * stitched.cell, r * stitched.cell) for c, r in ring] for ring in rings]
        id_ = feature_id(store, f"{raster.id}#region={rings[0][0]},{name},{stitched.cell:g},{share:g}")
        yield _feature(
            id_,
            {"type": "Polygon", "coordinates": corners},
            {
                "objectType": "annotation",
                "name": f"map of {name}",
                "isLocked": True,
                "classification": {"name": name, "color": list(REGION_COLOUR)},
                "measurements": measured | {"cells": len(rows)},
            },
        )


def _feature(id_: str, geometry: dict[str, Any], properties: dict[str, Any]) -> Feature:
    return {"type": "Feature", "id": id_, "geometry": geometry, "properties": properties}


def _class_colour(number: int | None) -> list[int]:
    """A colour of its own for each class: hues a golden section apart, red first."""
    red, green, blue = colorsys.hsv_to_rgb(((number or 0) * GOLDEN) % 1, 0.85, 0.8)
    return [round(255 * value) for value in (red, green, blue)]


def _corners(row: Mapping[str, Any]) -> Points:
    x, y, side = row["x"], row["y"], row["side"]
    return [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]


def _pixels_square(raster: RasterWindows, row: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "Polygon", "coordinates": [[_pixel(raster, x, y) for x, y in _corners(row)]]}


def _pixel(raster: RasterWindows, x: float, y: float) -> list[int | float]:
    """A place in QuPath's coordinates, which begin at the slide's origin, to a thousandth of a pixel."""
    inside = (min(x, raster.width), min(y, raster.height))
    place = [round(v - start, 3) for v, start in zip(inside, raster.origin, strict=True)]
    return [int(v) if v == int(v) else v for v in place]


def refuse_unplaced(rasters: Iterable[RasterWindows]) -> None:
    """Refuse rasters that do not say where on Earth they are."""
    for raster in rasters:
        if raster.crs is None or raster.transform is None:
            raise EquicamError(
                f"raster {raster.id!r}", "coordinates on Earth for --to geojson", "none in the file", "--to qupath",
            )  # fmt: skip


def _lonlat_squares(raster: RasterWindows, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The windows in degrees."""
    if not rows:
        return []
    crs = plain_crs(raster.crs or "", "a raster")
    flat = np.asarray([point for row in rows for point in _corners(row)], np.float64)
    degrees = limited.call(_to_degrees, crs, raster.transform or (), flat)
    return [_geometry([(x, y) for x, y in square.tolist()]) for square in np.split(degrees, len(rows))]


def _peum(store: RunStore, row: Mapping[str, Any]) -> float | None:
    """None of one view, which has no variance."""
    return row["peum_score"] if len(store.manifest.transforms) > 1 else None


def _finite(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Numbers that JSON has, else null."""
    return {k: float(v) if v is not None and math.isfinite(v) else None for k, v in values.items()}


def _to_degrees(crs: str, affine: Sequence[float], pixels: NDArray[np.float64]) -> NDArray[np.float64]:
    with needing("geo", "--to geojson"):
        from rasterio.errors import RasterioError
        from rasterio.warp import transform

    a, b, c, d, e, f = affine
    x, y = pixels[:, 0], pixels[:, 1]
    try:
        lon, lat = transform(crs, "EPSG:4326", (a * x + b * y + c).tolist(), (d * x + e * y + f).tolist())
        found = np.stack([np.asarray(lon), np.asarray(lat)], axis=1)
        if not np.isfinite(found).all():
            raise ValueError("places outside the area of the CRS")
    except (RasterioError, ValueError) as error:
        raise EquicamError(
            "a raster", "a CRS that has longitude and latitude", str(error)[:200], "--to geotiff"
        ) from error
    return found


def _geometry(ring: Points) -> dict[str, Any]:
    """A closed convex ring of degrees as a Polygon, or as a MultiPolygon if it crosses the antimeridian."""
    points = _unwrap(ring[:-1])
    parts = []
    for west in (-540.0, -180.0, 180.0):  # degrees; each 360 wide
        part = _clip(_clip(points, west, 1), west + 360, -1)
        if len(part) >= 3 and abs(_area(part)) > 0:
            parts.append([(x - west - 180, y) for x, y in part])
    shapes = [[_closed(part)] for part in parts or [ring[:-1]]]
    if len(shapes) == 1:
        return {"type": "Polygon", "coordinates": shapes[0]}
    return {"type": "MultiPolygon", "coordinates": shapes}


def _unwrap(points: Points) -> Points:
    """Longitudes without jumps: each is within 180 degrees of the one before."""
    found = points[:1]
    for x, y in points[1:]:
        before = found[-1][0]
        found.append((x - 360 * round((x - before) / 360), y))
    return found


def _clip(points: Points, meridian: float, sign: int) -> Points:
    """What of a convex ring lies east (1) or west (-1) of a meridian."""
    found: Points = []
    for (x0, y0), (x1, y1) in zip(points, [*points[1:], *points[:1]], strict=True):
        inside, next_inside = sign * (x0 - meridian) >= 0, sign * (x1 - meridian) >= 0
        if inside:
            found.append((x0, y0))
        if inside != next_inside:
            share = (meridian - x0) / (x1 - x0)
            found.append((meridian, y0 + share * (y1 - y0)))
    return found


def _closed(points: Points) -> list[list[float]]:
    ordered = points if _area(points) >= 0 else points[::-1]
    rounded = [[round(x, DECIMALS), round(y, DECIMALS)] for x, y in ordered]
    return [*rounded, rounded[0]]


def _area(points: Sequence[Point]) -> int | float:
    """Twice the area in a ring: above 0 if it is counter-clockwise with y upwards, clockwise with y downwards."""
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[0]], strict=True))


def _trace(mask: NDArray[np.bool_]) -> list[tuple[list[Ring], NDArray[np.intp]]]:
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
        points = ring[:-1]
        around = zip([points[-1], *points], points, [*points[1:], points[0]], strict=False)
        # without the points on a straight line
        corners = [b for a, b, c in around if (b[0] - a[0]) * (c[1] - b[1]) != (b[1] - a[1]) * (c[0] - b[0])]
        found.append([*corners, corners[0]])
    return found


def _next(steps: dict[tuple[int, int], list[tuple[int, int]]], ring: Ring) -> tuple[int, int]:
    """The next corner. Where two cells of an area touch in a corner only, the line goes left, to the other cell: the
    rings then touch there, and none crosses itself.
    """
    here = ring[-1]
    chosen = steps[here][0]
    if len(steps[here]) == 2 and len(ring) > 1:
        before = ring[-2]
        left = (here[0] + here[1] - before[1], here[1] - here[0] + before[0])
        chosen = left if left in steps[here] else chosen
    steps[here].remove(chosen)
    if not steps[here]:
        del steps[here]
    return chosen
