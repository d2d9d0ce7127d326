"""The composition: read every view, turn back, average, finish the chain once; and what the views disagree on.

`compose` is the paper: M_t turns view t back, w_t weighs it (sum 1), and for feature space

    ᾱ_k = mean_p Σ_t w_t (M_t g_t^k)(p),   map = unit ∘ upsample ∘ ReLU ( Σ_k ᾱ_k Σ_t w_t M_t A_t^k ).

PEUM, for every fusion: h_t = M_t map(view t), σ² = Σ_t w_t (h_t − Σ_s w_s h_s)².
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equicam.chain import Chain, constant, unit
from equicam.combine import Combine, grad_cam, grad_cam_rectified
from equicam.errors import EquicamError
from equicam.fuse import Frame, channels_first, inverse
from equicam.geometry import Fill, Views
from equicam.methods import Fusion, Method, Reader, find
from equicam.models.images import Images, as_batch
from equicam.models.model import Model, wrap
from equicam.readers.external import as_explainer, external
from equicam.readers.passes import Read, Target, as_targets, read_views, views_a_pass
from equicam.readers.reading import Pin, Reading


@dataclass(frozen=True)
class Explanation:
    """What `explain` found, per image, on the model's device."""

    map: Float[Tensor, "b H W"]  # in [0, 1]
    raw: Float[Tensor, "b H W"]  # just before the last min–max
    peum: Float[Tensor, "b H W"]  # variance of the views' aligned maps
    score: Float[Tensor, " b"]  # mean of peum: how much the views disagree
    target: Int[Tensor, " b"]  # the class explained
    sure: Float[Tensor, " b"]  # its probability in the picture as presented
    prob: Float[Tensor, "b t"]  # its probability in each view
    flips: Bool[Tensor, "b t"]  # views whose top-1 is not the presented picture's
    kept: Bool[Tensor, "b t"]  # views the weigher let through
    planes: Float[Tensor, "b t h w"]  # each view's own rectified plane, not turned back
    flags: tuple[frozenset[str], ...]  # of blank, constant, flipped, none-kept, low-coverage, odd-size
    angles: tuple[float, ...]
    layer: str | None = None


def explain(
    model: Model | nn.Module,
    images: Images,
    *,
    method: str | Fusion | Method = "equigrad-cam",
    views: int | Views | None = None,
    target: Target = None,
    fill: Fill | None = None,
    as_published: bool = False,
    tau: int | float | None = None,
    gamma: int | float | None = None,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
) -> Explanation:
    """Explain the model's top-1 (or `target`) on preprocessed tensors, PIL images or paths.

    `fill` is "reflect", or "zeros" with `as_published` (the paper authors' grid, fill and variants); `dtype` runs
    the network under autocast; `chunk` is the most views in one forward pass (default: by memory).
    """
    if not isinstance(model, Model):
        model = wrap(model, example=as_batch(None, images) if isinstance(images, Tensor) else None)
    chosen = find(method, views=views, as_published=as_published, tau=tau, gamma=gamma)
    device = model.device.type
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EquicamError("dtype", needs="a floating torch.dtype", got=repr(dtype), fix="torch.bfloat16")
    if dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    # inference tensors cannot join a backward pass, and our own algebra is never autocast
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        x = as_batch(model, images)
        found = compose(
            partial(_read, model, chosen.reader, dtype),
            x,
            combine=chosen.combine,
            fusion=chosen.fusion,
            target=target,
            fill=fill or ("zeros" if as_published else "reflect"),
            chunk=chunk,
        )
    return replace(found, layer=model.layer)


def _read(
    model: Model, reader: Reader, autocast: torch.dtype | None, x: Float[Tensor, "n c H W"], pin: Pin
) -> Reading:
    reading = reader(model, x.to(model.dtype), pin, autocast=autocast)
    if (
        model.classes is not None
        and reading.scores is not None
        and reading.scores.shape[1] != len(model.classes)
    ):
        raise EquicamError(
            "class names",
            needs=f"one for each of {reading.scores.shape[1]} classes",
            got=len(model.classes),
            fix="classes=None",
        )
    return reading


