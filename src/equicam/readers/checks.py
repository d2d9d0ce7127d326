"""Checks of values that live on a device, returned as data: each evaluation synchronises, so the caller evaluates all of them at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from equicam.errors import EquicamError


@dataclass(frozen=True)
class Check:
    """A condition on tensors, and the error to raise where it fails."""

    passes: Callable[[], Bool[Tensor, ""]]
    error: Callable[[], EquicamError]


def raise_failed(checks: Sequence[Check]) -> None:
    """Evaluate all checks with one synchronisation; raise the error of the first that fails."""
    if checks:
        raise_first(torch.stack([check.passes() for check in checks]).tolist(), checks)


def raise_first(passed: Sequence[bool], checks: Sequence[Check]) -> None:
    """Raise the error of the first check that did not pass."""
    for ok, check in zip(passed, checks, strict=True):
        if not ok:
            raise check.error()
