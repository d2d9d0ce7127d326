"""Keeps tensors that depend on sizes and angles alone, so that calls of the same size compute them once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from equicam.core.views import keeper

MAX_KEPT_BYTES = 256 * 2**20
"""Between calls. A call keeps what it uses until it ends, however large."""
_kept: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()


@contextmanager
def keep_constants(also_in: list[Tensor] | None = None) -> Iterator[None]:
    """Within it the core reuses its constants. A captured graph keeps those it reads in a list of its own."""

    def keep(make: Callable[..., Tensor], *args: object) -> Tensor:
        tensor = _lookup(make, *args)
        if also_in is not None:
            also_in.append(tensor)
        return tensor

    outermost = keeper.get() is None
    token = keeper.set(keep)
    try:
        yield
    finally:
        keeper.reset(token)
        if outermost:
            _drop_least_recent()


def _lookup(make: Callable[..., Tensor], *args: object) -> Tensor:
    key = (make, args)
    with _lock:
        if (kept := _kept.get(key)) is not None:
            _kept.move_to_end(key)
            return kept
    # a tensor made in the caller's inference mode could not join a backward pass later
    with torch.inference_mode(False):
        made = make(*args)
    with _lock:
        return _kept.setdefault(key, made)


def _drop_least_recent() -> None:
    with _lock:
        total = sum(tensor.nbytes for tensor in _kept.values())
        while total > MAX_KEPT_BYTES and len(_kept) > 1:
            _, dropped = _kept.popitem(last=False)
            total -= dropped.nbytes
