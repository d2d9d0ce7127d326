"""Tensors that depend on sizes and angles alone, such as sampling grids.

The core computes them on every use. A runtime that runs the same sizes again may keep them: it sets `keeper`.
"""

from collections.abc import Callable
from contextvars import ContextVar

from torch import Tensor

Keeper = Callable[..., Tensor]
"""(make, *args) → make(*args), or the tensor kept from an earlier call with the same arguments."""

keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


def constant(make: Callable[..., Tensor], *args: object) -> Tensor:
    """make(*args), or the kept result of the same call. `args` must be hashable."""
    keep = keeper.get()
    return make(*args) if keep is None else keep(make, *args)
