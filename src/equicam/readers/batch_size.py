"""How many images fit one forward pass."""

import torch
from jaxtyping import Float
from torch import Tensor

WIDEST_LAYERS = 64
"""A CNN's widest layers hold about this many times its input."""
SHARE_OF_FREE_MEMORY = 0.8
"""Of a GPU's free memory; a batch that does not fit after all is halved."""
CPU_BYTES_PER_FORWARD = 512 * 2**20
"""Past half a gibibyte a CPU's caches lose more than batching gains."""


def views_that_fit(x: Float[Tensor, "b c H W"]) -> int:
    """The number of images of this size in one forward pass, by memory."""
    image_bytes = WIDEST_LAYERS * x[0].numel() * 4
    if x.is_cuda:
        free, _ = torch.cuda.mem_get_info(x.device)
        return max(1, int(SHARE_OF_FREE_MEMORY * free) // image_bytes)
    return max(1, CPU_BYTES_PER_FORWARD // image_bytes)
