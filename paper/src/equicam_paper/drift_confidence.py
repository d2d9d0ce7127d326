"""Is drift correlated with lost confidence? Over pairs that keep the top-1."""

from collections.abc import Iterator

from equicam.evaluate import summary
from equicam.evaluate.statistics import Estimate
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Row, compare, correlation, not_run

NO_CHANGE = "as the authors compute it: with 1 − the probability of the rotated image, which is not a change"
NO_P = "seven pairs of one image are not independent: no p is given, the interval is by image"


def measure(context: Context) -> Iterator[Row]:
    """Pearson of 1 − Eq with the authors' quantity, with the probability lost, and with the log ratio; intervals by image."""
    tables = context.evaluate_both(["grad-cam"])
    found = tables.map(lambda e: summary.drift_and_confidence(e.table, "grad-cam", region=e.region))
    lost, ratio, theirs = (found.map(lambda of, i: correlation(of[i]), i) for i in range(3))
    yield compare("cond.corr.r", theirs, label="with 1 − the rotated image's probability", reason=NO_CHANGE)
    yield compare("cond.corr.var", theirs.map(_squared), label="variance explained", reason=NO_CHANGE)
    yield not_run("cond.corr.p", NO_P)
    yield compare("", lost, label="with the probability lost")
    yield compare("", ratio, label="with |log p ratio|")


def _squared(r: Estimate) -> Estimate:
    ends = sorted((r.low**2, r.high**2))
    return Estimate(r.value**2, 0.0 if r.low < 0 < r.high else ends[0], ends[1], r.n, r.groups)


EXPERIMENT = Experiment("Drift against confidence change", ("cond.corr",), measure)
