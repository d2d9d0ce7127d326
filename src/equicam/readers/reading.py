"""What a reader is and what it returns; any explainer `(x, target) → map` as one."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from operator import itemgetter
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.chain import Features, Plane, Stage
from equicam.errors import EquicamError
from equicam.readers.failures import Check, finite
from equicam.readers.forward import Forward, Network, capture_layer, read_layer
from equicam.readers.logits import at_least_float32


@dataclass(frozen=True)
class Targets:
    """The class to explain in each view, and the logits of its image as presented."""

    classes: Int[Tensor, " n"]
    presented_logits: Float[Tensor, "n y"] | None  # None without a model


@dataclass(frozen=True)
class Reading:
    """A batch of views, read: where it enters the chain, and the checks its values must pass."""

    stage: Stage
    values: tuple[Features | Plane, ...]  # (acts, grads) at features, one plane elsewhere
    checks: tuple[Check, ...] = ()


Read = Callable[..., Reading]
"""(forward pass of the views, targets) → what enters the chain; without a model the views themselves come first."""


@dataclass(frozen=True)
class Reader:
    """A forward pass of the views, and what is read once their target class is known."""

    read: Read
    forward: Callable[[Network, Float[Tensor, "n c H W"]], Forward] | None = capture_layer  # None: no model
    # every view goes through the network once, so views of many images may share a batch
    one_pass: bool = False


def without_gradient(read: Read) -> Reader:
    """A reader that needs features and logits of its views, and no gradient."""
    return Reader(read, forward=read_layer)


Explainer = Callable[[Float[Tensor, "n c H W"], Int[Tensor, " n"]], Tensor]


def external(fn: Any) -> Reader:
    """A reader of the explainer's own maps; it sees no model of ours."""
    return Reader(partial(_read_external, fn), forward=None)


def _read_external(fn: Any, x: Float[Tensor, "n c H W"], targets: Targets) -> Reading:
    """The explainer's own maps, signed values included: [n, h, w], or [n, c, h, w] summed over channels."""
    with torch.enable_grad():  # explainers may differentiate, whatever the caller computes in
        found: Any = _as_explainer(fn)(x, targets.classes)
    found = getattr(found, "map", found)  # an Explanation of ours
    if not isinstance(found, Tensor) or found.ndim not in (3, 4) or len(found) != len(x):
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        needs = f"maps [{len(x)}, h, w] as a tensor"
        raise EquicamError("an explainer", needs, got, "torch.as_tensor on its result")
    planes = at_least_float32(found.detach().to(x.device))
    if not finite(planes):
        got, fix = "NaN or infinity in them", "torch.nan_to_num on its result"
        raise EquicamError("an explainer", "finite maps", got, fix)
    return Reading("rectified", (planes.sum(1) if planes.ndim == 4 else planes,))


def _as_explainer(found: Any) -> Explainer:
    """A callable `(x, target) → map` for a peer's object, recognised by its attributes; a callable is returned as is."""
    if hasattr(
        found, "attribute"
    ):  # captum, which by default sends all steps of a path through the network at once
        bounded = "internal_batch_size" in signature(found.attribute).parameters
        return lambda x, target: found.attribute(
            x, target=target, **({"internal_batch_size": len(x)} if bounded else {})
        )
    if hasattr(found, "base_cam"):  # pytorch-grad-cam's FinerCAM drops its contrast when it is given targets
        raise EquicamError(
            "equivariant", "an explainer that takes a target", type(found).__name__,
            'explain(model, x, method="finer-cam", views=18)',
        )  # fmt: skip
    if hasattr(
        found, "activations_and_grads"
    ):  # pytorch-grad-cam, whose targets pick a number from a row of outputs
        return lambda x, target: torch.as_tensor(
            found(x, targets=[itemgetter((..., int(c))) for c in target])
        )
    if hasattr(found, "hook_a") and hasattr(found, "model"):  # torchcam
        return lambda x, target: found(target.tolist(), found.model(x))[0]
    if not callable(found):
        needs, got = "a callable (x, target) → map", type(found).__name__
        raise EquicamError("equivariant", needs, got, "a function of x and target")
    return cast(Explainer, found)
