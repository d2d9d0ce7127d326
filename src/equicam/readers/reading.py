"""What a reader is and what it returns."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.chain import Stage
from equicam.core.combine import Features, Plane
from equicam.readers.checks import Check
from equicam.readers.forward import Forward, Network, capture_layer, read_layer


@dataclass(frozen=True)
class Targets:
    """The class to explain in each view, and the logits of its image as presented."""

    classes: Int[Tensor, " n"]
    presented_logits: Float[Tensor, "n y"] | None  # None without a model


@dataclass(frozen=True)
class Reading:
    """A batch of views, read: where it enters the chain, and the checks its values must pass."""

    stage: Stage
    values: tuple[Features | Plane, ...]  # (acts, grads) at features, one plane elsewhere
    checks: tuple[Check, ...] = ()


Read = Callable[..., Reading]
"""(network, views, their forward pass, targets) → what enters the chain; without a model the first and third are None."""


@dataclass(frozen=True)
class Reader:
    """A forward pass of the views, and what is read once their target class is known."""

    read: Read
    forward: Callable[[Network, Float[Tensor, "n c H W"]], Forward] | None = (
        capture_layer  # None: sees no model
    )
    one_pass: bool = (
        False  # every view goes through the network once, so views of many images may share a batch
    )


def without_gradient(read: Read) -> Reader:
    """A reader that needs features and logits of its views, and no gradient."""
    return Reader(read, forward=read_layer)
