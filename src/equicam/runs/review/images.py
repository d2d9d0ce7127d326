"""Images for the page, rendered from the run's own rows: never a file as it is, never one the run does not name."""

import io
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from equicam.core.transforms import Transform, inner_radius, presented_index
from equicam.overlay import RgbImage, heat, opacity, overlay
from equicam.runs.report import render
from equicam.runs.review.queue import Queue, QueueItem
from equicam.runs.store import StoredMaps
from equicam.runs.verdicts import ReviewKey

LAYER_PX, THUMB_PX, TILE_PX = 384, 240, 96  # longer sides; maps are coarse and scale smoothly
MAX_INPUT_PX = 900
MAX_PNG_PX = 320  # larger input images are sent as JPEG
MAX_CACHE_BYTES = 64 << 20
BLOCK_BYTES, THUMB_BLOCK_BYTES = 128 << 10, 32 << 10  # sizes of images under blinding are multiples of these
RENDERING_VERSION = "3"  # part of every ETag: change it when the same arrays look different
NOTHING = "there is nothing to show here"
KINDS = re.compile(
    r"input|original|surroundings|map|presented|peum|strip|thumb|thumb-plain|scale|(?:view|thumb)-([0-9]{1,4})"
)

Encoded = tuple[bytes, str]
"""The bytes of an image and its media type."""


class ImageRenderer:
    """Renders images on demand and caches the last ones."""

    def __init__(self, transforms: Sequence[Transform], secret: ReviewKey) -> None:
        self.transforms, self.secret = tuple(transforms), secret
        self._cache: OrderedDict[str, Encoded | str] = OrderedDict()
        self._lock = threading.Lock()

    def has_kind(self, kind: str) -> bool:
        """Whether there are images of this kind."""
        found = KINDS.fullmatch(kind)
        return found is not None and (found[1] is None or int(found[1]) < len(self.transforms))

    def etag(self, queue: Queue, item: QueueItem | None, kind: str) -> str:
        """A tag that changes with everything the image is rendered from, and reveals nothing of it."""
        sources = [RENDERING_VERSION, kind]
        if item is not None:
            row = queue.row(item)
            maps = queue.store.path("maps", queue.shard(item))
            sources += [str(row.get("sha256")), item.key, _file_version(maps), _file_version(row["path"])]
        return self.secret.digest("etag", *sources)[:32]

    def render(self, queue: Queue, item: QueueItem | None, kind: str) -> Encoded | str:
        """The image; a sentence if there is none: no input image, no map, or only one view."""
        etag = self.etag(queue, item, kind)
        with self._lock:
            if etag in self._cache:
                self._cache.move_to_end(etag)
                return self._cache[etag]
        made = encode_scale() if item is None else self._render(queue, item, kind)
        with self._lock:
            self._cache[etag] = made
            total = sum(map(_count_bytes, self._cache.values()))
            while total > MAX_CACHE_BYTES:
                _, oldest = self._cache.popitem(last=False)
                total -= _count_bytes(oldest)
        return made

    @staticmethod
    def pad(data: bytes, kind: str) -> bytes:
        """An image with zeros after its end, which decoders ignore, so that its size reveals nothing of its map."""
        return data + bytes(-len(data) % (THUMB_BLOCK_BYTES if kind.startswith("thumb") else BLOCK_BYTES))

    def _render(self, queue: Queue, item: QueueItem, kind: str) -> Encoded | str:
        row, maps, manifest = queue.row(item), queue.maps(item), queue.store.manifest
        grid = (row.get("height") or 1, row.get("width") or 1) if maps is None else maps.map.shape[:2]
        fetch = item.id in queue.store.moved
        found: RgbImage | str
        if kind in ("surroundings", "original", "input"):
            if kind == "input":
                found = render.read_input(row, render.fit(grid, _input_side(row)), manifest, fetch=fetch)
            else:
                found = render.read_part(kind, row, manifest, fetch=fetch)
            return found if isinstance(found, str) else encode_input(found)
        if kind == "strip" or kind.startswith("thumb"):
            size = render.fit(grid, TILE_PX if kind == "strip" else THUMB_PX)
            image = render.background(render.read_input(row, size, manifest, fetch=fetch), size)
            if maps is None or kind == "thumb-plain":
                return _encode(image, "JPEG")
            if kind == "strip":
                return self._strip(image, maps)
            return _encode(overlay(image, self._layer(maps, kind.replace("thumb-", "view-"), size)), "JPEG")
        values = None if maps is None else self._layer(maps, kind, render.fit(grid, LAYER_PX))
        return NOTHING if values is None else encode_layer(values)

    def _strip(self, image: RgbImage, maps: StoredMaps) -> Encoded | str:
        """The tiles of all views in one row."""
        radius = inner_radius(self.transforms)
        tiles = [
            render.view_tile(image, plane, one, radius=radius)
            for plane, one in zip(maps.view_maps, self.transforms, strict=False)
        ]
        return _encode(np.concatenate(tiles, axis=1), "JPEG") if len(tiles) > 1 else NOTHING

    def _layer(self, maps: StoredMaps, kind: str, size: tuple[int, int]) -> Any:
        """The values of the map of all views, of their disagreement or of a view, aligned; None where there are none."""
        if kind in ("map", "thumb"):
            return render.stretch(maps.map, size)
        if kind == "peum":
            return render.deviation(maps.peum, size) if len(self.transforms) > 1 else None
        view = presented_index(self.transforms) if kind == "presented" else int(kind.removeprefix("view-"))
        if view is None:
            return None
        return render.align(render.stretch(maps.view_maps[view], size), self.transforms[view])


def _count_bytes(made: Encoded | str) -> int:
    return 0 if isinstance(made, str) else len(made[0])


def _input_side(row: Mapping[str, Any]) -> int:
    """The longer side of the model's input in the file, within bounds; the page enlarges small images itself."""
    box = row.get("input_box") or [0, 0, row.get("width") or 1, row.get("height") or 1]
    side = max(abs(box[2] - box[0]), abs(box[3] - box[1]))
    return int(min(max(side, 32), MAX_INPUT_PX))


def encode_layer(values: Any) -> Encoded:
    """Colours that are transparent where the map is low, to lie over the input image."""
    alpha = opacity(values)[..., None] * 255
    return _encode(np.concatenate([heat(values), alpha.round().astype(np.uint8)], axis=-1), "PNG")


def encode_scale() -> Encoded:
    """The layer of a map that rises from 0 to 1: over the grey of an image, its colours are those of a map over it."""
    return encode_layer(np.broadcast_to(np.linspace(0, 1, 512), (4, 512)).copy())


def encode_input(image: RgbImage) -> Encoded:
    """The image under the maps: exact where it is small."""
    small = max(image.shape[:2]) <= MAX_PNG_PX
    return _encode(image, "PNG") if small else _encode(image, "JPEG", quality=92)


def _encode(image: Any, kind: str, *, quality: int = 84) -> Encoded:
    buffer = io.BytesIO()
    options = {"compress_level": 4} if kind == "PNG" else {"quality": quality, "subsampling": 0}
    Image.fromarray(image).save(buffer, kind, **options)
    return buffer.getvalue(), f"image/{kind.lower()}"


def _file_version(path: Any) -> str:
    try:
        stat = Path(path or "").stat()
    except (OSError, ValueError):
        return "none"
    return f"{stat.st_mtime_ns} {stat.st_size}"
