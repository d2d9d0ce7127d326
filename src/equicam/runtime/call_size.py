"""Which calls fit memory, and which run so long that they are not captured as a graph."""

from jaxtyping import Float
from torch import Tensor

from equicam.readers.forward import views_that_fit

ALWAYS_CAPTURED_VALUES = 64 * 3 * 224**2
"""Calls whose views hold at most this many values are captured without estimating memory."""
LONG_VALUES = 256 * 3 * 224**2
"""Calls whose views hold more run for ten milliseconds and longer: their kernels are launched one by one."""


def is_long(x: Float[Tensor, "b c H W"], views: int) -> bool:
    """Whether a call of so many views of these images is launched, not captured."""
    return views * x[0].numel() > LONG_VALUES


def fits_memory(x: Float[Tensor, "b c H W"], views: int) -> bool:
    """Whether memory holds so many views of the images at once, and twice where they are captured."""
    if views * x[0].numel() <= ALWAYS_CAPTURED_VALUES:
        return True
    return views * (1 if is_long(x, views) else 2) <= views_that_fit(x, with_kept=True)
