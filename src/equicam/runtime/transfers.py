"""Tensors to and from a device while it computes something else."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray
from torch import Tensor


def to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """Arrays of one shape as a batch on a device; they may be overwritten when this returns."""
    if device.type != "cuda":
        return torch.from_numpy(np.stack(arrays)).to(device)
    staging, computing = _staging(device), torch.cuda.current_stream(device)
    with staging.lock, torch.cuda.stream(staging.stream):  # it does not wait for what is being computed
        batch = staging.put(arrays).to(device, non_blocking=True)
        staging.sent.record(staging.stream)
    computing.wait_stream(staging.stream)
    batch.record_stream(computing)
    return batch


class _Staging:
    """Page-locked memory that a device copies from by itself, and the stream in which it does."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.lock = threading.Lock()

    def put(self, arrays: Sequence[NDArray[Any]]) -> Tensor:
        """The arrays as a batch in this memory, when the batch before has left it.

        NumPy copies them in this thread: torch would wait for threads of its own, and decoders keep the cores busy.
        """
        self.sent.synchronize()
        shape, dtype = (len(arrays), *arrays[0].shape), arrays[0].dtype
        size = math.prod(shape) * dtype.itemsize
        if self.memory.numel() < size:
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        batch = self.memory[:size].numpy().view(dtype).reshape(shape)
        return torch.from_numpy(np.stack(arrays, out=batch))


_staging = cache(_Staging)


def numbers_of_levels(
    levels: UInt8[Tensor, "b c H W"], numbers: NDArray[np.float32]
) -> Float[Tensor, "b c H W"]:
    """The number of every level, by a table [c, 256]."""
    table = _table(numbers.tobytes(), levels.device)
    first = torch.arange(0, table.numel(), 256, dtype=torch.int32, device=levels.device).view(-1, 1, 1)
    return table.index_select(0, (levels + first).flatten()).view(levels.shape)


@lru_cache(maxsize=16)
def _table(numbers: bytes, device: torch.device) -> Tensor:
    """The numbers on a device; copied once, because the copy waits for what is being computed."""
    return torch.from_numpy(np.frombuffer(numbers, np.float32).copy()).to(device)


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


def send_packed_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """The same for many small tensors of one type: they leave the device in one copy."""
    device = next((value.device for value in tensors.values() if value.is_cuda), None)
    packed = {name: value for name, value in tensors.items() if value.device == device}
    others = {name: value.cpu() for name, value in tensors.items() if name not in packed}
    if not packed:
        return lambda: others
    arrive = send_to_host({"all": torch.cat([value.reshape(-1) for value in packed.values()])})

    def wait() -> dict[str, Tensor]:
        parts = torch.split(arrive()["all"], [value.numel() for value in packed.values()])
        arrived = {
            name: part.view(value.shape) for (name, value), part in zip(packed.items(), parts, strict=True)
        }
        return others | arrived

    return wait
