"""Readers of features and their gradients: Grad-CAM and its relatives, over noisy copies, and Opti-CAM, which optimises instead."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import interpolate

from equicam.core.chain import Chain, Combine, grad_cam_pp, weighted
from equicam.errors import EquicamError
from equicam.readers.failures import raise_failed
from equicam.readers.forward import Forward, capture_layer, frozen, read_layer, run_module
from equicam.readers.logits import read_output
from equicam.readers.reading import Reader, Reading, Targets


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
            raise EquicamError("finer-cam", "two classes or more", logits.shape[1], "grad-cam")
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


Objective = Callable[[Float[Tensor, "n y"], Int[Tensor, " n"]], Float[Tensor, "n y"]]
"""(presented logits, target) → the direction in logit space whose gradient is read."""


def _read_gradients(forward: Forward, targets: Targets, *, objective: Objective = class_logit) -> Reading:
    """A_n and g_n = ∂(objective · logits)/∂A_n at the model's layer, [n, k, h, w] each."""
    logits = forward.logits if targets.presented_logits is None else targets.presented_logits
    (grads,), checks = forward.gradient(objective(logits, targets.classes))
    return Reading("features", (forward.features, grads), checks)


def _read_features(forward: Forward, _targets: Targets) -> Reading:
    """Features alone, for combines that use no gradient; the features stand in for it."""
    return Reading("features", (forward.features, forward.features))


GRADIENTS = Reader(_read_gradients, one_pass=True)
FEATURES = Reader(_read_features, forward=read_layer, one_pass=True)


def gradients_of(objective: Objective) -> Reader:
    """Gradients of another objective than the target's logit."""
    return Reader(partial(_read_gradients, objective=objective), one_pass=True)


def smooth_grad_cam_pp(
    forward: Forward,
    targets: Targets,
    *,
    copies: int = 50,
    sigma: float = 0.15,
    combine: Combine = grad_cam_pp,
) -> Reading:
    """Mean over copies of unit(Grad-CAM++ of x + ε), ε ~ N(0, σ²) in preprocessed units.

    The noise depends on the copy alone, so an image's map does not depend on its batch.
    """
    x = forward.x
    chain = Chain(combine, (x.shape[-2], x.shape[-1]))
    total = torch.zeros((len(x), *x.shape[-2:]), dtype=forward.logits.dtype, device=x.device)
    checks = []
    for copy in range(copies):
        noisy = x + sigma * _noise(copy, tuple(x.shape[1:])).to(x)
        found = capture_layer(forward.network, noisy)
        reading = _read_gradients(found, targets)
        checks += [*found.checks, *reading.checks]
        total += chain.trace("features", reading.values)["map"]
    return Reading("rectified", (total / copies,), tuple(checks))


def _noise(copy: int, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(42 * 100_003 + copy)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def opti_cam(forward: Forward, targets: Targets, *, steps: int = 100, rate: float = 0.1) -> Reading:
    """Σ_k softmax(β)_k A_k, β from Adam that raises y_c(x ⊙ S), S = unit(upsample(Σ_k softmax(β)_k A_k)).

    All images are optimised at once. Adam works element by element, so images do not affect each other.
    """
    network, x, acts = forward.network, forward.x, forward.features
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
