"""The objective that is differentiated, as a direction in logit space."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.errors import EquicamError


def class_logit(logits: Float[Tensor, "n y"], target: Int[Tensor, " n"]) -> Float[Tensor, "n y"]:
    """y_c itself."""
    classes = torch.arange(logits.shape[1], device=logits.device)
    return (classes == target[:, None]).to(logits.dtype)


@dataclass(frozen=True)
class Contrast:
    """Finer-CAM: y_c − γ·mean of the `references` classes whose logits are nearest to y_c.

    The nearest classes are those of the presented image and stay fixed for every view, as the target does.
    `weigh_by_prob` is pytorch-grad-cam's reading: Σ_d p_d (y_c − γ y_d) / Σ_d p_d, differentiated through p.
    """

    gamma: int | float = 0.6
    references: int = 3
    weigh_by_prob: bool = False

    def __call__(self, logits: Float[Tensor, "n y"], target: Int[Tensor, " n"]) -> Float[Tensor, "n y"]:
        """∂objective/∂y at the presented image's logits."""
        if logits.shape[1] < 2:
            raise EquicamError("finer-cam", needs="two classes or more", got=logits.shape[1], fix="grad-cam")
        chosen = class_logit(logits, target).bool()
        distance = (logits - logits[chosen][:, None]).abs().masked_fill(chosen, torch.inf)
        nearest = distance.argsort(dim=1, stable=True)[:, : min(self.references, logits.shape[1] - 1)]
        with torch.enable_grad():
            y = logits.detach().requires_grad_()
            others = y.gather(1, nearest)
            if self.weigh_by_prob:
                share = y.softmax(1).gather(1, nearest)
                weights = share / (share.sum(1, keepdim=True) + 1e-9)
            else:
                weights = torch.full_like(others, 1 / nearest.shape[1])
            value = (weights * (y[chosen][:, None] - self.gamma * others)).sum()
            (direction,) = torch.autograd.grad(value, y)
        return direction
