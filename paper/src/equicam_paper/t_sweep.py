"""How many views: Eq against T, and the dip at T = 4."""

from collections.abc import Iterator
from dataclasses import replace

from equicam.evaluate import statistics, summary
from equicam.evaluate.statistics import Estimate, Floats
from equicam.methods import resolve
from equicam.recipe import Recipe
from equicam_paper.claims import claims
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Both, Contradiction, Row, compare, minus

VIEWS = (2, 3, 4, 6, 9, 12, 18, 36)
STEPS = ((6, 9), (9, 12), (12, 18))
VIGNETTE = "with zero filling T = 4 falls below T = 3; in the disc T = 3 is below T = 4"
DIP = "T = 4 − T = 3"
EqByViews = dict[int, Estimate]
"""Eq of EquiGrad-CAM by the number of views; 1 is Grad-CAM."""


def measure(context: Context) -> Iterator[Row]:
    """Eq at each T by both protocols; T = 4 against T = 3 is where they disagree."""
    tables = Both(_evaluate(context, "ours"), _evaluate(context, "paper"))
    found = tables.map(_eq)
    start = f"tsweep.{context.backbone}"
    dip = tables.map(Evaluation.eq_above, _name(4), _name(3))
    no_dip = Contradiction(minus(dip.clean), VIGNETTE)
    for t in VIEWS:
        names = [name for name in (f"{start}.T{t}", f"{start}.T{t}.derived") if name in claims()]
        for name in names or [""]:
            at = found.map(lambda eq, t: eq[t], t)
            yield compare(name, at, label=f"T = {t}", artefact=no_dip if t == 4 else None)
        if (name := f"{start}.frac.T{t}") in claims():
            share = tables.map(_share, 1, t)
            yield compare(name, share, label=f"share of the gain at T = {t}")
    for before, t in STEPS:
        points = tables.map(_share, before, t, times=100)
        label = f"points of the gain that T = {t} adds to T = {before}"
        yield compare(f"{start}.add.T{t}", points, label=label)
    yield compare("", dip, label=DIP, reason="paired by image")
    yield compare(f"{start}.base.derived", found.map(lambda eq: eq[1]), label="grad-cam")


def _evaluate(context: Context, protocol: str) -> Evaluation:
    # every T up to 18 is a subset of the 36 views, so all are read at once
    methods = {_name(t): resolve(Recipe("equigrad-cam", views=t, protocol=protocol)) for t in VIEWS}
    return context.evaluate(methods | {_name(1): resolve(Recipe("grad-cam"))}, protocol=protocol)


def _name(views: int) -> str:
    return f"T = {views}" if views > 1 else "grad-cam"


def _eq(found: Evaluation) -> EqByViews:
    return {t: found.eq(_name(t)) for t in (1, *VIEWS)}


def _share(found: Evaluation, before: int, t: int, times: int = 1) -> Estimate:
    """The share of the gain of 18 views that `t` views add to `before`."""
    columns = [summary.pick(found.table, "eq", _name(views), found.region) for views in (t, before, 18, 1)]
    values = [column.by_id(columns[0].ids) for column in columns]
    one = statistics.bootstrap(_gained, *values, cluster=columns[0].ids, group=columns[0].group)
    return replace(one, value=times * one.value, low=times * one.low, high=times * one.high)


def _gained(at: Floats, before: Floats, most: Floats, least: Floats) -> float:
    mean = statistics.mean
    return (mean(at) - mean(before)) / (mean(most) - mean(least))


EXPERIMENT = Experiment("T sweep: how many views", ("tsweep.",), measure)
