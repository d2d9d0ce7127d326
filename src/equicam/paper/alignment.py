"""Table align: what turning back buys, in feature and in output space."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from equicam.evaluation import summary
from equicam.evaluation.statistics import Estimate
from equicam.paper.context import (
    NAMES,
    Bench,
    Experiment,
    Line,
    beside,
    difference,
    eq,
    others,
    shown_of,
)

ROWS = (
    "Grad-CAM single view", "Unaligned output-space", "Aligned output-space", "Aligned feature-space (EquiGrad-CAM)",
)  # fmt: skip


def run(bench: Bench) -> Iterator[Line]:
    """Single view, unaligned, aligned in output space, aligned in feature space."""
    ours = {f"align.{words}.{bench.backbone}.eq": NAMES[words] for words in ROWS}
    methods = list(dict.fromkeys(ours.values()))
    published, clean = bench.rows(methods, as_published=True), bench.rows(methods)
    done = [
        beside(
            name,
            clean=eq(clean, m, as_published=False),
            as_published=eq(published, m, as_published=True),
            what=m,
        )
        for name, m in ours.items()
    ]
    yield from done
    gaps = [
        difference(eq(t, "equigrad-cam-out", as_published=a), eq(t, "equigrad-cam", as_published=a))
        for t, a in ((clean, False), (published, True))
    ]
    apart = summary.contrast(clean, "equigrad-cam-out", "equigrad-cam")
    reason = f"the paper calls the loci indistinguishable; paired by picture output space is above by {apart.mean:+.4f} [{apart.low:+.4f}, {apart.high:+.4f}], log10 p {apart.log10_p:.0f}"
    name = "align.locus.maxdiff"
    reason = f"the paper's is the largest of three networks, this is {bench.backbone} alone; {reason}"
    done.append(
        Line(name, "output minus feature space", shown_of(name), gaps[0], gaps[1], "undecided", reason)
    )
    yield done[-1]
    for m in methods:
        floors = {
            a: _above_floor(rows, m, "full" if a else "disc")
            for rows, a in ((clean, False), (published, True))
        }
        said = (
            f"an unrelated picture's map gets {floors[False][0]:.3f} by ours, {floors[True][0]:.3f} by theirs"
        )
        what = f"{m}: skill, the share of what is above the floor"
        yield Line("", what, "not in the paper", floors[False][1], floors[True][1], "measured", said)
    yield from others("align.", done, bench)


def _above_floor(rows: pa.Table, method: str, region: str) -> tuple[float, Estimate]:
    """What unrelated pictures get, and the share of the rest that the method gets."""
    kept = rows.filter(
        (pc.field("score") == "eq") & (pc.field("method") == method) & (pc.field("region") == region)
    )
    (found,) = summary.summarise(kept)
    nowhere = Estimate(float("nan"), float("nan"), float("nan"), found.value.n)
    return found.floor, found.skill or nowhere


EXPERIMENT = Experiment("Table align: what turning back buys", ("align.",), run)
