"""Explanations from altered features: the trunk runs on one picture, what follows it on many variants together."""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv2d

from equicam.core.combine import weighted
from equicam.errors import EquicamError
from equicam.readers.forward import Said, ask_head
from equicam.readers.gradients import layout_of
from equicam.readers.layout import Layout
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading, wide
from equicam.runtime.batching import views_a_pass

_BYTES = 256 * 2**20  # of one picture's variants in one run of the head
Make = Callable[[Tensor], Tensor]
"""Numbers of variants → those variants of one picture's features."""


def ablation_cam(
    model: Model, x: Float[Tensor, "n c H W"], pin: Pin, *, autocast: torch.dtype | None = None
) -> Reading:
    """Σ_k w_k A_k with w_k = (y_c − y_c without channel k) / |y_c|.

    The original divides by y_c itself, which turns the map upside down where a logit is negative.
    """

    def channels(features: Tensor, layout: Layout) -> tuple[int, Make]:
        axis = 1 if layout.kind == "nchw" else features.ndim - 1
        count = features.shape[axis]
        keep = 1 - torch.eye(count, dtype=features.dtype, device=features.device)
        keep = keep.view(count, *(count if a == axis else 1 for a in range(1, features.ndim)))
        return count, lambda rows: features * keep[rows]

    acts, scores, probs = _varied(model, x, channels, autocast)
    target, _ = pin(scores[:, 0])
    chosen = scores.gather(2, target[:, None, None].expand(-1, scores.shape[1], 1))[..., 0]
    weights = (chosen[:, :1] - chosen[:, 1:]) / chosen[:, :1].abs()
    return Reading("combined", (weighted(acts, weights.to(acts.dtype)),), scores[:, 0], probs[:, 0])


def recipro_cam(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    mask: Literal["one-hot", "gaussian"] = "one-hot",
    autocast: torch.dtype | None = None,
) -> Reading:
    """The target's probability when the features of one position are all that is left, for every position.

    `gaussian` spreads that position's features over its 3×3 neighbourhood with (1 2 1)ᵀ(1 2 1)/16. On tokens the
    prefix stays; where the layer is a norm in a block, the features are those that enter the block, so that the last
    attention still looks at the position left.
    """
    if mask not in ("one-hot", "gaussian"):
        raise EquicamError("mask", needs="one-hot or gaussian", got=repr(mask), fix='mask="one-hot"')

    def positions(features: Tensor, layout: Layout) -> tuple[int, Make]:
        planes = layout.planes(features)
        h, w = planes.shape[-2:]
        spread = torch.eye(h * w, dtype=features.dtype, device=features.device).view(h * w, 1, h, w)
        if mask == "gaussian":
            line = torch.tensor([1.0, 2.0, 1.0], dtype=features.dtype, device=features.device)
            spread = conv2d(spread, torch.outer(line, line)[None, None] / 16, padding=1)
        own = planes[0].flatten(1).T[:, :, None, None]  # each position's features

        def make(rows: Tensor) -> Tensor:
            left: Tensor = own[rows] * spread[rows]
            if layout.kind == "tokens":
                prefix = features[:, : layout.prefix].expand(len(rows), -1, -1)
                return torch.cat((prefix, left.flatten(2).transpose(1, 2)), 1)
            return left if layout.kind == "nchw" else left.permute(0, 2, 3, 1)

        return h * w, make

    acts, scores, probs = _varied(model, x, positions, autocast, block_input=True)
    target, _ = pin(scores[:, 0])
    chosen = probs[:, 1:].gather(2, target[:, None, None].expand(-1, probs.shape[1] - 1, 1))[..., 0]
    return Reading("rectified", (chosen.view(len(x), *acts.shape[-2:]),), scores[:, 0], probs[:, 0])


def _varied(
    model: Model,
    x: Float[Tensor, "n c H W"],
    variants: Callable[[Tensor, Layout], tuple[int, Make]],
    autocast: torch.dtype | None,
    *,
    block_input: bool = False,
) -> tuple[Float[Tensor, "n k h w"], Float[Tensor, "n m y"], Float[Tensor, "n m y"]]:
    """Features of each picture; scores and probabilities of them as they are (first) and of every variant."""
    acts: list[Tensor] = []
    scores, probs = [], []
    for one in torch.split(x, 1):
        known: list[tuple[int, int]] = []  # how many variants there are, how many fit in one run

        def vary(
            features: Tensor, start: int, stop: int | None, known: list[tuple[int, int]] = known
        ) -> Tensor:
            features = features[:1]
            layout = layout_of(model, features, (x.shape[-2], x.shape[-1]))
            count, make = variants(features, layout)
            if not known:
                acts.append(wide(layout.planes(features)))
                known.append((count, max(1, _BYTES // (features.numel() * features.element_size()))))
            stop = min(count, known[0][1]) if stop is None else stop
            made = make(torch.arange(start, stop, device=features.device))
            return torch.cat((features, made)) if start == 0 else made

        said = [_said(model, one, vary, 0, None, autocast, block_input)]
        count, most = known[0]
        said += [
            _said(model, one, vary, start, min(count, start + most), autocast, block_input)
            for start in range(min(count, most), count, most)
        ]
        scores.append(torch.cat([s for s, _ in said]))
        probs.append(torch.cat([p for _, p in said]))
    return torch.cat(acts), torch.stack(scores), torch.stack(probs)


def _said(
    model: Model,
    one: Float[Tensor, "1 c H W"],
    vary: Callable[[Tensor, int, int | None], Tensor],
    start: int,
    stop: int | None,
    autocast: torch.dtype | None,
    block_input: bool,
) -> Said:
    """The head on variants `start` to `stop`; where it does not take more rows than the trunk, the whole network."""
    sizes: list[int] = []

    def some(features: Tensor) -> Tensor:
        made = vary(features, start, stop)
        sizes.append(len(made))
        return made

    try:
        return ask_head(model, one, some, autocast, block_input=block_input)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        if not sizes:  # it failed before the layer: not for the number of rows
            raise
        parts = []
        for rows in torch.split(torch.arange(sizes[0], device=one.device), views_a_pass(one)):

            def few(features: Tensor, rows: Tensor = rows) -> Tensor:
                return some(features)[rows]

            many = one.expand(len(rows), -1, -1, -1)
            parts.append(ask_head(model, many, few, autocast, block_input=block_input))
        return torch.cat([s for s, _ in parts]), torch.cat([p for _, p in parts])
