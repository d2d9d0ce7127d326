"""Work captured as a CUDA graph: one launch instead of hundreds, for shapes that come again.

What is captured is the work itself, whatever it computes; a graph only remembers where its tensors are. It is made anew
when a network's tensors are others than those it was captured with.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from equicam.core.views import holding
from equicam.readers.checks import gathered
from equicam.runtime.streams import branching

Work = Callable[..., dict[str, Tensor]]
MOST = 8
"""Graphs kept for one network; each holds the memory its work takes."""
WARM = 3
"""Runs before the capture: compilers and libraries choose their kernels in the first."""
SMALL = 1 << 14
"""Values up to which a tensor is copied together with others: who keeps one of them keeps little else."""
TOLD = "told"
"""The name under which a graph keeps what is asked of it at once: which of its checks hold, then its flags."""


class Packed:
    """Tensors by name, the small ones of each type in one: few copies take them all out."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        self.large = {name: value for name, value in found.items() if value.numel() > SMALL}
        self.of: dict[torch.dtype, list[tuple[str, tuple[int, ...]]]] = {}
        for name, value in found.items():
            if name not in self.large:
                self.of.setdefault(value.dtype, []).append((name, tuple(value.shape)))
        self.rows = {t: torch.cat([found[n].reshape(-1) for n, _ in names]) for t, names in self.of.items()}

    def copied(self) -> dict[str, Tensor]:
        """The tensors as they are now."""
        found = {name: value.clone() for name, value in self.large.items()}
        for dtype, names in self.of.items():
            row, start = self.rows[dtype].clone(), 0
            for name, shape in names:
                count = torch.Size(shape).numel()
                found[name] = row[start : start + count].view(shape)
                start += count
        return found


class Graph:
    """Work on tensors of fixed shapes, captured; every call copies its inputs in and its outputs out."""

    def __init__(self, work: Work, given: tuple[Tensor | None, ...], reads: Iterable[Tensor] = ()) -> None:
        self.given = tuple(None if t is None else t.clone() for t in given)
        self.device = next(t.device for t in given if t is not None)
        # what the graph reads where it is: cached tensors and the network's, whoever else may drop them
        self.kept: list[Tensor] = [t.detach() for t in reads]
        token = holding.set(self.kept)
        try:
            with torch.cuda.device(self.device):
                self._capture(work)
        finally:
            holding.reset(token)

    def _capture(self, work: Work) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), gathered(), branching():
            for _ in range(WARM):
                work(*self.given)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with gathered() as checks, torch.cuda.graph(self.graph), branching():
            found = work(*self.given)
            told = torch.cat((torch.stack([holds for holds, _ in checks]), found.pop("flags").flatten()))
            self.packed = Packed(found | {TOLD: told})
        self.errors = [error for _, error in checks]

    def __call__(self, *given: Tensor | None) -> dict[str, Tensor]:
        """The work's outputs for these inputs; in place of its flags, what is to be asked."""
        with torch.cuda.device(self.device):
            for mine, new in zip(self.given, given, strict=True):
                if mine is not None and new is not None:
                    mine.copy_(new)
            self.graph.replay()
            return self.packed.copied()

    def flags(self, told: Tensor) -> list[bool]:
        """The work's flags, in one wait with its checks, the first of which that does not hold is raised."""
        said: list[bool] = told.tolist()
        for fine, error in zip(said, self.errors, strict=False):
            if not fine:
                raise error()
        return said[len(self.errors) :]


class Graphs:
    """A network's graphs, the latest used last, and where its tensors were when they were captured."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: OrderedDict[Hashable, Graph] = OrderedDict()
        self.module = ref(module)  # a network must not live on for its graphs
        self.parts: list[ref[nn.Module]] = []
        self.places: list[int] = []

    def run(
        self, key: Hashable, capture: Callable[[], Graph], given: tuple[Tensor | None, ...]
    ) -> tuple[Graph, dict[str, Tensor]]:
        """The graph of that key and what it finds; captured now if there is none, or the network is another since.

        Whether it is, is looked up while the device is already at it: a graph keeps what it reads, so that a network
        that has moved or has other parts or hooks costs a run that is thrown away, and nothing worse.
        """
        graph = self.kept.get(key)
        found = None if graph is None else graph(*given)
        if not self.places or _places(self.parts) != self.places:
            self.kept.clear()
            module = self.module()
            assert module is not None  # noqa: S101  # the caller has it
            self.parts = [ref(part) for part in module.modules()]
            self.places = _places(self.parts)
            graph = found = None
        if graph is None or found is None:
            graph = self.kept[key] = capture()
            found = graph(*given)
        self.kept.move_to_end(key)
        while len(self.kept) > MOST:
            self.kept.popitem(last=False)
        return graph, found


def _places(parts: list[ref[nn.Module]]) -> list[int]:
    """Which parts and hooks a network has, and where its tensors are."""
    found: list[int] = []
    for one in parts:
        if (part := one()) is None:
            return []
        hooks = (*part._forward_pre_hooks.values(), *part._forward_hooks.values())
        found += map(id, (*part._modules.values(), *hooks))
        tensors = (*part._parameters.values(), *part._buffers.values())
        found += [t.data_ptr() for t in tensors if t is not None]
    return found


_graphs: WeakKeyDictionary[nn.Module, Graphs] = WeakKeyDictionary()


def graphs_of(module: nn.Module) -> Graphs:
    """A network's graphs."""
    if module not in _graphs:
        _graphs[module] = Graphs(module)
    return _graphs[module]


def shape_of(given: tuple[Any, ...]) -> Hashable:
    """What tells inputs of one shape from those of another."""
    return tuple(None if t is None else (tuple(t.shape), t.dtype, t.device) for t in given)
