"""One call: which method, which views, and all that an auditor wants to know of the result."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from equicam.core.chain import span, stretched
from equicam.core.combine import Combine, grad_cam
from equicam.core.fusion import Fused, fuse, in_groups, see
from equicam.core.views import Fill, Views, picked
from equicam.core.weights import uniform
from equicam.errors import EquicamError
from equicam.methods import Fusion, Method, Reader, find
from equicam.models.images import Images, as_batch
from equicam.models.wrap import wrap
from equicam.readers.checks import explained_by, gathered, insist, settle
from equicam.readers.external import as_explainer, external
from equicam.readers.finite import finite, not_finite
from equicam.readers.gradients import tap, undisturbed
from equicam.readers.model import Model
from equicam.readers.reading import Pin, Reading
from equicam.runtime.adaptive import settled
from equicam.runtime.batching import Read, Target, as_targets, views_a_pass
from equicam.runtime.graphs import TOLD, Graph, graphs_of, shape_of
from equicam.runtime.streams import aside, rejoin

FLAGS = ("blank", "constant", "flipped", "none-kept", "low-coverage", "odd-size")
BY_VIEW = ("prob", "flips", "kept", "taken", "planes")
FEW = 64 * 3 * 224**2
"""Pixels of views that any device has room for."""


@dataclass(frozen=True)
class Explanation:
    """What `explain` found, per image, on the model's device."""

    map: Float[Tensor, "b H W"]  # in [0, 1]
    raw: Float[Tensor, "b H W"]  # just before the last min–max
    peum: Float[Tensor, "b H W"]  # variance of the views' aligned maps
    score: Float[Tensor, " b"]  # mean of peum: how much the views disagree
    target: Int[Tensor, " b"]  # the class explained
    sure: Float[Tensor, " b"]  # its probability in the picture as presented
    prob: Float[Tensor, "b t"]  # its probability in each view; NaN where it was not taken
    flips: Bool[Tensor, "b t"]  # views whose top-1 is not the presented picture's
    kept: Bool[Tensor, "b t"]  # views the weigher let through
    taken: Bool[Tensor, "b t"]  # views that were looked at: all, but with views="auto"
    plane: Float[Tensor, "b h w"]  # raw at the layer's resolution, rectified
    planes: Float[Tensor, "b t h w"]  # each view's own rectified plane, not turned back
    flags: tuple[frozenset[str], ...]  # of blank, constant, flipped, none-kept, low-coverage, odd-size
    angles: tuple[float, ...]
    layer: str | None = None


def explain(
    model: Model | nn.Module,
    images: Images,
    *,
    method: str | Fusion | Method = "equigrad-cam",
    views: int | Views | Literal["auto"] | None = None,
    target: Target = None,
    fill: Fill | None = None,
    as_published: bool = False,
    tau: int | float | None = None,
    gamma: int | float | None = None,
    dtype: torch.dtype | None = None,
    chunk: int | None = None,
    compiled: bool = False,
) -> Explanation:
    """Explain the model's top-1 (or `target`) on preprocessed tensors, PIL images or paths.

    `views` is how many or which; "auto" takes 6, 12 or 24, as many as each picture needs for its mean to settle.
    `fill` is "reflect", or "zeros" with `as_published` (the paper authors' grid, fill and variants); `dtype` runs
    the network under autocast; `chunk` is the most views in one forward pass (default: by memory); `compiled`
    compiles the network for each new size of batch, and on CUDA captures calls as graphs.
    """
    if not isinstance(model, Model):
        model = wrap(model, example=as_batch(None, images) if isinstance(images, Tensor) else None)
    chosen = find(method, views=views, as_published=as_published, tau=tau, gamma=gamma)
    device = model.device.type
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EquicamError("dtype", needs="a floating torch.dtype", got=repr(dtype), fix="torch.bfloat16")
    if dtype is None and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    model = replace(model, compiled=True) if compiled else model
    # inference tensors cannot join a backward pass, and our own algebra is never autocast
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        x = as_batch(model, images, check=False)
        fill = fill or ("zeros" if as_published else "reflect")
        graph = chunk is None and captured(model, chosen, fill, x)
        if not graph and not finite(x):
            raise not_finite(x)
        found = compose(
            partial(read, model, chosen.reader, dtype),
            x,
            combine=chosen.combine,
            fusion=chosen.fusion,
            target=target,
            fill=fill,
            chunk=chunk,
            graphs=model if graph else None,
        )
    return replace(found, layer=model.layer)


def captured(model: Model, method: Method, fill: Fill, x: Float[Tensor, "b c H W"]) -> bool:
    """Whether a call is captured as a graph: asked for, on CUDA, ours throughout, and with room for its views twice.

    What a combine or a gate of the caller's asks of a device on the way, a capture does not survive; `coverage` asks too.
    """
    fusion, views = method.fusion, len(x) * len(method.fusion.views)
    ours = method.reader is tap and method.combine.__module__ == grad_cam.__module__
    ours = ours and getattr(fusion.weigh, "__module__", "") == uniform.__module__
    if not model.compiled or not x.is_cuda or not ours or fill == "coverage" or fusion.auto is not None:
        return False
    return views * x[0].numel() <= FEW or views <= views_a_pass(x) // 2