def equivariant(
    fn: Any,
    views: int | Views = 18,
    *,
    fill: Fill = "reflect",
    chunk: int | None = None,
) -> Callable[[Float[Tensor, "b c H W"], Target], Explanation]:
    """Any explainer `(x, target) → map` as its aligned average over views, with PEUM.

    Captum attributions, pytorch-grad-cam and torchcam objects are taken as they are.
    """
    grid = views if isinstance(views, Views) else Views.evenly(views)
    fusion = Fusion(grid, "map", "map")

    def explainer(x: Float[Tensor, "b c H W"], target: Target) -> Explanation:
        """fn, averaged over aligned views."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.inference_mode(False), torch.autocast(kind, enabled=False):
            batch = as_batch(None, x)
            return compose(
                partial(external, as_explainer(fn), autocast=autocast),
                batch,
                combine=grad_cam,
                fusion=fusion,
                target=target,
                fill=fill,
                chunk=chunk,
            )

    return explainer


def compose(
    read: Read,
    x: Float[Tensor, "b c H W"],
    *,
    combine: Combine,
    fusion: Fusion,
    target: Target,
    fill: Fill,
    chunk: int | None,
) -> Explanation:
    """Explain images in groups whose views fit one forward pass of at most `chunk` views."""
    wanted = as_targets(target, x)
    most = views_a_pass(x) if chunk is None else chunk
    if not isinstance(most, int) or most < 1:
        raise EquicamError("chunk", needs="1 view or more", got=chunk, fix="chunk=None")
    seen, _ = fusion.views.presented_first()
    parts: list[Explanation] = []
    done = 0
    while done < len(x):
        groups = -(-(len(x) - done) // max(1, most // len(seen)))
        some = slice(done, done - (-(len(x) - done) // groups))  # groups of even size, none left small
        try:
            part = _compose(
                read, x[some], combine, fusion, None if wanted is None else wanted[some], fill, most
            )
        except torch.OutOfMemoryError:
            if most == 1:
                raise
            most = -(-min(most, len(seen) * (some.stop - some.start)) // 2)
            continue
        parts.append(part)
        done = some.stop
    return _concatenate(parts)


def _compose(
    read: Read,
    x: Float[Tensor, "b c H W"],
    combine: Combine,
    fusion: Fusion,
    target: Int[Tensor, " b"] | None,
    fill: Fill,
    chunk: int,
) -> Explanation:
    views, place = fusion.views.presented_first()  # the presented view gives target and fallback
    reading, target = read_views(read, views.act(x), target, chunk)
    prob, top1 = _said(reading, target, len(views))
    gate = fusion.weigh(prob[place], (top1 == target)[place])
    frame = Frame(views, fusion.align_at is not None, fill, _weights(gate, place, len(views)))
    if reading.rectify_weights and combine is grad_cam:
        combine = grad_cam_rectified
    chain = Chain(combine, (x.shape[-2], x.shape[-1]))
    value = [v.view(len(views), len(x), *v.shape[1:]) for v in reading.value]

    alone = chain.trace(reading.stage, value)  # each view's own chain
    maps = frame.undo(alone["map"])
    start = fusion.align_at or fusion.mean_at
    if start not in (reading.stage, *alone):
        raise EquicamError(
            f"a reader that starts at {reading.stage!r}", needs="a fusion from there on",
            got=f"align_at={fusion.align_at!r}, mean_at={fusion.mean_at!r}", fix='align_at="map", mean_at="map"',
        )  # fmt: skip
    if fusion.align_at == fusion.mean_at == "features" and combine in (grad_cam, grad_cam_rectified):
        plane = channels_first(frame, *value, rectify=combine is grad_cam_rectified)
        fused = chain.trace("combined", [plane])
    else:
        views_at = value if start == "features" else [alone[start]]
        turned = [maps] if start == "map" else [frame.undo(v) for v in views_at]
        carried = turned if start == fusion.mean_at else [chain.trace(start, turned)[fusion.mean_at]]
        fused = chain.trace(fusion.mean_at, [frame.mean(v) for v in carried])
    raw = fused["map"] if fusion.mean_at == "map" else fused["upsampled"]
    peum = frame.variance(maps)
    planes = alone["rectified" if "rectified" in alone else reading.stage]
    kept, flips = gate > 0, (top1 != top1[0])[place]
    return Explanation(
        map=unit(raw),
        raw=raw,
        peum=peum,
        score=peum.mean((-2, -1)),
        target=target,
        sure=prob[0],
        prob=prob[place].T,
        flips=flips.T,
        kept=kept.T,
        planes=planes[place].transpose(0, 1),
        flags=_flags(raw, flips, kept, frame, planes),
        angles=fusion.views.angles,
    )


def _said(
    reading: Reading, target: Int[Tensor, " b"], count: int
) -> tuple[Float[Tensor, "t b"], Int[Tensor, "t b"]]:
    """p_c and top-1 of every view; without a model, unknown and the target."""
    everywhere = target.expand(count, -1)
    if reading.probs is None:
        like = reading.value[0]
        return torch.full(everywhere.shape, torch.nan, dtype=like.dtype, device=like.device), everywhere
    probs = reading.probs.view(count, len(target), -1)
    return probs.gather(2, everywhere[..., None])[..., 0], probs.argmax(2)


def _weights(gate: Float[Tensor, "t b"], place: list[int], count: int) -> Float[Tensor, "s b"]:
    """Gates scaled to sum 1 and put at their place behind the presented view; all on that one where none is kept."""
    total = gate.sum(0)
    weights = torch.zeros((count, gate.shape[1]), dtype=gate.dtype, device=gate.device)
    weights[place] = gate * inverse(total)
    weights[0] = torch.where(total > 0, weights[0], 1)
    return weights


def _flags(
    raw: Float[Tensor, "b H W"],
    flips: Bool[Tensor, "t b"],
    kept: Bool[Tensor, "t b"],
    frame: Frame,
    planes: Float[Tensor, "s b h w"],
) -> tuple[frozenset[str], ...]:
    blank = (raw == 0).flatten(1).all(1)
    (height, width), (h, w) = raw.shape[-2:], planes.shape[-2:]
    unseen = torch.zeros_like(blank)
    if frame.align and frame.fill != "reflect":
        unseen = (frame.seen((h, w)) == 0).flatten(1).any(1)
    found = {
        "blank": blank,
        "constant": constant(raw) & ~blank,
        "flipped": flips.any(0),
        "none-kept": ~kept.any(0),
        "low-coverage": unseen,
        "odd-size": torch.full_like(blank, height != width or bool(height % h) or bool(width % w)),
    }
    rows = torch.stack(list(found.values()), 1).tolist()
    return tuple(frozenset(name for name, hit in zip(found, row, strict=True) if hit) for row in rows)


def _concatenate(parts: list[Explanation]) -> Explanation:
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {
        f.name: torch.cat([getattr(p, f.name) for p in parts])
        for f in fields(Explanation)
        if isinstance(getattr(parts[0], f.name), Tensor)
    }
    return replace(parts[0], **joined, flags=tuple(flags for p in parts for flags in p.flags))
