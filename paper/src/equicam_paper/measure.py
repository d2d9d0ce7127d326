"""Quantities that several experiments share: Eq, the relative gain, p-values, accuracy, constant maps, means over seeds."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float
from torch import Tensor

from equicam.evaluate import statistics, summary
from equicam.evaluate.rows import MetricColumn, ReasonCode
from equicam.evaluate.statistics import Estimate, Floats
from equicam.methods import find_method
from equicam.protocol import PAPER
from equicam.readers.forward import Network, capture_layer
from equicam.readers.gradients import class_logit
from equicam.readers.model import Model
from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.rows import Both, Row, compare, note, number, scaled, too_few, with_verdict

SIGNIFICANCE = 0.05  # p above which a difference is called not significant
NO_LABEL = "labels that are the model's classes"
STRETCHED = "{}, stretched to [0, 1]"
"""A map that the authors rotate as it is, had they stretched it as they do most others."""
NOT_STRETCHED = "the authors do not stretch this map"
SCORE_CAM_WEIGHTS = (
    "by their protocol, a channel's weight is the confidence that the image masked by it gains over the whole one, or 0 where it gains none; a map is constant where no channel "
    "gains any. By ours, weights are a softmax over the channels' confidences, and none is 0"
)


def eq_row(claim: str, found: Both[Evaluation], method: str, *, reason: str = "", first: bool = False) -> Row:
    """Eq of a method, maybe on images of the first classes; without a claim it stands alone."""
    label = f"{method}, first classes" if first else method
    eq = found.map(Evaluation.eq, method)
    return compare(claim, eq, label=label, reason=reason, of_first_classes=first)


def stretched_row(context: Context, found: Both[Evaluation], method: str) -> Row:
    """Eq by the authors' protocol of a map that they do not stretch to [0, 1], stretched; ours always is."""
    name = STRETCHED.format(method)
    own = {name: replace(find_method(method, PAPER), stretched=True)}
    stretched = context.evaluate(own, protocol="paper").eq(name)
    return compare("", Both(found.clean.eq(method), stretched), label=name, reason=NOT_STRETCHED)


def of_columns(statistic: statistics.Statistic, first: MetricColumn, *others: MetricColumn) -> Estimate:
    """A statistic of columns, on the images of the first, with its interval."""
    values = [first.value, *(other.by_id(first.ids) for other in others)]
    return statistics.bootstrap(statistic, *values, cluster=first.ids, group=first.group)


def gain_row(claim: str, found: Both[Evaluation]) -> Row:
    """How far EquiGrad-CAM is above Grad-CAM, in % of Grad-CAM."""

    def above(several: Floats, one: Floats) -> float:
        return 100 * (statistics.mean(several) / statistics.mean(one) - 1)

    def gain(e: Evaluation) -> Estimate:
        return of_columns(above, e.column("eq", "equigrad-cam"), e.column("eq", "grad-cam"))

    return compare(claim, found.map(gain), label="relative gain, %")


def mean_over(found: Sequence[MetricColumn]) -> Estimate:
    """The mean over several networks and their images: an image's values are averaged first, as it repeats."""
    values = np.stack([column.by_id(found[0].ids) for column in found])
    return summary.mean_of(replace(found[0], value=values.mean(0)))


def paired(a: MetricColumn, b: MetricColumn) -> MetricColumn:
    """The difference a − b on the same images."""
    return replace(a, value=a.value - b.by_id(a.ids))


def seed_rows(
    claim: str,
    label: str,
    mean: Both[Estimate | None],
    each: Sequence[Both[Estimate | None]],
    reason: str = "",
) -> Iterator[Row]:
    """The mean over seeds with their range, or why nothing is measured; and every seed, where there are several."""
    known = [one.clean for one in each if one.clean is not None]
    notes = [reason, "" if known else NO_LABEL]
    if len(known) > 1:
        values, groups = [one.value for one in known], known[0].groups
        over = "images" if groups is None else f"{groups} groups of images"
        spread = f"{min(values):.3f} to {max(values):.3f}"
        notes.append(f"mean of {len(values)} seeds, {spread}; the interval is over {over}")
    yield compare(claim, mean, label=label, reason="; ".join(filter(None, notes)))
    if len(each) > 1:
        yield from (compare("", found, label=f"{label}, seed {i}") for i, found in enumerate(each))


def p_row(claim: str, label: str, log10_p: Both[float], n: int, *, opposite: float = 0.0) -> Row:
    """A test's log10 p, in the published direction, against a published bound; `opposite` is that of the other one.

    Below the bound the claim holds, on fewer images than the paper's too, because p falls with more; on more, log10 p is
    scaled to theirs. A p above the bound, and a claim that nothing is significant, decide nothing: absence of a test
    result is not equality.
    """
    known = claims()[claim]
    bound = known.value if isinstance(known.value, float) else None
    p, significant = log10_p.as_published * min(1.0, (known.n or n) / n), math.log10(SIGNIFICANCE)
    verdict, why = "undecided", too_few(number(p, n))
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
    return Both(scaled(wrong, -1, 1) if wrong.n else None, None)


def constant_share(found: Evaluation, method: str) -> Estimate:
    """The share of images whose map is constant."""
    return summary.mean_of(is_constant(found, method))


def is_constant(found: Evaluation, method: str) -> MetricColumn:
    """1 for every image whose map is constant, 0 for the others."""
    eq, constant = found.column("eq", method), constant_maps(found, method)
    return replace(eq, value=np.array([constant[i] for i in eq.ids], dtype=np.float64), score="constant")


def eq_where_defined(found: Evaluation, method: str) -> Estimate:
    """The mean Eq of the images whose map is not constant."""
    return summary.mean_of(found.column("eq", method), is_constant(found, method).value == 0)


def constant_maps(found: Evaluation, method: str) -> dict[str, bool]:
    """Whether an image's map is constant: its Eq then counts 0 at every angle for that reason."""
    eq = found.column("eq", method, each_angle=True)
    constant: dict[str, bool] = {}
    for image, why in zip(eq.ids, eq.reason, strict=True):
        constant[image] = constant.get(image, True) and why == ReasonCode.CONSTANT_MAP
    return constant


def layer_gradient(model: Model, x: Float[Tensor, "b c H W"]) -> Float[Tensor, "b k h w"]:
    """The gradient of the top-1 logit at the model's layer."""
    found = capture_layer(Network(model), x)
    (gradient,), _ = found.gradient(class_logit(found.logits, found.logits.argmax(1)))
    return gradient
