"""The soft gate: views weighted by p^γ."""

from collections.abc import Iterator
from dataclasses import replace

from equicam.core.weights import SoftGate
from equicam.evaluation import summary
from equicam.evaluation.statistics import Estimate
from equicam.methods import resolve
from equicam.paper.context import Context, Evaluation
from equicam.paper.experiment import Experiment
from equicam.paper.margins import published_range
from equicam.paper.rows import Both, Row, compare
from equicam.recipe import Recipe

GAMMAS = (0.0, 0.25, 0.5, 1.0, 2.0)
CHANGE = "γ = 2 − γ = 0"
CHANGE_FIRST = f"{CHANGE}, first classes"
"""Of the classes that the published range is of."""


def measure(context: Context) -> Iterator[Row]:
    """Eq at each γ, of the claims on the first classes; γ = 0 is the ungated method."""
    found = Both(_evaluate(context, as_published=False), _evaluate(context, as_published=True))
    on_first = context.on_first_classes(found)
    first = on_first.map(_eq)
    of_first = context.labelled
    yield compare(
        "softgate.ungated",
        first.map(lambda eq: eq[0.0]),
        label="ungated, first classes",
        of_first_classes=of_first,
    )
    low, high = published_range("softgate.range")
    gated = first.map(
        lambda eq: max((eq[g] for g in GAMMAS if g), key=lambda e: max(low - e.value, e.value - high))
    )
    label = "γ from 0.25 to 2, first classes: the one furthest from the published range"
    yield compare("softgate.range", gated, label=label, of_first_classes=of_first)
    for gamma in GAMMAS:
        yield compare("", found.map(Evaluation.eq, _name(gamma)), label=_name(gamma))
    yield compare("", found.map(_change), label=CHANGE, reason="paired by image")
    if context.labelled:
        yield compare("", on_first.map(_change), label=CHANGE_FIRST, reason="paired by image")


def _evaluate(context: Context, *, as_published: bool) -> Evaluation:
    base = resolve(Recipe("equigrad-cam+soft", as_published=as_published))
    methods = {_name(g): replace(base, fusion=replace(base.fusion, weigh=SoftGate(g))) for g in GAMMAS}
    return context.evaluate(methods, as_published=as_published)


def _name(gamma: float) -> str:
    return f"γ = {gamma:g}"


def _change(found: Evaluation) -> Estimate:
    return summary.contrast(found.table, _name(2.0), _name(0.0), region=found.region).difference


def _eq(found: Evaluation) -> dict[float, Estimate]:
    return {gamma: found.eq(_name(gamma)) for gamma in GAMMAS}


EXPERIMENT = Experiment("Soft gate: views weighted by confidence", ("softgate.",), measure)
