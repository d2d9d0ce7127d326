"""What several views cost, in time on this machine and in passes."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.experiments.experiment import Bench, Experiment, Line, line, number
from equicam.experiments.measure import pictures
from equicam.explain import explain
from equicam.readers.ask import ask_at

A_FEW = 8


def run(bench: Bench) -> Iterator[Line]:
    """A map of 18 and of 6 views over one Grad-CAM: a view a pass, as the authors do, and all views in one."""
    x = pictures(bench, A_FEW)
    _seconds(bench, x[:1], views=18, chunk=None)  # the first call of all is slow for reasons of its own
    alone = _seconds(bench, x, views=1, chunk=1)
    for views in (18, 6):
        sequential, batched = (_seconds(bench, x, views=views, chunk=chunk) / alone for chunk in (1, None))
        reason = f"a view a pass {sequential:.1f}, all in one pass {batched:.1f} on {bench.model.device.type}, PEUM included"
        for end in ("lo", "hi"):
            yield line(
                f"cost.T{views} {end}", clean=number(batched, len(x)), as_published=number(sequential, len(x)),
                what=f"T = {views}, over one Grad-CAM", tolerance=0.1 * views, reason=reason,
            )  # fmt: skip
    features, _, _ = ask_at(bench.model, x[:1].to(bench.model.dtype), None)
    passes = 1 + features.shape[1]
    reason = f"{passes:,} forward passes against 6; the paper's is time, with Score-CAM's masks 64 to a pass"
    what = "Score-CAM's passes over those of T = 6"
    yield line("cost.t6_vs_scorecam", clean=number(passes / 6), what=what, tolerance=1.0, reason=reason)


def _seconds(bench: Bench, x: Float[Tensor, "b c H W"], *, views: int, chunk: int | None) -> float:
    """The median time of a map, one picture at a time."""
    method, taken = "equigrad-cam" if views > 1 else "grad-cam", []
    for picture in x:
        begin = _now(x)
        explain(
            bench.model,
            picture[None],
            method=method,
            views=views,
            chunk=chunk,
            dtype=bench.options.get("dtype"),
        )
        taken.append(_now(x) - begin)
    return median(taken)


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()


EXPERIMENT = Experiment("What several views cost", ("cost.",), run, needs="a classifier and a few pictures")
