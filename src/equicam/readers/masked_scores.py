"""Class scores of masked images, remembered where several explanations need the same ones.

A map by Score-CAM or RISE takes thousands of forward passes. Two protocols that compare the same maps differently, or two
ways of weighing the same scores, need them once.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jaxtyping import Float
from torch import Tensor

from equicam.readers.forward import Network

_known: ContextVar[dict[Hashable, Tensor] | None] = ContextVar("masked scores", default=None)


@contextmanager
def remember_masked_scores() -> Iterator[None]:
    """Inside, no network scores the same masked images twice. Its weights must stay as they are."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def remembered(
    masks: Hashable,
    network: Network,
    x: Float[Tensor, "c H W"],
    target: int,
    score: Callable[[], Float[Tensor, " m"]],
) -> Float[Tensor, " m"]:
    """What `score` finds for these masks of an image and a class, or has found before."""
    known = _known.get()
    if known is None:
        return score()
    pixels = hashlib.sha256(x.cpu().contiguous().view(-1).numpy().tobytes()).digest()
    model = network.model
    key = (masks, model.module, model.layer, model.task, network.autocast, pixels, tuple(x.shape), target)
    if key not in known:
        known[key] = score()
    return known[key]
