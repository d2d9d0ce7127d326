"""Work beside the main line, in a graph that is being captured: what nothing waits for until the end.

Small kernels leave most of a device idle; branches of a graph run at the same time. Elsewhere nothing is beside anything,
and work is done where it stands.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_side: ContextVar[Any] = ContextVar("side", default=None)


@contextmanager
def branching() -> Iterator[None]:
    """Let `aside` branch off the present stream; whoever does must `rejoin` it before what it reads is let go."""
    token = _side.set(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _side.reset(token)


@contextmanager
def aside() -> Iterator[None]:
    """What is done in here may run at the same time as what follows."""
    side = _side.get()
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield


def rejoin() -> None:
    """What follows waits for all that was done beside."""
    side = _side.get()
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
