"""The cost of several views, in time on this machine and in forward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from equicam.evaluate import statistics
from equicam.evaluate.statistics import Estimate
from equicam.explain import explain
from equicam_paper.claims import claims
from equicam_paper.context import Context
from equicam_paper.rows import Both, Row, compare, not_run

TIMINGS = 100  # rounds on a GPU; on a CPU, which decides nothing, there is one for each image
WARM_UP = 2  # rounds that do not count: the first run of a shape includes one-time work
PUBLISHED_FOR = "A100"
ANOTHER_DEVICE = f"published for an {PUBLISHED_FOR}; a ratio on another device says nothing about it: --device cuda on such a GPU"
SCORE_CAM_CLAIM = "cost.t6_vs_scorecam"
SCORE_CAM_PASSES = (
    "Score-CAM takes a forward pass for every channel of the layer, 2,048 in ResNet-50, and six views take six, and as many backward passes. "
    "With passes of equal cost that is more than a hundred times as long; the published 6 to 9 times needs far slower passes of views, as with masks in batches and views one by one"
)


@dataclass(frozen=True)
class Kind:
    """A kind of map that is timed."""

    method: str
    views: int = 1
    views_per_pass: int | None = None


GRAD_CAM = Both(Kind("grad-cam"), Kind("grad-cam", views_per_pass=1))
EQUIGRAD = {views: Both(Kind("equigrad-cam", views), Kind("equigrad-cam", views, 1)) for views in (18, 6)}
SCORE_CAM = Kind("score-cam")
Seconds = dict[Kind, list[float]]


def cost(context: Context) -> Iterator[Row]:
    """A map of 18 and of 6 views over one Grad-CAM run in the same way: one view per pass, as the authors do, and all in one.

    Times on another device than the paper's are listed and compared with nothing.
    """
    x = context.open_some(8)
    device = torch.cuda.get_device_name(x.device) if x.is_cuda else "a CPU"
    how = f"on {device}" + (", compiled" if context.options.get("compiled") else "")
    claimed = PUBLISHED_FOR in device
    kinds = [kind for both in (GRAD_CAM, *EQUIGRAD.values()) for kind in (both.clean, both.as_published)]
    if x.is_cuda:
        kinds.append(SCORE_CAM)
    seconds = time_rounds(context, x, kinds, rounds=TIMINGS if x.is_cuda else len(x))
    for views, maps in EQUIGRAD.items():
        over = Both.together([maps, GRAD_CAM]).map(lambda pair: _over(seconds, *pair))
        yield from over_one(views, over, how, claimed=claimed)
    if x.is_cuda:
        over = EQUIGRAD[6].map(lambda kind: _over(seconds, SCORE_CAM, kind))
        yield score_cam_row(over, how, claimed=claimed)
    if not claimed:
        yield not_run(SCORE_CAM_CLAIM, ANOTHER_DEVICE)


def over_one(views: int, over: Both[Estimate], how: str, *, claimed: bool) -> Iterator[Row]:
    """A map's cost over one Grad-CAM's; both ends of the published range have its verdict."""
    ends = {"from": f"cost.T{views} lo", "to": f"cost.T{views} hi"}
    label, reason = f"T = {views} over one Grad-CAM", f"{_both_ways(over)} {how}, PEUM included"
    if claimed:
        for end, claim in ends.items():
            yield compare(claim, over, label=f"{label}, {end}", reason=reason)
        return
    published = "–".join(claims()[claim].text for claim in ends.values())
    yield compare("", over, label=label, reason=reason, published=published)
    for claim in ends.values():
        yield not_run(claim, ANOTHER_DEVICE)


def score_cam_row(over: Both[Estimate], how: str, *, claimed: bool) -> Row:
    """Score-CAM's time over that of six views, and what decides it."""
    return compare(
        SCORE_CAM_CLAIM if claimed else "", over, label="Score-CAM over T = 6", published=claims()[SCORE_CAM_CLAIM].text,
        reason=f"{_both_ways(over)} {how}. {SCORE_CAM_PASSES}",
    )  # fmt: skip


def _both_ways(over: Both[Estimate]) -> str:
    return f"one view per pass {over.as_published.value:.1f}, all in one pass {over.clean.value:.1f}"


def time_rounds(
    context: Context, x: Float[Tensor, "b c H W"], kinds: Sequence[Kind], *, rounds: int
) -> Seconds:
    """Times of one map of one image, of every kind in each round: a slow moment of the machine meets all."""
    options = {"dtype": context.options.get("dtype"), "compiled": context.options.get("compiled", False)}
    seconds: Seconds = {kind: [] for kind in kinds}
    for i in range(WARM_UP + rounds):
        for kind in kinds:
            begin = _now(x)
            explain(
                context.model, x[i % len(x)][None], method=kind.method, views=kind.views,
                max_views_per_forward=kind.views_per_pass, **options,
            )  # fmt: skip
            seconds[kind].append(_now(x) - begin)
    return {kind: taken[WARM_UP:] for kind, taken in seconds.items()}


def _over(seconds: Seconds, taken: Kind, alone: Kind) -> Estimate:
    """The ratio of two medians; rounds are drawn as a whole."""
    return statistics.bootstrap(_ratio_of_medians, np.array(seconds[taken]), np.array(seconds[alone]))


def _ratio_of_medians(taken: statistics.Floats, alone: statistics.Floats) -> float:
    return float(np.median(taken) / np.median(alone))


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return perf_counter()
