"""Explanations averaged over noisy copies of the picture."""

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.chain import Chain
from equicam.core.combine import Combine, grad_cam_pp
from equicam.readers.forward import ask_at
from equicam.readers.gradients import tap
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading


def smooth_grad_cam_pp(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    copies: int = 50,
    sigma: float = 0.15,
    seed: int = 42,
    combine: Combine = grad_cam_pp,
    autocast: torch.dtype | None = None,
) -> Reading:
    """Mean over copies of unit(Grad-CAM++ of x + ε), ε ~ N(0, σ²) in preprocessed units.

    The noise depends on seed and copy alone, so a picture's map does not depend on its batch.
    """
    _, scores, probs = ask_at(model, x, autocast)
    target, presented = pin(scores)
    chain = Chain(combine, (x.shape[-2], x.shape[-1]))
    total = torch.zeros((len(x), *x.shape[-2:]), dtype=scores.dtype, device=x.device)
    for copy in range(copies):
        noisy = x + sigma * _noise(copy, tuple(x.shape[1:]), seed).to(x)
        reading = tap(model, noisy, lambda _: (target, presented), autocast=autocast)
        total += chain.trace("features", reading.value)["map"]
    return Reading("rectified", (total / copies,), scores, probs)


def _noise(copy: int, shape: tuple[int, ...], seed: int) -> Tensor:
    made = torch.Generator("cpu").manual_seed(seed * 100_003 + copy)
    return torch.randn(shape, generator=made, dtype=torch.float32, device="cpu")
