"""CUDA graphs: one launch instead of hundreds, for input shapes that come again.

A graph records kernels and the addresses they read and write. It is captured again when the network's tensors, parts
or hooks are no longer those it was captured with.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from equicam.readers.checks import raise_first
from equicam.runtime.constants import keep_constants
from equicam.runtime.deferred import DeferredChecks
from equicam.runtime.streams import allow_side_stream, join_side_stream

Tensors = dict[str, Tensor]
CapturedWork = Callable[[Tensor, Tensor | None], tuple[Tensors, DeferredChecks]]
"""(images, target) → results by name, and the checks they must pass."""
MAX_GRAPHS_PER_MODEL = 8
"""Each graph holds the memory its work needs."""
WARMUP_RUNS = 3
"""Compilers and libraries choose their kernels in the first runs."""
MAX_PACKED_VALUES = 1 << 14
"""Tensors up to this size are copied out together; a caller who keeps one of them keeps little else alive."""
HOST = "host"
"""The name of the tensor of booleans that the host reads: which checks passed, and the flags where there are any."""


class PackedTensors:
    """Tensors by name, the small ones of each type in one buffer, so that few copies take them all out."""

    def __init__(self, found: Tensors) -> None:
        self.large = {name: value for name, value in found.items() if value.numel() > MAX_PACKED_VALUES}
        self.layout: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
        for name, value in found.items():
            if name not in self.large:
                self.layout.setdefault(value.dtype, []).append((name, tuple(value.shape)))
        self.buffers = {
            dtype: torch.cat([found[name].reshape(-1) for name, _ in names])
            for dtype, names in self.layout.items()
        }

    def copy(self) -> Tensors:
        """The tensors as they are now."""
        found = {name: value.clone() for name, value in self.large.items()}
        for dtype, names in self.layout.items():
            buffer, start = self.buffers[dtype].clone(), 0
            for name, shape in names:
                count = torch.Size(shape).numel()
                found[name] = buffer[start : start + count].view(shape)
                start += count
        return found


class CapturedGraph:
    """Work on tensors of fixed shapes, captured; every call copies its inputs in and its outputs out."""

    def __init__(
        self, work: CapturedWork, inputs: tuple[Tensor, Tensor | None], network_tensors: Iterable[Tensor] = ()
    ) -> None:
        self.inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.device = inputs[0].device
        # the graph reads these where they are, whoever else may drop them
        self.alive: list[Tensor] = [t.detach() for t in network_tensors]
        with keep_constants(also_in=self.alive), torch.cuda.device(self.device):
            self._capture(work)

    def _capture(self, work: CapturedWork) -> None:
        warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup), allow_side_stream():
            for _ in range(WARMUP_RUNS):
                self._run(work)
        torch.cuda.current_stream().wait_stream(warmup)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), allow_side_stream():
            found, checks = self._run(work)
            self.checks = checks.checks
            self.packed = PackedTensors(found)

    def _run(self, work: CapturedWork) -> tuple[Tensors, DeferredChecks]:
        x, target = self.inputs
        assert x is not None  # noqa: S101  # images are never None
        found, checks = work(x, target)
        passed = checks.passed()
        join_side_stream()
        flags = found.get("flags", passed[:0])
        return found | {HOST: torch.cat((passed, flags.reshape(-1)))}, checks

    def __call__(self, *inputs: Tensor | None) -> Tensors:
        """The results for these inputs."""
        with torch.cuda.device(self.device):
            for mine, new in zip(self.inputs, inputs, strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)
            self.graph.replay()
            return self.packed.copy()

    def raise_failed(self, found: Tensors) -> Tensors:
        """Wait for these results; raise the error of the first check that failed. The flags come to the host."""
        host = found.pop(HOST).cpu()
        raise_first(host[: len(self.checks)].tolist(), self.checks)
        if "flags" in found:
            found["flags"] = host[len(self.checks) :].view(found["flags"].shape)
        return found


class GraphCache:
    """The graphs of one network."""

    def __init__(self, module: nn.Module) -> None:
        self.graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
        self.too_large: set[Hashable] = set()  # keys whose capture ran out of memory: not tried again
        self.module = ref(module)  # graphs must not keep a network alive
        self.parts: list[ref[nn.Module]] = []
        self.identity: list[int] = []

    def run(
        self, key: Hashable, capture: Callable[[], CapturedGraph], inputs: tuple[Tensor, Tensor | None]
    ) -> tuple[CapturedGraph, Tensors]:
        """The graph of that key and its results; captured now if there is none or the network has changed.

        Replay first, then check whether parameters or hooks moved; if so, discard the result and capture again. The
        graph keeps the tensors it reads, so a replay on a changed network wastes time and does no harm.
        """
        graph = self.graphs.get(key)
        found = None if graph is None else graph(*inputs)
        if not self.identity or _identity(self.parts) != self.identity:
            self.graphs.clear()
            module = self.module()
            assert module is not None  # noqa: S101  # the caller has it
            self.parts = [ref(part) for part in module.modules()]
            self.identity = _identity(self.parts)
            graph = found = None
        if graph is None or found is None:
            graph = self.graphs[key] = capture()
            found = graph(*inputs)
        self.graphs.move_to_end(key)
        while len(self.graphs) > MAX_GRAPHS_PER_MODEL:
            self.graphs.popitem(last=False)
        return graph, found


def _identity(parts: list[ref[nn.Module]]) -> list[int]:
    """Which parts and hooks a network has, and the addresses of its tensors."""
    found: list[int] = []
    for one in parts:
        if (part := one()) is None:
            return []
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        found += map(id, (*part._modules.values(), *hooks))
        tensors = (*part._parameters.values(), *part._buffers.values())
        found += [t.data_ptr() for t in tensors if t is not None]
    return found


_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()


def graphs_of(module: nn.Module) -> GraphCache:
    """A network's graphs."""
    if module not in _caches:
        _caches[module] = GraphCache(module)
    return _caches[module]


def shape_key(tensors: tuple[Tensor | None, ...]) -> Hashable:
    """Equal for inputs that one graph can take."""
    return tuple(None if t is None else (tuple(t.shape), t.dtype, t.device) for t in tensors)
