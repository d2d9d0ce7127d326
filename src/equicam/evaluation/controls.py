"""Maps that must not score well, and models and pictures that must not be explained well."""

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
    "coverage": "the map times what T views have covered: the vignette of a zero-filled average",
    "blur-SIGMA": "the map, blurred with this many pixels",
    "random-weights": "the method on the same network with weights drawn anew",
    "shuffled": "the method on pictures whose tiles (7×7) have changed places",
}
TILES = 7


def coverage_map(
    views: Views, grid: tuple[int, int], size: tuple[int, int], *, like: Tensor
) -> Float[Tensor, "H W"]:
    """mean_t M_t 1 with zeros outside, brought to pixel size: what an average shows that never looked at a picture."""
    seen = views.coverage(grid, like=like).mean(0)
    return Chain(grad_cam, size).upsample(seen)


def times_coverage(maps: Float[Tensor, "*n H W"], cover: Float[Tensor, "H W"]) -> Float[Tensor, "*n H W"]:
    """Maps under the vignette."""
    return unit(maps * cover)


def blurred_maps(maps: Float[Tensor, "*n H W"], sigma: int | float) -> Float[Tensor, "*n H W"]:
    """Maps after a Gaussian blur, stretched to [0, 1] again."""
    return unit(gaussian(maps, sigma))


def randomised(model: Model, *, seed: int = 0) -> Model:
    """A copy of the model with every layer initialised anew; what a layer cannot draw anew has its entries shuffled."""
    module = copy.deepcopy(model.module).cpu()  # drawn there, so that every device gets the same network
    drawn: set[int] = set()
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        for part in module.modules():
            if callable(getattr(part, "reset_parameters", None)):
                part.reset_parameters()  # type: ignore[operator]
                drawn |= {id(p) for p in part.parameters(recurse=False)}
        for weight in module.parameters():
            if id(weight) not in drawn:
                mixed = torch.randperm(weight.numel())
                weight.copy_(weight.flatten()[mixed].view_as(weight))
    return replace(model, module=module.to(model.device), name=f"{model.name or 'model'}, random weights")


def shuffled(x: Float[Tensor, "c H W"], seed: int) -> Float[Tensor, "c H W"]:
    """A picture whose 7×7 tiles have changed places; pixels beyond a whole number of tiles stay."""
    (c, height, width), out = x.shape, x.clone()
    h, w = height // TILES, width // TILES
    if not h or not w:
        return out
    whole = x[:, : h * TILES, : w * TILES].reshape(c, TILES, h, TILES, w).permute(1, 3, 0, 2, 4)
    places = torch.randperm(TILES**2, generator=torch.Generator().manual_seed(seed)).to(x.device)
    mixed = whole.flatten(0, 1)[places].view(TILES, TILES, c, h, w).permute(2, 0, 3, 1, 4)
    out[:, : h * TILES, : w * TILES] = mixed.reshape(c, h * TILES, w * TILES)
    return out


def item_seed(seed: int, item: str, purpose: str) -> int:
    """A number for a picture's own random stream, the same whatever it is batched with."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{item}\0{purpose}".encode()).digest()[:7])
