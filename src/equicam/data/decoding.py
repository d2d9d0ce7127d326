"""Images decoded in worker processes ahead of the device; an image that kills its worker becomes a row with a reason.

Workers close the run's lock when they start and die with their parent, so nothing of a killed run blocks the next.
They leave pixels in memory shared with their parent, because a pipe would make the computing process copy them. The
memory has no name, so the system frees it when the processes end.
"""

import contextlib
import hashlib
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from equicam.data.digests import file_digest
from equicam.data.items import Box, Item, open_item, prefetch
from equicam.data.processes import end_with_parent
from equicam.data.remote import file_stat
from equicam.reasons import Reason

Preprocess = Callable[[Image.Image], NDArray[np.float32]]
InputBox = Callable[[tuple[int, int]], Box]
"""From an image's width and height, the box of it that the model's input shows."""
SHARDS_AHEAD = 2
"""Shards decoded while one is computed."""


@dataclass(frozen=True)
class DecodedImage:
    """An image as the model's input, with the facts about its file; or the reason why it cannot be one."""

    item: Item
    x: NDArray[np.float32] | None = None
    sha256: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None
    width: int | None = None
    height: int | None = None
    input_box: Box | None = None
    reason: Reason | None = None
    seconds: float = 0.0


def failure_reason(error: Exception) -> Reason:
    """Why an image could not be decoded or preprocessed; every exception counts."""
    return Reason("unreadable", {"error": type(error).__name__, "message": str(error)})


def decode_image(item: Item, preprocess: Preprocess, input_box: InputBox) -> DecodedImage:
    """Decode and preprocess one image; any exception on the way becomes its reason."""
    start = time.perf_counter()
    found = DecodedImage(item)
    try:
        found = replace(found, **asdict(file_stat(item.path)))
        if item.index is None and found.bytes is not None:
            item = prefetch(item)
            found = replace(found, sha256=file_digest(item.path))
        image = open_item(item)
        size = (image.width, image.height)
        if item.index is not None:
            found = replace(found, sha256=hashlib.sha256(image.tobytes()).hexdigest())
        found = replace(found, width=size[0], height=size[1])
        found = replace(found, x=preprocess(image), input_box=input_box(size))
    except Exception as error:  # noqa: BLE001  # a bad image never ends a run
        found = replace(found, x=None, reason=failure_reason(error))
    return replace(found, seconds=time.perf_counter() - start)


class SharedBuffer:
    """Slots for arrays of one size, in memory that forked processes share."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        self.slot_bytes = slot_bytes
        self._memory = mmap.mmap(-1, max(1, slot_bytes * slots))

    def put(self, slot: int, x: NDArray[np.float32]) -> bool:
        """Copy an array into a slot; False if its size differs."""
        if x.nbytes != self.slot_bytes:
            return False
        self.at(slot, x.shape)[...] = x
        return True

    def at(self, slot: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """A view of a slot, not a copy."""
        count, start = self.slot_bytes // 4, slot * self.slot_bytes
        return np.frombuffer(self._memory, np.float32, count, start).reshape(shape)


Reply = tuple[DecodedImage, tuple[int, ...] | None]
"""A worker's answer; with a shape if the pixels are in shared memory."""


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
    ) -> None:
        """Images of another size than `image_bytes` once preprocessed are pickled instead of shared."""
        self._settings = (preprocess, input_box, lock, os.getpid())
        self._workers = workers
        self._image_bytes, self._shard_size = image_bytes, shard_size
        self._start_pool()

    def decode_shards(self, shards: Sequence[Sequence[Item]]) -> Iterator[list[DecodedImage]]:
        """The decoded images of every shard, in order; a shard's pixels are valid until the next is requested."""
        waiting: list[tuple[Sequence[Item], SharedBuffer, int, list[Future[Reply]]]] = []
        for number, shard in enumerate(shards):
            first = number % (SHARDS_AHEAD + 1) * self._shard_size
            waiting.append((shard, self._buffer, first, self._submit(shard, first)))
            if len(waiting) > SHARDS_AHEAD:
                yield self._results(*waiting.pop(0))
        for rest in waiting:
            yield self._results(*rest)

    def close(self) -> None:
        """Wait for the images being decoded, drop the others, and end the workers."""
        self._pool.shutdown(cancel_futures=True)

    def decode_isolated(self, items: Sequence[Item]) -> list[DecodedImage]:
        """Decode each image in a process of its own, so that only a deadly image is lost."""
        return [self._decode_isolated(item) for item in items]

    def _submit(self, shard: Sequence[Item], first: int) -> list[Future[Reply]]:
        try:
            slots = [first + i if i < self._shard_size else -1 for i in range(len(shard))]
            return [self._pool.submit(_decode, *one) for one in zip(shard, slots, strict=True)]
        except BrokenProcessPool:
            return []

    def _results(
        self, shard: Sequence[Item], buffer: SharedBuffer, first: int, futures: Sequence[Future[Reply]]
    ) -> list[DecodedImage]:
        try:
            if len(futures) == len(shard):
                replies = [future.result() for future in futures]
                return [
                    found if shape is None else replace(found, x=buffer.at(first + i, shape))
                    for i, (found, shape) in enumerate(replies)
                ]
        except BrokenProcessPool:
            pass
        # an image of this shard or of one ahead killed a worker: find it by decoding each alone
        isolated = self.decode_isolated(shard)
        self._start_pool()
        return isolated

    def _decode_isolated(self, item: Item) -> DecodedImage:
        with self._new_pool(1) as single:
            try:
                return single.submit(_decode, item, -1).result()[0]
            except BrokenProcessPool:
                return DecodedImage(item, **asdict(file_stat(item.path)), reason=Reason("killed-decoder"))

    def _start_pool(self) -> None:
        # a new buffer as well: workers of a broken pool may still be writing to the old one
        self._buffer = SharedBuffer(self._image_bytes, (SHARDS_AHEAD + 1) * self._shard_size)
        self._pool = self._new_pool(self._workers)

    def _new_pool(self, workers: int) -> ProcessPoolExecutor:
        # forked, because a model's preprocessing may be any function, picklable or not
        context = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(workers, context, _start_worker, (self._buffer, *self._settings))


_worker: dict[str, Any] = {}


def _start_worker(
    buffer: SharedBuffer, preprocess: Preprocess, input_box: InputBox, lock: int, parent: int
) -> None:
    with contextlib.suppress(OSError):
        os.close(lock)
    end_with_parent(parent)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _worker.update(preprocess=preprocess, input_box=input_box, buffer=buffer)


def _decode(item: Item, slot: int) -> Reply:
    """Decode one image; its pixels go into shared memory if it has a slot."""
    found = decode_image(item, _worker["preprocess"], _worker["input_box"])
    if slot < 0 or found.x is None or not _worker["buffer"].put(slot, found.x):
        return found, None
    return replace(found, x=None), found.x.shape
