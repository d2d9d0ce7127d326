"""Controls: maps that must not score well, and models and images that must not be explained well."""

import copy
import hashlib
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.core.chain import Chain, unit
from equicam.core.combine import grad_cam
from equicam.core.views import Views
from equicam.evaluation.blur import gaussian
from equicam.readers.model import Model

CONTROLS = {
    "coverage": "the map times the coverage of T views: the vignette of a zero-filled average",
    "blur-SIGMA": "the map, blurred with this many pixels",
    "random-weights": "the method on the same network with random weights",
    "shuffled": "the method on images whose 7×7 tiles are shuffled",
}
TILES_PER_SIDE = 7


def coverage_map(
    views: Views, grid: tuple[int, int], size: tuple[int, int], *, like: Tensor
) -> Float[Tensor, "H W"]:
    """mean_t M_t 1 with zeros outside, upsampled: the zero-filled average of views that show nothing."""
    return Chain(grad_cam, size).upsample(views.coverage(grid, like=like).mean(0))


def times_coverage(maps: Float[Tensor, "*n H W"], coverage: Float[Tensor, "H W"]) -> Float[Tensor, "*n H W"]:
    """Maps under the vignette, stretched to [0, 1] again."""
    return unit(maps * coverage)


def blur_maps(maps: Float[Tensor, "*n H W"], sigma: int | float) -> Float[Tensor, "*n H W"]:
    """Maps after a Gaussian blur, stretched to [0, 1] again."""
    return unit(gaussian(maps, sigma))


def randomise_weights(model: Model, *, seed: int = 0) -> Model:
    """A copy of the model with every layer initialised again; weights that no layer initialises are shuffled."""
    module = copy.deepcopy(model.module).cpu()  # on the CPU, so that every device gets the same network
    initialised: set[int] = set()
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for layer in module.modules():
            if callable(getattr(layer, "reset_parameters", None)):
                layer.reset_parameters()  # type: ignore[operator]
                initialised |= {id(p) for p in layer.parameters(recurse=False)}
        for weight in module.parameters():
            if id(weight) not in initialised:
                order = torch.randperm(weight.numel())
                weight.copy_(weight.flatten()[order].view_as(weight))
    return replace(model, module=module.to(model.device), name=f"{model.name or 'model'}, random weights")


def shuffle_tiles(x: Float[Tensor, "c H W"], seed: int) -> Float[Tensor, "c H W"]:
    """An image whose 7×7 tiles are shuffled; pixels beyond a whole number of tiles stay in place."""
    (c, height, width), out = x.shape, x.clone()
    n, h, w = TILES_PER_SIDE, height // TILES_PER_SIDE, width // TILES_PER_SIDE
    if not h or not w:
        return out
    tiles = x[:, : h * n, : w * n].reshape(c, n, h, n, w).permute(1, 3, 0, 2, 4)
    order = torch.randperm(n**2, generator=torch.Generator().manual_seed(seed)).to(x.device)
    mixed = tiles.flatten(0, 1)[order].view(n, n, c, h, w).permute(2, 0, 3, 1, 4)
    out[:, : h * n, : w * n] = mixed.reshape(c, h * n, w * n)
    return out


def item_seed(seed: int, item: str, purpose: str) -> int:
    """The seed of an image's own random stream, whatever batch the image is in."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{item}\0{purpose}".encode()).digest()[:7])
