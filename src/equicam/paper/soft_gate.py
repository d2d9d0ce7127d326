"""The soft gate: views weighed by p^γ."""

from collections.abc import Iterator
from dataclasses import replace

from equicam.core.weights import SoftGate
from equicam.methods import find
from equicam.paper.context import Bench, Experiment, Line, eq, line, number

GAMMAS = (0.0, 0.25, 0.5, 1.0, 2.0)


def run(bench: Bench) -> Iterator[Line]:
    """Eq at each γ; γ = 0 is the ungated method."""
    made = {}
    for published in (True, False):
        base = find("equigrad-cam+soft", as_published=published)
        methods = {
            f"γ = {g:g}": replace(base, fusion=replace(base.fusion, weigh=SoftGate(g))) for g in GAMMAS
        }
        rows = bench.rows(methods, as_published=published)
        made[published] = {name: eq(rows, name, as_published=published) for name in methods}
    ungated = "γ = 0"
    yield line(
        "softgate.ungated", clean=made[False][ungated], as_published=made[True][ungated], what="ungated"
    )
    low, high = (
        min(v.value for k, v in made[True].items() if k != ungated),
        max(v.value for k, v in made[True].items()),
    )
    yield line(
        "softgate.range",
        as_published=number((low + high) / 2),
        clean=None,
        what=f"γ from 0.25 to 2: {low:.3f} to {high:.3f}",
    )
    for name, value in made[True].items():
        yield Line("", name, "not in the paper", made[False][name], value, "measured")


EXPERIMENT = Experiment("Soft gate: views weighed by confidence", ("softgate.",), run)
