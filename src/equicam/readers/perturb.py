"""Explanations from altered features: the trunk runs on one image, the head on many variants of its features."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import conv2d

from equicam.core.chain import weighted
from equicam.errors import EquicamError, ModelError
from equicam.readers.failures import raise_failed
from equicam.readers.forward import (
    Forward,
    Network,
    frozen,
    last_output,
    layer_layout,
    run_module,
    views_that_fit,
)
from equicam.readers.layout import Layout, is_block_norm
from equicam.readers.logits import Logits, read_output, require_probabilities
from equicam.readers.reading import Reading, Targets

VARIANT_BYTES = 256 * 2**20
"""Memory for the variants of one image in one run of the head."""
MakeVariants = Callable[[Tensor, Layout, Tensor], Tensor]
"""(one image's features, their layout, indices) → those variants of the features."""


def ablation_cam(forward: Forward, targets: Targets) -> Reading:
    """Σ_k w_k A_k with w_k = (y_c − y_c without channel k) / |y_c|.

    The original divides by y_c itself, which inverts the map where a logit is negative.
    """

    def without_channels(features: Tensor, layout: Layout, rows: Tensor) -> Tensor:
        axis = 1 if layout.kind == "nchw" else features.ndim - 1
        keep = (torch.arange(features.shape[axis], device=rows.device) != rows[:, None]).to(features.dtype)
        return features * keep.view(len(rows), *(-1 if a == axis else 1 for a in range(1, features.ndim)))

    acts, count = forward.features, forward.features.shape[1] + 1
    # the last variant lacks no channel: its logit comes from the same run, so that rounding cancels in the difference
    found = _predict_variants(forward, count, without_channels)
    logits = found.logits.gather(1, targets.classes.repeat_interleave(count)[:, None]).view(-1, count)
    weights = (logits[:, -1:] - logits[:, :-1]) / logits[:, -1:].abs()
    return Reading("combined", (weighted(acts, weights.to(acts.dtype)),))


def recipro_cam(
    forward: Forward, targets: Targets, *, mask: Literal["one-hot", "gaussian"] = "one-hot"
) -> Reading:
    """The target's probability when the features of one position alone are kept, for every position.

    `gaussian` spreads that position's features over its 3×3 neighbourhood with (1 2 1)ᵀ(1 2 1)/16. On tokens the
    prefix stays; where the layer is a norm in a block, the features are those that enter the block, so that the last
    attention still attends to the position that is kept.
    """
    if mask not in ("one-hot", "gaussian"):
        raise EquicamError("mask", "one-hot or gaussian", repr(mask), 'mask="one-hot"')
    h, w = forward.features.shape[-2:]

    def single_positions(features: Tensor, layout: Layout, rows: Tensor) -> Tensor:
        spread = (
            (torch.arange(h * w, device=rows.device) == rows[:, None]).to(features.dtype).view(-1, 1, h, w)
        )
        if mask == "gaussian":
            line = torch.tensor([1.0, 2.0, 1.0], dtype=features.dtype, device=features.device)
            spread = conv2d(spread, torch.outer(line, line)[None, None] / 16, padding=1)
        own = layout.planes(features)[0].flatten(1).T  # each position's features
        kept: Tensor = own[rows][:, :, None, None] * spread
        if layout.kind == "tokens":
            prefix = features[:, : layout.prefix].expand(len(rows), -1, -1)
            return torch.cat((prefix, kept.flatten(2).transpose(1, 2)), 1)
        return kept if layout.kind == "nchw" else kept.permute(0, 2, 3, 1)

    found = _predict_variants(forward, h * w, single_positions, block_input=True)
    probabilities = require_probabilities(found.probabilities, "recipro-cam")
    chosen = probabilities.gather(1, targets.classes.repeat_interleave(h * w)[:, None])
    return Reading("rectified", (chosen.view(-1, h, w),))


def _predict_from(
    network: Network, x: Float[Tensor, "r c H W"], vary: Callable[[Tensor], Tensor], *, block_input: bool
) -> Logits:
    """Logits of one image (or rows of it) with the target layer's output passed through `vary`.

    The trunk runs on the image as given. `vary` returns any number of variants, and only the head runs on them all.
    A residual around the layer stays one image and broadcasts. With `block_input`, where the layer is a norm in a
    row of blocks, tokens are varied where they enter its block instead.
    """
    model, varied, calls = network.model, list[Tensor](), 0

    def swap(tensor: Tensor) -> Tensor:
        varied.append(vary(tensor))
        return varied[-1]

    def enter_block(_module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inputs:
            return ((swap(inputs[0]), *inputs[1:]), kwargs) if inputs[0].ndim == 3 else None
        tokens = (key for key, value in kwargs.items() if isinstance(value, Tensor) and value.ndim == 3)
        name = next(tokens, None)
        return None if name is None else (inputs, kwargs | {name: swap(kwargs[name])})

    def leave_layer(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise EquicamError(
                f"layer {model.layer!r}", "to run once in a forward pass here", "another call of it",
                "the block around it, or a gradient method, which reads its last call",
            )  # fmt: skip
        if varied:
            return None
        return (swap(output[0]), *output[1:]) if isinstance(output, tuple) else swap(output)

    handles = [model.module.get_submodule(model.layer).register_forward_hook(leave_layer)]
    if block_input and is_block_norm(model.module, model.layer):
        block = model.module.get_submodule(model.layer.rpartition(".")[0])
        handles.append(block.register_forward_pre_hook(enter_block, with_kwargs=True))
    try:
        with frozen(model.module), torch.no_grad():
            output = run_module(network, x)
            if not varied:
                last_output(model, varied, x)
            found = read_output(model, output, count=len(varied[-1]))
    finally:
        for handle in handles:
            handle.remove()
    raise_failed(found.checks)
    return found


def _predict_variants(
    forward: Forward, count: int, make: MakeVariants, *, block_input: bool = False
) -> Logits:
    """Logits and probabilities [n · variants, y] of every variant of each image's features, as many at once as fit."""
    network, x = forward.network, forward.x
    fitting = max(1, VARIANT_BYTES // forward.features[0].nbytes)

    def run_head(image: Float[Tensor, "1 c H W"], rows: Tensor) -> list[Logits]:
        reached = False

        def vary(features: Tensor, rows: Tensor) -> Tensor:
            nonlocal reached
            reached = True
            features = features[:1]
            return make(features, layer_layout(network.model, features, (x.shape[-2], x.shape[-1])), rows)

        try:
            return [_predict_from(network, image, partial(vary, rows=rows), block_input=block_input)]
        except torch.OutOfMemoryError:
            raise
        except (ModelError, RuntimeError):
            if not reached:  # it failed before the layer, so not because of the number of rows
                raise
        # the head cannot take more rows than the trunk: the whole network runs on copies of the image
        found = []
        for some in torch.split(rows, views_that_fit(image)):
            copies = image.expand(len(some), -1, -1, -1)
            found.append(_predict_from(network, copies, partial(vary, rows=some), block_input=block_input))
        return found

    pieces = torch.split(torch.arange(count, device=x.device), fitting)
    found = [one for image in torch.split(x, 1) for rows in pieces for one in run_head(image, rows)]
    logits = torch.cat([f.logits for f in found])
    known = [f.probabilities for f in found if f.probabilities is not None]
    return Logits(logits, torch.cat(known) if known else None, checks=())
