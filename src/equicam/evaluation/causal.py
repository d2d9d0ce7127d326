"""Does the model use the pixels whose saliency moves: occlusion of the drift region, beside regions it must beat.

In the presented frame, h̃ = R_−θ h(R_θ x): drift is the tenth with the largest |h − h̃|, agreement the tenth with the
largest min(h, h̃). Each region is blurred out of the picture, and, carried by R_θ, out of the turned picture; what is
measured is the class probability lost. A drop says little by itself: regions of other shape, place and saliency drop
too, hence the controls. `as_published`: the full square with zero fill (whose corners count as drift) and single
pixels drawn at random, whose blurring is noise all over the object.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.views import Degrees, rotate, rotate_each
from equicam.evaluation.faithfulness import Ask, blurred
from equicam.evaluation.similarity import Region, flat, inside

SHARE = 0.10
CONTROLS = {
    "drift": "where the map moves",
    "agreement": "where it stays",
    "drift-elsewhere": "the drift region turned about the centre by a random angle: its shape, elsewhere",
    "drift-of-another": "the drift region of another picture",
    "agreement-of-another": "the agreement region of another picture",
    "same-saliency": "other pixels of the same mean saliency as the drift region",
    "scattered": "single pixels at random",
}
PUBLISHED = ("drift", "agreement", "scattered")


@dataclass(frozen=True)
class Drops:
    """Probability lost by angle and picture, in the presented and in the turned picture; NaN for constant maps."""

    presented: dict[str, Float[Tensor, "a b"]]
    turned: dict[str, Float[Tensor, "a b"]]
    constant: Bool[Tensor, "a b"]


def occlusion(
    ask: Ask,
    x: Float[Tensor, "b c H W"],
    maps: Float[Tensor, "v b H W"],
    angles: Sequence[Degrees],
    target: Int[Tensor, " b"],
    *,
    seeds: Sequence[int],
    as_published: bool = False,
) -> Drops:
    """Probability lost without each region; `maps` are the presented pictures' and those at each angle."""
    frame: Region = "full" if as_published else "disc"
    kept = PUBLISHED if as_published else tuple(CONTROLS)
    before: dict[str, list[Tensor]] = {name: [] for name in kept}
    after: dict[str, list[Tensor]] = {name: [] for name in kept}
    still = []
    soft = blurred(x)
    sure = _of_target(ask(x), target)
    # one stream a picture, whatever it is batched with
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    for step, angle in enumerate(angles):
        back = rotate(maps[step + 1], -angle, fill="zeros" if as_published else "reflect")
        masks = regions(maps[0], back, frame, streams, as_published=as_published)
        turned = rotate(x, angle)
        turned_soft = blurred(turned)
        turned_sure = _of_target(ask(turned), target)
        dead = flat(maps[0], frame) | flat(maps[step + 1], frame)
        still.append(dead)
        # every region in both frames in one go: [regions, b, …]
        marks = torch.stack([masks[name].to(x.dtype) for name in kept])
        carried = rotate(marks, angle, fill="zeros" if as_published else "reflect")
        carried = carried.clamp(0, 1) if as_published else (carried >= 0.5).to(x.dtype)
        for into, picture, blur, where, whole in (
            (before, x, soft, marks, sure),
            (after, turned, turned_soft, carried, turned_sure),
        ):
            hidden = picture + where[:, :, None] * (blur - picture)
            probs = ask(hidden.flatten(0, 1)).view(len(kept), len(x), -1)
            for name, some in zip(kept, probs, strict=True):
                lender = (dead.roll(1) | (len(x) == 1)) & name.endswith("-of-another")
                into[name].append(torch.where(dead | lender, torch.nan, whole - _of_target(some, target)))
    return Drops(
        {name: torch.stack(rows) for name, rows in before.items()},
        {name: torch.stack(rows) for name, rows in after.items()},
        torch.stack(still),
    )


def regions(
    h: Float[Tensor, "b H W"],
    back: Float[Tensor, "b H W"],
    frame: Region,
    streams: Sequence[torch.Generator],
    *,
    as_published: bool,
) -> dict[str, Bool[Tensor, "b H W"]]:
    """The drift and agreement regions of each picture, and regions to hold against them."""
    valid = inside(frame, (h.shape[-2], h.shape[-1]), h.device)
    count = round(SHARE * int(valid.sum()))
    drift = largest((h - back).abs(), valid, count)
    agreement = largest(torch.minimum(h, back), valid, count)
    noise = torch.stack([torch.rand(h.shape[1:], generator=g) for g in streams]).to(h)
    found = {"drift": drift, "agreement": agreement, "scattered": largest(noise, valid, count)}
    if as_published:
        return found
    angles = torch.cat([torch.rand(1, generator=g) * 360 for g in streams])
    elsewhere = rotate_each(drift[:, None].to(h.dtype), angles)[:, 0] >= 0.5
    return found | {
        "drift-elsewhere": elsewhere & valid,
        "drift-of-another": drift.roll(1, 0),
        "agreement-of-another": agreement.roll(1, 0),
        "same-saliency": same_saliency(h, drift, valid),
    }


def largest(planes: Float[Tensor, "b H W"], valid: Bool[Tensor, "H W"], count: int) -> Bool[Tensor, "b H W"]:
    """The `count` valid pixels with the largest values, equal ones in reading order."""
    values = torch.where(valid, planes, -torch.inf).flatten(1)
    chosen = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(1, chosen, True).view(planes.shape)


def same_saliency(
    h: Float[Tensor, "b H W"], region: Bool[Tensor, "b H W"], valid: Bool[Tensor, "H W"]
) -> Bool[Tensor, "b H W"]:
    """As many valid pixels outside the region, neighbours in order of h, whose mean h is nearest to the region's."""
    count = int(region[0].sum())  # regions of one call have one size
    free = (valid & ~region).flatten(1)
    ordered, place = torch.where(free, h.flatten(1).double(), torch.inf).sort(dim=1, stable=True)
    sums = torch.nn.functional.pad(ordered[:, : int(valid.sum()) - count].cumsum(1), (1, 0))
    means = (sums[:, count:] - sums[:, :-count]) / count
    wanted = (h * region).flatten(1).double().sum(1, keepdim=True) / count
    start = (means - wanted).abs().argmin(1, keepdim=True)
    chosen = place.gather(1, start + torch.arange(count, device=h.device))
    return torch.zeros_like(free).scatter_(1, chosen, True).view(region.shape)


def _of_target(probs: Float[Tensor, "b y"], target: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    return probs.gather(1, target[:, None])[:, 0]
