"""Figure signal-noise: (a) Eq by confidence; (b) how similar pooled features and logits stay under rotation."""

import re
from collections.abc import Iterator
from dataclasses import replace

from matplotlib import rc_context

from equicam_paper import decomposition, plots, strata
from equicam_paper.context import Context
from equicam_paper.experiment import Experiment
from equicam_paper.rows import Row, note

PLOTTED_LABELS = r".+ \(n = \d+\)|(feature|logit), .+"
"""Labels of the rows that both panels show."""


def measure(context: Context) -> Iterator[Row]:
    """The rows of `strata` and the cosines of `decomposition`, next to those of unrelated images."""
    bins, stages = list(strata.measure(context)), list(decomposition.measure(context))
    (by_confidence,) = plots.strata(bins)
    _, cosines = plots.decomposition(stages)
    panels = [
        by_confidence,
        replace(cosines, title="pooled features and logits"),
    ]
    context.out.mkdir(parents=True, exist_ok=True)
    with rc_context(plots.STYLE):
        figure = plots.compose(
            panels, f"Drift and the network's response\n{context.backbone}, n = {len(context.sample):,}"
        )
        paths = plots.save_figure(figure, context.out / "figure-signal-noise")
    png = next(path for path in paths if path.suffix == ".png")
    yield Row("", "figure", "figure", None, None, "measured", note(f"written: {png}"))
    for row in (*bins, *stages):
        if (
            re.fullmatch(PLOTTED_LABELS, row.label) and row.verdict != "not run"
        ):  # `strata` and `decomposition` answer the claims
            yield replace(row, claim="", verdict="measured", why=None, margin=None, within=None)


EXPERIMENT = Experiment("Figure signal-noise: drift and confidence", (), measure)
