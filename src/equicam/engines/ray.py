"""Many machines: parts go through Ray Data, opened by tasks on CPUs and computed by actors that hold the model.

Ray does the scheduling, the waiting and the trying again; this is the only module that imports it.
"""

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pyarrow as pa

from equicam.engines.worker import Job, Part, Recipe, Sent
from equicam.errors import EquicamError

BLOCKS = 20_000
"""At most so many blocks; beyond that, several parts share one."""
AHEAD = 2
"""Parts that wait at an actor while it works on one."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster by its address, or one started here; `actors` hold a model each, on a GPU or a CPU each."""

    device: str = "cpu"
    address: str | None = None
    actors: int | None = None
    made: Recipe | Sent | None = None

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise EquicamError(
                "device", needs="cpu or cuda with Ray", got=repr(self.device), fix="--device cuda"
            )
        if self.actors is not None and self.actors < 1:
            raise EquicamError("actors", needs="at least 1", got=self.actors, fix="--actors 2")

    @property
    def kind(self) -> str:
        """What its actors compute on: cpu or cuda."""
        return self.device

    def work(self, job: Job, parts: Sequence[Part]) -> Iterator[int]:
        """Compute the parts; their numbers as they are written, in any order."""
        with _connected(self.address, self.actors) as ray, _told(ray):
            actors, openers = self._counts(ray)
            sent = ray.put(job)
            rows = [{"part": number, "items": pickle.dumps(list(items))} for number, items in parts]
            data = ray.data.from_items(rows, override_num_blocks=min(len(rows), BLOCKS))
            _bound(ray, data.context, job.part_bytes * (actors * (AHEAD + 1) + 2))
            # beside actors on CPUs opening books none, or actors that come back after a node is lost could take them all
            data = data.map_batches(
                _open, fn_args=(sent,), batch_size=1, batch_format="pyarrow", num_cpus=1 if self.device == "cuda" else 0,
                compute=ray.data.TaskPoolStrategy(size=openers),
            )  # fmt: skip
            data = data.map_batches(
                _Worker, fn_constructor_args=(sent, self.device), batch_size=1, batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=AHEAD),
                num_cpus=1, num_gpus=1 if self.device == "cuda" else 0,
            )  # fmt: skip
            for row in data.iter_rows():
                if row["problem"]:
                    raise EquicamError(
                        "the cluster", needs="to compute every part", got=row["problem"],
                        fix="the same command once that is put right: what is written stays",
                    )  # fmt: skip
                yield int(row["part"])

    def _counts(self, ray: Any) -> tuple[int, int]:
        """How many actors: as asked, else one a GPU, or all CPUs but one; and how many CPUs are left to open pictures."""
        there = ray.cluster_resources()
        gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
        if self.device == "cuda" and not gpus:
            raise EquicamError("the cluster", needs="GPUs", got=f"{cpus} CPUs alone", fix="--device cpu")
        wanted = self.actors or (gpus if self.device == "cuda" else max(1, cpus - 1))
        if wanted >= cpus:
            raise EquicamError(
                "the cluster", needs=f"more CPUs than actors ({wanted})", got=cpus,
                fix=f"--actors {max(1, cpus - 1)}, or ray start --num-cpus {wanted + 1}",
            )  # fmt: skip
        return wanted, cpus - wanted


def best(address: str | None) -> str:
    """What a cluster computes on: cuda if it has GPUs, else cpu."""
    if not (address or os.environ.get("RAY_ADDRESS")):  # this machine, and no need to start Ray to know
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    with _connected(address, None) as ray:
        return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


@cache
def _fetched(sent: Any) -> Job:
    """The job, fetched once a process."""
    found: Job = _ray().get(sent)
    return found


def _open(batch: pa.Table, sent: Any) -> pa.Table:
    """A task: one part's pictures, opened."""
    (row,) = batch.to_pylist()
    problem, found = "", b""
    try:
        found = pickle.dumps(_fetched(sent).opened((row["part"], pickle.loads(row["items"]))))  # noqa: S301  # our own
    except (EquicamError, OSError) as error:
        problem = _here(error)
    columns = {"part": [row["part"]], "opened": pa.array([found], pa.large_binary()), "problem": [problem]}
    return pa.table(columns)


class _Worker:
    """An actor: the model is loaded when it starts, and stays."""

    def __init__(self, sent: Any, device: str) -> None:
        self._problem = ""
        try:
            self._compute: Callable[[int, Any], None] = _fetched(sent).ready(device)
        except (EquicamError, OSError) as error:
            self._problem = _here(error)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Compute and write one part."""
        number, opened, problem = (batch[name][0].as_py() for name in ("part", "opened", "problem"))
        problem = problem or self._problem
        if not problem:
            try:
                self._compute(number, pickle.loads(opened))  # noqa: S301  # our own
            except (EquicamError, OSError) as error:
                problem = _here(error)
        return pa.table({"part": [number], "problem": [problem]})


def _here(error: Exception) -> str:
    return f"{error} (on {socket.gethostname()})"


def _bound(ray: Any, context: Any, limit: int) -> None:
    """Opened pictures that may wait at once, in bytes, after which Ray opens no more; and no bars of Ray's own."""
    context.execution_options.resource_limits = ray.data.ExecutionResources(object_store_memory=limit)
    context.enable_progress_bars = False


@contextmanager
def _connected(address: str | None, actors: int | None) -> Iterator[Any]:
    """Ray at an address, or started here for the while; one that the caller has connected to stays so."""
    ray = _ray()
    if ray.is_initialized():
        yield ray
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    own: dict[str, Any] = {
        "include_dashboard": False,
        "num_cpus": max(os.cpu_count() or 1, (actors or 1) + 1),
    }
    try:
        ray.init(address, logging_level="ERROR", log_to_driver=False, **(own if address == "local" else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EquicamError(
            "a Ray cluster", needs=f"to be reached at {address!r}", got=next(iter(str(error).splitlines()), "nothing"),
            fix="ray start --head there, its token in RAY_AUTH_TOKEN, or no --address for this machine alone",
        ) from error  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _told(ray: Any) -> Iterator[None]:
    """What ends a run on a cluster, in a sentence."""
    try:
        yield
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise EquicamError(
            "the cluster", needs="to stay", got=f"{type(error).__name__}: {lines[-1]}",
            fix="the same command once it is back: what is written stays",
        ) from error  # fmt: skip


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about a run leaves the cluster
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EquicamError(
            "--engine ray", needs="Ray", got="no such package", fix="pip install 'equicam[ray]'"
        ) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
