"""A Gaussian blur of images and maps on the device."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv1d, pad


def gaussian(
    x: Float[Tensor, "*n H W"], sigma: int | float, *, reach: int | None = None
) -> Float[Tensor, "*n H W"]:
    """Blur with reflected edges; the kernel ends `reach` pixels from its centre (default: 4σ)."""
    height, width = x.shape[-2:]
    planes = x.reshape(-1, height, width)
    radius = round(4 * sigma) if reach is None else reach
    for _ in range(2):  # blur along the rows, transpose, and blur along the rows again
        length = planes.shape[-1]
        reflected = min(radius, length - 1)  # a reflection cannot be longer than the image
        steps = torch.arange(-reflected, reflected + 1, dtype=x.dtype, device=x.device)
        kernel = torch.exp(-(steps**2) / (2 * sigma**2))
        rows = pad(planes.reshape(-1, 1, length), (reflected, reflected), mode="reflect")
        planes = conv1d(rows, (kernel / kernel.sum())[None, None]).reshape(planes.shape).mT
    return planes.reshape(x.shape)
