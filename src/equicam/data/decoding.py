"""Pictures opened in worker processes, ahead of the device; a picture that kills its worker is a row with a reason.

Workers let go of the run's lock when they start and die with their parent, so nothing of a killed run blocks the next.
What they make of pictures they put into memory that they share with their parent: through a pipe it would be copied by
the process that computes. It has no name, so that nothing is left of it when they end.
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

from equicam.auditing.store import file_digest
from equicam.data.items import Item, open_item, prefetch
from equicam.data.remote import file_stat
from equicam.engines.worker import die_with
from equicam.errors import EquicamError

Prepare = Callable[[Image.Image], NDArray[np.float32]]
Frame = Callable[[tuple[int, int]], tuple[float, float, float, float]]
AHEAD = 2
"""Parts that are opened while one is worked on."""


@dataclass(frozen=True)
class Opened:
    """A picture as the model's input, and what is known of its file; or the reason why there is none."""

    item: Item
    x: NDArray[np.float32] | None = None
    sha256: str | None = None
    bytes: int | None = None
    mtime_ns: int | None = None
    width: int | None = None
    height: int | None = None
    frame: tuple[float, float, float, float] | None = None
    reason: str | None = None
    seconds: float = 0.0


def opened(item: Item, prepare: Prepare, frame: Frame) -> Opened:
    """Open one picture; whatever is wrong with it becomes its reason."""
    start = time.perf_counter()
    found = Opened(item)
    try:
        found = replace(found, **asdict(file_stat(item.path)))
        if item.index is None and found.bytes is not None:
            item = prefetch(item)
            found = replace(found, sha256=file_digest(item.path))
        picture = open_item(item)
        size = (picture.width, picture.height)
        if item.index is not None:
            found = replace(found, sha256=hashlib.sha256(picture.tobytes()).hexdigest())
        found = replace(found, width=size[0], height=size[1])
        found = replace(found, x=prepare(picture), frame=frame(size))
    except (EquicamError, OSError, ValueError, MemoryError, RuntimeError) as error:
        found = replace(found, x=None, reason=str(error) or type(error).__name__)
    return replace(found, seconds=time.perf_counter() - start)


class Shared:
    """Places for pictures of one size, in memory that processes forked from this one see too."""

    def __init__(self, size: int, count: int) -> None:
        self.size = size
        self._memory = mmap.mmap(-1, max(1, size * count))

    def put(self, place: int, x: NDArray[np.float32]) -> bool:
        """Leave a picture there, if it has the size."""
        if x.nbytes != self.size:
            return False
        self.at(place, x.shape)[...] = x
        return True

    def at(self, place: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """What is there: the memory itself, not a copy."""
        count, start = self.size // 4, place * self.size
        return np.frombuffer(self._memory, np.float32, count, start).reshape(shape)


Told = tuple[Opened, tuple[int, ...] | None]
"""What a worker says of a picture; with a shape where its pixels are in shared memory."""


class Decoders:
    """Worker processes that open pictures of parts, the next parts while the present one is worked on."""

    def __init__(
        self, prepare: Prepare, frame: Frame, *, workers: int, size: int = 0, part: int = 0, lock: int = -1
    ) -> None:
        """`size` is how many bytes a prepared picture has, `part` how many pictures a part; one of others is sent."""
        self._settings = (prepare, frame, lock, os.getpid())
        self._workers = workers
        self._size, self._part = size, part
        self._open_pool()

    def parts(self, parts: Sequence[Sequence[Item]]) -> Iterator[list[Opened]]:
        """Every part's pictures, opened, in order; their pixels stay as they are until the next part is asked for."""
        waiting: list[tuple[Sequence[Item], Shared, int, list[Future[Told]]]] = []
        for number, part in enumerate(parts):
            first = number % (AHEAD + 1) * self._part
            waiting.append((part, self._shared, first, self._submit(part, first)))
            if len(waiting) > AHEAD:
                yield self._results(*waiting.pop(0))
        for some in waiting:
            yield self._results(*some)

    def close(self) -> None:
        """End the workers; what they are at is waited for, what they would do next is not done."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, part: Sequence[Item], first: int) -> list[Future[Told]]:
        try:
            places = [first + i if i < self._part else -1 for i in range(len(part))]
            return [self._pool.submit(_open, *one) for one in zip(part, places, strict=True)]
        except BrokenProcessPool:
            return []

    def _results(
        self, part: Sequence[Item], shared: Shared, first: int, futures: Sequence[Future[Told]]
    ) -> list[Opened]:
        try:
            if len(futures) == len(part):
                told = [future.result() for future in futures]
                return [
                    found if shape is None else replace(found, x=shared.at(first + i, shape))
                    for i, (found, shape) in enumerate(told)
                ]
        except BrokenProcessPool:
            pass
        # one of these, or of the parts ahead, killed a worker: each alone, in a process of its own
        alone = self.alone(part)
        self._open_pool()
        return alone

    def alone(self, items: Sequence[Item]) -> list[Opened]:
        """Each picture in a process of its own: one that kills it has that as its reason."""
        return [self._alone(item) for item in items]

    def _alone(self, item: Item) -> Opened:
        with self._new(1) as single:
            try:
                return single.submit(_open, item, -1).result()[0]
            except BrokenProcessPool:
                return Opened(
                    item,
                    **asdict(file_stat(item.path)),
                    reason="opening it killed the process: the file is not safe to open",
                )

    def _open_pool(self) -> None:
        # with a memory of its own: what is left of a pool that broke may still be writing
        self._shared = Shared(self._size, (AHEAD + 1) * self._part)
        self._pool = self._new(self._workers)

    def _new(self, workers: int) -> ProcessPoolExecutor:
        # forked: the model's own preprocessing may be any function, and need not be one that can be sent
        context = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(workers, context, _enter, (self._shared, *self._settings))


_worker: dict[str, Any] = {}


def _enter(shared: Shared, prepare: Prepare, frame: Frame, lock: int, parent: int) -> None:
    with contextlib.suppress(OSError):
        os.close(lock)
    die_with(parent)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _worker.update(prepare=prepare, frame=frame, shared=shared)


def _open(item: Item, place: int) -> Told:
    """Open one picture; its pixels go into shared memory where there is a place for them."""
    found = opened(item, _worker["prepare"], _worker["frame"])
    if place < 0 or found.x is None or not _worker["shared"].put(place, found.x):
        return found, None
    return replace(found, x=None), found.x.shape
