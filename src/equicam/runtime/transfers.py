"""Tensors to and from a device while it computes something else."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(arrays: Sequence[NDArray[np.float32]], device: torch.device) -> Tensor:
    """Arrays of one shape as a batch on a device; they may be overwritten when this returns."""
    if device.type != "cuda":
        return torch.stack([torch.from_numpy(array).to(device) for array in arrays])
    computing, copying = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(copying):  # it does not wait for what is being computed
        batch = torch.empty((len(arrays), *arrays[0].shape), dtype=torch.float32, device=device)
        # one copy per image: stacking them on the CPU first takes longer
        for row, array in zip(batch, arrays, strict=True):
            row.copy_(torch.from_numpy(array))
    computing.wait_stream(copying)
    batch.record_stream(computing)
    return batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def send_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Start copying tensors to the CPU; the function returned waits until they are there."""
    on_their_way = {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}
    devices = [value.device for value in tensors.values() if value.is_cuda]
    if not devices:
        return lambda: on_their_way
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(devices[0]))

    def wait() -> dict[str, Tensor]:
        arrived.synchronize()
        return on_their_way

    return wait
