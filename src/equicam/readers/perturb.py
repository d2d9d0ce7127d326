"""Explanations from altered features: the trunk runs on one image, the head on many variants of its features."""

from collections.abc import Callable
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
from equicam.readers.logits import Logits, at_least_float32, read_output, require_probabilities
from equicam.readers.reading import Reading, Targets

VARIANT_BYTES = 256 * 2**20
"""Memory for the variants of one image in one run of the head."""
MakeVariants = Callable[[Tensor], Tensor]
"""Indices of variants → those variants of one image's features."""


def ablation_cam(
    network: Network, x: Float[Tensor, "n c H W"], _forward: Forward, targets: Targets
) -> Reading:
    """Σ_k w_k A_k with w_k = (y_c − y_c without channel k) / |y_c|.

    The original divides by y_c itself, which inverts the map where a logit is negative.
    """

    def without_channels(features: Tensor, layout: Layout) -> tuple[int, MakeVariants]:
        axis = 1 if layout.kind == "nchw" else features.ndim - 1
        count = features.shape[axis]
        keep = 1 - torch.eye(count, dtype=features.dtype, device=features.device)
        keep = keep.view(count, *(count if a == axis else 1 for a in range(1, features.ndim)))
        return count, lambda rows: features * keep[rows]

    acts, logits, _ = _predict_variants(network, x, without_channels)
    chosen = logits.gather(2, targets.classes[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]
    weights = (chosen[:, :1] - chosen[:, 1:]) / chosen[:, :1].abs()
    return Reading("combined", (weighted(acts, weights.to(acts.dtype)),))


def recipro_cam(
    network: Network,
    x: Float[Tensor, "n c H W"],
    _forward: Forward,
    targets: Targets,
    *,
    mask: Literal["one-hot", "gaussian"] = "one-hot",
) -> Reading:
    """The target's probability when the features of one position alone are kept, for every position.

    `gaussian` spreads that position's features over its 3×3 neighbourhood with (1 2 1)ᵀ(1 2 1)/16. On tokens the
    prefix stays; where the layer is a norm in a block, the features are those that enter the block, so that the last
    attention still attends to the position that is kept.
    """
    if mask not in ("one-hot", "gaussian"):
        raise EquicamError("mask", "one-hot or gaussian", repr(mask), 'mask="one-hot"')

    def single_positions(features: Tensor, layout: Layout) -> tuple[int, MakeVariants]:
        planes = layout.planes(features)
        h, w = planes.shape[-2:]
        spread = torch.eye(h * w, dtype=features.dtype, device=features.device).view(h * w, 1, h, w)
        if mask == "gaussian":
            line = torch.tensor([1.0, 2.0, 1.0], dtype=features.dtype, device=features.device)
            spread = conv2d(spread, torch.outer(line, line)[None, None] / 16, padding=1)
        own = planes[0].flatten(1).T[:, :, None, None]  # each position's features

        def make(rows: Tensor) -> Tensor:
            kept: Tensor = own[rows] * spread[rows]
            if layout.kind == "tokens":
                prefix = features[:, : layout.prefix].expand(len(rows), -1, -1)
                return torch.cat((prefix, kept.flatten(2).transpose(1, 2)), 1)
            return kept if layout.kind == "nchw" else kept.permute(0, 2, 3, 1)

        return h * w, make

    acts, _, found = _predict_variants(network, x, single_positions, block_input=True)
    probabilities = require_probabilities(found, "recipro-cam")
    index = targets.classes[:, None, None].expand(-1, probabilities.shape[1] - 1, 1)
    chosen = probabilities[:, 1:].gather(2, index)[..., 0]
    return Reading("rectified", (chosen.view(len(x), *acts.shape[-2:]),))


def predict_from(
    network: Network,
    x: Float[Tensor, "r c H W"],
    vary: Callable[[Tensor], Tensor],
    *,
    block_input: bool = False,
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
    network: Network,
    x: Float[Tensor, "n c H W"],
    variants: Callable[[Tensor, Layout], tuple[int, MakeVariants]],
    *,
    block_input: bool = False,
) -> tuple[Float[Tensor, "n k h w"], Float[Tensor, "n m y"], Float[Tensor, "n m y"] | None]:
    """Each image's features; logits and probabilities of them as they are (first) and of every variant."""
    acts: list[Tensor] = []
    logits, probabilities = [], []
    for image in torch.split(x, 1):
        known: list[tuple[int, int]] = []  # how many variants there are, how many fit one run

        def vary(
            features: Tensor, start: int, stop: int | None, known: list[tuple[int, int]] = known
        ) -> Tensor:
            features = features[:1]
            layout = layer_layout(network.model, features, (x.shape[-2], x.shape[-1]))
            count, make = variants(features, layout)
            if not known:
                acts.append(at_least_float32(layout.planes(features)))
                known.append((count, max(1, VARIANT_BYTES // (features.numel() * features.element_size()))))
            stop = min(count, known[0][1]) if stop is None else stop
            made = make(torch.arange(start, stop, device=features.device))
            return torch.cat((features, made)) if start == 0 else made

        found = [_run_head(network, image, vary, 0, None, block_input)]
        count, fitting = known[0]
        found += [
            _run_head(network, image, vary, start, min(count, start + fitting), block_input)
            for start in range(min(count, fitting), count, fitting)
        ]
        logits.append(torch.cat([f.logits for f in found]))
        probabilities += [one for one in (_cat_probabilities(found),) if one is not None]
    return torch.cat(acts), torch.stack(logits), torch.stack(probabilities) if probabilities else None


def _run_head(
    network: Network,
    image: Float[Tensor, "1 c H W"],
    vary: Callable[[Tensor, int, int | None], Tensor],
    start: int,
    stop: int | None,
    block_input: bool,
) -> Logits:
    """The head on variants `start` to `stop`; the whole network where the head cannot take more rows than the trunk."""
    sizes: list[int] = []

    def vary_all(features: Tensor) -> Tensor:
        made = vary(features, start, stop)
        sizes.append(len(made))
        return made

    try:
        return predict_from(network, image, vary_all, block_input=block_input)
    except torch.OutOfMemoryError:
        raise
    except (ModelError, RuntimeError):
        if not sizes:  # it failed before the layer, so not because of the number of rows
            raise
        found = []
        for rows in torch.split(torch.arange(sizes[0], device=image.device), views_that_fit(image)):

            def vary_rows(features: Tensor, rows: Tensor = rows) -> Tensor:
                return vary_all(features)[rows]

            copies = image.expand(len(rows), -1, -1, -1)
            found.append(predict_from(network, copies, vary_rows, block_input=block_input))
        logits = torch.cat([f.logits for f in found])
        return Logits(logits, _cat_probabilities(found), checks=())


def _cat_probabilities(found: list[Logits]) -> Float[Tensor, "m y"] | None:
    known = [f.probabilities for f in found if f.probabilities is not None]
    return torch.cat(known) if known else None
