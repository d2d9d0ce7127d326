"""Keeps tensors that depend on sizes and angles alone, so that calls of the same size compute them once."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from equicam.core.constants import keeper

MAX_KEPT_BYTES = 256 * 2**20
_kept: OrderedDict[Hashable, Tensor] = OrderedDict()


@contextmanager
def keep_constants(also_in: list[Tensor] | None = None) -> Iterator[None]:
    """Within it the core reuses its constants. A captured graph keeps those it reads in a list of its own."""

    def keep(make: Callable[..., Tensor], *args: object) -> Tensor:
        tensor = _lookup(make, *args)
        if also_in is not None:
            also_in.append(tensor)
        return tensor

    token = keeper.set(keep)
    try:
        yield
    finally:
        keeper.reset(token)


def _lookup(make: Callable[..., Tensor], *args: object) -> Tensor:
    key = (make, args)
    if key not in _kept:
        # a tensor made in the caller's inference mode could not join a backward pass later
        with torch.inference_mode(False):
            _kept[key] = make(*args)
        while sum(t.nbytes for t in _kept.values()) > MAX_KEPT_BYTES and len(_kept) > 1:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]
