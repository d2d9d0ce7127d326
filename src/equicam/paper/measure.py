"""Quantities that several experiments share: Eq, the relative gain, p-values, accuracy and constant maps."""

import math

from jaxtyping import Float
from torch import Tensor

from equicam.evaluation import statistics, summary
from equicam.evaluation.reasons import ReasonCode
from equicam.evaluation.statistics import Estimate
from equicam.paper.claims import claims
from equicam.paper.context import Evaluation
from equicam.paper.rows import Both, Row, compare, number, with_verdict
from equicam.readers.forward import Network, capture_layer
from equicam.readers.model import Model
from equicam.readers.objective import class_logit

SIGNIFICANCE = 0.05
"""p above which a difference is called not significant."""
NO_LABEL = "labels that are the model's classes"


def eq_row(claim: str, found: Both[Evaluation], method: str, *, reason: str = "") -> Row:
    """Eq of a method; without a claim it stands alone."""
    return compare(claim, found.map(Evaluation.eq, method), label=method, reason=reason)


def gain_row(claim: str, found: Both[Evaluation]) -> Row:
    """How far EquiGrad-CAM is above Grad-CAM, in % of Grad-CAM."""

    def gain(e: Evaluation) -> Estimate:
        one, several = (summary.pick(e.table, "eq", m, e.region) for m in ("grad-cam", "equigrad-cam"))
        return statistics.bootstrap(_percent_above, several.by_id(one.ids), one.value, cluster=one.ids)

    return compare(claim, found.map(gain), label="relative gain, %")


def _percent_above(several: statistics.Floats, one: statistics.Floats) -> float:
    return 100 * (statistics.mean(several) / statistics.mean(one) - 1)


def p_row(claim: str, label: str, log10_p: Both[float], n: int) -> Row:
    """A test's log10 p against a published bound: below it the claim holds, on fewer images too, because p falls with more.

    A p above the bound, and a claim that nothing is significant, decide nothing: absence of a test result is not equality.
    """
    known = claims()[claim]
    bound = known.value if isinstance(known.value, float) else None
    p = log10_p.as_published
    if bound is None:
        verdict = "differs" if p < math.log10(SIGNIFICANCE) else "undecided"
    else:
        verdict = "matches" if p < math.log10(bound) else "undecided"
    published = "n.s." if bound is None else f"p < {bound:g}"
    found = log10_p.map(number, n)
    reason = "p falls as images are added; a p that is not small decides nothing"
    return with_verdict(claim, found, verdict, label=label, published=published, reason=reason)


def accuracy(found: Both[Evaluation]) -> Both[Estimate | None]:
    """The share of images classified as labelled; None where no label is one of the model's classes."""
    wrong = found.clean.mean("misclassified")
    right = Estimate(1 - wrong.value, 1 - wrong.high, 1 - wrong.low, wrong.n) if wrong.n else None
    return Both(right, None)


def constant_share(found: Evaluation, method: str) -> Estimate:
    """The share of images whose map is constant."""
    constant = constant_maps(found, method)
    return statistics.proportion(sum(constant.values()), len(constant))


def eq_where_defined(found: Evaluation, method: str) -> Estimate:
    """The mean Eq of the images whose map is not constant."""
    eq, constant = summary.pick(found.table, "eq", method, found.region), constant_maps(found, method)
    return statistics.bootstrap(statistics.mean, eq.value[[not constant[i] for i in eq.ids]])


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
