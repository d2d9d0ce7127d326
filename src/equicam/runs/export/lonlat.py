"""Areas of a raster in longitude and latitude, as RFC 7946 wants them: counter-clockwise, and cut at the antimeridian."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equicam.errors import EquicamError
from equicam.images import limited
from equicam.rasters.raster import plain_crs
from equicam.runs.export.libraries import needing

DECIMALS = 9
"""Of degrees: a tenth of a millimetre."""

Point = tuple[float, float]
Points = list[Point]


class LonLat:
    """From pixels of a raster to degrees."""

    def __init__(self, crs: str, transform: Sequence[float]) -> None:
        self._crs, self._transform = plain_crs(crs, "a raster"), transform

    def polygons(self, rings: Sequence[Sequence[Point]]) -> list[dict[str, Any]]:
        """A geometry for every closed ring of pixels, which is convex."""
        if not rings:
            return []
        flat = np.asarray([point for ring in rings for point in ring], np.float64)
        degrees = limited.call(_to_degrees, self._crs, self._transform, flat)
        ends = np.cumsum([len(ring) for ring in rings])
        return [geometry([(x, y) for x, y in part.tolist()]) for part in np.split(degrees, ends[:-1])]


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
            "a raster", needs="a CRS that has longitude and latitude", got=str(error)[:200], fix="--to geotiff"
        ) from error  # fmt: skip
    return found


def geometry(ring: Points) -> dict[str, Any]:
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


def _area(points: Points) -> float:
    """Above 0 for a ring that is counter-clockwise with latitudes upwards."""
    return sum(
        x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in zip(points, [*points[1:], *points[:1]], strict=True)
    )
