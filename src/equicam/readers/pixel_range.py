"""Pixels from 0 to 255 where a network expects preprocessed ones."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from equicam.errors import EquicamError

LARGEST_PIXEL = 255
TIMES_WHITE = 8
"""How far above a white pixel of the model's normalisation a batch must reach to be taken for pixels."""


def unscaled(x: Float[Tensor, "b c H W"], mean: Sequence[float], std: Sequence[float]) -> Bool[Tensor, ""]:
    """Whether a batch holds grey or RGB pixels from 0 to 255, by the normalisation that the model states.

    Preprocessed images have negative values, or reach little above white. A model that takes such pixels states so:
    a mean of 0 and a standard deviation of 1/255. Other numbers of channels have scales of their own.
    """
    white = max(((1 - m) / s for m, s in zip(mean, std, strict=False) if s > 0), default=1.0)
    if x.shape[1] not in (1, 3) or TIMES_WHITE * white >= LARGEST_PIXEL:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    low, high = x.aminmax()
    return (low >= 0) & (high > TIMES_WHITE * white) & (high <= LARGEST_PIXEL)


def not_scaled() -> EquicamError:
    """The error for a batch of such pixels."""
    return EquicamError(
        "images", needs="preprocessed values: a tensor of floats counts as the model's input", got="pixels from 0 to 255",
        fix="x.byte() of a tensor or x.astype(np.uint8) of an array, which are preprocessed like image files; wrap(…, mean=(0, 0, 0), std=(1/255,) * 3) for a model "
        "that takes such pixels",
    )  # fmt: skip
