"""Pictures opened in worker processes, ahead of the device; a picture that kills its worker is a row with a reason.

Workers let go of the run's lock when they start and die with their parent, so nothing of a killed run blocks the next.
"""

import contextlib
import hashlib
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

from equicam.audit.store import file_digest
from equicam.data.items import Item, fetched, open_item
from equicam.data.remote import stamp
from equicam.engines.job import die_with
from equicam.errors import EquicamError

Prepare = Callable[[Image.Image], NDArray[np.float32]]
Frame = Callable[[tuple[int, int]], tuple[float, float, float, float]]


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
        found = replace(found, **asdict(stamp(item.path)))
        if item.index is None and found.bytes is not None:
            item = fetched(item)
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


class Decoders:
    """Worker processes that open pictures of parts, the next parts while the present one is worked on."""

    def __init__(self, prepare: Prepare, frame: Frame, *, workers: int, lock: int = -1) -> None:
        self._settings = (prepare, frame, lock, os.getpid())
        self._workers = workers
        self._pool = self._new(workers)

    def parts(self, parts: Sequence[Sequence[Item]], *, ahead: int = 2) -> Iterator[list[Opened]]:
        """Every part's pictures, opened, in order."""
        waiting: list[tuple[Sequence[Item], list[Future[Opened]]]] = []
        for part in parts:
            waiting.append((part, self._submit(part)))
            if len(waiting) > ahead:
                yield self._results(*waiting.pop(0))
        for part, futures in waiting:
            yield self._results(part, futures)

    def close(self) -> None:
        """End the workers; what they are at is waited for, what they would do next is not done."""
        self._pool.shutdown(cancel_futures=True)

    def _submit(self, part: Sequence[Item]) -> list[Future[Opened]]:
        try:
            return [self._pool.submit(_open, item) for item in part]
        except BrokenProcessPool:
            return []

    def _results(self, part: Sequence[Item], futures: Sequence[Future[Opened]]) -> list[Opened]:
        try:
            if len(futures) == len(part):
                return [future.result() for future in futures]
        except BrokenProcessPool:
            pass
        # one of these, or of the parts ahead, killed a worker: each alone, in a process of its own
        found = self.alone(part)
        self._pool = self._new(self._workers)
        return found

    def alone(self, items: Sequence[Item]) -> list[Opened]:
        """Each picture in a process of its own: one that kills it has that as its reason."""
        return [self._alone(item) for item in items]

    def _alone(self, item: Item) -> Opened:
        with self._new(1) as single:
            try:
                return single.submit(_open, item).result()
            except BrokenProcessPool:
                return Opened(
                    item,
                    **asdict(stamp(item.path)),
                    reason="opening it killed the process: the file is not safe to open",
                )

    def _new(self, workers: int) -> ProcessPoolExecutor:
        # forked: the model's own preprocessing may be any function, and need not be one that can be sent
        context = multiprocessing.get_context("fork")
        return ProcessPoolExecutor(workers, context, _enter, self._settings)


_worker: dict[str, Any] = {}


def _enter(prepare: Prepare, frame: Frame, lock: int, parent: int) -> None:
    with contextlib.suppress(OSError):
        os.close(lock)
    die_with(parent)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    _worker.update(prepare=prepare, frame=frame)


def _open(item: Item) -> Opened:
    return opened(item, _worker["prepare"], _worker["frame"])
