"""Opti-CAM: channel weights found by gradient ascent on the masked picture's score."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from equicam.core.combine import weighted
from equicam.readers.forward import ask_at
from equicam.readers.gradients import class_scores, feed, undisturbed
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading


def opti_cam(
    model: Model,
    x: Float[Tensor, "n c H W"],
    pin: Pin,
    *,
    steps: int = 100,
    rate: float = 0.1,
    autocast: torch.dtype | None = None,
) -> Reading:
    """Σ_k softmax(β)_k A_k, β from Adam that raises y_c(x ⊙ S), S = unit(upsample(Σ_k softmax(β)_k A_k)).

    All pictures at once; Adam works element by element, so none of them knows of the others.
    """
    acts, scores, probs = ask_at(model, x, autocast)
    target, _ = pin(scores)
    beta = torch.zeros(acts.shape[:2], dtype=acts.dtype, device=acts.device, requires_grad=True)
    adam = torch.optim.Adam([beta], lr=rate)
    with undisturbed(model.module), torch.enable_grad():
        for _ in range(steps):
            large = interpolate(weighted(acts, beta.softmax(1))[:, None], x.shape[-2:], mode="bilinear")
            low, high = large.amin((2, 3), keepdim=True), large.amax((2, 3), keepdim=True)
            mask = (large - low) / (high - low + 1e-8)
            said, _ = class_scores(feed(model, x * mask.to(x.dtype), autocast), count=len(x))
            (beta.grad,) = torch.autograd.grad(-said.gather(1, target[:, None]).sum(), beta)
            adam.step()
    return Reading("combined", (weighted(acts, beta.detach().softmax(1)),), scores, probs)
