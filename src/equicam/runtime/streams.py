"""A side stream for work whose result is needed only at the end.

Small kernels leave most of a device idle, and branches of a captured CUDA graph run at the same time. Outside capture
(and its warm-up runs) everything runs in order on the current stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

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
