"""Work beside the main line, in a graph that is being captured: what nothing waits for until the end.

Small kernels leave most of a device idle; branches of a graph run at the same time. So they do in the runs that warm it up,
for streams have libraries' memory of their own; elsewhere work is done where it stands.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_side: ContextVar[Any] = ContextVar("side", default=None)


@contextmanager
def branching() -> Iterator[None]:
    """Let `aside` branch off the present stream."""
    token = _side.set((torch.cuda.Stream(), []))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _side.reset(token)


@contextmanager
def aside(*reads: Any) -> Iterator[None]:
    """What is done in here may run at the same time as what follows; what it reads is kept until it is rejoined.

    Memory that is let go is given to who asks next on the main line, without waiting for this one.
    """
    if (found := _side.get()) is None:
        yield
        return
    side, kept = found
    kept += reads
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def rejoin() -> None:
    """What follows waits for all that was done beside."""
    if (found := _side.get()) is not None:
        side, kept = found
        torch.cuda.current_stream().wait_stream(side)
        kept.clear()
