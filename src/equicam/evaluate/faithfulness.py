"""Does the model need the pixels a map marks? Insertion and deletion.

Pixels in the order of the map are put into the blurred image (insertion) or blurred out of the image (deletion)
in equal steps, and the class probability is recorded. The paper's authors divide by 21, so that a curve that stays
at 1 scores .952, and leave out the pixels that 20 steps of ⌊HW/20⌋ do not reach.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import conv1d, pad

from equicam.evaluate.batch import Predict, target_probability
from equicam.readers.forward import views_that_fit


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
    lines = pad(lines, (reflected, reflected), mode="reflect")
    return conv1d(lines, (kernel / kernel.sum())[None, None])[:, 0]


STEPS = 20


def blur_out(x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b c H W"]:
    """The image that stands for absent pixels: σ = 10 pixels, kernel 51, edges reflected."""
    return gaussian(x, 10.0, reach=25)


def _pixel_ranks(maps: Float[Tensor, "b H W"]) -> Int[Tensor, "b H W"]:
    """Each pixel's rank, the largest value first; equal values in reading order."""
    first = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    return first.argsort(dim=1).view(maps.shape)


def curve(
    predict: Predict,
    x: Float[Tensor, "b c H W"],
    maps: Float[Tensor, "b H W"],
    target: Int[Tensor, " b"],
    kind: Literal["insertion", "deletion"],
    *,
    whole_pixels: bool = False,
) -> Float[Tensor, "b s"]:
    """p_c after 0, 1, … 20 steps; `whole_pixels`: of ⌊HW/20⌋ pixels each."""
    pixels = maps[0].numel()
    counts = [s * (pixels // STEPS) if whole_pixels else round(s * pixels / STEPS) for s in range(STEPS + 1)]
    rank, blurred = _pixel_ranks(maps), blur_out(x)
    before, after = (blurred, x) if kind == "insertion" else (x, blurred)
    found = torch.empty((len(x), len(counts)), dtype=x.dtype, device=x.device)
    steps_per_pass = max(1, views_that_fit(x) // len(x))
    for start in range(0, len(counts), steps_per_pass):
        some = torch.tensor(counts[start : start + steps_per_pass], device=x.device)
        changed = rank < some[:, None, None, None]  # [s, b, H, W]
        mixed = torch.where(changed[:, :, None], after, before)
        probs = predict(mixed.flatten(0, 1)).view(len(some), len(x), -1)
        found[:, start : start + len(some)] = target_probability(probs, target).T.to(found.dtype)
    return found


def area(values: Float[Tensor, "b s"], divisor: int = STEPS) -> Float[Tensor, " b"]:
    """Area under the curve by trapezoids of width 1/divisor."""
    return torch.trapezoid(values, dim=1) / divisor
