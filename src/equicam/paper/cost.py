"""What several views cost, in time on this machine and in passes."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.explain import explain
from equicam.paper.context import (
    COSTLY,
    Bench,
    Experiment,
    Line,
    claims,
    line,
    not_run,
    number,
)
from equicam.paper.measure import pictures

A_FEW = 8


def run(bench: Bench) -> Iterator[Line]:
    """A map of 18 and of 6 views over one Grad-CAM: a view a pass, as the authors do, and all views in one.

    Each over the Grad-CAM that is run in the same way: a call with a `chunk` is never captured as a graph.
    """
    x = pictures(bench, A_FEW)
    taken = {t: [_seconds(bench, x, views=t, chunk=chunk) for chunk in (1, None)] for t in (1, 18, 6)}
    alone = taken.pop(1)
    how = f"on {bench.model.device.type}{', compiled' if bench.options.get('compiled') else ''}"
    for views, times in taken.items():
        sequential, batched = (seconds / one for seconds, one in zip(times, alone, strict=True))
        yield from _over_one(views, sequential, batched, len(x), how)
    yield _against_score_cam(bench, x, *taken[6], how=how)


def _over_one(views: int, sequential: float, batched: float, n: int, how: str) -> Iterator[Line]:
    """A map's cost over one Grad-CAM's; both ends of the published range have the verdict of the range."""
    ends = {"from": f"cost.T{views} lo", "to": f"cost.T{views} hi"}
    low, high = (claims()[claim].value for claim in ends.values())
    assert isinstance(low, float)  # noqa: S101  # each is one number
    assert isinstance(high, float)  # noqa: S101
    for end, claim in ends.items():
        yield line(
            claim, clean=number(batched, n), as_published=number(sequential, n), tolerance=0.1 * views, within=(low, high),
            what=f"T = {views} over one Grad-CAM, {end}",
            reason=f"a view a pass {sequential:.1f}, all in one pass {batched:.1f} {how}, PEUM included",
        )  # fmt: skip


def _against_score_cam(
    bench: Bench, x: Float[Tensor, "b c H W"], sequential: float, batched: float, *, how: str
) -> Line:
    """Score-CAM's time over that of six views, on one picture."""
    claim = "cost.t6_vs_scorecam"
    if not (bench.costly or x.is_cuda):
        return not_run(claim, f"{COSTLY['score-cam']:,} forward passes a map: --costly")
    slow = _seconds(bench, x[:1], views=1, chunk=None, method="score-cam")
    return line(
        claim, clean=number(slow / batched, 1), as_published=number(slow / sequential, 1), tolerance=1.0,
        what="Score-CAM's time over that of T = 6", reason=f"{how}; a pass of masks holds what memory allows, the paper's 64",
    )  # fmt: skip


def _seconds(
    bench: Bench, x: Float[Tensor, "b c H W"], *, views: int, chunk: int | None, method: str | None = None
) -> float:
    """The median time of a map, one picture at a time."""
    method, taken = method or ("equigrad-cam" if views > 1 else "grad-cam"), []
    for picture in (x[0], *x):
        begin = _now(x)
        explain(
            bench.model,
            picture[None],
            method=method,
            views=views,
            chunk=chunk,
            dtype=bench.options.get("dtype"),
            compiled=bench.options.get("compiled", False),
        )
        taken.append(_now(x) - begin)
    return median(taken[1:])  # the first of a shape is slow for reasons of its own


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()


EXPERIMENT = Experiment("What several views cost", ("cost.",), run, needs="a classifier and a few pictures")
