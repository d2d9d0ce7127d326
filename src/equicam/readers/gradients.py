"""Features and their gradients: what Grad-CAM and its relatives read."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from equicam.readers.forward import Forward, Network, read_layer
from equicam.readers.objective import class_logit
from equicam.readers.reading import Reader, Reading, Targets

Objective = Callable[[Float[Tensor, "n y"], Int[Tensor, " n"]], Float[Tensor, "n y"]]
"""(presented logits, target) → the direction in logit space whose gradient is read."""


def read_gradients(
    _network: Network,
    _x: Float[Tensor, "n c H W"],
    forward: Forward,
    targets: Targets,
    *,
    objective: Objective = class_logit,
) -> Reading:
    """A_n and g_n = ∂(objective · logits)/∂A_n at the model's layer, [n, k, h, w] each."""
    logits = forward.logits if targets.presented_logits is None else targets.presented_logits
    (grads,), checks = forward.gradient(objective(logits, targets.classes))
    return Reading("features", (forward.features, grads), checks)


def read_features(
    _network: Network, _x: Float[Tensor, "n c H W"], forward: Forward, _targets: Targets
) -> Reading:
    """Features alone, for combines that use no gradient; the features stand in for it."""
    return Reading("features", (forward.features, forward.features))


GRADIENTS = Reader(read_gradients, one_pass=True)
FEATURES = Reader(read_features, forward=read_layer, one_pass=True)


def gradients_of(objective: Objective) -> Reader:
    """Gradients of another objective than the target's logit."""
    return Reader(partial(read_gradients, objective=objective), one_pass=True)
