"""GeoJSON of windows and regions: for QuPath in pixels of the slide, for QGIS in longitude and latitude."""

import colorsys
import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equicam.errors import EquicamError
from equicam.runs.export.lonlat import LonLat
from equicam.runs.export.outlines import trace
from equicam.runs.export.stitched import StitchedMap
from equicam.runs.export.windows import RasterWindows, Row, predicted_class
from equicam.runs.feature_ids import feature_id
from equicam.runs.store import RunStore

Feature = dict[str, Any]
REGION_COLOUR = (226, 120, 20)
GOLDEN = 0.618033988749895


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


def qupath_tiles(store: RunStore, raster: RasterWindows) -> Iterable[Feature]:
    """Windows as QuPath's tiles, with their measurements and the predicted class."""
    for row in raster.rows:
        number, name = predicted_class(row, store.manifest)
        measured = {"stability": row["stability"], "PEUM": _peum(store, row), "flip rate": row["flip_rate"]}
        yield {
            "type": "Feature",
            "id": feature_id(store, row["id"]),
            "geometry": _pixels_square(raster, row),
            "properties": {
                "objectType": "tile",
                "name": row["id"].rpartition("#")[2],
                "isLocked": True,
                "classification": {"name": name, "color": class_colour(number)},
                "measurements": _finite(measured),
                "metadata": {"equicam id": feature_id(store, row["id"]), "equicam window": row["id"]},
            },
        }


def qupath_blind(store: RunStore, raster: RasterWindows, places: Mapping[str, int]) -> Iterable[Feature]:
    """The windows under review, in order of place, with nothing that reveals what the model made of them."""
    for row in by_place(raster, places):
        yield {
            "type": "Feature",
            "id": feature_id(store, row["id"]),
            "geometry": _pixels_square(raster, row),
            "properties": {
                "objectType": "annotation",
                "name": str(places[row["id"]]),
                "isLocked": True,
                "metadata": {"equicam blind": "true"},
            },
        }


def qupath_regions(store: RunStore, stitched: StitchedMap, share: float) -> Iterable[Feature]:
    """The areas where the stitched map is highest, `share` of the cells that have a value, as annotations."""
    values = stitched.bands[0]
    known = np.isfinite(values)
    threshold = np.quantile(values[known], 1 - share) if known.any() else math.inf
    # where more than the share has the lowest value, that value marks nothing
    high = known & (values >= threshold) & (values > np.min(values[known], initial=math.inf))
    raster, name = stitched.raster, stitched.facts["class"]
    for rings, (rows, columns) in trace(high):
        measured = {
            label: float(np.nanmean(stitched.bands[band][rows, columns]))
            for band, label in enumerate(("map", "PEUM", "stability"))
            if np.isfinite(stitched.bands[band][rows, columns]).any()
        }
        corners = [[_pixel(raster, c * stitched.cell, r * stitched.cell) for c, r in ring] for ring in rings]
        yield {
            "type": "Feature",
            "id": feature_id(store, f"{raster.id}#region={rings[0][0]},{name},{stitched.cell:g},{share:g}"),
            "geometry": {"type": "Polygon", "coordinates": corners},
            "properties": {
                "objectType": "annotation",
                "name": f"map of {name}",
                "isLocked": True,
                "classification": {"name": name, "color": list(REGION_COLOUR)},
                "measurements": measured | {"cells": len(rows)},
            },
        }


def lonlat_windows(store: RunStore, raster: RasterWindows) -> Iterable[Feature]:
    """Windows with a column for every fact, and an empty one for the verdict."""
    squares = _lonlat_squares(raster, raster.rows)
    for row, geometry in zip(raster.rows, squares, strict=True):
        _, name = predicted_class(row, store.manifest)
        name_of = feature_id(store, row["id"])
        facts = _finite(
            {
                "confidence": (row["top5_confidence"] or [None])[0],
                "explained_confidence": row["confidence"],
                "stability": row["stability"],
                "peum": _peum(store, row),
                "flip_rate": row["flip_rate"],
            },
            keep=True,
        )
        explained = store.manifest.output_name(row["target"])
        columns = {"id": name_of, "item": row["id"], "class": name, "explained": explained, **facts}
        columns["steadiness"] = row["steadiness"]
        columns |= {"flags": ",".join(map(str, row["flags"] or ())), "verdict": None}
        yield {"type": "Feature", "id": name_of, "geometry": geometry, "properties": columns}


def lonlat_blind(store: RunStore, raster: RasterWindows, places: Mapping[str, int]) -> Iterable[Feature]:
    """The windows under review, in order of place, with an empty column for the verdict and no fact about them."""
    rows = by_place(raster, places)
    for row, geometry in zip(rows, _lonlat_squares(raster, rows), strict=True):
        name = feature_id(store, row["id"])
        yield {
            "type": "Feature",
            "id": name,
            "geometry": geometry,
            "properties": {"id": name, "place": places[row["id"]], "verdict": None, "equicam blind": True},
        }


def by_place(raster: RasterWindows, places: Mapping[str, int]) -> list[Row]:
    """The rows of a raster that are under review, in order of review."""
    return sorted((row for row in raster.rows if row["id"] in places), key=lambda row: places[row["id"]])


def class_colour(number: int | None) -> list[int]:
    """A colour of its own for each class: hues a golden section apart, red first."""
    red, green, blue = colorsys.hsv_to_rgb(((number or 0) * GOLDEN) % 1, 0.85, 0.8)
    return [round(255 * value) for value in (red, green, blue)]


def _corners(row: Mapping[str, Any]) -> list[tuple[float, float]]:
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
                f"raster {raster.id!r}", needs="coordinates on Earth for --to geojson", got="none in the file", fix="--to qupath"
            )  # fmt: skip


def _lonlat_squares(raster: RasterWindows, rows: Sequence[Row]) -> list[dict[str, Any]]:
    lonlat = LonLat(raster.crs or "", raster.transform or ())
    return lonlat.polygons([_corners(row) for row in rows])


def _peum(store: RunStore, row: Mapping[str, Any]) -> float | None:
    """None of one view, which has no variance."""
    return row["peum_score"] if len(store.manifest.transforms) > 1 else None


def _finite(values: Mapping[str, float | None], *, keep: bool = False) -> dict[str, float | None]:
    """Numbers that JSON has; others are left out, or null."""
    known = {k: float(v) if v is not None and math.isfinite(v) else None for k, v in values.items()}
    return {k: v for k, v in known.items() if keep or v is not None}
