"""Features of a GeoJSON file, packed or not, as QuPath and QGIS write them."""

import gzip
import io
import json
import zlib
from collections.abc import Mapping
from typing import Any

from equicam.errors import EquicamError

MAX_BYTES = 1 << 26
"""Of a file, packed or unpacked: 10,000 windows of QuPath have 5 MB."""
GZIP = b"\x1f\x8b"


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
        raise EquicamError(what, needs="GeoJSON", got=got, fix="exporting it again, as GeoJSON") from error
    if isinstance(found, list):
        return found, {}
    features = found.get("features") if isinstance(found, dict) else None
    if isinstance(found, dict) and found.get("type") == "Feature":
        return [found], {}
    if not isinstance(features, list):
        raise EquicamError(
            what,
            needs="a FeatureCollection or a list of features",
            got=type(found).__name__,
            fix="exporting it again",
        )
    return features, found


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
        constants -= sum(
            isinstance(v, _NotANumber) for row in rows if isinstance(row, dict) for v in row.values()
        )
        return found

    found = json.loads(data, parse_constant=count, object_hook=forgive)
    if constants:
        raise ValueError("NaN or infinity, which JSON does not have")
    return found


class _NotANumber:
    """Stands for NaN or infinity while a file is read."""
