"""Score-CAM and RISE: explanations from masked inputs, which are made a batch at a time, never all at once.

A map takes thousands of forward passes. Two protocols that compare the same maps differently, or two ways of weighing the
same scores, need them once: they are remembered where the caller says so.
"""

import hashlib
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from equicam.core.chain import unit, weighted
from equicam.errors import not_one_of
from equicam.readers.forward import Forward, Network, predict, views_that_fit
from equicam.readers.logits import Logits, at_least_float32, require_probabilities
from equicam.readers.reading import Reading, Targets

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


def _memory_of(network: Network, x: Float[Tensor, "c H W"], target: int) -> Remembered:
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


Weighing = Literal["softmax", "softmax_of_logits", "relu_minus_full_image", "probability"]
MASKS_PER_BATCH = 256
MASKS_PER_COMPILED_BATCH = 1024
RISE_CELLS = 7  # the side of RISE's coarse grid, as the paper's authors have it


def score_cam(
    forward: Forward, targets: Targets, *, weigh: Weighing = "softmax", channels: int | None = None
) -> Reading:
    """Σ_k w_k A_k with s_k the target's probability on x ⊙ unit(upsample(A_k)).

    `softmax`: w = softmax_k(s_k − s(blank)), the original; the blank image's score cancels in the softmax.
    `softmax_of_logits`: the same on logits, as pytorch-grad-cam has it.
    `relu_minus_full_image`: w = (s_k − p_c(x))⁺, the paper authors'; mostly all zero.
    `probability`: w = s_k, their Score-CAM-80 with `channels=80`, the largest by |mean activation|.
    """
    if weigh not in get_args(Weighing):
        raise not_one_of("weigh", get_args(Weighing), weigh, 'weigh="softmax"')
    network, x, acts = forward.network, forward.x, forward.features
    probabilities = require_probabilities(forward.probabilities, "score-cam")
    by_logits = weigh == "softmax_of_logits"
    rows = []
    for i in range(len(x)):
        target = int(targets.classes[i])
        count = acts.shape[1] if channels is None else min(channels, acts.shape[1])
        chosen = acts[i].mean((-2, -1)).abs().argsort(descending=True, stable=True)[:count].sort().values

        def score(i: int = i, target: int = target, chosen: Tensor = chosen) -> Tensor:
            masked = (x[i] * _masks(acts[i, some], x) for some in _batches(network, chosen, x))
            found = [predict(network, one) for one in masked]
            return torch.cat([f.logits[:, target] if by_logits else _probability(f, target) for f in found])

        scores = _memory_of(network, x[i], target)(("score-cam", count, by_logits), score)
        weights = torch.zeros_like(acts[i, :, 0, 0])
        if weigh == "relu_minus_full_image":
            scores = (scores - probabilities[i, target]).relu()
        elif weigh != "probability":
            scores = scores.softmax(0)
        weights[chosen] = scores.to(weights.dtype)
        rows.append(weights)
    return Reading("combined", (weighted(acts, torch.stack(rows)),))


def _batches(network: Network, masks: Tensor, x: Tensor) -> Sequence[Tensor]:
    """Masks in batches that fit memory: even ones where each size is compiled, whatever memory is free just now."""
    fit = views_that_fit(x)
    if network.predict is None:
        return torch.split(masks, min(MASKS_PER_BATCH, fit))
    most = min(MASKS_PER_COMPILED_BATCH, 1 << (fit.bit_length() - 1))
    return masks.tensor_split(-(-len(masks) // most))


def _probability(found: Logits, target: int) -> Float[Tensor, " m"]:
    assert found.probabilities is not None  # noqa: S101  # the images as they are have some
    return found.probabilities[:, target]


def _masks(planes: Float[Tensor, "k h w"], x: Tensor) -> Float[Tensor, "k 1 H W"]:
    large = interpolate(planes[:, None], x.shape[-2:], mode="bilinear", align_corners=False)
    return unit(large).to(x.dtype)


def rise(forward: Forward, targets: Targets, *, masks: int = 8000, seed: int = 42) -> Reading:
    """RISE: Σ_m s_m m / Σ_m m, s_m the target's probability on x ⊙ m; the same masks for every image and view."""
    network, x, dtype = forward.network, forward.x, forward.logits.dtype
    require_probabilities(forward.probabilities, "rise")
    grids, shifts = rise_grids(masks, (x.shape[-2], x.shape[-1]), seed)
    total = torch.zeros((len(x), *x.shape[-2:]), dtype=dtype, device=x.device)
    mass = torch.zeros_like(total[0])
    classes: list[int] = targets.classes.tolist()
    memories = [_memory_of(network, image, target) for image, target in zip(x, classes, strict=True)]
    for some in _batches(network, torch.arange(masks, device="cpu"), x):
        shown = _enlarge(grids[some], shifts[some].tolist(), x).to(dtype)
        mass += shown.sum(0)
        for i in range(len(x)):

            def score(i: int = i, shown: Tensor = shown) -> Tensor:
                return _probability(predict(network, x[i] * shown[:, None].to(x.dtype)), classes[i])

            scores = memories[i](("rise", masks, seed, int(some[0]), len(some)), score)
            total[i] += torch.einsum("m,mhw->hw", scores, shown)
    return Reading("rectified", (total / (mass + 1e-8),))


def rise_grids(count: int, size: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """The paper's random stream: all Bernoulli(½) grids first, then for each mask its shift along x and along y."""
    rng = np.random.default_rng(seed)
    grids = rng.random((count, RISE_CELLS, RISE_CELLS)) < 0.5
    shifts = rng.integers(0, [side // RISE_CELLS + 1 for side in reversed(size)], (count, 2))
    return torch.from_numpy(grids), torch.from_numpy(shifts)


def _enlarge(grids: Tensor, shifts: Sequence[Sequence[int]], x: Tensor) -> Float[Tensor, "m H W"]:
    """Grids enlarged by one cell more than needed and cropped at their shifts."""
    height, width = x.shape[-2:]
    large = ((RISE_CELLS + 1) * (height // RISE_CELLS + 1), (RISE_CELLS + 1) * (width // RISE_CELLS + 1))
    coarse = at_least_float32(grids[:, None].to(x))
    smooth = interpolate(coarse, large, mode="bilinear", align_corners=False)[:, 0]
    cropped = [m[dy : dy + height, dx : dx + width] for m, (dx, dy) in zip(smooth, shifts, strict=True)]
    return torch.stack(cropped)
