"""Checks of values on a device, evaluated there as they come and read on the host once."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from equicam.readers.failures import Check, raise_first
from equicam.runtime.streams import side_stream


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
