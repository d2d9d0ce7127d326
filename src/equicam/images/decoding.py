"""Images decoded in worker processes ahead of the device, each within limits of time and memory.

An image that takes too long or kills its worker becomes a row with a reason: the pool breaks, the images it had not
finished are decoded again, each in a process of its own, and how that process ends tells why.

Workers close the run's lock when they start and die with their parent, so nothing of a killed run blocks the next.
They leave pixels in memory shared with their parent, because a pipe would make the computing process copy them. The
memory has no name, so the system frees it when the processes end.
"""

import contextlib
import math
import mmap
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from equicam.errors import EquicamError, ModelError, error_text
from equicam.images.files import FileStat, RemotePath, file_stat
from equicam.images.formats import LevelPixels
from equicam.images.item_table import Items
from equicam.images.items import Box, Item, ItemContent, LoadedItem, read_item
from equicam.images.limited import (
    ATTEMPTS,
    KilledError,
    TimeLimitError,
    call_alone,
    end_with_parent,
    enter,
    give_back_freed_memory,
    is_memory_error,
    limit_time,
    limits,
    limits_scale,
)
from equicam.rasters.windows import WindowPixels
from equicam.reasons import Reason

Preprocess = Callable[[Image.Image | WindowPixels], NDArray[np.float32] | LevelPixels]
InputBox = Callable[[tuple[int, int]], Box]
"""From an image's width and height, the box of it that the model's input shows."""
SHARDS_AHEAD = 2
"""Shards decoded while one is computed."""
MAX_DECODERS = 10
"""For one device, unless the caller wants more: next to an H200 they kept up with 1,420 images of 640 × 480 a second, and starting each takes time."""
MAX_IMAGES_PER_MESSAGE = 8
"""Of those that a worker decodes in a row."""
MAX_UPLOAD_SECONDS = 30.0
"""For one image that somebody sent and waits for."""


@dataclass(frozen=True)
class DecodedImage:
    """An image as the model's input, with the facts about its file; or the reason why it cannot be one."""

    item: Item
    x: NDArray[Any] | None = None  # [c, H, W], float32, or 8-bit levels where it has `numbers`
    numbers: NDArray[np.float32] | None = None  # the model's number for each level
    sha256: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None
    width: int | None = None
    height: int | None = None
    input_box: Box | None = None
    as_stored: bool = False  # its EXIF orientation cannot be read
    margin: tuple[int, int] | None = None  # rows and columns around a window that its raster has
    nodata: bool = False  # some of a window has no data
    reason: Reason | None = None
    seconds: float = 0.0


def failure_reason(error: Exception) -> Reason:
    """Why an image could not be decoded or preprocessed; every exception counts."""
    if is_memory_error(error):
        return Reason("out-of-memory")
    if isinstance(error, TimeLimitError):
        return Reason("decoding-timeout", {"seconds": limits()[0]})
    if isinstance(error, KilledError):
        return Reason("killed-decoder")
    if isinstance(error, ModelError):  # the file is fine
        return Reason("refused", error.to_plain())
    return Reason("unreadable", {"error": type(error).__name__, "message": error_text(error)})


def decode_image(
    item: Item, preprocess: Preprocess, input_box: InputBox, content: ItemContent | None = None
) -> DecodedImage:
    """Read an image's file once, digest, decode and preprocess it; with `content` nothing is read: the bytes are in memory."""
    return preprocess_loaded(item, lambda: content or read_item(item), preprocess, input_box)


def preprocess_loaded(
    item: Item, load: Callable[[], ItemContent | LoadedItem], preprocess: Preprocess, input_box: InputBox
) -> DecodedImage:
    """An image that `load` reads, here or in a process that opens files, as the model's input; any exception on the way becomes its reason."""
    start, found = time.perf_counter(), DecodedImage(item)
    try:
        loaded = load()
        found = replace(found, **asdict(loaded.stat), sha256=loaded.sha256)
        content = loaded.content
        if isinstance(content, WindowPixels):
            size, box = (content.tile,) * 2, (0.0, 0.0, float(content.tile), float(content.tile))
            shown = replace(found, margin=content.margin, nodata=not content.valid.all())
        else:
            size, box = content.image.size, input_box(content.image.size)
            shown = replace(found, as_stored=content.orientation is None)
        shown = replace(shown, width=size[0], height=size[1], input_box=box)
        given = content if isinstance(content, WindowPixels) else content.image
        found = _with_pixels(shown, preprocess(given))
    except Exception as error:  # noqa: BLE001  # a bad image never ends a run
        stat = {} if found.sha256 else asdict(file_stat(item.path))
        found = replace(found, **stat, x=None, reason=failure_reason(error))
    return replace(found, seconds=time.perf_counter() - start)


