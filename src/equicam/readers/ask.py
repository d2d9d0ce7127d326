"""What a model says of a batch, without a graph; and what its head says of other features."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.models.model import Model
from equicam.readers.layout import Layout
from equicam.readers.reading import wide
from equicam.readers.tap import caught_features, class_scores, feed, tapped, undisturbed

Said = tuple[Float[Tensor, "n y"], Float[Tensor, "n y"]]


def ask(model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None) -> Said:
    """Scores and probabilities of a batch."""
    with undisturbed(model.module), torch.no_grad():
        return class_scores(feed(model, x, autocast), count=len(x))


def ask_at(
    model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None
) -> tuple[Float[Tensor, "n k h w"], Layout, Float[Tensor, "n y"], Float[Tensor, "n y"]]:
    """The target layer's activations and their layout, scores and probabilities of a batch."""
    with undisturbed(model.module), torch.no_grad(), tapped(model) as caught:
        output = feed(model, x, autocast)
        features, layout = caught_features(model, caught, x)
        scores, probs = class_scores(output, count=len(x))
    return wide(layout.planes(features.detach())), layout, scores, probs


def ask_head(
    model: Model,
    x: Float[Tensor, "1 c H W"],
    vary: Callable[[Tensor], Tensor],
    autocast: torch.dtype | None,
    *,
    block_input: bool = False,
) -> Said:
    """Scores of one picture with the target layer's output put through `vary`.

    The trunk runs once, on one picture; `vary` returns any number of variants and only what follows sees them all.
    A residual around the layer stays one picture and broadcasts. With `block_input`, tokens are varied where they
    enter the layer's block instead.
    """
    varied: list[Tensor] = []

    def swap(tensor: Tensor) -> Tensor:
        varied.append(vary(tensor))
        return varied[-1]

    def enter(_module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inputs:
            return ((swap(inputs[0]), *inputs[1:]), kwargs) if inputs[0].ndim == 3 else None
        name = next(
            (key for key, value in kwargs.items() if isinstance(value, Tensor) and value.ndim == 3), None
        )
        return None if name is None else (inputs, kwargs | {name: swap(kwargs[name])})

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if varied:
            return None
        return (swap(output[0]), *output[1:]) if isinstance(output, tuple) else swap(output)

    block = model.module.get_submodule(model.layer.rpartition(".")[0])
    handles = [model.module.get_submodule(model.layer).register_forward_hook(leave)]
    if block_input:
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        with undisturbed(model.module), torch.no_grad():
            output = feed(model, x, autocast)
            return class_scores(output, count=len(varied[-1]) if varied else len(x))
    finally:
        for handle in handles:
            handle.remove()
