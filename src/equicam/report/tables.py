"""An evaluation as printed tables: numbers with intervals, floors beside them, and what was left out."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Table

from equicam.errors import EquicamError
from equicam.scores import stats, summary
from equicam.scores.stats import Correlation, Estimate


def printed(rows: pa.Table, *, details: bool = False) -> Iterator[Table | str]:
    """The main table and, on request, the rest; last of all the pictures that could not be read."""
    yield _main(rows)
    if details:
        for part in (_by_angle, _conditions, _strata, _against_first, _signals):
            try:
                yield part(rows)
            except EquicamError:
                continue  # an evaluation without those scores
    bad = rows.filter(pc.is_null(rows["score"]))
    if len(bad):
        total = len(pc.unique(rows["id"]))
        yield f"{len(bad)} of {total} pictures could not be read; their rows say why"


def _main(rows: pa.Table) -> Table:
    table = Table("score", "method", "region", "n", "value", "floor", "skill", "constant")
    for column in table.columns[3:]:
        column.justify = "right"
    for line in summary.summarise(rows):
        floor = "" if np.isnan(line.floor) else f"{line.floor:.3f}"
        skill = "" if line.skill is None else estimate(line.skill)
        constant = f"{line.constant:.1%}, else {line.otherwise:.3f}" if line.constant > 0 else ""
        table.add_row(
            line.score, line.method or "", line.region or "", f"{line.value.n:,}", estimate(line.value), floor, skill,
            constant,
        )  # fmt: skip
    table.caption = (
        "mean over pictures [95 %, bootstrap by picture]; floor: unrelated pictures, or a trivial map"
    )
    return table


def _by_angle(rows: pa.Table) -> Table:
    found = {m: summary.by_angle(rows, m) for m in _methods(rows)}
    table = Table("Eq in the disc at", *(f"{angle:g}°" for angle, _ in next(iter(found.values()), [])))
    for method, line in found.items():
        table.add_row(method, *(f"{value.value:.3f}" for _, value in line))
    return table


def _conditions(rows: pa.Table) -> Table:
    table = Table("Eq in the disc", "all pairs", "stable top-1", "by confidence", "drift ~ confidence lost")
    for method in _methods(rows):
        found = summary.conditional(rows, method)
        r, _ = summary.drift_and_confidence(rows, method)
        table.add_row(method, *map(estimate, (found.all, found.stable, found.weighed)), correlation(r))
        table.caption = (
            f"the top-1 survives {found.stable_rate.value:.1%} of the turns; r over pairs that keep it"
        )
    return table


def _strata(rows: pa.Table) -> Table:
    found = {m: summary.by_confidence(rows, m) for m in _methods(rows)}
    table = Table("Eq in the disc, confidence", *(name for name, _ in next(iter(found.values()), [])))
    for method, line in found.items():
        table.add_row(method, *(estimate(value) for _, value in line))
    return table


def _against_first(rows: pa.Table) -> Table:
    first, *others = _methods(rows)
    if not others:
        raise EquicamError("a comparison", needs="two methods", got=first, fix="another --methods")
    table = Table(f"Eq in the disc above {first}", "mean", "better on", "effect (rank)", "log10 p (Holm)")
    found = {m: summary.contrast(rows, m, first) for m in others}
    adjusted = stats.holm(np.array([c.log10_p for c in found.values()]))
    for (method, c), p in zip(found.items(), adjusted, strict=True):
        table.add_row(
            method,
            f"{c.mean:+.3f} [{c.low:+.3f}, {c.high:+.3f}]",
            f"{c.wins:.1%}",
            f"{c.rank_biserial:+.2f}",
            f"{p:.1f}",
        )
    return table


def _signals(rows: pa.Table) -> Table:
    table = Table(
        "tells unstable maps",
        "Pearson",
        "Spearman",
        "AUROC",
        "capture lift",
        "held-out lift",
        "PEUM ahead by",
    )
    several = [m for m in _methods(rows) if _has(rows, "peum", m)]
    if not several:
        raise EquicamError("signals", needs="PEUM rows", got="none", fix="--scores eq,peum")
    for s in summary.signals(rows, several[0]):
        ahead = "" if s.ahead is None else estimate(s.ahead)
        table.add_row(
            s.name, correlation(s.pearson), correlation(s.spearman), estimate(s.auroc), estimate(s.capture),
            estimate(s.held_out.lift), ahead,
        )  # fmt: skip
    table.caption = "against 1 − Eq(grad-cam) in the disc; AUROC and capture of the worst tenth"
    return table


def estimate(e: Estimate) -> str:
    """A number with its interval."""
    if np.isnan(e.value):
        return "–"
    return f"{e.value:.3f}" if np.isnan(e.low) else f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"


def correlation(c: Correlation) -> str:
    """A correlation with its interval."""
    return "–" if np.isnan(c.r) else f"{c.r:+.2f} [{c.low:+.2f}, {c.high:+.2f}]"


def _methods(rows: pa.Table) -> list[str]:
    """In the order of the evaluation."""
    some = rows.filter(
        pc.and_(pc.is_valid(rows["method"]), pc.fill_null(pc.equal(rows["score"], "eq"), False))
    )
    found: list[str] = pc.unique(some["method"]).to_pylist()
    if not found:
        raise EquicamError("a table of Eq", needs="rows of it", got="none", fix="--scores eq")
    return found


def _has(rows: pa.Table, score: str, method: str) -> bool:
    both = pc.and_(pc.equal(rows["score"], score), pc.equal(rows["method"], method))
    return bool(pc.any(pc.fill_null(both, False)).as_py())
