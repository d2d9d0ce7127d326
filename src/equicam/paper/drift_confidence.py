"""Is drift correlated with lost confidence? Over pairs that keep the top-1."""

from collections.abc import Iterator

from equicam.evaluation import summary
from equicam.paper.context import Context
from equicam.paper.experiment import Experiment
from equicam.paper.rows import Row, compare, correlation, not_run, number

NO_CHANGE = (
    "the paper correlates with 1 − the largest probability of the rotated image, which is not a change"
)
NO_P = "seven pairs of one image are not independent: no p is given, the interval is by image"


def measure(context: Context) -> Iterator[Row]:
    """Pearson of 1 − Eq with the probability lost, and with the log ratio; intervals by image, not by pair."""
    tables = context.evaluate_both(["grad-cam"])
    found = tables.map(lambda e: summary.drift_and_confidence(e.table, "grad-cam", region=e.region))
    lost, ratio = (found.map(lambda pair, i: correlation(pair[i]), i) for i in (0, 1))
    yield compare("cond.corr.r", lost, label="with the probability lost", reason=NO_CHANGE)
    explained = lost.map(lambda r: number(r.value**2))
    yield compare("cond.corr.var", explained, label="variance explained", tolerance=0.01, reason=NO_CHANGE)
    yield not_run("cond.corr.p", NO_P)
    yield compare("", ratio, label="with |log p ratio|")


EXPERIMENT = Experiment("Drift against confidence change", ("cond.corr",), measure)
