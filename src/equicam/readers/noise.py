"""Explanations averaged over noisy copies of the image."""

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.chain import Chain
from equicam.core.combine import Combine, grad_cam_pp
from equicam.readers.forward import Forward, Network, capture_layer
from equicam.readers.gradients import read_gradients
from equicam.readers.reading import Reading, Targets


def smooth_grad_cam_pp(
    network: Network,
    x: Float[Tensor, "n c H W"],
    forward: Forward,
    targets: Targets,
    *,
    copies: int = 50,
    sigma: float = 0.15,
    seed: int = 42,
    combine: Combine = grad_cam_pp,
) -> Reading:
    """Mean over copies of unit(Grad-CAM++ of x + ε), ε ~ N(0, σ²) in preprocessed units.

    The noise depends on seed and copy alone, so an image's map does not depend on its batch.
    """
    chain = Chain(combine, (x.shape[-2], x.shape[-1]))
    total = torch.zeros((len(x), *x.shape[-2:]), dtype=forward.logits.dtype, device=x.device)
    checks = []
    for copy in range(copies):
        noisy = x + sigma * _noise(copy, tuple(x.shape[1:]), seed).to(x)
        noisy_forward = capture_layer(network, noisy)
        reading = read_gradients(network, noisy, noisy_forward, targets)
        checks += [*noisy_forward.checks, *reading.checks]
        total += chain.trace("features", reading.values)["map"]
    return Reading("rectified", (total / copies,), tuple(checks))


def _noise(copy: int, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed * 100_003 + copy)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
