"""Quantities that several experiments share: Eq, the relative gain, p-values, accuracy and constant maps."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor

from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import MetricColumn, ReasonCode
from equicam.evaluate.statistics import Estimate
from equicam.methods import find_method
from equicam.protocol import PAPER
from equicam.readers.forward import Network, capture_layer
from equicam.readers.gradients import class_logit
from equicam.readers.model import Model
from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.rows import Both, Row, compare, note, number, too_few, with_verdict

SIGNIFICANCE = 0.05
"""p above which a difference is called not significant."""
NO_LABEL = "labels that are the model's classes"


def eq_row(
    claim: str, found: Both[Evaluation], method: str, *, reason: str = "", of_first_classes: bool = False
) -> Row:
    """Eq of a method, maybe on images of the first classes; without a claim it stands alone."""
    return compare(
        claim,
        found.map(Evaluation.eq, method),
        label=f"{method}, first classes" if of_first_classes else method,
        reason=reason,
        of_first_classes=of_first_classes,
    )


STRETCHED = "{}, stretched to [0, 1]"
"""A map that the authors rotate as it is, had they stretched it as they do most others."""
NOT_STRETCHED = "the authors do not stretch this map"
SCORE_CAM_WEIGHTS = (
    "by their protocol, a channel's weight is the confidence that the image masked by it gains over the whole one, or 0 where it gains none; a map is constant where no channel "
    "gains any. By ours, weights are a softmax over the channels' confidences, and none is 0"
)


def stretched_row(context: Context, found: Both[Evaluation], method: str) -> Row:
    """Eq by the authors' protocol of a map that they do not stretch to [0, 1], stretched; ours always is."""
    name = STRETCHED.format(method)
    stretched = context.evaluate(
        {name: replace(find_method(method, PAPER), stretched=True)}, protocol="paper"
    )
    return compare("", Both(found.clean.eq(method), stretched.eq(name)), label=name, reason=NOT_STRETCHED)


def gain_row(claim: str, found: Both[Evaluation]) -> Row:
    """How far EquiGrad-CAM is above Grad-CAM, in % of Grad-CAM."""

    def gain(e: Evaluation) -> Estimate:
        one, several = (summary.pick(e.table, "eq", m, e.region) for m in ("grad-cam", "equigrad-cam"))
        return statistics.bootstrap(
            _percent_above, several.by_id(one.ids), one.value, cluster=one.ids, group=one.group
        )

    return compare(claim, found.map(gain), label="relative gain, %")


def _percent_above(several: statistics.Floats, one: statistics.Floats) -> float:
    return 100 * (statistics.mean(several) / statistics.mean(one) - 1)


def mean_over(found: Sequence[MetricColumn]) -> Estimate:
    """The mean over several networks and their images: each image's values are averaged first, as the same image repeats."""
    first = found[0]
    values = np.stack([column.by_id(first.ids) for column in found])
    return summary.mean_of(replace(first, value=values.mean(0)))


def paired(a: MetricColumn, b: MetricColumn) -> MetricColumn:
    """The difference a − b on the same images."""
    return replace(a, value=a.value - b.by_id(a.ids))


def p_row(claim: str, label: str, log10_p: Both[float], n: int, *, opposite: float = 0.0) -> Row:
    """A test's log10 p, in the published direction, against a published bound; `opposite` is that of the other direction.

    Below the bound the claim holds, on fewer images than the paper's too, because p falls with more; on more, log10 p is
    scaled to theirs. A p above the bound, and a claim that nothing is significant, decide nothing: absence of a test
    result is not equality.
    """
    known = claims()[claim]
    bound = known.value if isinstance(known.value, float) else None
    scale = min(1.0, known.n / n) if known.n else 1.0
    p, significant = scale * log10_p.as_published, math.log10(SIGNIFICANCE)
    verdict = "undecided"
    why = too_few(number(p, n))
    if why is None:
        why = note("p falls as images are added; a p that is not small decides nothing")
        if (p if bound is None else opposite) < significant:
            verdict = "differs"
        elif bound is not None and p < math.log10(bound):
            verdict = "matches"
    published = "n.s." if bound is None else f"p < {bound:g}"
    return with_verdict(claim, log10_p.map(number, n), verdict, label=label, published=published, why=why)


def accuracy(found: Both[Evaluation]) -> Both[Estimate | None]:
    """The share of images classified as labelled; None where no label is one of the model's classes."""
    wrong = found.clean.mean("misclassified")
    right = (
        Estimate(1 - wrong.value, 1 - wrong.high, 1 - wrong.low, wrong.n, wrong.groups) if wrong.n else None
    )
    return Both(right, None)


def constant_share(found: Evaluation, method: str) -> Estimate:
    """The share of images whose map is constant."""
    return summary.mean_of(is_constant(found, method))


def is_constant(found: Evaluation, method: str) -> MetricColumn:
    """1 for every image whose map is constant, 0 for the others."""
    eq, constant = summary.pick(found.table, "eq", method, found.region), constant_maps(found, method)
    return replace(eq, value=np.array([constant[i] for i in eq.ids], dtype=np.float64), score="constant")


def eq_where_defined(found: Evaluation, method: str) -> Estimate:
    """The mean Eq of the images whose map is not constant."""
    eq, constant = summary.pick(found.table, "eq", method, found.region), constant_maps(found, method)
    return summary.mean_of(eq, np.array([not constant[i] for i in eq.ids], dtype=np.bool_))


def constant_maps(found: Evaluation, method: str) -> dict[str, bool]:
    """Whether an image's map is constant: its Eq then counts 0 at every angle for that reason."""
    eq = summary.pick(found.table, "eq", method, found.region, each_angle=True)
    constant: dict[str, bool] = {}
    for image, why in zip(eq.ids, eq.reason, strict=True):
        constant[image] = constant.get(image, True) and why == ReasonCode.CONSTANT_MAP
    return constant


def layer_gradient(model: Model, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b k h w"]:
    """The gradient of the top-1 logit at the model's layer."""
    found = capture_layer(Network(model), x)
    (gradient,), _ = found.gradient(class_logit(found.logits, found.logits.argmax(1)))
    return gradient


def describe_seeds(found: Sequence[Estimate]) -> str:
    """The range of a quantity over the seeds whose mean a row has, and what its interval is over."""
    values, groups = [one.value for one in found], found[0].groups
    over = "images" if groups is None else f"{groups} groups of images"
    return f"mean of {len(values)} seeds, {min(values):.3f} to {max(values):.3f}; the interval is over {over}"
