"""What a model says of a batch, and what its head says of other features."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.errors import EquicamError
from equicam.readers.gradients import caught_features, class_scores, feed, tapped, undisturbed
from equicam.readers.layout import is_block_norm
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading, wide

Said = tuple[Float[Tensor, "n y"], Float[Tensor, "n y"]]


def ask(model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None) -> Said:
    """Scores and probabilities of a batch."""
    with undisturbed(model.module), torch.no_grad():
        return class_scores(feed(model, x, autocast), count=len(x))


def ask_at(
    model: Model, x: Float[Tensor, "n c H W"], autocast: torch.dtype | None
) -> tuple[Float[Tensor, "n k h w"], Float[Tensor, "n y"], Float[Tensor, "n y"]]:
    """The target layer's activations, scores and probabilities of a batch."""
    # with a graph behind the layer, by which a sigmoid head is told from logits
    with undisturbed(model.module), torch.enable_grad(), tapped(model) as caught:
        output = feed(model, x, autocast)
        features, layout = caught_features(model, caught, x)
        scores, probs = class_scores(output, count=len(x))
    return wide(layout.planes(features.detach())), scores.detach(), probs.detach()


def look(
    model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
) -> Reading:
    """Activations alone, for combines that ask for no gradient (they stand in for it)."""
    acts, scores, probs = ask_at(model, x, autocast)
    pin(scores)
    return Reading("features", (acts, acts), scores, probs)


def ask_head(
    model: Model,
    x: Float[Tensor, "r c H W"],
    vary: Callable[[Tensor], Tensor],
    autocast: torch.dtype | None,
    *,
    block_input: bool = False,
) -> Said:
    """Scores of one picture (or rows of it) with the target layer's output put through `vary`.

    The trunk runs on the picture as given; `vary` returns any number of variants and only what follows sees them all.
    A residual around the layer stays one picture and broadcasts. With `block_input`, where the layer is a norm in a
    row of blocks, tokens are varied where they enter its block instead.
    """
    varied: list[Tensor] = []
    ran = 0

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
        nonlocal ran
        ran += 1
        if ran > 1:
            raise EquicamError(
                f"layer {model.layer!r}", needs="to run once in a forward pass here", got="another call of it",
                fix="the block around it, or a gradient method, which reads its last call",
            )  # fmt: skip
        if varied:
            return None
        return (swap(output[0]), *output[1:]) if isinstance(output, tuple) else swap(output)

    handles = [model.module.get_submodule(model.layer).register_forward_hook(leave)]
    if block_input and is_block_norm(model.module, model.layer):
        block = model.module.get_submodule(model.layer.rpartition(".")[0])
        handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
    try:
        with undisturbed(model.module), torch.no_grad():
            output = feed(model, x, autocast)
            if not varied:
                caught_features(model, varied, x)
            return class_scores(output, count=len(varied[-1]))
    finally:
        for handle in handles:
            handle.remove()
