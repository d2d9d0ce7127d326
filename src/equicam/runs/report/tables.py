"""An evaluation as tables for the terminal: means with intervals, floors, and the images that were left out."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.table import Table

from equicam.evaluate import statistics, summary
from equicam.evaluate.statistics import Comparison, Correlation, Estimate

SIGNALS_CAPTION = (
    "of {of}, against 1 − Eq({against}) in the disc; AUROC and capture (× chance) of the worst tenth, mean ratio with a "
    "held-out threshold, AUROC for wrong predictions, difference of Pearson. Disagreement and stability are correlations "
    "of aligned maps, as Eq is"
)


def evaluation_tables(rows: pa.Table, *, details: bool = False) -> Iterator[Table | str]:
    """The main table, the detailed ones on request, and the number of images that could not be read."""
    yield from _main(rows)
    scores = set(rows["score"].to_pylist())
    if "causal-drift" in scores:
        yield from (_causal(rows, method) for method in _methods(rows, "causal-drift"))
    if details and "eq" in scores:
        yield from (_by_angle(rows), _conditions(rows), _strata(rows))
        if len(_methods(rows, "eq")) > 1:
            yield _against_first(rows)
        if "peum" in scores:
            yield _signals(rows)
    bad = rows.filter(pc.is_null(rows["score"]))
    if len(bad):
        total = len(pc.unique(rows["id"]))
        yield f"{len(bad)} of {total} images could not be read; their rows give the reason"


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]], caption: str | None = None) -> Table:
    table = Table(*columns, box=SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*row)
    return table


def _main(rows: pa.Table) -> Iterator[Table | str]:
    remarks, cells, groups = [], [], summary.count_groups(rows)
    for line in summary.summarise(rows):
        if line.score.startswith("causal-"):
            continue  # in a table of its own
        named = (line.score, line.method or "", line.region or "")
        floor = "" if np.isnan(line.floor) else f"{line.floor:.3f}"
        skill = "" if line.skill is None else f"{line.skill.value:.3f}"
        cells.append((*named, f"{line.value.n:,}", _estimate(line.value), floor, skill))
        of = f" of {line.method}" if line.method else ""
        name = f"{line.score}{of}" + (f" ({line.region})" if line.region else "")
        if line.constant > 0:
            without = f"{line.without_constant:.3f} without them"
            remarks.append(f"{name}: {line.constant:.1%} constant maps count 0; {without}")
        if not line.value.n and line.reason:
            remarks.append(f"{name}: {line.reason}")
    by = "image" if groups is None else "group"
    caption = f"mean over images [95 %, bootstrap by {by}]; floor: unrelated images, or a trivial map"
    table = _table(("score", "method", "region", "n", "value", "floor", "skill"), cells, caption)
    yield table
    yield from summary.groups_remark(groups)
    yield from remarks


def _causal(rows: pa.Table, method: str) -> Table:
    of_method = pc.and_(pc.equal(rows["score"], "causal-drift"), pc.equal(rows["method"], method))
    in_disc = pc.any(pc.fill_null(pc.and_(of_method, pc.equal(rows["region"], "disc")), False)).as_py()
    cells = []
    for line in summary.occlusion_effects(rows, method, region="disc" if in_disc else "full"):
        more = line.drift_above
        above = ("", "") if more is None else (_difference(more), f"{more.wins:.0%}")
        cells.append((line.region, _estimate(line.presented), _estimate(line.rotated), *above))
    columns = (f"{method} without", "presented", "rotated", "drift costs more by", "on")
    return _table(columns, cells, "probability lost; paired by image, in the presented frame")


def _by_angle(rows: pa.Table) -> Table:
    found = {m: summary.by_angle(rows, m) for m in _methods(rows, "eq")}
    labels: dict[float, str] = {}
    if "presentation" in rows.column_names:  # not in rows written before there were groups
        pairs = rows.select(["angle", "presentation"]).group_by(["angle", "presentation"]).aggregate([])
        labels = {one["angle"]: one["presentation"] for one in pairs.to_pylist() if one["presentation"]}
    headings = [labels.get(angle, f"{angle:g}°") for angle, _ in next(iter(found.values()), [])]
    cells = ((method, *(f"{value.value:.3f}" for _, value in line)) for method, line in found.items())
    return _table(("Eq in the disc at", *headings), cells)


def _conditions(rows: pa.Table) -> Table:
    rate, cells = None, []
    for method in _methods(rows, "eq"):
        found = summary.conditional(rows, method)
        lost, ratio, _ = summary.drift_and_confidence(rows, method)
        means = map(_estimate, (found.all, found.consistent, found.weighted))
        cells.append((method, *means, _correlation(lost), _correlation(ratio)))
        rate = rate or found.consistency_rate
    columns = ("all pairs", "consistent top-1", "by confidence", "drift ~ p lost", "drift ~ |log p ratio|")
    survives = None if rate is None else f"the top-1 survives {rate.value:.1%} of the presentations"
    return _table(("Eq in the disc", *columns), cells, survives and f"{survives}; r over pairs that keep it")


def _strata(rows: pa.Table) -> Table:
    found = {m: summary.by_confidence(rows, m) for m in _methods(rows, "eq")}
    names = [name for name, _ in next(iter(found.values()), [])]
    cells = (
        (method, *(f"{v.value:.3f} ({v.n})" if v.n else "–" for _, v in line))
        for method, line in found.items()
    )
    return _table(("Eq by p of the class", *names), cells, "mean (images)")


def _against_first(rows: pa.Table) -> Table:
    first, *others = _methods(rows, "eq")
    found = [summary.contrast(rows, m, first) for m in others]
    log10_p = np.array([c.log10_p for c in found])
    corrected = (statistics.holm(log10_p), statistics.bonferroni(log10_p))
    cells = (
        (m, _difference(c), f"{c.wins:.1%}", f"{c.rank_biserial:+.2f}", f"{holm:.1f}", f"{bonferroni:.1f}")
        for m, c, holm, bonferroni in zip(others, found, *corrected, strict=True)
    )
    columns = ("mean", "better on", "effect (rank)", "log10 p: Holm", "Bonferroni")
    return _table((f"Eq above {first}", *columns), cells)


def _signals(rows: pa.Table) -> Table:
    several = _methods(rows, "peum")
    single = [m for m in _methods(rows, "eq") if m not in several]
    against = "grad-cam" if "grad-cam" in single else (single or several)[0]
    cells = []
    for s in summary.signals(rows, several[0], of=against):
        found = (s.auroc, s.capture, s.held_out.lift, s.wrong)
        behind = "" if s.behind_peum is None else _estimate(s.behind_peum)
        cells.append((s.name, *map(_correlation, (s.pearson, s.spearman)), *map(_estimate, found), behind))
    columns = ("Pearson", "Spearman", "AUROC", "capture", "held-out", "wrong", "behind PEUM")
    return _table(("finds low Eq", *columns), cells, SIGNALS_CAPTION.format(of=several[0], against=against))


def _estimate(e: Estimate) -> str:
    """A number with its interval."""
    if np.isnan(e.value):
        return "–"
    return f"{e.value:.3f}" if np.isnan(e.low) else f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"


def _correlation(c: Correlation) -> str:
    return "–" if np.isnan(c.r) else f"{c.r:+.2f} [{c.low:+.2f}, {c.high:+.2f}]"


def _difference(c: Comparison) -> str:
    e = c.difference
    return f"{e.value:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"


def _methods(rows: pa.Table, score: str) -> list[str]:
    """The methods with this score, in the order of the evaluation."""
    some = rows.filter(
        pc.and_(pc.is_valid(rows["method"]), pc.fill_null(pc.equal(rows["score"], score), False))
    )
    found: list[str] = pc.unique(some["method"]).to_pylist()
    return found
