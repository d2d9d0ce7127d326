"""A Gaussian blur of images and maps on the device."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv1d, pad


def gaussian(
    x: Float[Tensor, "*n H W"], sigma: int | float, *, reach: int | None = None
) -> Float[Tensor, "*n H W"]:
    """Blur with reflected edges; the kernel ends `reach` pixels from its centre (default: 4σ)."""
    radius = round(4 * sigma) if reach is None else reach
    columns, rows = (_blur_matrix(length, sigma, radius, x) for length in x.shape[-2:])
    return columns.mT @ x @ rows


def _blur_matrix(length: int, sigma: int | float, radius: int, like: Tensor) -> Float[Tensor, "i j"]:
    """Row i: a line that is 1 at pixel i and 0 elsewhere, blurred. A product with it is many times faster than a convolution."""
    reflected = min(radius, length - 1)  # a reflection cannot be longer than the image
    steps = torch.arange(-reflected, reflected + 1, dtype=like.dtype, device=like.device)
    kernel = torch.exp(-(steps**2) / (2 * sigma**2))
    lines = torch.eye(length, dtype=like.dtype, device=like.device)[:, None]
    return conv1d(pad(lines, (reflected, reflected), mode="reflect"), (kernel / kernel.sum())[None, None])[
        :, 0
    ]
