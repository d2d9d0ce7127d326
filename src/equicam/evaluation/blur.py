"""A Gaussian blur of pictures and maps on the device."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv1d, pad


def gaussian(
    x: Float[Tensor, "*n H W"], sigma: int | float, *, reach: int | None = None
) -> Float[Tensor, "*n H W"]:
    """Blurred with reflected edges; the kernel ends `reach` pixels from its centre (default: 4σ)."""
    height, width = x.shape[-2:]
    planes = x.reshape(-1, height, width)
    wanted = round(4 * sigma) if reach is None else reach
    for _ in range(2):  # along the rows, turn, and along the rows again
        length = planes.shape[-1]
        far = min(wanted, length - 1)  # a reflection cannot reach further than the picture
        steps = torch.arange(-far, far + 1, dtype=x.dtype, device=x.device)
        kernel = torch.exp(-(steps**2) / (2 * sigma**2))
        rows = pad(planes.reshape(-1, 1, length), (far, far), mode="reflect")
        planes = conv1d(rows, (kernel / kernel.sum())[None, None]).reshape(planes.shape).mT
    return planes.reshape(x.shape)
