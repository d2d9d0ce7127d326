"""Many machines: Ray Data decodes shards in CPU tasks and computes them in actors that hold the model.

Ray schedules, throttles and retries; this is the only module that imports it.
"""

import json
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

from equicam.engines.worker import Job, ModelSource, Shard
from equicam.errors import EquicamError

MAX_BLOCKS = 20_000  # with more shards than this, several share a Ray block
SHARDS_QUEUED_PER_ACTOR = 2


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster by its address, or one started here; each of the `actors` holds a model, on a GPU or a CPU."""

    device: str = "cpu"
    address: str | None = None
    actors: int | None = None
    model_source: ModelSource | None = None

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise EquicamError("device", "cpu or cuda with Ray", repr(self.device), "--device cuda")
        if self.actors is not None and self.actors < 1:
            raise EquicamError("actors", "at least 1", self.actors, "actors=2")

    @property
    def kind(self) -> str:
        """Cpu or cuda."""
        return self.device

    def work(self, job: Job, shards: Sequence[Shard]) -> Iterator[tuple[int, Any]]:
        """Compute the shards; yield each number and result once it is written, in any order."""
        with _connected(self.address, self.actors) as ray:
            actors, decoders = self._counts(ray)
            sent = ray.put(job)
            rows = [{"shard": number, "items": pickle.dumps(list(items))} for number, items in shards]
            data = ray.data.from_items(rows, override_num_blocks=min(len(rows), MAX_BLOCKS))
            # pause decoding while more than so many bytes of decoded images wait
            waiting = job.shard_bytes * (actors * (SHARDS_QUEUED_PER_ACTOR + 1) + 2)
            limits = ray.data.ExecutionResources(object_store_memory=waiting)
            data.context.execution_options.resource_limits = limits
            data.context.enable_progress_bars = False
            # with actors on CPUs, decoding reserves none: actors restarted after a lost node could reserve them all
            data = data.map_batches(
                _decode, fn_args=(sent,), batch_size=1, batch_format="pyarrow", num_cpus=1 if self.device == "cuda" else 0,
                compute=ray.data.TaskPoolStrategy(size=decoders),
            )  # fmt: skip
            data = data.map_batches(
                _Worker, fn_constructor_args=(sent, self.device), batch_size=1, batch_format="pyarrow",
                compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=SHARDS_QUEUED_PER_ACTOR),
                num_cpus=1, num_gpus=1 if self.device == "cuda" else 0,
            )  # fmt: skip
            for row in data.iter_rows():
                if row["problem"]:
                    raise EquicamError(
                        "the cluster", "to compute every shard", row["problem"],
                        "the same command once that is fixed: written shards stay",
                    )  # fmt: skip
                yield int(row["shard"]), json.loads(row["result"])

    def _counts(self, ray: Any) -> tuple[int, int]:
        """The number of actors (by default one per GPU, or all CPUs but one), and of CPUs left to decode images."""
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        if self.device == "cuda" and not gpus:
            raise EquicamError("the cluster", "GPUs", f"{cpus} CPUs alone", "--device cpu")
        wanted = self.actors or (gpus if self.device == "cuda" else max(1, cpus - 1))
        if wanted >= cpus:
            raise EquicamError(
                "the cluster", f"more CPUs than actors ({wanted})", cpus,
                f"actors={max(1, cpus - 1)}, or ray start --num-cpus {wanted + 1}",
            )  # fmt: skip
        return wanted, cpus - wanted


def best_device(address: str | None) -> str:
    """The device a cluster computes on: cuda if it has GPUs, else cpu."""
    if not (address or os.environ.get("RAY_ADDRESS")):  # this machine: no need to start Ray
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    with _connected(address, None) as ray:
        return "cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu"


@cache
def _fetch_job(sent: Any) -> Job:
    """The job, fetched once per process."""
    found: Job = _ray().get(sent)
    return found


def _attempt(work: Callable[..., Any], *given: Any) -> tuple[Any, str]:
    """What it returns, or the sentence of its error, with this machine's name."""
    try:
        return work(*given), ""
    except (EquicamError, OSError) as error:
        return None, f"{error} (on {socket.gethostname()})"


def _decode(batch: pa.Table, sent: Any) -> pa.Table:
    """A task: decode the images of one shard."""
    (row,) = batch.to_pylist()
    shard = row["shard"], pickle.loads(row["items"])  # noqa: S301  # our own
    found, problem = _attempt(lambda: pickle.dumps(_fetch_job(sent).decode(shard)))
    decoded = pa.array([found or b""], pa.large_binary())
    return pa.table({"shard": [row["shard"]], "decoded": decoded, "problem": [problem]})


class _Worker:
    """An actor: loads the model once, when it starts."""

    def __init__(self, sent: Any, device: str) -> None:
        self._compute, self._problem = _attempt(lambda: _fetch_job(sent).prepare(device))

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Compute and write one shard."""
        number, decoded, problem = (batch[name][0].as_py() for name in ("shard", "decoded", "problem"))
        problem, result = problem or self._problem, None
        if not problem:
            result, problem = _attempt(self._compute, number, pickle.loads(decoded))  # noqa: S301  # our own
        return pa.table({"shard": [number], "problem": [problem], "result": [json.dumps(result)]})


@contextmanager
def _connected(address: str | None, actors: int | None) -> Iterator[Any]:
    """Ray at an address, or started here for the duration; a connection of the caller's is reused and left open."""
    ray = _ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        own: dict[str, Any] = {}
        if address == "local":
            own = {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, (actors or 1) + 1)}
        try:
            ray.init(address, logging_level="ERROR", log_to_driver=False, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EquicamError(
                "a Ray cluster", f"to be reached at {address!r}", next(iter(str(error).splitlines()), "nothing"),
                "ray start --head there, its token in RAY_AUTH_TOKEN, or address=None for this machine alone",
            ) from error  # fmt: skip
    try:
        yield ray
    except ray.exceptions.RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise EquicamError(
            "the cluster", "to stay", f"{type(error).__name__}: {lines[-1]}",
            "the same command once it is back: written shards stay",
        ) from error  # fmt: skip
    finally:
        if is_ours:
            ray.shutdown()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise EquicamError("engine ray", "Ray", "no such package", "pip install 'equicam[ray]'") from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
