"""How many images fit one forward pass."""

import torch
from jaxtyping import Float
from torch import Tensor

WIDEST_LAYERS = 64
"""A CNN's widest layers hold about this many times its input."""
SHARE_OF_FREE_MEMORY = 0.8
"""Of a GPU's free memory; a batch that does not fit after all is halved."""
CUDA_BYTES_PER_FORWARD = 144 * WIDEST_LAYERS * 3 * 224**2 * 4
"""144 images of 224² keep a large GPU busy; more take more memory and hardly less time."""
CPU_BYTES_PER_FORWARD = 512 * 2**20
"""More gains a CPU nothing where freed memory is kept, and costs time where it is not (runtime/memory.py)."""


def views_that_fit(x: Float[Tensor, "b c H W"]) -> int:
    """The number of images of this size in one forward pass, by memory."""
    image_bytes = WIDEST_LAYERS * x[0].numel() * 4
    if x.is_cuda:
        free, _ = torch.cuda.mem_get_info(x.device)
        return max(1, int(SHARE_OF_FREE_MEMORY * free) // image_bytes)
    return max(1, CPU_BYTES_PER_FORWARD // image_bytes)


def views_per_forward(x: Float[Tensor, "b c H W"]) -> int:
    """The number of images of this size in one forward pass by default: what fits, and no more than helps."""
    return min(views_that_fit(x), max(1, CUDA_BYTES_PER_FORWARD // (WIDEST_LAYERS * x[0].numel() * 4)))
