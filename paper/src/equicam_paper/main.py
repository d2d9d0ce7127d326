"""Table main: equivariance of every method."""

from collections.abc import Iterator

from equicam.methods import find_method
from equicam.protocol import PAPER
from equicam_paper.claims import METHODS, claims
from equicam_paper.context import FORWARD_PASSES, Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.measure import SCORE_CAM_WEIGHTS, eq_row, gain_row, stretched_row
from equicam_paper.rows import Row, compare, costly, not_run

REASONS = {"score-cam": SCORE_CAM_WEIGHTS}
FIRST_CLASSES = "on images of the first fifth of the classes, as the published number is"


def measure(context: Context) -> Iterator[Row]:
    """Eq of each method by both protocols, and the relative gain of EquiGrad-CAM."""
    published = {
        name: m for name, m in METHODS.items() if any(c.startswith(f"main.{name}.") for c in claims())
    }
    methods = context.affordable([*published.values(), "coverage"])
    first = [m for name, m in published.items() if m in methods and _is_of_first_classes(name, context)]
    with context.masked_scores():  # some of the first images are in the sample too
        found = context.evaluate_both(methods)
        on_first = context.evaluate_both(first, items=context.first_images) if first else found
        stretched = [
            stretched_row(context, found, m)
            for m in methods
            if m in METHODS and not find_method(m, PAPER).stretched
        ]
    for name, method in published.items():
        claim = f"main.{name}.{context.backbone}.eq"
        if method in first:
            yield eq_row(claim, on_first, method, reason=FIRST_CLASSES, of_first_classes=True)
            yield eq_row("", found, method)
        elif method in methods:
            yield eq_row(claim, found, method, reason=REASONS.get(method, ""))
        elif claim in claims():
            yield not_run(claim, costly(FORWARD_PASSES[method]))
    yield from stretched
    yield gain_row(f"gain.{context.backbone}", found)
    yield compare(
        "", found.map(Evaluation.eq, "coverage"), label="coverage: a map that ignores the image",
        reason="the full square with zero filling rewards it",
    )  # fmt: skip


def _is_of_first_classes(name: str, context: Context) -> bool:
    """Whether a method's published number is of the first classes."""
    known = claims().get(f"main.{name}.{context.backbone}.eq")
    return context.labelled and known is not None and known.of_first_classes


EXPERIMENT = Experiment("Table main: equivariance of every method", ("main.", "gain."), measure)
