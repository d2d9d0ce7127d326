"""Controls: maps that must not score well, and models and images that must not be explained well."""

import copy
import hashlib
from dataclasses import replace
from itertools import chain

import torch
from jaxtyping import Float
from torch import Tensor, nn

from equicam.core.chain import Chain, grad_cam, unit
from equicam.core.views import Views
from equicam.evaluate.faithfulness import gaussian
from equicam.readers.model import Model
from equicam.recipe import Recipe

CONTROLS = {
    "coverage": "the map times the coverage of T views: the vignette of a zero-filled average",
    "blur-SIGMA": "the map, blurred with this many pixels",
    "random-weights": "the method on the same network with random weights",
    "shuffled": "the method on images whose 7×7 tiles are shuffled",
}
TILES_PER_SIDE = 7
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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


def randomise_weights(model: Model, *, seed: int = 0, share: int | float = 1.0) -> Model:
    """A copy of the model whose last layers, this share of all, are initialised again (Adebayo et al. 2018, "cascading").

    Layers count in the order in which the network registers them. Convolutions are initialised by He et al. 2015, and
    biases are 0, as torchvision has it: by PyTorch's defaults biases alone predict in a deep network, and its maps are blank.
    Weights that a layer cannot initialise (class tokens, positions) are shuffled. The random numbers are not those of
    `torch.manual_seed(seed)`: a head that was made after it, and then fine-tuned, would be given its first weights back.
    """
    module = copy.deepcopy(model.module).cpu()  # on the CPU, so that every device gets the same network
    layers = [layer for layer in module.modules() if _has_state(layer)]
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(item_seed(seed, "", "random weights"))
        for layer in layers[-max(1, round(share * len(layers))) :]:
            if callable(getattr(layer, "reset_parameters", None)):
                layer.reset_parameters()  # type: ignore[operator]
                if isinstance(layer, CONVOLUTIONS):
                    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                if isinstance(layer, (*CONVOLUTIONS, nn.Linear)) and layer.bias is not None:
                    nn.init.zeros_(layer.bias)
                continue
            for weight in layer.parameters(recurse=False):
                order = torch.randperm(weight.numel())
                weight.copy_(weight.flatten()[order].view_as(weight))
    if model.dtype == torch.float16:
        module = module.float()
    return replace(model, module=module.to(model.device), name=f"{model.name or 'model'}, random weights")


def without_float16(recipe: Recipe) -> Recipe:
    """For a network of random weights: signals fade in it, to numbers that float16 takes for 0, and then all maps are constant.

    It runs in the type of its weights instead, of which `randomise_weights` has none narrower than bfloat16.
    """
    return replace(recipe, dtype=None) if recipe.dtype == "float16" else recipe


def _has_state(layer: nn.Module) -> bool:
    """Whether a layer has weights or statistics of its own."""
    return any(True for _ in chain(layer.parameters(recurse=False), layer.buffers(recurse=False)))


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
