"""Table align: the gain of alignment, in feature and in output space."""

from collections.abc import Iterator

import pyarrow.compute as pc

from equicam.evaluate import summary
from equicam.evaluate.summary import SummaryRow
from equicam_paper.claims import METHODS
from equicam_paper.context import Context, Evaluation
from equicam_paper.experiment import Experiment
from equicam_paper.measure import eq_row
from equicam_paper.rows import Remark, Row, compare, number, with_verdict

PUBLISHED = (
    "Grad-CAM single view", "Unaligned output-space", "Aligned output-space", "Aligned feature-space (EquiGrad-CAM)",
)  # fmt: skip
UNALIGNED = "aug-cam − grad-cam: averaging without alignment, raw Eq"


def measure(context: Context) -> Iterator[Row]:
    """Single view, unaligned, aligned in output space, aligned in feature space."""
    methods = [METHODS[name] for name in PUBLISHED]
    found = context.evaluate_both(methods)
    for name in PUBLISHED:
        yield eq_row(f"align.{name}.{context.backbone}.eq", found, METHODS[name])
    pairs = summary.contrast(found.clean.table, "equigrad-cam-out", "equigrad-cam")
    gap = found.map(Evaluation.eq_above, "equigrad-cam-out", "equigrad-cam")
    reason = (
        f"the paper calls the two spaces indistinguishable; paired by image, output space is above by {pairs.mean:+.4f} "
        f"[{pairs.low:+.4f}, {pairs.high:+.4f}], log10 p {pairs.log10_p:.0f}"
    )
    yield with_verdict(
        "align.locus.maxdiff", gap, "undecided", label="output minus feature space", reason=reason,
        why=Remark("one-network", {"network": context.backbone}),
    )  # fmt: skip
    yield compare(
        "", found.map(Evaluation.eq_above, "aug-cam", "grad-cam"), label=UNALIGNED,
        reason="paired by image; raw Eq counts what all maps have in common, the skill below does not",
    )  # fmt: skip
    for method in methods:
        lines = found.map(_summary, method)
        reason = f"maps of unrelated images score {lines.clean.floor:.3f} by ours, {lines.as_published.floor:.3f} by theirs"
        skill = lines.map(lambda line: line.skill or number(float("nan"), line.value.n))
        yield compare("", skill, label=f"{method}: skill above the floor", reason=reason)


def _summary(found: Evaluation, method: str) -> SummaryRow:
    """Eq, the floor that unrelated images set, and skill: the share of the range above the floor."""
    wanted = {"score": "eq", "method": method, "region": found.region}
    keep = [pc.field(column) == value for column, value in wanted.items()]
    (line,) = summary.summarise(found.table.filter(keep[0] & keep[1] & keep[2]))
    return line


EXPERIMENT = Experiment("Table align: the gain of alignment", ("align.",), measure)