def _with_pixels(found: DecodedImage, pixels: NDArray[np.float32] | LevelPixels) -> DecodedImage:
    """The image with its pixels, or with the reason if preprocessing made NaN or infinity of it."""
    if isinstance(pixels, LevelPixels):
        if np.isfinite(pixels.numbers).all():
            return replace(found, x=pixels.levels, numbers=pixels.numbers)
        pixels = pixels.to_numbers()
    finite = np.isfinite(pixels).all()
    return replace(found, x=pixels) if finite else replace(found, reason=Reason("not-finite"))


def decode_upload(data: bytes, name: str, preprocess: Preprocess, input_box: InputBox) -> DecodedImage:
    """Decode and preprocess bytes that somebody sent, in a process of its own with limits; they touch no disk."""
    item = Item(name, Path(name))
    limit = MAX_UPLOAD_SECONDS * limits_scale()
    settings = _Settings(preprocess, input_box, -1, os.getpid(), limit, limits()[1], network=False)
    return _decode_alone(item, settings, ItemContent(item, data, FileStat(len(data), None)))


def _decode_alone(item: Item, settings: "_Settings", content: ItemContent | None = None) -> DecodedImage:
    """`decode_image` in a process of its own, whose exit says whether the time was up."""
    reason = Reason("killed-decoder")
    for _ in range(1 if content else ATTEMPTS):  # for bytes that were sent, somebody waits
        found, exit_code = call_alone(_decode_one, item, settings, content)
        if isinstance(found, DecodedImage):
            return found
        if exit_code == -signal.SIGALRM:
            reason = Reason("decoding-timeout", {"seconds": settings.seconds})
            break
    return DecodedImage(item, **({} if content else asdict(file_stat(item.path))), reason=reason)


class _SharedBuffer:
    """Slots for arrays up to a size, in memory that forked processes share."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, max(1, slot_bytes * slots))

    def put(self, slot: int, x: NDArray[Any]) -> bool:
        """Copy an array into a slot; False if it is too large."""
        if x.nbytes > self.slot_bytes:
            return False
        self.at(slot, x.shape, x.dtype)[...] = x
        return True

    def at(self, slot: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A view of a slot, not a copy."""
        found = np.frombuffer(self._memory, dtype, math.prod(shape), slot * self.slot_bytes)
        return found.reshape(shape)


Reply = tuple[DecodedImage, tuple[tuple[int, ...], np.dtype[Any]] | None]
"""A worker's answer; with a shape and type if the pixels are in shared memory."""


