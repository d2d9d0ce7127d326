"""Views of pictures, read once, and every fusion made from them.

`fuse` is the paper: M_t turns view t back, w_t weighs it (sum 1), and for feature space

    ᾱ_k = mean_p Σ_t w_t (M_t g_t^k)(p),   map = unit ∘ upsample ∘ ReLU ( Σ_k ᾱ_k Σ_t w_t M_t A_t^k ).

PEUM, for every fusion: h_t = M_t map(view t), σ² = Σ_t w_t (h_t − Σ_s w_s h_s)².
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from equicam.core.alignment import Frame, channels_first
from equicam.core.chain import STAGES, Chain, Stage, unit
from equicam.core.combine import Combine, grad_cam, grad_cam_rectified
from equicam.core.views import Fill, Views, picked
from equicam.errors import EquicamError
from equicam.methods import Fusion
from equicam.readers.reading import Reading
from equicam.runtime.batching import Read, read_views, views_a_pass

T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """What a reader found in every view of some pictures; the presented view is the first."""

    views: Views
    stage: Stage
    value: tuple[Float[Tensor, "s b ..."], ...]
    prob: Float[Tensor, "s b"]  # of the target
    top1: Int[Tensor, "s b"]
    target: Int[Tensor, " b"]
    presented: Reading  # of the presented view alone
    size: tuple[int, int]
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def of(self, views: Views) -> "Seen":
        """The same pictures seen in these views alone, the presented one first."""
        ordered, _ = views.presented_first()
        at = {angle % 360: s for s, angle in enumerate(self.views.angles)}
        rows = [at[angle % 360] for angle in ordered.angles]
        if rows == list(range(len(self.views))):
            return self
        return self._once(
            ("of", *rows),
            lambda: replace(
                self,
                views=ordered,
                value=tuple(picked(v, rows) for v in self.value),
                prob=picked(self.prob, rows),
                top1=picked(self.top1, rows),
                _kept={},
            ),
        )

    def at(self, rows: slice | Int[Tensor, " r"]) -> "Seen":
        """Some of the pictures alone."""
        reading = self.presented
        return replace(
            self,
            value=tuple(v[:, rows] for v in self.value),
            prob=self.prob[:, rows],
            top1=self.top1[:, rows],
            target=self.target[rows],
            presented=replace(
                reading,
                value=tuple(v[rows] for v in reading.value),
                scores=None if reading.scores is None else reading.scores[rows],
                probs=None if reading.probs is None else reading.probs[rows],
            ),
            _kept={},
        )

    def alone(self, combine: Combine) -> dict[Stage, Tensor]:
        """Every named plane of each view's own chain."""
        return self._once(("alone", combine), lambda: Chain(combine, self.size).trace(self.stage, self.value))

    def maps(self, combine: Combine, frame: Frame) -> Float[Tensor, "s b H W"]:
        """h_t: each view's own map, turned back if the frame does."""
        return self._once(
            ("maps", combine, frame.align, frame.fill), lambda: frame.undo(self.alone(combine)["map"])
        )

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made


@dataclass(frozen=True)
class Fused:
    """One fusion of what was seen, finished up to the last min–max."""

    seen: Seen
    views: Views  # the fusion's, in its order
    frame: Frame
    combine: Combine
    gate: Float[Tensor, "t b"]
    place: list[int]  # where each of the fusion's views stands in `seen`
    raw: Float[Tensor, "b H W"]
    plane: Float[Tensor, "b h w"]  # the same at the layer's resolution

    def at(self, rows: slice | Int[Tensor, " r"]) -> "Fused":
        """Of some of the pictures alone."""
        return replace(
            self,
            seen=self.seen.at(rows),
            frame=replace(self.frame, weights=self.frame.weights[:, rows]),
            gate=self.gate[:, rows],
            raw=self.raw[rows],
            plane=self.plane[rows],
        )

    @property
    def map(self) -> Float[Tensor, "b H W"]:
        """In [0, 1]."""
        return unit(self.raw)

    @property
    def maps(self) -> Float[Tensor, "s b H W"]:
        """h_t: each view's own map in the presented frame, the presented view first."""
        return self.seen.maps(self.combine, self.frame)

    def peum(self) -> Float[Tensor, "b H W"]:
        """σ²: the variance of the views' maps."""
        return self.frame.variance(self.maps)


def see(
    read: Read,
    x: Float[Tensor, "b c H W"],
    views: Views,
    target: Int[Tensor, " b"] | None,
    chunk: int,
    *,
    originals: int | None = None,
) -> Seen:
    """Every view of the pictures through the reader; the presented view gives target and fallback.

    With `originals`, the rest of x are turned copies of that many first pictures and explain their class.
    """
    views, _ = views.presented_first()
    reading, target = read_views(read, views.act(x), target, chunk, originals=originals)
    prob, top1 = _said(reading, target, len(views))
    b = len(x)
    return Seen(
        views=views,
        stage=reading.stage,
        value=tuple(v.view(len(views), b, *v.shape[1:]) for v in reading.value),
        prob=prob,
        top1=top1,
        target=target,
        presented=replace(
            reading,
            value=tuple(v[:b] for v in reading.value),
            scores=None if reading.scores is None else reading.scores[:b],
            probs=None if reading.probs is None else reading.probs[:b],
        ),
        size=(x.shape[-2], x.shape[-1]),
    )


