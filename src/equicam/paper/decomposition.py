"""The stage-wise decomposition: where on the way to the map the turn is lost."""

from collections.abc import Iterator

import numpy as np

from equicam.core.chain import constant
from equicam.evaluation import statistics, summary
from equicam.paper.context import (
    Bench,
    Experiment,
    Line,
    beside,
    claims,
    eq,
    line,
    mean_of,
    number,
    others,
)
from equicam.paper.measure import pictures
from equicam.readers.gradients import tap

STAGES = {
    "activations A": "stage-activations",
    "gradient field g": "stage-gradients",
    "alpha Pearson": "stage-weights",
    "alpha_cos": "stage-weights-cosine",
    "pre-ReLU weighted sum": "stage-combined",
    "after ReLU": "stage-rectified",
    "final map": "stage-map",
}
COSINES = {"feature": "stage-pooled-cosine", "logit": "stage-logits-cosine"}


def run(bench: Bench) -> Iterator[Line]:
    """Every stage beside unrelated pictures, whose likeness the paper leaves out."""
    published, clean = (bench.rows(["grad-cam"], ["eq", "stages"], as_published=p) for p in (True, False))
    done = []
    for words, score in STAGES.items():
        name = f"decomp.{words}.{bench.backbone}"
        grid = "no grid" if "weights" in score else None
        values = {
            p: mean_of(t, score, "grad-cam", grid or ("full" if p else "disc"))
            for p, t in ((True, published), (False, clean))
        }
        floor = summary.pick(clean, score, "grad-cam", grid or "disc")
        reason = (
            f"unrelated pictures {float(floor.floor[~np.isnan(floor.floor)].mean()):.3f}"
            if not np.isnan(floor.floor).all()
            else (floor.reason[0] or "")
        )
        if "weights" in score and values[True].value > 0.9999:
            reason += "; an identity: the class is held fixed and the gradient is the same everywhere"
        done.append(
            beside(
                name,
                clean=values[False],
                as_published=values[True],
                what=score.removeprefix("stage-"),
                reason=reason,
            )
        )
    for words, score in COSINES.items():
        rows = summary.pick(clean, score, "grad-cam", "no grid")
        done.append(
            line(
                f"cos.{words}.rot",
                clean=mean_of(clean, score, "grad-cam", "no grid"),
                what=f"{words}, turned",
                tolerance=0.05,
            )
        )
        done.append(
            line(
                f"cos.{words}.unrelated",
                clean=statistics.bootstrap(statistics.mean, rows.floor, cluster=rows.ids),
                what=f"{words}, unrelated",
                tolerance=0.1,
            )
        )
    final = mean_of(published, "stage-map", "grad-cam", "full")
    evaluated = {p: eq(t, "grad-cam", as_published=p) for p, t in ((True, published), (False, clean))}
    name = f"decomp.published Grad-CAM (main).{bench.backbone}"
    done.append(
        beside(name, clean=evaluated[False], as_published=evaluated[True], what="grad-cam, evaluated whole")
    )
    done.append(
        line("decomp.reproduces", as_published=number(abs(final.value - evaluated[True].value), final.n),
             what="the last stage against grad-cam evaluated whole", tolerance=0.003)
    )  # fmt: skip
    if f"decomp.const_channels.{bench.backbone}" in claims():
        x = pictures(bench, 4)
        reading = tap(bench.model, x.to(bench.model.dtype), lambda scores: (scores.argmax(1), None))  # type: ignore[union-attr]
        still = int(constant(reading.value[1]).all(0).sum())
        name = f"decomp.const_channels.{bench.backbone}"
        done.append(
            line(
                name,
                clean=number(still, len(x)),
                what="channels whose gradient is the same everywhere",
                tolerance=0,
            )
        )
    yield from done
    yield from others("decomp.", done, bench)


EXPERIMENT = Experiment("Decomposition: where the turn is lost", ("decomp.", "cos."), run)
