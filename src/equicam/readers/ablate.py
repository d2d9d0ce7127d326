"""Explanations from altered features: the trunk runs once a picture, what follows runs on all variants together."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d

from equicam.combine import weighted
from equicam.models.model import Model
from equicam.readers.ask import ask_head
from equicam.readers.layout import Layout
from equicam.readers.reading import Pin, Reading, wide
from equicam.readers.tap import layout_of

_BYTES = 256 * 2**20  # of one picture's variants in one run of the head
Keep = Callable[[Tensor, Layout], Tensor]
"""(features, layout) → what to multiply them with, one row a variant."""


def ablation_cam(
    model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
) -> Reading:
    """Σ_k w_k A_k with w_k = (y_c − y_c without channel k) / y_c."""

    def keep(features: Tensor, layout: Layout) -> Tensor:
        axis = 1 if layout.kind == "nchw" else features.ndim - 1
        count = features.shape[axis]
        return (1 - torch.eye(count)).view(
            count, *(count if a == axis else 1 for a in range(1, features.ndim))
        )

    acts, scores, probs = _varied(model, x, keep, autocast)
    target, _ = pin(scores[:, 0])
    chosen = scores.gather(2, target[:, None, None].expand(-1, scores.shape[1], 1))[..., 0]
    weights = (chosen[:, :1] - chosen[:, 1:]) / chosen[:, :1]
    return Reading("combined", (weighted(acts, weights.to(acts.dtype)),), scores[:, 0], probs[:, 0])


def recipro_cam(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    mask: Literal["one-hot", "gaussian"] = "one-hot",
    autocast: torch.dtype | None = None,
) -> Reading:
    """The target's probability when only one position of the features is left, for every position.

    On tokens the prefix stays, and the features are those that enter the layer's block, so that the last attention
    still looks at the position left. `gaussian` leaves a 3×3 neighbourhood with weights (1 2 1)ᵀ(1 2 1)/4.
    """

    def keep(features: Tensor, layout: Layout) -> Tensor:
        h, w = layout.planes(features).shape[-2:]
        left = torch.eye(h * w).view(h * w, 1, h, w)
        if mask == "gaussian":
            line = torch.tensor([1.0, 2.0, 1.0])
            left = conv2d(left, torch.outer(line, line)[None, None] / 4, padding=1)
        if layout.kind == "tokens":
            return torch.cat((torch.ones(h * w, layout.prefix or 0), left.flatten(1)), 1)[:, :, None]
        return left if layout.kind == "nchw" else left.permute(0, 2, 3, 1)

    acts, scores, probs = _varied(model, x, keep, autocast, block_input=True)
    target, _ = pin(scores[:, 0])
    chosen = probs[:, 1:].gather(2, target[:, None, None].expand(-1, probs.shape[1] - 1, 1))[..., 0]
    planes = chosen.view(len(x), *acts.shape[-2:])
    return Reading("rectified", (planes,), scores[:, 0], probs[:, 0])


def _varied(
    model: Model,
    x: Float[Tensor, "n c H W"],
    keep: Keep,
    autocast: torch.dtype | None,
    *,
    block_input: bool = False,
) -> tuple[Float[Tensor, "n k h w"], Float[Tensor, "n m y"], Float[Tensor, "n m y"]]:
    """Features of each picture, and scores and probabilities of them as they are and of every variant."""
    acts: list[Tensor] = []
    scores, probs = [], []
    for one in torch.split(x, 1):
        rest: Tensor | None = None

        def vary(features: Tensor, one: Tensor = one) -> Tensor:
            nonlocal rest
            first = rest is None
            if rest is None:
                layout = layout_of(model, features, (one.shape[-2], one.shape[-1]))
                acts.append(wide(layout.planes(features)))
                rest = keep(features, layout).to(features)
            count = max(1, _BYTES // (features.numel() * features.element_size()))
            now, rest = rest[:count], rest[count:]
            return torch.cat((features, features * now)) if first else features * now

        said = [ask_head(model, one, vary, autocast, block_input=block_input)]
        while rest is not None and len(rest):
            said.append(ask_head(model, one, vary, autocast, block_input=block_input))
        scores.append(torch.cat([s for s, _ in said]))
        probs.append(torch.cat([p for _, p in said]))
    return torch.cat(acts), torch.stack(scores), torch.stack(probs)
