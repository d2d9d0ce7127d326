"""CUDA graphs: one launch instead of hundreds, for input shapes that come again.

A graph records kernels and the addresses they read and write. It is captured again when the network's tensors, parts
or hooks are no longer those it was captured with.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.core.views import keeper
from equicam.readers.failures import Check, out_of_memory, raise_first
from equicam.readers.forward import Network, views_that_fit
from equicam.runtime.compile.traced import TracedCall
from equicam.runtime.pending import DeferredChecks, Pending, Tensors, allow_side_stream, join_side_stream

MAX_KEPT_BYTES = 256 * 2**20  # between calls; a call keeps what it uses until it ends, however large
_kept: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()


@contextmanager
def keep_constants(also_in: list[Tensor] | None = None) -> Iterator[None]:
    """Within it the core reuses its constants. A captured graph keeps those it reads in a list of its own."""

    def keep(make: Callable[..., Tensor], *args: object) -> Tensor:
        tensor = _lookup(make, *args)
        if also_in is not None:
            also_in.append(tensor)
        return tensor

    outermost = keeper.get() is None
    token = keeper.set(keep)
    try:
        yield
    finally:
        keeper.reset(token)
        if outermost:
            with _lock:
                total = sum(tensor.nbytes for tensor in _kept.values())
                while total > MAX_KEPT_BYTES and len(_kept) > 1:
                    total -= _kept.popitem(last=False)[1].nbytes  # the least recently used


def _lookup(make: Callable[..., Tensor], *args: object) -> Tensor:
    key = (make, args)
    with _lock:
        if (kept := _kept.get(key)) is not None:
            _kept.move_to_end(key)
            return kept
    # a tensor made in the caller's inference mode could not join a backward pass later
    with torch.inference_mode(False):
        made = make(*args)
    with _lock:
        return _kept.setdefault(key, made)


ALWAYS_CAPTURED_VALUES = 64 * 3 * 224**2  # in the views of a call that is captured without estimating memory
LONG_VALUES = 256 * 3 * 224**2  # calls with more take 10 ms and longer: their kernels are launched one by one


def _is_long(x: Float[Tensor, "b c H W"], views: int) -> bool:
    """Whether a call of so many views of these images is launched, not captured."""
    return views * x[0].numel() > LONG_VALUES


def _fits_memory(x: Float[Tensor, "b c H W"], views: int) -> bool:
    """Whether memory holds so many views of the images at once, and twice where they are captured."""
    if views * x[0].numel() <= ALWAYS_CAPTURED_VALUES:
        return True
    return views * (1 if _is_long(x, views) else 2) <= views_that_fit(x, with_kept=True)


LOG = logging.getLogger(__name__)
Inputs = tuple[Tensor, Tensor | None]  # images and targets
CapturedWork = Callable[[Tensor, Tensor | None], tuple[Tensors, DeferredChecks]]
"""Inputs → results by name, and the checks they must pass."""
Wait = Callable[[], object]
MAX_GRAPHS_PER_MODEL = 8  # each holds the memory its work needs
WARMUP_RUNS = 3  # in which compilers and libraries choose their kernels
MAX_PACKED_VALUES = 1 << 16
"""Tensors up to this size, such as a map of 224 × 224, are copied out together; a caller who keeps one keeps them all."""
HOST = "host"  # the name of the booleans that the host reads: which checks passed, and the flags if there are any


class _PackedTensors:
    """Tensors by name, the small ones in one buffer of bytes, so that few copies take them all out."""

    def __init__(self, found: Tensors) -> None:
        self.large = {name: value for name, value in found.items() if value.numel() > MAX_PACKED_VALUES}
        # the widest types first: every tensor then starts at a multiple of its type's width
        small = [(name, value) for name, value in found.items() if name not in self.large]
        small.sort(key=lambda named: -named[1].element_size())
        self.layout = [(name, value.dtype, value.shape, value.nbytes) for name, value in small]
        self.bytes = torch.cat([value.reshape(-1).view(torch.uint8) for _, value in small])

    def copy(self) -> Tensors:
        """The tensors as they are now."""
        found = {name: value.clone() for name, value in self.large.items()}
        values = torch.split(self.bytes.clone(), [count for *_, count in self.layout])
        for (name, dtype, shape, _), value in zip(self.layout, values, strict=True):
            found[name] = value.view(dtype).view(shape)
        return found


def pending_call(tensors: Tensors, checks: list[Check], host: Tensor, wait: Wait) -> Pending[Tensors]:
    """The results of a call, still on their way; when `wait` returns, `host` says which checks passed, and the flags."""

    def check() -> None:  # it keeps no tensor of the results alive
        wait()
        raise_first(host[: len(checks)].tolist(), checks)

    def finish() -> Tensors:
        check()
        if "flags" not in tensors:
            return tensors
        return tensors | {"flags": host[len(checks) :].view(tensors["flags"].shape)}

    return Pending(tensors, finish, check)


class CompiledCall:
    """Work on tensors of fixed shapes, compiled whole where that is possible and captured as a CUDA graph.

    Compiled work that is `long` is not captured: the device is busy while its kernels are launched, and a graph would hold
    memory of its own. Every call copies its inputs in; a captured one also copies its outputs out.
    """

    def __init__(
        self,
        traceable: CapturedWork,
        work: CapturedWork,
        inputs: Inputs,
        network_tensors: Iterable[Tensor],
        *,
        long: bool,
    ) -> None:
        self.inputs = tuple(None if t is None else t.clone() for t in inputs)
        self.given = [t for t in self.inputs if t is not None]
        self.device = inputs[0].device
        # the graph reads these where they are, whoever else may drop them
        self.alive: list[Tensor] = [t.detach() for t in network_tensors]
        self.checks: list[Check] = []
        self.traced: TracedCall | None = None
        with keep_constants(also_in=self.alive), torch.cuda.device(self.device):
            try:
                traced = TracedCall(lambda *given: self._results(traceable, *given), self.given)
                traced.compile(self.given)
                traced(*self.given)  # what the compiler makes of a rare operation may fail when it runs
                self.traced = traced
            except Exception as error:
                if out_of_memory(error):
                    raise
                LOG.warning("the call is not compiled as a whole, only the network: %s", error)
            self.graph: torch.cuda.CUDAGraph | None = None
            if self.traced is None or not long:
                self._capture(partial(self._results, work) if self.traced is None else self.traced)

    def _capture(self, run: Callable[..., Tensors]) -> None:
        warmup = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warmup.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warmup), allow_side_stream():
            for _ in range(WARMUP_RUNS):
                run(*self.given)
        torch.cuda.current_stream().wait_stream(warmup)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), allow_side_stream():
            self.packed = _PackedTensors(run(*self.given))

    def _results(self, work: CapturedWork, x: Tensor, target: Tensor | None = None) -> Tensors:
        found, checks = work(x, target)
        self.checks = checks.checks
        passed = checks.passed()
        join_side_stream()
        flags = found.get("flags", passed[:0])
        return found | {HOST: torch.cat((passed, flags.reshape(-1)))}

    def __call__(self, *inputs: Tensor | None) -> Pending[Tensors]:
        """The results for these inputs."""
        with torch.cuda.device(self.device):
            for mine, new in zip(self.inputs, inputs, strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)
            if self.graph is None:
                assert self.traced is not None  # noqa: S101  # nothing else is left uncaptured
                found = dict(self.traced(*self.given))
            else:
                self.graph.replay()
                found = self.packed.copy()
            host = found.pop(HOST).to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
            return pending_call(found, self.checks, host, arrived.synchronize)

    def refresh(self) -> None:
        """Take over weights that have changed where they are."""
        if self.traced is not None:
            self.traced.refresh()


class GraphCache:
    """The graphs of one network."""

    def __init__(self, module: nn.Module) -> None:
        self.graphs: OrderedDict[Hashable, CompiledCall] = OrderedDict()
        self.too_large: set[Hashable] = set()  # keys whose capture ran out of memory: not tried again
        self.module = ref(module)  # graphs must not keep a network alive
        self.parts: list[ref[nn.Module]] = []
        self.identity: list[int] = []
        self.versions: list[int] = []

    def run(self, key: Hashable, capture: Callable[[], CompiledCall], inputs: Inputs) -> Pending[Tensors]:
        """The results of the graph of that key; captured now if there is none or the network has changed.

        Replay first, then check whether parameters or hooks moved or changed; if so, discard the result. The graph
        keeps the tensors it reads, so a replay on a changed network wastes time and does no harm.
        """
        graph = self.graphs.get(key)
        found = None if graph is None else graph(*inputs)
        identity, versions = _identity(self.parts)
        if not self.identity or identity != self.identity:
            self.graphs.clear()
            module = self.module()
            assert module is not None  # noqa: S101  # the caller has it
            self.parts = [ref(part) for part in module.modules()]
            self.identity, self.versions = _identity(self.parts)
            graph = found = None
        elif versions != self.versions:
            self.versions, found = versions, None
            for each in self.graphs.values():
                each.refresh()
        if graph is None:
            graph = self.graphs[key] = capture()
        if found is None:
            found = graph(*inputs)
        self.graphs.move_to_end(key)
        while len(self.graphs) > MAX_GRAPHS_PER_MODEL:
            self.graphs.popitem(last=False)
        return found


_caches: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()


def _graphs_of(module: nn.Module) -> GraphCache:
    if module not in _caches:
        _caches[module] = GraphCache(module)
    return _caches[module]


def replay(
    network: Network,
    key: tuple[Hashable, ...],
    traceable: CapturedWork,
    work: CapturedWork,
    inputs: Inputs,
    *,
    presented: Float[Tensor, "b c H W"],
    views: int,
) -> Pending[Tensors] | None:
    """The results of captured work on a network, still on their way; None where memory does not suffice, now or before.

    Calls with equal keys and inputs of equal shapes do the same; `presented` are the images as the network sees them.
    """
    module = network.model.module
    graphs = _graphs_of(module)
    key = (*key, tuple(None if t is None else (tuple(t.shape), t.dtype, t.device) for t in inputs))

    def capture() -> CompiledCall:
        LOG.info("compiling for inputs %s", tuple(inputs[0].shape))
        with network.frozen():
            tensors = (*module.parameters(), *module.buffers())
            return CompiledCall(traceable, work, inputs, tensors, long=_is_long(presented, views))

    if key in graphs.too_large or not (key in graphs.graphs or _fits_memory(presented, views)):
        return None
    try:
        return graphs.run(key, capture, inputs)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        if key not in graphs.graphs:  # there was no memory to make it; else this call alone has too little
            graphs.graphs.clear()
            graphs.too_large.add(key)
        return None


def _identity(parts: list[ref[nn.Module]]) -> tuple[list[int], list[int]]:
    """Which parts and hooks a network has and the addresses of its tensors; and how often each tensor was changed.

    It is found for every call: most of its loops over hundreds of parts are those of `map` and `chain`, which are fast.
    """
    alive = [part for one in parts if (part := one()) is not None]
    if len(alive) < len(parts):
        return [], []
    modules = [part._modules for part in alive]
    hooks, kept = (list(chain.from_iterable(map(tables, alive))) for tables in (_HOOKS, _TENSORS))
    tensors = [tensor for table in filter(None, kept) for tensor in table.values() if tensor is not None]
    found = [
        *map(len, chain(modules, kept)),  # which part has which of them
        *map(id, chain.from_iterable(table.values() for table in filter(None, modules))),
        *chain.from_iterable(filter(None, hooks)),  # their keys: each registration has its own
        *map(Tensor.data_ptr, tensors),
    ]
    try:
        return found, list(map(_VERSION, tensors))
    except RuntimeError:  # tensors made in inference mode have no version
        return found, [0 if tensor.is_inference() else tensor._version for tensor in tensors]


_HOOKS, _TENSORS = attrgetter("_forward_pre_hooks", "_forward_hooks"), attrgetter("_parameters", "_buffers")
_VERSION = attrgetter("_version")
