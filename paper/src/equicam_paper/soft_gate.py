"""The soft gate: views weighted by p^γ."""

from collections.abc import Iterator
from dataclasses import replace

from equicam.core.weights import SoftGate
from equicam.methods import resolve
from equicam.recipe import Recipe
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Row, compare

GAMMAS = (0.0, 0.25, 0.5, 1.0, 2.0)
CHANGE = "γ = 2 − γ = 0"
CHANGE_FIRST = f"{CHANGE}, first classes"
"""Of the classes that the published range is of."""


def measure(context: Context) -> Iterator[Row]:
    """Eq at each γ, and the change from γ = 0, the ungated method; the claims are about the first classes."""
    found = Both(_evaluate(context, "ours"), _evaluate(context, "paper"))
    on_first = context.on_first_classes(found)
    ungated, of_first = on_first.map(Evaluation.eq, _name(0.0)), context.labelled
    label = "ungated, first classes" if of_first else "ungated"
    yield compare("softgate.ungated", ungated, label=label, of_first_classes=of_first)
    strongest = _name(2.0), _name(0.0)
    yield compare(
        "softgate.range", on_first.map(Evaluation.eq_above, *strongest), label=CHANGE_FIRST if of_first else CHANGE,
        reason="paired by image; of γ = 2 alone, the strongest gate tried", of_first_classes=of_first,
    )  # fmt: skip
    for gamma in GAMMAS:
        yield compare("", found.map(Evaluation.eq, _name(gamma)), label=_name(gamma))
    if of_first:
        change = found.map(Evaluation.eq_above, *strongest)
        yield compare("", change, label=CHANGE, reason="paired by image")


def _evaluate(context: Context, protocol: str) -> Evaluation:
    base = resolve(Recipe("equigrad-cam+soft", protocol=protocol))
    methods = {_name(g): replace(base, fusion=replace(base.fusion, weigh=SoftGate(g))) for g in GAMMAS}
    return context.evaluate(methods, protocol=protocol)


def _name(gamma: float) -> str:
    return f"γ = {gamma:g}"


EXPERIMENT = Experiment("Soft gate: views weighted by confidence", ("softgate.",), measure)
