"""Several devices of one machine: a process for each, and parts dealt out to them like cards."""

import contextlib
import multiprocessing
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from equicam.engines.worker import Job, Part, Recipe, Sent, die_with
from equicam.errors import EquicamError


@dataclass(frozen=True)
class Devices:
    """Devices by name; `made` is how each gets its model, the caller's own if left out."""

    names: tuple[str, ...]
    made: Recipe | Sent | None = None

    def __post_init__(self) -> None:
        kinds = {name.partition(":")[0] for name in self.names}
        if len(kinds) != 1 or (kinds != {"cpu"} and len(set(self.names)) != len(self.names)):
            raise EquicamError(
                "devices", needs="devices of one kind, each once", got=repr(",".join(self.names)), fix="cuda:0,cuda:1",
            )  # fmt: skip

    @property
    def kind(self) -> str:
        """What they are: cpu or cuda."""
        return self.names[0].partition(":")[0]

    def work(self, job: Job, parts: Sequence[Part]) -> Iterator[int]:
        """Compute the parts; their numbers as they are written. What a worker that fails had written stays."""
        # not forked: a process that has used CUDA has no children that can
        context = multiprocessing.get_context("spawn")
        waiting: dict[Any, tuple[str, SpawnProcess]] = {}
        share = len(self.names)
        try:
            for i, name in enumerate(self.names):
                if dealt := parts[i::share]:
                    ours, theirs = context.Pipe(duplex=False)
                    worker = context.Process(
                        target=_worker, args=(job, name, share, dealt, theirs, os.getpid())
                    )
                    with _sendable():
                        worker.start()
                    theirs.close()
                    waiting[ours] = name, worker
            while waiting:
                heard = wait(list(waiting))
                for ours in [one for one in waiting if one in heard]:
                    name, worker = waiting[ours]
                    said = _said(ours)
                    if isinstance(said, int):
                        yield said
                        continue
                    worker.join()
                    if said is not None or worker.exitcode:
                        raise _failed(name, said, worker.exitcode)
                    del waiting[ours]
        finally:
            for _, worker in waiting.values():
                worker.kill()  # a part is whole or not there
                worker.join()


def _said(ours: Any) -> int | str | None:
    """A part's number, what is wrong, or None when there is nothing more."""
    try:
        said: int | str = ours.recv()
    except EOFError:
        return None
    return said


@contextlib.contextmanager
def _sendable() -> Iterator[None]:
    try:
        yield
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise EquicamError(
            "several devices", needs="a model and methods that other processes can be sent", got=error,
            fix="a model by name, a factory in a file, or one device",
        ) from error  # fmt: skip


def _failed(name: str, said: str | None, code: int | None) -> EquicamError:
    killed = f"killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    return EquicamError(
        f"the worker on {name}", needs="to finish its parts", got=said or f"a process that was {killed}",
        fix="the same command again: what is written stays",
    )  # fmt: skip


def _worker(job: Job, device: str, share: int, parts: Sequence[Part], pipe: Connection, parent: int) -> None:
    die_with(parent)
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // share))
    try:
        compute = job.ready(device)
        for (number, _), found in zip(parts, job.ahead(parts), strict=True):
            compute(number, found)
            pipe.send(number)
    except (EquicamError, OSError) as error:
        pipe.send(str(error))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise  # whose fault it is, the traceback says
