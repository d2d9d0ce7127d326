"""GeoJSON, packed or not, as QuPath and QGIS write it: its features, and the areas they draw on a raster."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images.files import AnyPath, read_file
from equicam.rasters.raster import RasterInfo

MAX_BYTES = 1 << 26
"""Of a file, packed or unpacked: 10,000 windows of QuPath have 5 MB."""
GZIP = b"\x1f\x8b"
LONGITUDE_LATITUDE = "EPSG:4326"
Ring = NDArray[np.float64]
"""Points of a closed line, in pixels of level 0: [n, 2]."""


def read_features(data: bytes, what: str) -> tuple[list[Any], Mapping[str, Any]]:
    """The features of a collection, of a bare list or a single one, and the collection's own members."""
    try:
        found = _parse(_unpack(data) if data.startswith(GZIP) else data)
    except (ValueError, RecursionError, OSError, EOFError, zlib.error) as error:
        got = str(error)[:200] or type(error).__name__
        if isinstance(error, RecursionError):
            got = "JSON that is nested too deeply"
        elif isinstance(error, json.JSONDecodeError):
            got = f"text that is no JSON from line {error.lineno} on"
        raise EquicamError(what, "GeoJSON", got, "exporting it again, as GeoJSON") from error
    if isinstance(found, list):
        return found, {}
    if isinstance(found, dict) and found.get("type") == "Feature":
        return [found], {}
    if not isinstance(found, dict) or not isinstance(found.get("features"), list):
        needs = "a FeatureCollection or a list of features"
        raise EquicamError(what, needs, type(found).__name__, "exporting it again")
    return found["features"], found


def _unpack(data: bytes) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        found = file.read(MAX_BYTES + 1)
    if len(found) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES:,} bytes when unpacked")
    return found


def _parse(data: bytes) -> Any:
    """JSON without NaN and infinity, except in QuPath's measurements, where it writes them and we read nothing."""
    constants = 0

    def count(_name: str) -> _NotANumber:
        nonlocal constants
        constants += 1
        return _NotANumber()

    def forgive(found: dict[str, Any]) -> dict[str, Any]:
        nonlocal constants
        measured = found.pop("measurements", None)
        rows = measured if isinstance(measured, list) else [measured]
        values = (value for row in rows if isinstance(row, dict) for value in row.values())
        constants -= sum(isinstance(value, _NotANumber) for value in values)
        return found

    found = json.loads(data, parse_constant=count, object_hook=forgive)
    if constants:
        raise ValueError("NaN or infinity, which JSON does not have")
    return found


class _NotANumber:
    """Stands for NaN or infinity while a file is read."""


def read_regions(info: RasterInfo, path: AnyPath, regions: str) -> list[tuple[str | None, list[Ring]]]:
    """Areas of a GeoJSON file, in pixels: of slides as QuPath writes them, of maps in longitude and latitude or its `crs`.

    A folder has one file for each raster, of its name with .geojson. Points and lines are no areas and left out.
    """
    file = Path(regions)
    if file.is_dir():
        file = file / f"{path.stem}.geojson"
    what = f"regions {str(file)!r}"
    data, _ = read_file(file, what=what, limit=MAX_BYTES)
    features, collection = read_features(data, what)
    crs = _crs(collection, what)
    found: list[tuple[str | None, list[Ring]]] = []
    for number, feature in enumerate(features, start=1):
        try:
            geometry = feature.get("geometry") or {}
            if geometry.get("type") not in ("Polygon", "MultiPolygon"):
                continue
            shapes = geometry["coordinates"]
            polygons = [shapes] if geometry["type"] == "Polygon" else shapes
            rings = [np.asarray(ring, np.float64)[:, :2] for polygon in polygons for ring in polygon]
            if not all(len(ring) >= 3 and np.isfinite(ring).all() for ring in rings):
                raise ValueError("a ring without points")
            label = _region_label(feature.get("properties") or {})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            got = f"feature {number}, which has none"
            raise EquicamError(what, "areas with rings of points", got, "exporting it again") from error
        found.append((label, [_to_pixels(info, ring, crs, what) for ring in rings]))
    if not found:
        got = f"{len(features):,} features without one"
        raise EquicamError(what, "at least one polygon", got, "an export of QuPath or QGIS")
    return found


def _crs(collection: Mapping[str, Any], what: str) -> str:
    """The coordinate system that a file names, as older GeoJSON does; longitude and latitude if it names none."""
    given = collection.get("crs")
    if given is None:
        return LONGITUDE_LATITUDE
    properties = given.get("properties") if isinstance(given, dict) else None
    name = str(properties.get("name")) if isinstance(properties, dict) else str(given)
    if "CRS84" in name:
        return LONGITUDE_LATITUDE
    if code := re.search(r"EPSG:+(\d{4,6})$", name):
        return f"EPSG:{code[1]}"
    needs = "longitude and latitude, or a crs by its EPSG code"
    raise EquicamError(what, needs, name[:80], "saving it as EPSG:4326")


def _region_label(properties: dict[str, Any]) -> str | None:
    name, classification = properties.get("label"), properties.get("classification")
    if isinstance(classification, dict):
        names = classification.get("names")
        joined = ": ".join(map(str, names)) if isinstance(names, list) and names else None
        name = classification.get("name", joined)
    return str(name)[:200] if name is not None else None


def _to_pixels(info: RasterInfo, ring: Ring, crs: str, what: str) -> Ring:
    if info.kind != "map":
        return np.asarray(ring + np.asarray(info.origin))
    if info.crs is None or info.transform is None:
        return ring
    from rasterio.warp import transform

    if crs == LONGITUDE_LATITUDE and not (np.abs(ring) <= (360, 90)).all():
        needs, got = "longitude and latitude in degrees, or a crs", f"{ring[0, 0]:g}, {ring[0, 1]:g}"
        raise EquicamError(what, needs, got, "saving it as EPSG:4326")
    x, y = transform(crs, info.crs, ring[:, 0].tolist(), ring[:, 1].tolist())
    a, b, c, d, e, f = info.transform
    matrix = np.linalg.inv(np.array([[a, b], [d, e]]))
    return np.asarray(np.stack([np.asarray(x) - c, np.asarray(y) - f], axis=1) @ matrix.T)


def find_in_regions(
    regions: list[tuple[str | None, list[Ring]]], x: NDArray[Any], y: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The label of the last region that each point lies in, and whether it lies in any."""
    labels: NDArray[Any] = np.full(len(x), None, object)
    inside = np.zeros(len(x), bool)
    for label, rings in regions:
        here = np.zeros(len(x), bool)
        for ring in rings:
            here ^= _in_ring(ring, x, y)
        labels[here] = label
        inside |= here
    return labels, inside


def _in_ring(ring: Ring, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether a line to the right of each point crosses the ring an odd number of times."""
    inside = np.zeros(len(x), bool)
    for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
        if y0 == y1:
            continue
        crosses = ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
        inside ^= crosses
    return inside
