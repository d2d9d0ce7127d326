"""Does the model use the pixels whose saliency moves? Occlusion of the drift region and of regions to compare with.

In the presented frame, h̃ = T⁻¹ h(T x) for a presentation T: drift is the tenth with the largest |h − h̃|, agreement the
tenth with the largest min(h, h̃). Each region is blurred out of the image and, carried by T, out of T x ("rotated",
whatever T does); the metric is the class probability lost. A drop alone says little, because regions of other shape,
place and saliency drop too: hence the controls. The paper's authors take the full square with zero fill (whose corners
count as drift), soft masks, and single pixels chosen at random, whose blurring is noise all over the object.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from equicam.core.transforms import Element
from equicam.core.uncertainty import Region
from equicam.core.views import Views, rotate_each, transform_all
from equicam.evaluate.batch import Predict, target_probability
from equicam.evaluate.faithfulness import blur_out
from equicam.evaluate.similarity import constant_in_region, region_mask
from equicam.protocol import OURS, Protocol

REGION_SHARE = 0.10
"""Share of the pixels that a region covers."""
CONTROLS = {
    "drift": "where the map moves",
    "agreement": "where it stays",
    "drift-elsewhere": "the drift region rotated about the centre by a random angle: its shape, elsewhere",
    "drift-of-another": "the drift region of another image",
    "agreement-of-another": "the agreement region of another image",
    "same-saliency": "other pixels of the same mean saliency as the drift region",
    "scattered": "single pixels at random",
}
BORROWED = ("drift-of-another", "agreement-of-another")
UNCONTROLLED = ("drift", "agreement", "scattered")


@dataclass(frozen=True)
class _Drops:
    """Probability lost by presentation and image, in the presented and the transformed image; NaN for constant maps."""

    presented: dict[str, Float[Tensor, "a b"]]
    rotated: dict[str, Float[Tensor, "a b"]]
    constant: Bool[Tensor, "a b"]


def occlusion(
    predict: Predict,
    x: Float[Tensor, "b c H W"],
    maps: Float[Tensor, "v b H W"],
    presentations: Sequence[Element],
    target: Int[Tensor, " b"],
    *,
    seeds: Sequence[int],
    protocol: Protocol = OURS,
    unrelated: Bool[Tensor, "b b"] | None = None,
) -> _Drops:
    """Probability lost without each region; `maps` are of the presented images, then of each presentation.

    `unrelated` says which images may lend their region to which; without it, all others may.
    """
    lenders = _lenders(unrelated, x)
    lends_itself = lenders == torch.arange(len(x), device=x.device)
    names = tuple(CONTROLS) if protocol.causal_controls else UNCONTROLLED
    lost: tuple[list[Tensor], list[Tensor]] = ([], [])
    constant_at = []
    blurred, confidence = blur_out(x), target_probability(predict(x), target)
    every = regions_by_presentation(maps, presentations, seeds=seeds, protocol=protocol, lenders=lenders)
    for one, (masks, constant) in zip(Views(presentations).transforms, every, strict=True):
        # every region in both frames in one pass: [regions, b, …]
        mask = torch.stack([masks[name] for name in names])
        carried = transform_all(mask.to(x.dtype), [one], fill=protocol.causal_fill)[0]
        carried = carried.clamp(0, 1) if protocol.soft_masks else carried >= 0.5
        no_lender = torch.stack([(constant[lenders] | lends_itself) & (name in BORROWED) for name in names])
        rotated = transform_all(x, [one])[0]
        before = target_probability(predict(rotated), target)
        frames = ((x, blurred, mask, confidence), (rotated, blur_out(rotated), carried, before))
        for found, (image, blur, where, p) in zip(lost, frames, strict=True):
            drop = lost_without(predict, image, blur, where, target, p)
            found.append(torch.where(constant | no_lender, torch.nan, drop))
        constant_at.append(constant)
    here, there = (dict(zip(names, torch.stack(found).unbind(1), strict=True)) for found in lost)
    return _Drops(here, there, torch.stack(constant_at))


def lost_without(
    predict: Predict,
    x: Float[Tensor, "b c H W"],
    blurred: Float[Tensor, "b c H W"],
    masks: Bool[Tensor, "r b H W"] | Float[Tensor, "r b H W"],
    target: Int[Tensor, " b"],
    confidence: Float[Tensor, " b"],
) -> Float[Tensor, "r b"]:
    """Probability lost in images of known confidence without each of some regions, which may have soft edges."""
    where = masks[:, :, None]
    hidden = torch.where(where, blurred, x) if masks.dtype == torch.bool else x + where * (blurred - x)
    probs = predict(hidden.flatten(0, 1)).view(*masks.shape[:2], -1)
    return confidence - target_probability(probs, target)


def regions_by_presentation(
    maps: Float[Tensor, "v b H W"],
    presentations: Sequence[Element],
    *,
    seeds: Sequence[int],
    protocol: Protocol = OURS,
    lenders: Int[Tensor, " b"] | None = None,
) -> Iterator[tuple[dict[str, Bool[Tensor, "b H W"]], Bool[Tensor, " b"]]]:
    """For each presentation, the regions by name, and the images whose map is constant there."""
    views, region, controls = Views(presentations), protocol.region, protocol.causal_controls
    # one random stream per image, whatever batch it is in
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    for own, inverse in zip(maps[1:], views.inverses, strict=True):
        aligned = transform_all(own, [inverse], fill=protocol.causal_fill)[0]
        masks = _regions(maps[0], aligned, region, streams, views.radius, controls=controls, lenders=lenders)
        yield masks, constant_in_region(torch.stack((maps[0], own)), region, views.radius).any(0)


def _lenders(unrelated: Bool[Tensor, "b b"] | None, x: Float[Tensor, "b *_"]) -> Int[Tensor, " b"]:
    """The image that lends its regions to each: the nearest one before it, in a circle, that is unrelated; else itself."""
    n = len(x)
    back = (torch.arange(n)[:, None] - torch.arange(n)) % n
    back = torch.where(torch.eye(n, dtype=torch.bool) if unrelated is None else ~unrelated.cpu(), n, back)
    least, lender = back.min(1)
    return torch.where((least == n) | (least == 0), torch.arange(n), lender).to(x.device)


def _regions(
    h: Float[Tensor, "b H W"],
    aligned: Float[Tensor, "b H W"],
    region: Region,
    streams: Sequence[torch.Generator],
    radius: float = 1.0,
    *,
    controls: bool = True,
    lenders: Int[Tensor, " b"] | None = None,
) -> dict[str, Bool[Tensor, "b H W"]]:
    """The drift and agreement regions of each image, and the regions to compare them with; the previous image lends its."""
    lenders = _lenders(None, h) if lenders is None else lenders
    valid = region_mask(region, (h.shape[-2], h.shape[-1]), h.device, radius)
    count = round(REGION_SHARE * int(valid.sum()))
    drift = _largest((h - aligned).abs(), valid, count)
    agreement = _largest(torch.minimum(h, aligned), valid, count)
    noise = torch.stack([torch.rand(h.shape[1:], generator=g) for g in streams]).to(h)
    found = {"drift": drift, "agreement": agreement, "scattered": _largest(noise, valid, count)}
    if not controls:
        return found
    angles = torch.cat([torch.rand(1, generator=g) * 360 for g in streams])
    elsewhere = rotate_each(drift[:, None].to(h.dtype), angles)[:, 0] >= 0.5
    return found | {
        "drift-elsewhere": elsewhere & valid,
        "drift-of-another": drift[lenders],
        "agreement-of-another": agreement[lenders],
        "same-saliency": _same_saliency(h, drift, valid),
    }


def _largest(planes: Float[Tensor, "b H W"], valid: Bool[Tensor, "H W"], count: int) -> Bool[Tensor, "b H W"]:
    """The `count` valid pixels with the largest values, equal values in reading order."""
    values = torch.where(valid, planes, -torch.inf).flatten(1)
    least = values.kthvalue(values.shape[1] - count + 1, dim=1, keepdim=True).values
    above, tied = values > least, values == least
    # a selection with its ties in order: many times faster than a sort
    free = count - above.sum(1, keepdim=True)
    return (above | (tied & (tied.cumsum(1) <= free))).view(planes.shape)


def _same_saliency(
    h: Float[Tensor, "b H W"], region: Bool[Tensor, "b H W"], valid: Bool[Tensor, "H W"]
) -> Bool[Tensor, "b H W"]:
    """As many valid pixels outside the region, neighbours in order of h, whose mean h is nearest to the region's."""
    count = int(region[0].sum())  # regions of one call have one size
    free = (valid & ~region).flatten(1)
    ordered, place = torch.where(free, h.flatten(1), torch.inf).sort(dim=1, stable=True)
    sums = torch.nn.functional.pad(ordered[:, : int(valid.sum()) - count].double().cumsum(1), (1, 0))
    means = (sums[:, count:] - sums[:, :-count]) / count
    wanted = (h * region).flatten(1).double().sum(1, keepdim=True) / count
    start = (means - wanted).abs().argmin(1, keepdim=True)
    chosen = place.gather(1, start + torch.arange(count, device=h.device))
    return torch.zeros_like(free).scatter_(1, chosen, True).view(region.shape)
