"""Pictures for the page, drawn from the run's own rows: never a file as it is, never one the run does not name."""

import hashlib
import io
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from equicam.review.queue import Entry, Shelf

if TYPE_CHECKING:
    from equicam.auditing.stored_maps import StoredMaps

LAYER, THUMB, TILE = 256, 176, 96  # longer sides: maps are coarse and scale smoothly
MOST_PHOTO, PLAIN_PNG = 900, 320
MOST_KEPT = 64 << 20  # bytes of drawn pictures
DRAWING = "1"  # changes where the same arrays are drawn otherwise
KINDS = re.compile(r"photo|map|single|peum|strip|thumb|bare|scale|(?:view|thumb)-([0-9]{1,3})")


class Pictures:
    """Draws on demand and keeps the last ones."""

    def __init__(self, angles: Sequence[float]) -> None:
        self.angles = tuple(angles)
        self._kept: OrderedDict[str, tuple[bytes, str] | None] = OrderedDict()
        self._bytes, self._lock = 0, threading.Lock()

    def known(self, kind: str) -> bool:
        """Is there such a picture?"""
        found = KINDS.fullmatch(kind)
        return found is not None and (found[1] is None or int(found[1]) < len(self.angles))

    def stamp(self, shelf: Shelf, entry: Entry | None, kind: str) -> str:
        """Changes when anything it is drawn from does."""
        told = [DRAWING, kind]
        if entry is not None:
            row = shelf.row(entry)
            told += [
                str(row.get("sha256")),
                entry.key,
                _written(shelf.run.path("maps", entry.part)),
                _written(row["path"]),
            ]
        return hashlib.sha256("\n".join(told).encode("utf-8", "replace")).hexdigest()[:32]

    def drawn(self, shelf: Shelf, entry: Entry | None, kind: str) -> tuple[bytes, str] | None:
        """Bytes and media type; None: there is nothing to draw (no photo, no map, one view)."""
        stamp = self.stamp(shelf, entry, kind)
        with self._lock:
            if stamp in self._kept:
                self._kept.move_to_end(stamp)
                return self._kept[stamp]
        made = _scale() if entry is None else self._draw(shelf, entry, kind)
        with self._lock:
            self._kept[stamp] = made
            self._bytes = sum(len(one[0]) if one else 0 for one in self._kept.values())
            while self._bytes > MOST_KEPT:
                _, gone = self._kept.popitem(last=False)
                self._bytes -= len(gone[0]) if gone else 0
        return made

    def missing(self, shelf: Shelf, entry: Entry) -> str | None:
        """Why its photo cannot be shown, in a sentence."""
        if self.drawn(shelf, entry, "photo") is not None:
            return None
        from equicam.report import render

        found = render.photograph(shelf.row(entry), (8, 8), fetch=bool(shelf.run.moved))
        return found if isinstance(found, str) else None

    def _draw(self, shelf: Shelf, entry: Entry, kind: str) -> tuple[bytes, str] | None:
        from equicam.report import render
        from equicam.report.overlay import overlay

        row, arrays = shelf.row(entry), shelf.drawn(entry)
        name, _, number = kind.partition("-")
        if kind == "photo":
            size = render.fitted(_grid(row, arrays), _side(row))
            photo = render.photograph(row, size, fetch=bool(shelf.run.moved))
            return None if isinstance(photo, str) else _encoded(photo)
        if name in ("thumb", "bare", "strip"):
            size = render.fitted(_grid(row, arrays), TILE if name == "strip" else THUMB)
            photo = render.photograph(row, size, fetch=bool(shelf.run.moved))
            if name == "bare" or arrays is None:
                return _jpeg(render.ground(photo, size))
            under = render.ground(photo, size)
            if name == "strip":
                tiles = [
                    render.view_tile(under, plane, degrees, size=size)
                    for plane, degrees in zip(arrays.view_maps, self.angles, strict=False)
                ]
                return _jpeg(np.concatenate(tiles, axis=1)) if len(tiles) > 1 else None
            values = self._turned(arrays, int(number), size) if number else render.stretched(arrays.map, size)
            return _jpeg(overlay(under, values))
        if arrays is None:
            return None
        size = render.fitted(_grid(row, arrays), LAYER)
        if kind == "map":
            return _layer(render.stretched(arrays.map, size))
        if kind == "peum":
            return _layer(render.deviation(arrays.peum, size)) if len(self.angles) > 1 else None
        if kind == "single":
            at = next((i for i, angle in enumerate(self.angles) if angle % 360 == 0), None)
            return None if at is None else _layer(self._turned(arrays, at, size))
        return _layer(self._turned(arrays, int(number), size))

    def _turned(self, arrays: "StoredMaps", number: int, size: tuple[int, int]) -> Any:
        from equicam.report import render

        plane = arrays.view_maps[number]
        return np.clip(render.turned_back(render.stretched(plane, size), self.angles[number]), 0, 1)


def _grid(row: dict[str, Any], arrays: "StoredMaps | None") -> tuple[int, int]:
    if arrays is not None:
        return arrays.map.shape[0], arrays.map.shape[1]
    return int(row.get("height") or 1), int(row.get("width") or 1)


def _side(row: dict[str, Any]) -> int:
    """As large as what the model saw of the file, within bounds; a small picture is enlarged by the page."""
    frame = row.get("input_box") or [0, 0, row.get("width") or 1, row.get("height") or 1]
    seen = max(abs(frame[2] - frame[0]), abs(frame[3] - frame[1]))
    return int(min(max(seen, 32), MOST_PHOTO))


def _layer(values: Any) -> tuple[bytes, str]:
    """Colours that are clear where the map is low, to lie over the photo."""
    from equicam.report.overlay import heat

    clear = np.clip(values, 0, 1)[..., None] ** 0.7 * 255
    return _png(np.concatenate([heat(values), clear.round().astype(np.uint8)], axis=-1))


def _scale() -> tuple[bytes, str]:
    from equicam.report.overlay import heat

    return _png(heat(np.broadcast_to(np.linspace(0, 1, 256), (8, 256)).copy()))


def _encoded(photo: Any) -> tuple[bytes, str]:
    return _png(photo) if max(photo.shape[:2]) <= PLAIN_PNG else _jpeg(photo, quality=92)


def _png(pixels: Any) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=4)
    return buffer.getvalue(), "image/png"


def _jpeg(pixels: Any, *, quality: int = 84) -> tuple[bytes, str]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality, subsampling=0)
    return buffer.getvalue(), "image/jpeg"


def _written(path: Any) -> str:
    try:
        stat = Path(path or "").stat()
    except (OSError, ValueError):
        return "none"
    return f"{stat.st_mtime_ns} {stat.st_size}"
