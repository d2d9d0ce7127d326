"""Opti-CAM: channel weights found by gradient ascent on the masked image's logit."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from equicam.core.combine import weighted
from equicam.readers.checks import raise_failed
from equicam.readers.forward import Forward, Network, frozen, run_module
from equicam.readers.logits import read_output
from equicam.readers.reading import Reading, Targets


def opti_cam(
    network: Network,
    x: Float[Tensor, "n c H W"],
    forward: Forward,
    targets: Targets,
    *,
    steps: int = 100,
    rate: float = 0.1,
) -> Reading:
    """Σ_k softmax(β)_k A_k, β from Adam that raises y_c(x ⊙ S), S = unit(upsample(Σ_k softmax(β)_k A_k)).

    All images are optimised at once. Adam works element by element, so images do not affect each other.
    """
    acts = forward.features
    beta = torch.zeros(acts.shape[:2], dtype=acts.dtype, device=acts.device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=rate)
    with frozen(network.model.module), torch.enable_grad():
        for _ in range(steps):
            large = interpolate(weighted(acts, beta.softmax(1))[:, None], x.shape[-2:], mode="bilinear")
            low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
            mask = (large - low) / (high - low + 1e-8)
            found = read_output(network.model, run_module(network, x * mask.to(x.dtype)), count=len(x))
            raise_failed(found.checks)
            chosen = found.logits.gather(1, targets.classes[:, None])
            (beta.grad,) = torch.autograd.grad(-chosen.sum(), beta)
            adam.step()
    return Reading("combined", (weighted(acts, beta.detach().softmax(1)),))
