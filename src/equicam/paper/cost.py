"""The cost of several views, in time on this machine and in forward passes."""

from collections.abc import Iterator
from statistics import median
from time import perf_counter

import torch
from jaxtyping import Float
from torch import Tensor

from equicam.explain import explain
from equicam.paper.claims import claims
from equicam.paper.context import FORWARD_PASSES, Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Row, compare, not_run, number

IMAGES = 8


def measure(context: Context) -> Iterator[Row]:
    """A map of 18 and of 6 views over one Grad-CAM: one view per pass, as the authors do, and all views in one pass.

    Each is over a Grad-CAM run in the same way, because a call with `max_views_per_forward` is never captured as a graph.
    """
    x = context.open_some(IMAGES)
    seconds = {
        views: Both(
            _seconds(context, x, views=views), _seconds(context, x, views=views, max_views_per_forward=1)
        )
        for views in (1, 18, 6)
    }
    alone = seconds.pop(1)
    compiled = ", compiled" if context.options.get("compiled") else ""
    how = f"on {context.model.device.type}{compiled}"
    for views, taken in seconds.items():
        over = Both(taken.clean / alone.clean, taken.as_published / alone.as_published)
        yield from _over_one(views, over, len(x), how)
    yield _against_score_cam(context, x, seconds[6], how=how)


def _over_one(views: int, over: Both[float], n: int, how: str) -> Iterator[Row]:
    """A map's cost over one Grad-CAM's; both ends of the published range have the verdict of the range."""
    ends = {"from": f"cost.T{views} lo", "to": f"cost.T{views} hi"}
    low, high = (claims()[claim].values[0] for claim in ends.values())
    for end, claim in ends.items():
        yield compare(
            claim, over.map(number, n), tolerance=0.1 * views, within=(low, high),
            label=f"T = {views} over one Grad-CAM, {end}",
            reason=f"one view per pass {over.as_published:.1f}, all in one pass {over.clean:.1f} {how}, PEUM included",
        )  # fmt: skip


def _against_score_cam(context: Context, x: Float[Tensor, "b c H W"], six: Both[float], *, how: str) -> Row:
    """Score-CAM's time over that of six views, on one image."""
    claim = "cost.t6_vs_scorecam"
    if not (context.costly or x.is_cuda):
        return not_run(claim, f"{FORWARD_PASSES['score-cam']:,} forward passes per map: --costly")
    slow = _seconds(context, x[:1], views=1, method="score-cam")
    return compare(
        claim, six.map(lambda seconds: number(slow / seconds, 1)), tolerance=1.0,
        label="Score-CAM's time over that of T = 6",
        reason=f"{how}; here a forward pass holds as many masks as memory allows, in the paper 64",
    )  # fmt: skip


def _seconds(
    context: Context,
    x: Float[Tensor, "b c H W"],
    *,
    views: int,
    max_views_per_forward: int | None = None,
    method: str | None = None,
) -> float:
    """The median time of a map, one image at a time."""
    method, seconds = method or ("equigrad-cam" if views > 1 else "grad-cam"), []
    options = {"dtype": context.options.get("dtype"), "compiled": context.options.get("compiled", False)}
    options["max_views_per_forward"] = max_views_per_forward
    for image in (x[0], *x):
        begin = _now(x)
        explain(context.model, image[None], method=method, views=views, **options)
        seconds.append(_now(x) - begin)
    return median(seconds[1:])  # the first run of a shape includes one-time work


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()


EXPERIMENT = Experiment(
    "The cost of several views", ("cost.",), measure, needs="a classifier and a few images"
)
