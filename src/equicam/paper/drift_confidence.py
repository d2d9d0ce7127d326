"""Does drift go with lost confidence? Correlation over pairs that keep the top-1."""

from collections.abc import Iterator

from equicam.evaluation import summary
from equicam.paper.context import Bench, Experiment, Line, correlated, line, not_run, number


def run(bench: Bench) -> Iterator[Line]:
    """Pearson of 1 − Eq with the probability lost, and with the log ratio; intervals by picture, not by pair."""
    tables = {p: bench.rows(["grad-cam"], as_published=p) for p in (True, False)}
    found = {
        p: summary.drift_and_confidence(t, "grad-cam", region="full" if p else "disc")
        for p, t in tables.items()
    }
    lost = {p: correlated(found[p][0]) for p in (True, False)}
    why = "the paper correlates with 1 − the largest probability of the turned picture, which is no change"
    yield line(
        "cond.corr.r",
        clean=lost[False],
        as_published=lost[True],
        what="with the probability lost",
        reason=why,
    )
    yield line(
        "cond.corr.var",
        clean=number(lost[False].value ** 2),
        as_published=number(lost[True].value ** 2),
        what="variance explained",
        tolerance=0.01,
        reason=why,
    )
    yield not_run(
        "cond.corr.p",
        "seven pairs of one picture are not independent: no p is given, the interval is by picture",
    )
    yield Line(
        "",
        "with |log p ratio|",
        "not in the paper",
        correlated(found[False][1]),
        correlated(found[True][1]),
        "measured",
    )


EXPERIMENT = Experiment("Drift against confidence change", ("cond.corr",), run)
