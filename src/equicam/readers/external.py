"""Any explainer of the user's as a reader: `(x, target) → map`."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor

from equicam.errors import EquicamError
from equicam.readers.reading import Pin, Reading, wide

Explainer = Callable[[Float[Tensor, "n c H W"], Int[Tensor, " n"]], Tensor]


def external(fn: Explainer, x: Float[Tensor, "n c H W"], pin: Pin) -> Reading:
    """Fn's own maps, signed values and all: [n, h, w], or [n, c, h, w] summed over channels."""
    target, _ = pin(None)
    found = fn(x, target)
    if not isinstance(found, Tensor) or found.ndim not in (3, 4) or len(found) != len(x):
        got = f"{tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise EquicamError(
            "an explainer",
            needs=f"maps [{len(x)}, h, w] as a tensor",
            got=got,
            fix="torch.as_tensor on its result",
        )
    planes = wide(found.detach().to(x.device))
    return Reading(stage="rectified", value=(planes.sum(1) if planes.ndim == 4 else planes,))
