"""An evaluation as tables for the terminal: means with intervals, floors, and the images that were left out."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.table import Table

from equicam.evaluate import statistics, summary
from equicam.evaluate.statistics import Correlation, Estimate


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


def _table(*columns: str, caption: str | None = None) -> Table:
    table = Table(*columns, box=SIMPLE_HEAD, caption=caption, padding=(0, 1, 0, 0), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    return table


def _main(rows: pa.Table) -> Iterator[Table | str]:
    table = _table("score", "method", "region", "n", "value", "floor", "skill")
    remarks = []
    for line in summary.summarise(rows):
        if line.score.startswith("causal-"):
            continue  # in a table of its own
        floor = "" if np.isnan(line.floor) else f"{line.floor:.3f}"
        skill = "" if line.skill is None else f"{line.skill.value:.3f}"
        table.add_row(
            line.score,
            line.method or "",
            line.region or "",
            f"{line.value.n:,}",
            estimate(line.value),
            floor,
            skill,
        )
        name = (
            line.score
            + (f" of {line.method}" if line.method else "")
            + (f" ({line.region})" if line.region else "")
        )
        if line.constant > 0:
            remarks.append(
                f"{name}: {line.constant:.1%} constant maps count 0; {line.without_constant:.3f} without them"
            )
        if not line.value.n and line.reason:
            remarks.append(f"{name}: {line.reason}")
    by = "image" if summary.count_groups(rows) is None else "group"
    table.caption = f"mean over images [95 %, bootstrap by {by}]; floor: unrelated images, or a trivial map"
    yield table
    yield from summary.groups_remark(summary.count_groups(rows))
    yield from remarks


def _causal(rows: pa.Table, method: str) -> Table:
    table = _table(f"{method} without", "presented", "rotated", "drift costs more by", "on")
    region = "disc" if _has(rows, "causal-drift", method, "disc") else "full"
    for line in summary.occlusion_effects(rows, method, region=region):
        more = line.drift_above
        by = "" if more is None else _signed(more.difference)
        table.add_row(
            line.region,
            estimate(line.presented),
            estimate(line.rotated),
            by,
            "" if more is None else f"{more.wins:.0%}",
        )
    table.caption = "probability lost; paired by image, in the presented frame"
    return table


def _by_angle(rows: pa.Table) -> Table:
    found = {m: summary.by_angle(rows, m) for m in _methods(rows, "eq")}
    labels: dict[float, str] = {}
    if "presentation" in rows.column_names:  # not in rows written before there were groups
        pairs = rows.select(["angle", "presentation"]).group_by(["angle", "presentation"]).aggregate([])
        labels = {one["angle"]: one["presentation"] for one in pairs.to_pylist() if one["presentation"]}
    headings = (labels.get(angle, f"{angle:g}°") for angle, _ in next(iter(found.values()), []))
    table = _table("Eq in the disc at", *headings)
    for method, line in found.items():
        table.add_row(method, *(f"{value.value:.3f}" for _, value in line))
    return table


def _conditions(rows: pa.Table) -> Table:
    table = _table(
        "Eq in the disc",
        "all pairs",
        "consistent top-1",
        "by confidence",
        "drift ~ p lost",
        "drift ~ |log p ratio|",
    )
    rate = None
    for method in _methods(rows, "eq"):
        found = summary.conditional(rows, method)
        lost, ratio, _ = summary.drift_and_confidence(rows, method)
        table.add_row(
            method,
            *map(estimate, (found.all, found.consistent, found.weighted)),
            correlation(lost),
            correlation(ratio),
        )
        rate = rate or found.consistency_rate
    if rate is not None:
        table.caption = f"the top-1 survives {rate.value:.1%} of the presentations; r over pairs that keep it"
    return table


def _strata(rows: pa.Table) -> Table:
    found = {m: summary.by_confidence(rows, m) for m in _methods(rows, "eq")}
    table = _table("Eq by p of the class", *(name for name, _ in next(iter(found.values()), [])))
    for method, line in found.items():
        table.add_row(method, *(f"{v.value:.3f} ({v.n})" if v.n else "–" for _, v in line))
    table.caption = "mean (images)"
    return table


def _against_first(rows: pa.Table) -> Table:
    first, *others = _methods(rows, "eq")
    table = _table(f"Eq above {first}", "mean", "better on", "effect (rank)", "log10 p: Holm", "Bonferroni")
    found = {m: summary.contrast(rows, m, first) for m in others}
    log10_p = np.array([c.log10_p for c in found.values()])
    for (method, c), holm, bonferroni in zip(
        found.items(), statistics.holm(log10_p), statistics.bonferroni(log10_p), strict=True
    ):
        effect = f"{c.rank_biserial:+.2f}"
        table.add_row(
            method, _signed(c.difference), f"{c.wins:.1%}", effect, f"{holm:.1f}", f"{bonferroni:.1f}"
        )
    return table


def _signals(rows: pa.Table) -> Table:
    several = _methods(rows, "peum")
    single = [m for m in _methods(rows, "eq") if m not in several]
    of = "grad-cam" if "grad-cam" in single else (single or several)[0]
    table = _table(
        "finds low Eq", "Pearson", "Spearman", "AUROC", "capture", "held-out", "wrong", "behind PEUM"
    )
    for s in summary.signals(rows, several[0], of=of):
        behind = "" if s.behind_peum is None else estimate(s.behind_peum)
        table.add_row(
            s.name, correlation(s.pearson), correlation(s.spearman), estimate(s.auroc), estimate(s.capture),
            estimate(s.held_out.lift), estimate(s.wrong), behind,
        )  # fmt: skip
    table.caption = f"of {several[0]}, against 1 − Eq({of}) in the disc; AUROC and capture (× chance) of the worst tenth, mean ratio with a held-out threshold, AUROC for wrong predictions, difference of Pearson. Disagreement and stability are correlations of aligned maps, as Eq is"
    return table


def estimate(e: Estimate) -> str:
    """A number with its interval."""
    if np.isnan(e.value):
        return "–"
    return f"{e.value:.3f}" if np.isnan(e.low) else f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"


def _signed(e: Estimate) -> str:
    return f"{e.value:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"


def correlation(c: Correlation) -> str:
    """A correlation with its interval."""
    return "–" if np.isnan(c.r) else f"{c.r:+.2f} [{c.low:+.2f}, {c.high:+.2f}]"


def _methods(rows: pa.Table, score: str) -> list[str]:
    """The methods with this score, in the order of the evaluation."""
    some = rows.filter(
        pc.and_(pc.is_valid(rows["method"]), pc.fill_null(pc.equal(rows["score"], score), False))
    )
    found: list[str] = pc.unique(some["method"]).to_pylist()
    return found


def _has(rows: pa.Table, score: str, method: str, region: str) -> bool:
    keep = pc.and_(pc.equal(rows["score"], score), pc.equal(rows["method"], method))
    return bool(pc.any(pc.fill_null(pc.and_(keep, pc.equal(rows["region"], region)), False)).as_py())
