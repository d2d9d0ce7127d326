"""Class scores of masked images, remembered where several explanations need the same ones.

A map by Score-CAM or RISE takes thousands of forward passes. Two protocols that compare the same maps differently, or two
ways of weighing the same scores, need them once.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.readers.forward import Network

Scores = MutableMapping[str, Tensor]
"""Scores of one network, by the SHA-256 of what they are of: image, class, masks and how the network ran."""


Remembered = Callable[[Hashable, Callable[[], Tensor]], Tensor]
"""(masks, function that scores them) → what it finds, or has found before."""

_memory: ContextVar[dict[nn.Module, Scores] | None] = ContextVar("masked scores", default=None)


@contextmanager
def remember_masked_scores(module: nn.Module | None = None, scores: Scores | None = None) -> Iterator[None]:
    """Inside, no network scores the same masked images twice. Its weights must stay as they are.

    The scores of one module may be kept by the caller, as in files. Inside itself it does nothing.
    """
    if _memory.get() is not None:
        yield
        return
    token = _memory.set({} if module is None or scores is None else {module: scores})
    try:
        yield
    finally:
        _memory.reset(token)


def memory_of(network: Network, x: Float[Tensor, "c H W"], target: int) -> Remembered:
    """The scores of one image and class: by this function they are computed once, where they are to be remembered."""
    memory = _memory.get()
    if memory is None:
        return lambda _masks, score: score()
    model = network.model
    known = memory.setdefault(model.module, {})
    about = (
        model.layer, model.layout, model.task, str(network.autocast), str(x.dtype), tuple(x.shape), target,
        hashlib.sha256(x.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
    )  # fmt: skip

    def remembered(masks: Hashable, score: Callable[[], Tensor]) -> Tensor:
        key = hashlib.sha256(repr((masks, about)).encode()).hexdigest()
        if key not in known:
            known[key] = score().clone()  # not a column of all classes' scores
        return known[key].to(x.device)

    return remembered