def see_more(read: Read, x: Float[Tensor, "b c H W"], seen: Seen, views: Views, chunk: int) -> Seen:
    """The same pictures also in those of the views that they have not been seen in."""
    known = {angle % 360 for angle in seen.views.angles}
    added = Views(tuple(angle for angle in views.angles if angle % 360 not in known))
    reading, _ = read_views(read, added.act(x), seen.target, chunk, presented=seen.presented.scores)
    prob, top1 = _said(reading, seen.target, len(added))
    return replace(
        seen,
        views=Views((*seen.views.angles, *added.angles)),
        value=tuple(
            torch.cat((old, new.view(len(added), len(x), *new.shape[1:])))
            for old, new in zip(seen.value, reading.value, strict=True)
        ),
        prob=torch.cat((seen.prob, prob)),
        top1=torch.cat((seen.top1, top1)),
        _kept={},
    )


def fuse(seen: Seen, combine: Combine, fusion: Fusion, fill: Fill) -> Fused:
    """Carry views to `align_at`, turn them back, on to `mean_at`, average, and finish the chain once."""
    seen = seen.of(fusion.views)
    _, place = fusion.views.presented_first()
    gate = fusion.weigh(picked(seen.prob, place), picked(seen.top1 == seen.target, place))
    frame = Frame(seen.views, fusion.align_at is not None, fill, _weights(gate, place, len(seen.views)))
    combine = deployed(combine, seen.presented)
    chain = Chain(combine, seen.size)
    start = fusion.align_at or fusion.mean_at
    if STAGES.index(start) < STAGES.index(seen.stage):
        raise EquicamError(
            f"a reader that starts at {seen.stage!r}", needs="a fusion from there on",
            got=f"align_at={fusion.align_at!r}, mean_at={fusion.mean_at!r}", fix='align_at="map", mean_at="map"',
        )  # fmt: skip
    if fusion.align_at == fusion.mean_at == "features" and combine in (grad_cam, grad_cam_rectified):
        plane = channels_first(frame, *seen.value, rectify=combine is grad_cam_rectified)
        fused = chain.trace("combined", [plane], until="upsampled")
    else:
        turned: Iterable[Tensor]
        if start == "map":
            turned = [seen.maps(combine, frame)]
        else:
            views_at = seen.value if start == "features" else [seen.alone(combine)[start]]
            turned = [frame.undo(v) for v in views_at]
        at = fusion.mean_at
        carried = turned if start == at else [chain.trace(start, list(turned), until=at)[at]]
        fused = chain.trace(at, [frame.mean(v) for v in carried], until="upsampled")
    raw = fused["map"] if fusion.mean_at == "map" else fused["upsampled"]
    # a mean taken at pixel size is brought down to the grid its views were read on
    plane = fused["rectified"] if "rectified" in fused else _pooled(raw, seen.value[0].shape[-2:])
    return Fused(seen, fusion.views, frame, combine, gate, place, raw, plane)


def _pooled(raw: Float[Tensor, "b H W"], grid: Sequence[int]) -> Float[Tensor, "b h w"]:
    return torch.nn.functional.adaptive_avg_pool2d(raw, (grid[0], grid[1]))


def deployed(combine: Combine, reading: Reading) -> Combine:
    """The combine as it is used on this reading: Grad-CAM's weights are rectified where the reader says so."""
    return grad_cam_rectified if reading.rectify_weights and combine is grad_cam else combine


def in_groups(
    x: Float[Tensor, "b c H W"], views: int, chunk: int | None, work: Callable[[slice, int], T]
) -> list[T]:
    """`work` on groups of pictures whose views fit one pass of at most `chunk`; smaller ones when memory runs out."""
    most = views_a_pass(x) if chunk is None else chunk
    if not isinstance(most, int) or most < 1:
        raise EquicamError("chunk", needs="1 view or more", got=chunk, fix="chunk=None")
    parts: list[T] = []
    done = 0
    while done < len(x):
        groups = -(-(len(x) - done) // max(1, most // views))
        some = slice(done, done - (-(len(x) - done) // groups))  # groups of even size, none left small
        try:
            part = work(some, most)
        except torch.OutOfMemoryError:
            if most == 1:
                raise
            most = -(-min(most, views * (some.stop - some.start)) // 2)
            continue
        parts.append(part)
        done = some.stop
    return parts


def _said(
    reading: Reading, target: Int[Tensor, " b"], count: int
) -> tuple[Float[Tensor, "t b"], Int[Tensor, "t b"]]:
    """p_c and top-1 of every view; without a model, unknown and the target."""
    everywhere = target.expand(count, -1)
    if reading.probs is None:
        like = reading.value[0]
        return torch.full(everywhere.shape, torch.nan, dtype=like.dtype, device=like.device), everywhere
    chosen = reading.probs.gather(1, everywhere.reshape(-1, 1))
    return chosen.view(everywhere.shape), reading.probs.argmax(1).view(everywhere.shape)


def _weights(gate: Float[Tensor, "t b"], place: list[int], count: int) -> Float[Tensor, "s b"]:
    """Gates scaled to sum 1 and put at their place behind the presented view; all on that one where none is kept."""
    if len(place) < count:  # the presented view is none of the fusion's
        gate = torch.cat((torch.zeros_like(gate[:1]), gate))
        place = [0, *place]
    total = gate.sum(0)
    presented = torch.eye(count, 1, dtype=gate.dtype, device=gate.device)
    return torch.where(total > 0, picked(gate, [place.index(s) for s in range(count)]) / total, presented)
