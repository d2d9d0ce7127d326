"""What a layer must put out to be read, and what is said where it does not."""

from collections.abc import Sequence

from torch import Tensor

from equicam.errors import EquicamError


def caught_leaf_of(layer: str, caught: Sequence[Tensor], count: int) -> Tensor:
    """What the layer put out when it ran last: one row a picture."""
    if not caught:
        raise EquicamError(
            f"layer {layer!r}", needs="to run when the model does", got="no call of it",
            fix="a layer the forward pass calls (scripted modules do not fire hooks)",
        )  # fmt: skip
    if len(caught[-1]) != count:
        raise EquicamError(
            f"layer {layer!r}", needs=f"one row a picture, {count} in all", got=f"shape {tuple(caught[-1].shape)}",
            fix="a layer that does not fold windows into the batch",
        )  # fmt: skip
    return caught[-1]


def not_a_tensor(layer: str, found: object) -> EquicamError:
    """What is wrong with a layer that puts out something else."""
    return EquicamError(
        f"layer {layer!r}", needs="a floating-point tensor as output", got=type(found).__name__,
        fix="a layer that returns its features",
    )  # fmt: skip
