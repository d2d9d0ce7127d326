"""How many views: Eq against T, and the dip at T = 4."""

from collections.abc import Iterator

from equicam.evaluation.statistics import Estimate
from equicam.methods import resolve
from equicam.paper.claims import claims
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Both, Row, compare, number
from equicam.recipe import Recipe

VIEWS = (2, 3, 4, 6, 9, 12, 18, 36)
STEPS = ((6, 9), (9, 12), (12, 18))
VIGNETTE = "with zero filling T = 4 falls below T = 3; in the disc it does not"
EqByViews = dict[int, Estimate]
"""Eq of EquiGrad-CAM by the number of views; 1 is Grad-CAM."""


def measure(context: Context) -> Iterator[Row]:
    """Eq at each T by both protocols; T = 4 against T = 3 is where they disagree."""
    found = Both(_eq(context, as_published=False), _eq(context, as_published=True))
    start = f"tsweep.{context.backbone}"
    dips = found.map(lambda eq: eq[3].value > eq[4].value)
    artefact = VIGNETTE if dips.as_published and not dips.clean else ""
    for t in VIEWS:
        names = [name for name in (f"{start}.T{t}", f"{start}.T{t}.derived") if name in claims()]
        for name in names or [""]:
            at = found.map(lambda eq, t: eq[t], t)
            yield compare(name, at, label=f"T = {t}", artefact=artefact if t == 4 else "")
        if (name := f"{start}.frac.T{t}") in claims():
            share = found.map(_share, 1, t).map(number)
            yield compare(name, share, label=f"share of the gain at T = {t}", tolerance=0.06)
    for before, t in STEPS:
        points = found.map(lambda eq, before, t: number(100 * _share(eq, before, t)), before, t)
        label = f"points of the gain that T = {t} adds to T = {before}"
        yield compare(f"{start}.add.T{t}", points, label=label, tolerance=1.5)
    yield compare(f"{start}.base.derived", found.map(lambda eq: eq[1]), label="grad-cam")


def _eq(context: Context, *, as_published: bool) -> EqByViews:
    # every T up to 18 is a subset of the 36 views, so all are read at once
    methods = {f"T = {t}": resolve(Recipe("equigrad-cam", views=t, as_published=as_published)) for t in VIEWS}
    found = context.evaluate(methods | {"grad-cam": resolve(Recipe("grad-cam"))}, as_published=as_published)
    return {1: found.eq("grad-cam")} | {t: found.eq(f"T = {t}") for t in VIEWS}


def _share(eq: EqByViews, before: int, t: int) -> float:
    """The share of the gain of 18 views that `t` views add to `before`."""
    return (eq[t].value - eq[before].value) / (eq[18].value - eq[1].value)


EXPERIMENT = Experiment("T sweep: how many views", ("tsweep.",), measure)
