"""The stage-wise decomposition: where on the way to the map the turn is lost."""

from collections.abc import Iterator

import numpy as np

from equicam.experiments.experiment import Bench, Experiment, Line, beside, line, mean_of, others
from equicam.scores import stats, summary

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
                clean=stats.bootstrap(stats.mean, rows.floor, cluster=rows.ids),
                what=f"{words}, unrelated",
                tolerance=0.1,
            )
        )
    yield from done
    yield from others("decomp.", done, bench)


EXPERIMENT = Experiment("Decomposition: where the turn is lost", ("decomp.", "cos."), run)
