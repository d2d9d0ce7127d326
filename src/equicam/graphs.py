"""Small work captured as a CUDA graph: one launch instead of hundreds, for shapes that come again.

What is captured is the work itself, whatever it computes; a graph only remembers where its tensors are. It is made anew
when a network's tensors are others than those it was captured with.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from equicam.geometry import holding
from equicam.readers.checks import Check, gathered

Work = Callable[..., dict[str, Tensor]]
MOST = 8
"""Graphs kept for one network; each holds the memory its work takes."""
WARM = 3
"""Runs before the capture: compilers and libraries choose their kernels in the first."""


class Graph:
    """Work on tensors of fixed shapes, captured; every call copies its inputs in and its outputs out."""

    def __init__(self, work: Work, given: tuple[Tensor | None, ...]) -> None:
        self.given = tuple(None if t is None else t.clone() for t in given)
        self.kept: list[Tensor] = []  # cached tensors the graph reads, which their cache may drop
        self.checks: list[Check]
        token = holding.set(self.kept)
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side), gathered():
                for _ in range(WARM):
                    work(*self.given)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with gathered() as checks, torch.cuda.graph(self.graph):
                self.found = work(*self.given)
                held = [c for c, _ in checks]
                self.holds = torch.stack(held) if held else None
            self.checks = checks
        finally:
            holding.reset(token)

    def __call__(self, *given: Tensor | None) -> dict[str, Tensor]:
        """The work's outputs for these inputs, and `holds`: which of its checks do."""
        for mine, new in zip(self.given, given, strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)
        self.graph.replay()
        found = {name: value.clone() for name, value in self.found.items()}
        return found if self.holds is None else found | {"holds": self.holds.clone()}

    def refuse(self, holds: list[bool]) -> None:
        """Raise the first check that does not hold."""
        for fine, (_, error) in zip(holds, self.checks, strict=True):
            if not fine:
                raise error()


class Graphs:
    """A network's graphs, the latest used last, and where its tensors were when they were captured."""

    def __init__(self, module: nn.Module) -> None:
        self.kept: OrderedDict[Hashable, Graph] = OrderedDict()
        self.tables = [t for m in module.modules() for t in (m._parameters, m._buffers)]
        self.places = self._places()

    def _places(self) -> list[int]:
        return [t.data_ptr() for table in self.tables for t in table.values() if t is not None]

    def find(self, key: Hashable, capture: Callable[[], Graph]) -> Graph:
        """The graph of that key, captured now if there is none or the network has moved."""
        if (places := self._places()) != self.places:
            self.kept.clear()
            self.places = places
        if key not in self.kept:
            self.kept[key] = capture()
        self.kept.move_to_end(key)
        while len(self.kept) > MOST:
            self.kept.popitem(last=False)
        return self.kept[key]


_graphs: WeakKeyDictionary[nn.Module, Graphs] = WeakKeyDictionary()


def graphs_of(module: nn.Module) -> Graphs:
    """A network's graphs."""
    if module not in _graphs:
        _graphs[module] = Graphs(module)
    return _graphs[module]


def shape_of(given: tuple[Any, ...]) -> Hashable:
    """What tells inputs of one shape from those of another."""
    return tuple(None if t is None else (tuple(t.shape), t.dtype, t.device) for t in given)
