"""CUB-200-2011: does the map point at the bird?"""

from collections.abc import Iterator
from dataclasses import replace

from equicam.evaluate import statistics, summary
from equicam_paper.claims import Claim
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment, another_network
from equicam_paper.rows import Remark, Row, compare, note

METHODS = {"eg": "equigrad-cam+pcf", "gc": "grad-cam", "gcpp": "grad-cam++"}
BASELINES = {"pointing": "the middle pixel", "box-iou": "the whole frame"}
"""Each metric, and the answer to it that needs no map."""


def measure(context: Context) -> Iterator[Row]:
    """Pointing game and box overlap; the paper's method here is PCF."""
    if context.of_cub:
        yield from box_rows(context, context.backbone)


def has_boxes(context: Context) -> bool:
    """Whether any image of the source has a box."""
    return any(item.boxes for item in context.listing)


def box_rows(context: Context, of: str) -> Iterator[Row]:
    """Both metrics of every method, with the score of an answer without a map; `of` names the network as claims do."""
    # only the presented maps are scored: one exact rotation instead of seven
    once = replace(context, options=context.options | {"angles": (180,)})
    found = once.evaluate_both([*METHODS.values(), "equigrad-cam"], list(BASELINES))
    for metric, baseline in BASELINES.items():
        for short, method in (*METHODS.items(), ("", "equigrad-cam")):
            claim = f"cub.iou.{of}.{short}"
            if metric == "pointing":
                claim = f"cub.pg.{of}" if short == "eg" else ""
            mean = found.map(Evaluation.mean, metric, method, "boxes")
            floor = statistics.mean(summary.pick(found.clean.table, metric, method, "boxes").floor)
            yield compare(claim, mean, label=f"{method}, {metric}", reason=f"{baseline} gets {floor:.3f}")


def _missing(context: Context, claim: Claim) -> Remark:
    if context.of_cub:
        return another_network(context, claim)
    return note("images of birds with their boxes: --data CUB_200_2011")


EXPERIMENT = Experiment(
    "CUB-200-2011: does the map point at the bird?",
    ("cub.",),
    measure,
    needs="an ImageNet classifier and CUB-200-2011",
    missing=_missing,
)
