"""Checks of values that live on a device: asked at once, or gathered and asked together, for each answer is a wait."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool
from torch import Tensor

from equicam.errors import EquicamError

Check = tuple[Bool[Tensor, ""], Callable[[], EquicamError]]
_gathered: ContextVar[list[Check] | None] = ContextVar("gathered", default=None)


def insist(holds: Bool[Tensor, ""], error: Callable[[], EquicamError]) -> None:
    """Raise the error unless the value holds; inside `gathered`, when `settle` asks."""
    later = _gathered.get()
    if later is not None:
        later.append((holds, error))
    elif not bool(holds):
        raise error()


@contextmanager
def gathered() -> Iterator[list[Check]]:
    """Gather checks instead of asking them."""
    found: list[Check] = []
    token = _gathered.set(found)
    try:
        yield found
    finally:
        _gathered.reset(token)


def settle(checks: Sequence[Check]) -> None:
    """Ask what was gathered, in one go; the first that does not hold is raised."""
    if not checks:
        return
    for holds, (_, error) in zip(torch.stack([c for c, _ in checks]).tolist(), checks, strict=True):
        if not holds:
            raise error()


@contextmanager
def explained_by(checks: Sequence[Check]) -> Iterator[None]:
    """Where work fails over values that a gathered check would have refused, the check is what is raised."""
    try:
        yield
    except EquicamError:
        raise
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        try:
            settle(checks)
        except EquicamError as refused:
            raise refused from error
        raise
