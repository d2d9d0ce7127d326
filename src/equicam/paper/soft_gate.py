"""The soft gate: views weighted by p^γ."""

from collections.abc import Iterator
from dataclasses import replace

from equicam.core.weights import SoftGate
from equicam.evaluation.statistics import Estimate
from equicam.methods import resolve
from equicam.paper.claims import claims
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Row, compare
from equicam.recipe import Recipe

GAMMAS = (0.0, 0.25, 0.5, 1.0, 2.0)


def measure(context: Context) -> Iterator[Row]:
    """Eq at each γ; γ = 0 is the ungated method."""
    found = Both(_eq(context, as_published=False), _eq(context, as_published=True))
    yield compare("softgate.ungated", found.map(lambda eq: eq[0.0]), label="ungated")
    low, high = min(claims()["softgate.range"].values), max(claims()["softgate.range"].values)
    gated = found.map(
        lambda eq: max((eq[g] for g in GAMMAS if g), key=lambda e: max(low - e.value, e.value - high))
    )
    yield compare(
        "softgate.range", gated, label="γ from 0.25 to 2: the one furthest from the published range"
    )
    for gamma in GAMMAS:
        yield compare("", found.map(lambda eq, gamma: eq[gamma], gamma), label=f"γ = {gamma:g}")


def _eq(context: Context, *, as_published: bool) -> dict[float, Estimate]:
    base = resolve(Recipe("equigrad-cam+soft", as_published=as_published))
    methods = {f"γ = {g:g}": replace(base, fusion=replace(base.fusion, weigh=SoftGate(g))) for g in GAMMAS}
    found = context.evaluate(methods, as_published=as_published)
    return {gamma: found.eq(f"γ = {gamma:g}") for gamma in GAMMAS}


EXPERIMENT = Experiment("Soft gate: views weighted by confidence", ("softgate.",), measure)
