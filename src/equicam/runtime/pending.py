"""Answers that a device is still computing: work started ahead of them, their checks, side streams, and tensors on their way."""

import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from numpy.typing import NDArray
from torch import Tensor

from equicam.readers.failures import Check, raise_first

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")
Tensors = dict[str, Tensor]
Started = tuple[Name, Callable[[], Result]]


@dataclass(frozen=True)
class Pending(Generic[Result]):
    """An answer that may still be computed: its tensors may be used on the device, `finish` waits for it and checks it."""

    tensors: Tensors
    finish: Callable[[], Result]
    check: Callable[[], None]  # the waiting and the checks alone; it keeps no tensor alive


def finish_in_order(started: Iterable[Started[Name, Result]], ahead: int) -> Iterator[tuple[Name, Result]]:
    """Names and results of work that is started as this iterates; `ahead` pieces are started before one is finished.

    What was started is finished also if the next piece fails or is interrupted; the error comes after it.
    """
    waiting: deque[Started[Name, Result]] = deque()
    failed: BaseException | None = None
    pieces = iter(started)
    while True:
        try:
            waiting.append(next(pieces))
        except StopIteration:
            break
        except BaseException as error:  # noqa: BLE001  # raised below
            failed = error
            break
        while len(waiting) > ahead:
            yield _finish_first(waiting)
    while waiting:
        yield _finish_first(waiting)
    if failed is not None:
        raise failed


def _finish_first(waiting: deque[Started[Name, Result]]) -> tuple[Name, Result]:
    name, finish = waiting.popleft()
    return name, finish()


# A side stream is for work whose result is needed only at the end. Small kernels leave most of a device idle, and branches
# of a captured CUDA graph run at the same time; outside capture (and its warm-up runs) everything runs in order on the
# current stream.
_side: ContextVar[Any] = ContextVar("side", default=None)


@contextmanager
def allow_side_stream() -> Iterator[None]:
    """Within it `side_stream` branches off the current stream."""
    token = _side.set((torch.cuda.Stream(), []))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _side.reset(token)


@contextmanager
def side_stream(*inputs: Any) -> Iterator[None]:
    """The block may run at the same time as the code after it; its inputs stay alive until `join_side_stream`.

    Memory freed on the main stream is reused there at once, without waiting for the side stream.
    """
    if (found := _side.get()) is None:
        yield
        return
    stream, alive = found
    alive += inputs
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


def join_side_stream() -> None:
    """Make the code after it wait for the side stream."""
    if (found := _side.get()) is not None:
        stream, alive = found
        torch.cuda.current_stream().wait_stream(stream)
        alive.clear()


class DeferredChecks:
    """Checks whose results stay on the device until `raise_failed`; in a captured graph nothing waits for them."""

    def __init__(self) -> None:
        self.checks: list[Check] = []
        self._passed: list[Tensor] = []

    def add(self, checks: Sequence[Check]) -> None:
        """Evaluate these without waiting for the results."""
        with side_stream(checks):
            self._passed += [check.passes() for check in checks]
        self.checks += checks

    def passed(self) -> Bool[Tensor, " checks"]:
        """Which checks passed, in the order they were added."""
        with side_stream():
            return torch.stack(self._passed)

    def raise_failed(self) -> None:
        """Wait for the results; raise the error of the first check that failed."""
        if self.checks:
            raise_first(self.passed().tolist(), self.checks)


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """Arrays of one shape as a batch on a device; they may be overwritten when this returns."""
    if device.type == "cuda":
        return _staging(device).send(arrays)
    return torch.from_numpy(np.stack(arrays)).to(device)


class _Staging:
    """Page-locked memory that a device copies from by itself, and the stream in which it does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.lock = threading.Lock()

    def send(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """The arrays as a batch on the device, by way of this memory, when the batch before has left it.

        NumPy copies them in this thread: torch would wait for threads of its own, and decoders keep the cores busy.
        """
        shape, dtype = (len(arrays), *arrays[0].shape), arrays[0].dtype
        size, computing = math.prod(shape) * dtype.itemsize, torch.cuda.current_stream(self.device)
        with self.lock, torch.cuda.stream(self.stream):  # it does not wait for what is being computed
            self.sent.synchronize()
            if self.memory.numel() < size:
                self.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            staged = np.stack(arrays, out=self.memory[:size].numpy().view(dtype).reshape(shape))
            batch = torch.from_numpy(staged).to(self.device, non_blocking=True)
            self.sent.record(self.stream)
        computing.wait_stream(self.stream)
        batch.record_stream(computing)
        return batch


_staging = cache(_Staging)


def numbers_of_levels(
    levels: UInt8[Tensor, "b c H W"], table: NDArray[np.float32]
) -> Float[Tensor, "b c H W"]:
    """The number of every level, by a table [c, 256]."""
    numbers = _table(table.tobytes(), levels.device)
    first = torch.arange(0, numbers.numel(), 256, dtype=torch.int32, device=levels.device).view(-1, 1, 1)
    return numbers.index_select(0, (levels + first).flatten()).view(levels.shape)


@lru_cache(maxsize=16)
def _table(numbers: bytes, device: torch.device) -> Tensor:
    """The numbers on a device; copied once, because the copy waits for what is being computed."""
    return torch.from_numpy(np.frombuffer(numbers, np.float32).copy()).to(device)


def send_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Start copying tensors to the CPU; the function returned waits until they are there."""
    on_their_way = {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}
    device = next((value.device for value in tensors.values() if value.is_cuda), None)
    if device is None:
        return lambda: on_their_way
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(device))

    def wait() -> dict[str, Tensor]:
        arrived.synchronize()
        return on_their_way

    return wait


def send_packed_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """The same for many small tensors of one type: they leave the device in one copy."""
    device = next((value.device for value in tensors.values() if value.is_cuda), None)
    packed = {name: value for name, value in tensors.items() if value.device == device}
    others = {name: value.cpu() for name, value in tensors.items() if name not in packed}
    if not packed:
        return lambda: others
    arrive = send_to_host({"all": torch.cat([value.reshape(-1) for value in packed.values()])})

    def wait() -> dict[str, Tensor]:
        parts = torch.split(arrive()["all"], [value.numel() for value in packed.values()])
        pairs = zip(packed.items(), parts, strict=True)
        return others | {name: part.view(value.shape) for (name, value), part in pairs}

    return wait
