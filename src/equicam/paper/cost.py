"""The cost of several views, in time on this machine and in forward passes."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.evaluation import statistics
from equicam.evaluation.statistics import Estimate
from equicam.explain import explain
from equicam.paper.claims import claims
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Row, compare, not_run, number

TIMINGS = 100
PUBLISHED_FOR = "A100"
ANOTHER_DEVICE = f"published for an {PUBLISHED_FOR}; a ratio on another device says nothing about it: --device cuda on such a GPU"
SCORE_CAM_CLAIM = "cost.t6_vs_scorecam"
SCORE_CAM = (
    "Score-CAM takes a forward pass for every channel, 2,048 in ResNet-50, and six views take six: 341 times as many, "
    "less the backward passes of the views. The published 6 to 9 times is reached only if a view's pass takes some 40 to 60 times as long as a mask's, "
    "as when masks run in batches of 64 and views one by one; here both run in batches"
)
Seconds = list[float]


def measure(context: Context) -> Iterator[Row]:
    """A map of 18 and of 6 views over one Grad-CAM: one view per pass, as the authors do, and all views in one pass.

    Each is over a Grad-CAM run in the same way, because a call with `max_views_per_forward` is never captured as a graph.
    Times on another device than the paper's are listed and compared with nothing.
    """
    x = context.open_some(8)
    seconds = {
        views: Both(
            _seconds(context, x, views=views), _seconds(context, x, views=views, max_views_per_forward=1)
        )
        for views in (1, 18, 6)
    }
    alone = seconds.pop(1)
    compiled = ", compiled" if context.options.get("compiled") else ""
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else "a CPU"
    how = f"on {device}{compiled}"
    for views, taken in seconds.items():
        over = Both(_over(taken.clean, alone.clean), _over(taken.as_published, alone.as_published))
        yield from _over_one(views, over, how, claimed=PUBLISHED_FOR in device)
    yield from _against_score_cam(context, x, seconds[6], how=how, claimed=PUBLISHED_FOR in device)


def _over_one(views: int, over: Both[Estimate], how: str, *, claimed: bool) -> Iterator[Row]:
    """A map's cost over one Grad-CAM's; both ends of the published range have the verdict of the range."""
    ends = {"from": f"cost.T{views} lo", "to": f"cost.T{views} hi"}
    reason = f"one view per pass {over.as_published.value:.1f}, all in one pass {over.clean.value:.1f} {how}, PEUM included"
    for end, claim in ends.items():
        label = f"T = {views} over one Grad-CAM, {end}"
        if claimed:
            yield compare(claim, over, label=label, reason=reason)
        else:
            yield compare("", over, label=label, reason=reason, published=claims()[claim].text)
            yield not_run(claim, ANOTHER_DEVICE)


def _against_score_cam(
    context: Context, x: Float[Tensor, "b c H W"], six: Both[Seconds], *, how: str, claimed: bool
) -> Iterator[Row]:
    """Score-CAM's time over that of six views, on one image."""
    if x.is_cuda:
        slow = _seconds(context, x[:1], views=1, method="score-cam", timings=3)
        yield _score_cam_row(slow, six, how, claimed=claimed)
    if not claimed or not x.is_cuda:
        yield not_run(SCORE_CAM_CLAIM, ANOTHER_DEVICE)


def _score_cam_row(slow: Seconds, six: Both[Seconds], how: str, *, claimed: bool) -> Row:
    """Score-CAM's time over that of six views, and why it is not the published one."""
    return compare(
        SCORE_CAM_CLAIM if claimed else "", six.map(lambda seconds: number(median(slow) / median(seconds), 1)),
        label="Score-CAM's time over that of T = 6", published=claims()[SCORE_CAM_CLAIM].text, reason=f"{how}. {SCORE_CAM}",
    )  # fmt: skip


def _over(taken: Seconds, alone: Seconds) -> Estimate:
    """The ratio of two medians."""
    return statistics.bootstrap(_ratio_of_medians, np.array(taken), np.array(alone))


def _ratio_of_medians(taken: statistics.Floats, alone: statistics.Floats) -> float:
    return float(np.median(taken) / np.median(alone))


def _seconds(
    context: Context,
    x: Float[Tensor, "b c H W"],
    *,
    views: int,
    max_views_per_forward: int | None = None,
    method: str | None = None,
    timings: int | None = None,
) -> Seconds:
    """Times of a map, one image at a time; on a CPU, which decides nothing, one of each image."""
    method, seconds = method or ("equigrad-cam" if views > 1 else "grad-cam"), []
    options = {"dtype": context.options.get("dtype"), "compiled": context.options.get("compiled", False)}
    options["max_views_per_forward"] = max_views_per_forward
    count = timings or (TIMINGS if x.is_cuda else len(x))
    for i in range(count + 1):
        begin = _now(x)
        explain(context.model, x[i % len(x)][None], method=method, views=views, **options)
        seconds.append(_now(x) - begin)
    return seconds[1:]  # the first run of a shape includes one-time work


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()


EXPERIMENT = Experiment(
    "The cost of several views", ("cost.",), measure, needs="a classifier and a few images"
)
