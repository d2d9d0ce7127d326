"""Several devices of one machine: one process per device, and each process gets its share of the shards."""

import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from equicam.engines.worker import Job, ModelSource, Shard
from equicam.errors import EquicamError
from equicam.images.limited import end_with_parent


@dataclass(frozen=True)
class Devices:
    """Devices by name; each loads its model from `model_source`, or gets a copy of the caller's."""

    names: tuple[str, ...]
    model_source: ModelSource | None = None

    def __post_init__(self) -> None:
        kinds = {name.partition(":")[0] for name in self.names}
        if len(kinds) != 1 or (kinds != {"cpu"} and len(set(self.names)) != len(self.names)):
            given = repr(",".join(self.names))
            raise EquicamError("devices", "devices of one kind, each once", given, "cuda:0,cuda:1")

    @property
    def kind(self) -> str:
        """Cpu or cuda."""
        return self.names[0].partition(":")[0]

    def work(self, job: Job, shards: Sequence[Shard]) -> Iterator[tuple[int, Any]]:
        """Compute the shards; yield each number and result once it is written. Shards of a failed worker stay."""
        # spawn, because a forked child of a process that has used CUDA cannot use it
        context = multiprocessing.get_context("spawn")
        running: dict[Any, tuple[str, SpawnProcess]] = {}
        share = len(self.names)
        try:
            for i, name in enumerate(self.names):
                if dealt := shards[i::share]:
                    receiver, sender = context.Pipe(duplex=False)
                    given = (job, name, share, dealt, sender, os.getpid())
                    worker = context.Process(target=_worker, args=given)
                    try:
                        worker.start()
                    except (pickle.PicklingError, AttributeError, TypeError) as error:
                        raise EquicamError(
                            "several devices", "a model and methods that can be pickled", error,
                            "a model by name, a factory in a file, or one device",
                        ) from error  # fmt: skip
                    sender.close()
                    running[receiver] = name, worker
            while running:
                ready: list[Any] = wait(list(running))
                for receiver in ready:
                    name, worker = running[receiver]
                    try:
                        message = receiver.recv()
                    except EOFError:
                        message = ""
                    if isinstance(message, tuple):  # the number and result of a written shard
                        yield message
                        continue
                    worker.join()
                    if message or worker.exitcode:
                        raise _failed(name, message, worker.exitcode)
                    del running[receiver]
        finally:
            for _, worker in running.values():
                worker.kill()  # safe: a shard is written atomically
                worker.join()


def _failed(name: str, message: str, code: int | None) -> EquicamError:
    killed = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    return EquicamError(
        f"the worker on {name}", "to finish its shards", message or f"a process that was {killed}",
        "the same command again: written shards stay",
    )  # fmt: skip


def _worker(
    job: Job, device: str, share: int, shards: Sequence[Shard], pipe: Connection, parent: int
) -> None:
    end_with_parent(parent)
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // share))
    try:
        compute = job.prepare(device)
        for (number, _), decoded in zip(shards, job.decode_ahead(shards), strict=True):
            pipe.send((number, compute(number, decoded)))
    except (EquicamError, OSError) as error:
        pipe.send(str(error))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise  # a bug: keep its traceback