class DecoderPool:
    """Worker processes that decode the images of shards ahead of the caller."""

    def __init__(
        self,
        preprocess: Preprocess,
        input_box: InputBox,
        *,
        workers: int,
        image_bytes: int = 0,
        shard_size: int = 0,
        lock: int = -1,
        network: bool = False,
    ) -> None:
        """Images of more than `image_bytes` once preprocessed are pickled instead of shared; those at URLs need the network."""
        self._settings = _Settings(preprocess, input_box, lock, os.getpid(), *limits(), network)
        self._workers = workers
        self._image_bytes, self._shard_size = image_bytes, shard_size
        self._start_pool()

    def decode_shards(self, shards: Sequence[Sequence[Item]]) -> Iterator[list[DecodedImage]]:
        """The decoded images of every shard, in order; a shard's pixels are valid until the next is requested."""
        waiting: list[_Submitted] = []
        for number, shard in enumerate(shards):
            waiting.append(self._submit(shard, number % (SHARDS_AHEAD + 1) * self._shard_size))
            if len(waiting) > SHARDS_AHEAD:
                yield self._results(waiting.pop(0))
        for rest in waiting:
            yield self._results(rest)

    def close(self) -> None:
        """Wait for the images being decoded, drop the others, and end the workers."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, shard: Sequence[Item], first: int) -> "_Submitted":
        futures: list[Future[list[Reply]]] = []
        slots = [first + i if i < self._shard_size else -1 for i in range(len(shard))]
        # several images a message: at a thousand images a second messages cost more than they carry
        size = max(1, min(MAX_IMAGES_PER_MESSAGE, len(shard) // self._workers))
        with contextlib.suppress(BrokenProcessPool):
            for start in range(0, len(shard), size):
                some = slice(start, start + size)
                futures.append(self._pool.submit(_decode_some, shard[some], slots[some]))
        return _Submitted(shard, first, futures, self._pool, self._buffer, size)

    def _results(self, submitted: "_Submitted") -> list[DecodedImage]:
        replies: dict[int, DecodedImage] = {}
        for number, future in enumerate(submitted.futures):
            with contextlib.suppress(BrokenProcessPool, MemoryError):
                for i, (found, shared) in enumerate(future.result(), number * submitted.images_per_message):
                    x = found.x if shared is None else submitted.buffer.at(submitted.first + i, *shared)
                    replies[i] = replace(found, x=x)
        if len(replies) < len(submitted.shard) and submitted.pool is self._pool:
            self._start_pool()
        # an image of this shard or of one ahead killed a worker: decoding each alone finds it
        shard = enumerate(submitted.shard)
        return [replies.get(i) or _decode_alone(item, self._settings) for i, item in shard]

    def _start_pool(self) -> None:
        # a new buffer as well: workers of a broken pool may still be writing to the old one
        self._buffer = _SharedBuffer(self._image_bytes, (SHARDS_AHEAD + 1) * self._shard_size)
        give_back_freed_memory()
        # forked, because a model's preprocessing may be any function, picklable or not
        context = multiprocessing.get_context("fork")
        start = (self._settings, self._buffer)
        self._pool = ProcessPoolExecutor(self._workers, context, _start_worker, start)


def need_network(shards: Iterable[Sequence[Item]]) -> bool:
    """Whether some of the images are at URLs."""
    return any(
        items.has_urls if isinstance(items, Items) else any(isinstance(i.path, RemotePath) for i in items)
        for items in shards
    )


def decoder_count(wanted: int | None, images: int, devices: int = 1) -> int:
    """Processes that decode for each device: as many as the caller wants; else one less than there are CPUs for all devices, at most ten, and no more than images."""
    if wanted is not None:
        if isinstance(wanted, int) and wanted >= 1:
            return wanted
        needs = "a number of processes that decode images, at least 1"
        raise EquicamError("workers", needs, repr(wanted), "workers=2")
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return max(1, min(MAX_DECODERS, (cpus - 1) // devices, images))


@dataclass(frozen=True)
class _Settings:
    """What a worker needs besides the images."""

    preprocess: Preprocess
    input_box: InputBox
    lock: int  # a file descriptor of the parent's, to be closed
    parent: int
    seconds: float
    memory_bytes: int
    network: bool  # whether its images are at URLs


@dataclass(frozen=True)
class _Submitted:
    """A shard in the hands of the workers."""

    shard: Sequence[Item]
    first: int  # its first slot
    futures: Sequence[Future[list[Reply]]]
    pool: ProcessPoolExecutor
    buffer: _SharedBuffer
    images_per_message: int


_worker: dict[str, Any] = {}


def _start_worker(settings: _Settings, buffer: _SharedBuffer | None) -> None:
    with contextlib.suppress(OSError):
        os.close(settings.lock)
    end_with_parent(settings.parent)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    enter(settings.memory_bytes, network=settings.network)
    _worker.update(settings=settings, buffer=buffer)


def _decode_some(items: Sequence[Item], slots: Sequence[int]) -> list[Reply]:
    return [_decode(item, slot) for item, slot in zip(items, slots, strict=True)]


def _decode(item: Item, slot: int, content: ItemContent | None = None) -> Reply:
    """Decode one image; its pixels go into shared memory if it has a slot."""
    settings: _Settings = _worker["settings"]
    limit_time(settings.seconds)
    found = decode_image(item, settings.preprocess, settings.input_box, content)
    limit_time(0.0)
    if slot < 0 or found.x is None or not _worker["buffer"].put(slot, found.x):
        return found, None
    return replace(found, x=None), (found.x.shape, found.x.dtype)


def _decode_one(item: Item, settings: _Settings, content: ItemContent | None) -> DecodedImage:
    """The whole work of a process that decodes one image."""
    _start_worker(settings, None)
    return _decode(item, -1, content)[0]
