"""Does the model need what a map marks: insertion and deletion.

Pixels in the order of the map are put into the blurred picture (insertion) or blurred out of the picture (deletion)
in equal steps, and the class probability is followed. `as_published`: steps of ⌊HW/20⌋ pixels and a step width of
1/21, so that a curve that stays at 1 scores .952.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.evaluation.blur import gaussian
from equicam.runtime.batching import views_a_pass

Ask = Callable[[Float[Tensor, "n c H W"]], Float[Tensor, "n y"]]
"""Class probabilities of a batch."""

STEPS = 20


def blurred(x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b c H W"]:
    """What stands for absence: σ = 10 pixels, kernel 51, edges reflected."""
    return gaussian(x, 10.0, reach=25)


def order(maps: Float[Tensor, "b H W"]) -> Int[Tensor, "b H W"]:
    """Each pixel's place when the largest comes first; equal ones in reading order."""
    first = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    return first.argsort(dim=1).view(maps.shape)


def curve(
    ask: Ask,
    x: Float[Tensor, "b c H W"],
    maps: Float[Tensor, "b H W"],
    target: Int[Tensor, " b"],
    kind: Literal["insertion", "deletion"],
    *,
    as_published: bool = False,
) -> Float[Tensor, "b s"]:
    """p_c after 0, 1, … 20 steps."""
    pixels = maps[0].numel()
    counts = [s * (pixels // STEPS) if as_published else round(s * pixels / STEPS) for s in range(STEPS + 1)]
    place, blur = order(maps), blurred(x)
    before, after = (blur, x) if kind == "insertion" else (x, blur)
    found = torch.empty((len(x), len(counts)), dtype=x.dtype, device=x.device)
    a_pass = max(1, views_a_pass(x) // len(x))
    for start in range(0, len(counts), a_pass):
        some = torch.tensor(counts[start : start + a_pass], device=x.device)
        changed = place < some[:, None, None, None]  # [s, b, H, W]
        mixed = torch.where(changed[:, :, None], after, before)
        probs = ask(mixed.flatten(0, 1)).view(len(some), len(x), -1)
        of_target = probs.gather(2, target[None, :, None].expand(len(some), -1, 1))[..., 0]
        found[:, start : start + len(some)] = of_target.T.to(found.dtype)
    return found


def area(values: Float[Tensor, "b s"], *, as_published: bool = False) -> Float[Tensor, " b"]:
    """Under the curve by trapezoids of width 1/20; `as_published`: 1/21."""
    return torch.trapezoid(values, dim=1) / (STEPS + 1 if as_published else STEPS)
