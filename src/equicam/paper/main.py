"""Table main: equivariance of every method."""

from collections.abc import Iterator

from equicam.paper.claims import METHODS, claims
from equicam.paper.context import FORWARD_PASSES, Context, Evaluation
from equicam.paper.experiment import Experiment
from equicam.paper.measure import eq_row, gain_row
from equicam.paper.rows import Row, compare, costly, not_run


def measure(context: Context) -> Iterator[Row]:
    """Eq of each method by both protocols, and the relative gain of EquiGrad-CAM."""
    published = {
        name: m for name, m in METHODS.items() if any(c.startswith(f"main.{name}.") for c in claims())
    }
    methods = context.affordable([*published.values(), "coverage"])
    found = context.evaluate_both(methods)
    for name, method in published.items():
        claim = f"main.{name}.{context.backbone}.eq"
        if method in methods:
            yield eq_row(claim, found, method, context=context)
        elif claim in claims():
            yield not_run(claim, costly(FORWARD_PASSES[method]))
    yield gain_row(f"gain.{context.backbone}", found)
    yield compare(
        "", found.map(Evaluation.eq, "coverage"), label="coverage: a map that ignores the image",
        reason="the full square with zero filling rewards it",
    )  # fmt: skip


EXPERIMENT = Experiment("Table main: equivariance of every method", ("main.", "gain."), measure)