def read(
    model: Model, reader: Reader, autocast: torch.dtype | None, x: Float[Tensor, "n c H W"], pin: Pin
) -> Reading:
    """What the reader finds in a batch of views; class names must be as many as classes."""
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
    if not isinstance(views, int | Views):
        raise EquicamError("views", needs="a number of views or Views", got=repr(views), fix="views=18")
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
    graphs: Model | None = None,
) -> Explanation:
    """Explain images in groups whose views fit one forward pass of at most `chunk` views, or as a captured graph."""
    wanted = as_targets(target, x)

    def parts(read: Read, some: Tensor, given: Tensor | None, most: int) -> dict[str, Tensor]:
        return measured(fuse(see(read, some, fusion.views, given, most), combine, fusion, fill))

    if graphs is not None:
        reader, autocast = read.args[1:]  # type: ignore[attr-defined]
        about = (graphs.layer, graphs.layout, graphs.rectify_weights, graphs.classes, reader, autocast)
        key = (about, combine, fusion, fill, shape_of((x, wanted)))

        def checked(some: Tensor, given: Tensor | None) -> dict[str, Tensor]:
            def checking(views: Tensor, pin: Pin) -> Reading:
                with aside(some):
                    insist(finite(some), lambda: not_finite(some))
                return read(views, pin)

            return parts(checking, some, given, sys.maxsize)

        def capture() -> Graph:
            with undisturbed(graphs.module, eager=False):
                tensors = (*graphs.module.parameters(), *graphs.module.buffers())
                return Graph(checked, (x, wanted), tensors)

        graph, outputs = graphs_of(graphs.module).run(key, capture, (x, wanted))
        found: dict[str, Any] = dict(outputs)
        marks = graph.flags(found.pop(TOLD))
        found["flags"] = [marks[i : i + len(FLAGS)] for i in range(0, len(marks), len(FLAGS))]
        return finished(found, fusion.views)

    def work(some: slice, most: int) -> Explanation:
        if fusion.auto is not None:
            given = None if wanted is None else wanted[some]
            return _gathered(list(settled(read, x[some], combine, fusion, given, fill, most)), fusion.views)
        with gathered() as checks, explained_by(checks):
            found = parts(read, x[some], None if wanted is None else wanted[some], most)
        settle(checks)
        return finished(found, fusion.views)

    return _concatenate(in_groups(x, len(fusion.views.presented_first()[0]), chunk, work))


def explanation(fused: Fused) -> Explanation:
    """A finished fusion with what its views disagree on."""
    return finished(measured(fused), fused.views)


def measured(fused: Fused) -> dict[str, Tensor]:
    """Every tensor of an explanation by its name, and `flags` as a table of what is to be remarked."""
    seen, place = fused.seen, fused.place
    with aside(fused):
        alone = seen.alone(fused.combine)
        planes = picked(alone["rectified" if "rectified" in alone else seen.stage], place).transpose(0, 1)
        peum = fused.peum()
        score = peum.mean((-2, -1))
    kept, flips = fused.gate > 0, picked(seen.top1 != seen.top1[0], place)
    low, width = span(fused.raw)
    found = {
        "map": stretched(fused.raw, low, width),
        "raw": fused.raw,
        "peum": peum,
        "score": score,
        "target": seen.target,
        "sure": seen.prob[0],
        "prob": picked(seen.prob, place).T,
        "flips": flips.T,
        "kept": kept.T,
        "taken": torch.ones_like(kept.T),
        "plane": fused.plane,
        "planes": planes,
        "flags": _flags(fused, low, width == torch.inf, flips, kept, planes),
    }
    rejoin()
    return found


def finished(found: dict[str, Any], views: Views) -> Explanation:
    """An explanation of its tensors, the flags in words."""
    marks = found.pop("flags")
    rows = marks.tolist() if isinstance(marks, Tensor) else marks
    flags = tuple(frozenset(name for name, hit in zip(FLAGS, row, strict=True) if hit) for row in rows)
    return Explanation(**found, flags=flags, angles=views.angles)


def _gathered(parts: list[tuple[Tensor, Fused]], views: Views) -> Explanation:
    """Pictures that took different views as one explanation, each view at its place among all."""
    rows = torch.cat([where for where, _ in parts]).argsort()
    made: dict[str, list[Tensor]] = {}
    for _, fused in parts:
        at = {angle % 360: t for t, angle in enumerate(views.angles)}
        place = torch.tensor([at[angle % 360] for angle in fused.views.angles], device=rows.device)
        for name, value in measured(fused).items():
            if name in BY_VIEW:
                blank = torch.nan if name == "prob" else 0
                whole = value.new_full((len(value), len(views), *value.shape[2:]), blank)
                whole[:, place] = value
                value = whole
            made.setdefault(name, []).append(value)
    return finished({name: torch.cat(values)[rows] for name, values in made.items()}, views)


def _flags(
    fused: Fused,
    low: Float[Tensor, " b"],
    constant: Bool[Tensor, " b"],
    flips: Bool[Tensor, "t b"],
    kept: Bool[Tensor, "t b"],
    planes: Float[Tensor, "b t h w"],
) -> Bool[Tensor, "b f"]:
    zero = low == 0
    frame, (height, width), (h, w) = fused.frame, fused.seen.size, planes.shape[-2:]
    unseen = torch.zeros_like(zero)
    if frame.align and frame.fill != "reflect":
        unseen = (frame.seen((h, w)) == 0).flatten(1).any(1)
    odd = torch.full_like(zero, height != width or bool(height % h) or bool(width % w))
    return torch.stack((constant & zero, constant & ~zero, flips.any(0), ~kept.any(0), unseen, odd), 1)


def _concatenate(parts: list[Explanation]) -> Explanation:
    if len(parts) == 1:
        return parts[0]
    joined: dict[str, Any] = {
        f.name: torch.cat([getattr(p, f.name) for p in parts])
        for f in fields(Explanation)
        if isinstance(getattr(parts[0], f.name), Tensor)
    }
    return replace(parts[0], **joined, flags=tuple(flags for p in parts for flags in p.flags))
