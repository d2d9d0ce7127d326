"""Explanations from masked inputs: Score-CAM and RISE. Masked inputs are made a pass at a time, never all at once."""

from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from equicam.core.chain import unit
from equicam.core.combine import weighted
from equicam.errors import EquicamError
from equicam.readers.forward import ask, ask_at
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading, wide
from equicam.runtime.batching import views_a_pass

Weighing = Literal["softmax", "softmax_of_logits", "relu_minus_full_image", "probability"]
_A_PASS = 256  # masked inputs made at a time, where memory would allow more
_CELLS = 7  # RISE's coarse grid, as the paper's authors have it


def score_cam(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    weigh: Weighing = "softmax",
    channels: int | None = None,
    autocast: torch.dtype | None = None,
) -> Reading:
    """Σ_k w_k A_k with s_k the target's probability on x ⊙ unit(upsample(A_k)).

    `softmax`: w = softmax_k(s_k − s(blank)), the original; the blank's score drops out of the softmax.
    `softmax_of_logits`: the same on scores before the softmax over classes, as pytorch-grad-cam has it.
    `relu_minus_full_image`: w = (s_k − p_c(x))⁺, the paper authors'; mostly all zero.
    `probability`: w = s_k, their Score-CAM-80 with `channels=80`, the largest by |mean activation|.
    """
    if weigh not in get_args(Weighing):
        raise EquicamError(
            "weigh", needs=f"one of {', '.join(get_args(Weighing))}", got=repr(weigh), fix='weigh="softmax"'
        )
    acts, scores, probs = ask_at(model, x, autocast)
    target, _ = pin(scores)
    rows = []
    for i in range(len(x)):
        count = acts.shape[1] if channels is None else min(channels, acts.shape[1])
        chosen = acts[i].mean((-2, -1)).abs().argsort(descending=True, stable=True)[:count].sort().values
        said = torch.cat(
            [
                _of_class(model, x[i] * _masks(acts[i, part], x), int(target[i]), weigh, autocast)
                for part in torch.split(chosen, min(_A_PASS, views_a_pass(x)))
            ]
        )
        weights = torch.zeros_like(acts[i, :, 0, 0])
        weights[chosen] = _weights(said, weigh, full=probs[i, target[i]]).to(weights.dtype)
        rows.append(weights)
    return Reading("combined", (weighted(acts, torch.stack(rows)),), scores, probs)


def _masks(planes: Float[Tensor, "k h w"], x: Tensor) -> Float[Tensor, "k 1 H W"]:
    large = interpolate(planes[:, None], x.shape[-2:], mode="bilinear", align_corners=False)
    return unit(large).to(x.dtype)


def _of_class(
    model: Model, masked: Float[Tensor, "m c H W"], target: int, weigh: Weighing, autocast: torch.dtype | None
) -> Float[Tensor, " m"]:
    scores, probs = ask(model, masked, autocast)
    return (scores if weigh == "softmax_of_logits" else probs)[:, target]


def _weights(said: Float[Tensor, " k"], weigh: Weighing, *, full: Float[Tensor, ""]) -> Float[Tensor, " k"]:
    if weigh == "relu_minus_full_image":
        return (said - full).relu()
    return said if weigh == "probability" else said.softmax(0)


def rise(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    masks: int = 8000,
    seed: int = 42,
    autocast: torch.dtype | None = None,
) -> Reading:
    """RISE: Σ_m s_m m / Σ_m m, s_m the target's probability on x ⊙ m; the same masks for every picture and view."""
    _, scores, probs = ask_at(model, x, autocast)
    target, _ = pin(scores)
    grids, shifts = _grids(masks, (x.shape[-2], x.shape[-1]), seed)
    total = torch.zeros((len(x), *x.shape[-2:]), dtype=scores.dtype, device=x.device)
    mass = torch.zeros_like(total[0])
    for part in torch.split(torch.arange(masks, device="cpu"), min(_A_PASS, views_a_pass(x))):
        shown = _shown(grids[part], shifts[part], x).to(scores.dtype)
        mass += shown.sum(0)
        for i in range(len(x)):
            _, said = ask(model, x[i] * shown[:, None].to(x.dtype), autocast)
            total[i] += torch.einsum("m,mhw->hw", said[:, target[i]], shown)
    return Reading("rectified", (total / (mass + 1e-8),), scores, probs)


@lru_cache(maxsize=8)
def _grids(count: int, size: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    """The paper's stream: all Bernoulli(½) grids first, then for each mask its shift along x and along y."""
    rng = np.random.default_rng(seed)
    grids = rng.random((count, _CELLS, _CELLS)) < 0.5
    cells = [side // _CELLS + 1 for side in size]
    shifts = [(int(rng.integers(0, cells[1])), int(rng.integers(0, cells[0]))) for _ in range(count)]
    return torch.from_numpy(grids), torch.tensor(shifts, device="cpu")


def _shown(grids: Tensor, shifts: Tensor, x: Tensor) -> Float[Tensor, "m H W"]:
    """Grids enlarged by one cell more than needed and cut out at their shifts."""
    height, width = x.shape[-2:]
    large = ((_CELLS + 1) * (height // _CELLS + 1), (_CELLS + 1) * (width // _CELLS + 1))
    smooth = interpolate(wide(grids[:, None].to(x)), large, mode="bilinear", align_corners=False)[:, 0]
    return torch.stack(
        [m[dy : dy + height, dx : dx + width] for m, (dx, dy) in zip(smooth, shifts.tolist(), strict=True)]
    )
